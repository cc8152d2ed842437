"""What does not fit the machine is said before the kernel would kill the run without a word."""

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from slicewise.config import load_config
from slicewise.errors import ExitCode, UserError
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.train import host_memory
from slicewise.train.faults import explained
from slicewise.train.step import build_train_step

TINY = ["model=demo-tiny", "sequence_length=32", "global_batch_size=4", "dataset=synthetic", "eval_batches=0"]
TINY += ["checkpoint_every=0", "tensorboard=false", "steps=2"]


def built(*overrides, devices=1):
    config = load_config(None, [*TINY, *overrides]).config
    return config, build_train_step(config, build_mesh(config, by_slice(jax.devices()[:devices])))


@pytest.fixture
def memory(monkeypatch):
    """Lets this machine have so many bytes."""
    return lambda size_bytes: monkeypatch.setattr(host_memory, "limit_bytes", lambda: size_bytes)


@pytest.mark.parametrize(
    "sizes", [("sequence_length=1e9",), ("global_batch_size=1e9",), ("sequence_length=2147483647",)]
)
def test_more_tokens_than_devices_count_are_refused_by_the_step(sizes):
    with pytest.raises(
        UserError, match=r"= [\d,]+ tokens a step: devices count at most 2,147,483,647; lower"
    ):
        built(*sizes)


def test_what_is_known_before_compiling_is_said_before_compiling(memory):
    config, step = built()
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.abstract_state))
    memory(state_bytes)
    host_memory.check(config, step)
    memory(state_bytes - 1)
    with pytest.raises(
        UserError, match="demo-tiny does not fit: its weights and optimiser state take"
    ) as found:
        host_memory.check(config, step)
    assert found.value.code == ExitCode.USER
    memory(1000)
    with pytest.raises(UserError, match="4 x 32 tokens do not fit: the batches held at once take 6.14 kB"):
        host_memory.check(config, step)


def test_replicas_count_each_and_shards_once(memory):
    for overrides, word in (
        (["ici_data_parallelism=4", "ici_fsdp_parallelism=1"], "shard it over fsdp instead of data"),
        (["ici_fsdp_parallelism=4"], "more machines"),
    ):
        config, step = built(*overrides, devices=4)
        memory(10_000)
        with pytest.raises(UserError, match=word) as found:
            host_memory.check(config, step)
        assert "on 4 devices" in str(found.value)


def test_a_compiled_program_that_needs_more_than_there_is_or_is_free(memory, monkeypatch):
    """Of two matrices, one given and one made: any program will do for an update."""
    config, step = built()
    update = jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((500, 500), np.float32)).compile()
    memory(1_999_999)
    with pytest.raises(
        UserError, match=r"a step takes 2.00 MB on one device, .* lower global_batch_size"
    ) as found:
        host_memory.check_compiled(config, step, update)
    assert found.value.code == ExitCode.USER
    memory(2_000_000)
    monkeypatch.setattr(host_memory, "_meminfo_bytes", lambda name, default: 1_000_000)
    assert (
        "1.00 MB are free: the kernel may end the run" in host_memory.check_compiled(config, step, update)[0]
    )
    monkeypatch.setattr(host_memory, "_meminfo_bytes", lambda name, default: 2_000_000)
    assert host_memory.check_compiled(config, step, update) == []


def test_the_limit_of_a_container_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path)
    assert host_memory.limit_bytes() > 1 << 20
    monkeypatch.setattr(host_memory, "_container_limits_bytes", lambda: [1 << 20])
    assert host_memory.limit_bytes() == 1 << 20


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("Unable to allocate 9.1 TiB for an array"), "this machine cannot give 9.1 TiB"),
        (
            JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes"),
            "a device cannot give 12 bytes",
        ),
        (
            RuntimeError("INVALID_ARGUMENT: overflow in static extent product: dimensions=[4]"),
            "no array can be as",
        ),
    ],
)
def test_errors_of_memory_say_what_to_lower(error, words):
    config = load_config(None, TINY).config
    found = explained(error, config, has_stepped=False)
    assert isinstance(found, UserError)
    assert (found.code, words in str(found)) == (ExitCode.USER, True), found
    assert "lower" in str(found)


def test_other_errors_stay_what_they_are():
    error = RuntimeError("something else")
    assert explained(error, load_config(None, TINY).config, has_stepped=False) is error
