import json

import jax
import numpy as np
import pytest

from slicewise import cli
from slicewise.config import RunConfig, with_overrides
from slicewise.measure import bench_shardings
from slicewise.parallel import cluster
from slicewise.parallel.cluster import SliceDevices, by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.plan.stack import Stack

TINY = Stack(rows=8, d_model=16, layers=2, dtype="float32")
OPTIONS = [
    "--batch-size",
    "8",
    "--embedding-dimension",
    "16",
    "--layers",
    "2",
    "--dtype",
    "float32",
    "--steps",
    "2",
]


def devices(count, slices=1):
    array = np.empty(count, dtype=object)
    array[:] = jax.devices()[:count]
    return SliceDevices(array.reshape(slices, -1))


@pytest.fixture
def two_slices(monkeypatch):
    monkeypatch.setattr(cluster, "initialize", lambda: None)
    monkeypatch.setattr(cluster, "found", lambda: devices(4, 2))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as JAX is configured already")


def after_one_step(*overrides, count=4, slices=1):
    """The weights after one step, on the host."""
    mesh = build_mesh(with_overrides(RunConfig(), overrides), devices(count, slices))
    with jax.set_mesh(mesh):
        weights, x_BD = jax.jit(lambda: bench_shardings._start(TINY, 4))()
        return jax.device_get(jax.jit(bench_shardings._step(TINY))(weights, x_BD))


def test_a_step_is_the_same_in_every_layout():
    alone = after_one_step(count=1)
    for overrides in (
        ["ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"],
        ["ici_data_parallelism=2", "ici_fsdp_parallelism=2"],
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
            alone,
            after_one_step(*overrides),
        )
    across = ["dcn_data_parallelism=1", "dcn_tensor_parallelism=2", "ici_fsdp_parallelism=2"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
        alone,
        after_one_step(*across, slices=2),
    )


def test_a_sweep_tries_every_split_that_divides_the_stack():
    found = list(bench_shardings.layouts(TINY, 2, 4))
    assert len({tuple(overrides) for overrides in found}) == len(found) == 3 * 6
    narrow = Stack(rows=8, d_model=2, layers=1)
    assert all(
        "ici_fsdp_parallelism=4" not in overrides for overrides in bench_shardings.layouts(narrow, 1, 4)
    )


def test_one_layout_is_timed_beside_a_plain_product(two_slices, capsys):
    assert cli.main(["bench", "shardings", *OPTIONS, "dcn_fsdp_parallelism=2", "dcn_data_parallelism=1"]) == 0
    said = capsys.readouterr().out
    assert "2 layers of 16 x 64 and back, float32, 8 rows a device, on 4 x cpu in 2 slices" in said
    assert "parameters 16.4 kB, activations 20.5 kB over all devices" in said
    assert "layout: dcn fsdp 2 x ici fsdp 2" in said
    assert "share of plain matmul" in said
    assert "in 2 steps" in said


def test_programs_that_cannot_be_kept_are_not_offered_to_the_cache(programs_of_tests):
    """Warnings are errors here, and JAX warns of a program that it cannot write."""
    least_s, mesh = "jax_persistent_cache_min_compile_time_secs", build_mesh(RunConfig(), devices(1))
    x = jax.ShapeDtypeStruct((256, 256), "float32")
    before = getattr(jax.config, least_s)
    jax.config.update(least_s, 0.0)
    try:
        bench_shardings._compiled(jax.jit(lambda a, b: a.T @ b).lower(x, x), mesh)
        assert getattr(jax.config, least_s) == 0.0
    finally:
        jax.config.update(least_s, before)


