import jax
import numpy as np
import pytest

from slicewise.catalog.model import load
from slicewise.config import load_config
from slicewise.errors import ExitCode, UserError
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.train import choices
from slicewise.train.step import BATCH_KEYS, build_train_step

TINY = ["model=demo-tiny", "global_batch_size=8", "sequence_length=64"]


def mesh(config):
    return build_mesh(config, by_slice(jax.devices()[:2]))


@pytest.mark.parametrize(("estimate", "is_low"), [(1e-3, True), (1e3, False)])
def test_logits_above_the_estimate_are_counted(estimate, is_low):
    config = load_config(None, [*TINY, f"use_max_logits_estimate={estimate}"]).config
    step = build_train_step(config, mesh(config))
    tokens = np.random.default_rng(0).integers(0, step.spec.vocab, (8, 64)).astype(np.int32)
    ones, index = np.ones((8, 64), np.int32), np.tile(np.arange(64, dtype=np.int32), (8, 1))
    batch = dict(zip(BATCH_KEYS, (tokens, tokens, ones, index), strict=True))
    batch = {k: jax.device_put(v, step.abstract_batch[k].sharding) for k, v in batch.items()}
    with jax.set_mesh(step.mesh):
        above = float(step.logits_above(step.init().params, batch))
    pairs = step.spec.layers * step.spec.heads * 8 * 64 * 65 / 2
    assert (0.2 * pairs < above < 0.6 * pairs) if is_low else above == 0


def test_without_an_estimate_nothing_is_counted():
    config = load_config(None, TINY).config
    assert build_train_step(config, mesh(config)).logits_above is None


def test_a_cpu_has_no_compiler_flags_and_no_kernels():
    config = load_config(None, [*TINY, "compiler_flags=sparsecore-all-gather"]).config
    assert choices.compiler_options(config, mesh(config)) == {}
    assert choices.expected_kernels(config, load("demo-moe"), mesh(config)) == ()
    assert choices.notes(config, load("demo-tiny"), mesh(config)) == []


def test_a_warm_up_that_outlasts_the_run_is_warned_of():
    for steps, words in ((9, "warmup_steps = 10 is more than steps = 9: the learning rate never"), (10, "")):
        config = load_config(None, [*TINY, "warmup_steps=10", f"steps={steps}"]).config
        said = "".join(choices.notes(config, load("demo-tiny"), mesh(config)))
        assert words in said
        assert bool(words) == bool(said)


def test_an_estimate_that_no_kernel_uses_is_said():
    config = load_config(None, [*TINY, "use_max_logits_estimate=0.5"]).config
    (said,) = choices.notes(config, load("demo-tiny"), mesh(config))
    assert "use_max_logits_estimate = 0.5 changes nothing here, where attention is 'reference'" in said


def test_a_chosen_kernel_that_the_program_lacks_is_an_error():
    choices.check_kernels(("splash",), 'custom_call @tpu_custom_call kernel_name = "splash_mha_fwd"')
    with pytest.raises(UserError, match="does not call the kernel ragged_dot_gmm") as caught:
        choices.check_kernels(("splash", "ragged_dot_gmm"), "splash_mha_fwd")
    assert caught.value.code == ExitCode.INTERNAL