def test_a_sweep_is_ranked_by_time(two_slices, capsys, monkeypatch):
    some = list(bench_shardings.layouts(TINY, 2, 2))[:3]
    monkeypatch.setattr(bench_shardings, "layouts", lambda *_: some)
    assert cli.main(["bench", "shardings", *OPTIONS, "--sweep", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    times = [one["step_s"] for one in found["layouts"]]
    assert len(times) == 3
    assert times == sorted(times)
    assert all(len(one["times_s"]) == 2 and one["plan_step_s"] is None for one in found["layouts"])


def out_of_memory_when(is_tight, monkeypatch):
    """A compiler that finds no room for some meshes, in the words of the one for TPUs."""
    compiled = bench_shardings._compiled

    def compile_or_not(lowered, mesh):
        if is_tight(dict(mesh.shape)):
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory: trying to allocate 3.1G."
            )
        return compiled(lowered, mesh)

    monkeypatch.setattr(bench_shardings, "_compiled", compile_or_not)


def test_a_sweep_goes_on_past_a_layout_that_does_not_fit(two_slices, capsys, monkeypatch):
    some = list(bench_shardings.layouts(TINY, 2, 2))[:3]
    monkeypatch.setattr(bench_shardings, "layouts", lambda *_: some)
    out_of_memory_when(lambda degrees: degrees["tensor"] == 4, monkeypatch)
    assert cli.main(["bench", "shardings", *OPTIONS, "--sweep"]) == 0
    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row[:3].strip() for row in rows[:3]] == ["1", "2", "-"]
    assert "does not fit" in rows[2]
    assert rows[2].endswith("dcn tensor 2 x ici tensor 2")
    assert rows[4] == (
        "does not fit: out of memory: a device cannot give 3.1G for dcn tensor 2 x ici tensor 2"
    )
    assert cli.main(["bench", "shardings", *OPTIONS, "--sweep", "--json"]) == 0
    last = json.loads(capsys.readouterr().out)["layouts"][-1]
    assert (last["step_s"], last["times_s"]) == (None, [])
    assert last["lack"] == "out of memory: a device cannot give 3.1G"


def test_a_stack_that_no_layout_fits_is_refused(two_slices, capsys, monkeypatch):
    out_of_memory_when(lambda degrees: True, monkeypatch)
    assert cli.main(["bench", "shardings", *OPTIONS]) == 2
    assert "a device cannot give 3.1G; lower --batch-size" in capsys.readouterr().err


def test_devices_that_are_not_here_are_predicted(capsys):
    command = ["bench", "shardings", "--chip", "v4", "--topology", "2x2x1", "ici_fsdp_parallelism=4"]
    assert cli.main(command) == 0
    assert "TFLOP/s a device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["steps=3"], "steps has no part in this experiment"),
        (["pipeline_repeats=2"], "pipeline_repeats has no part in this experiment; give degrees only"),
        (["context_strategy=ring"], "context_strategy has no part in this experiment"),
        (["--embedding-dimension", "9e15"], "lower --batch-size, --embedding-dimension or --layers"),
        (["--batch-size", "8e15"], "B of memory; lower --batch-size"),
        (
            ["--sweep", "ici_fsdp_parallelism=1"],
            "--sweep tries every layout; leave ici_fsdp_parallelism=1 out",
        ),
        (["--chip", "v4"], "a prediction needs --chip and --topology"),
        (["--chip", "v4", "--topology", "2x2x1", "--sweep"], "--sweep goes with devices that are here"),
        (["--chip", "v4", "--topology", "2x2x1", "--layers", "20"], "a device of v4 has"),
        (["--layers", "0"], "--layers 0"),
        (["--batch-size", "none"], "--batch-size none"),
        (["--steps", "-1"], "--steps -1"),
        (["nonsense=1"], "unknown key 'nonsense'"),
        (["ici_fsdp_parallelism=3"], "the ici_ axes multiply to 3"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(two_slices, capsys, options, message):
    assert cli.main(["bench", "shardings", *options]) == 2
    assert message in capsys.readouterr().err


def test_plain_products_have_a_rate():
    assert bench_shardings.plain_flops_per_s(TINY, by_slice(jax.devices()[:2]), repeats=1) > 0
