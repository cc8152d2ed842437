"""Training in 8 bits reaches the loss of training in bfloat16."""

import argparse
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from slicewise.checkpoint.store import CheckpointStore
from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.train.step import build_train_step

pytestmark = pytest.mark.slow

TINY = ["model=demo-tiny", "global_batch_size=8", "sequence_length=64", "steps=60", "learning_rate=3e-3"]


def final_loss(*overrides: str) -> float:
    config = load_config(None, [*TINY, *overrides]).config
    step = build_train_step(config, build_mesh(config, by_slice(jax.devices()[:1])))
    rng, text = np.random.default_rng(0), np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    ones, index = np.ones((8, 64), np.int32), np.tile(np.arange(64, dtype=np.int32), (8, 1))
    seen = []
    with jax.set_mesh(step.mesh):
        state = step.init()
        for _ in range(config.run.steps):
            rows = np.stack(
                [text[start : start + 65] for start in rng.integers(0, len(text) - 65, 8)]
            ).astype(np.int32)
            batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "segment_ids": ones, "positions": index}
            state, metrics = step.update(state, batch)
            seen.append(float(metrics["loss"]))
    assert seen[-1] < seen[0] / 2
    return float(np.mean(seen[-10:]))


def test_fp8_ends_within_a_hundredth_of_bfloat16():
    assert final_loss("quantization=fp8") == pytest.approx(final_loss(), rel=0.01)


def test_off_is_off():
    config = load_config(
        None, [*TINY, "quantization=fp8", "use_qwix_quantization=false", "quantization_layers=x"]
    )
    build_train_step(config.config, build_mesh(config.config, by_slice(jax.devices()[:1])))


def test_a_pattern_that_matches_nothing_is_refused_before_compiling():
    config = load_config(None, [*TINY, "quantization=fp8", "quantization_layers=mlp"]).config
    with pytest.raises(UserError, match="matches no matrix"):
        build_train_step(config, build_mesh(config, by_slice(jax.devices()[:1])))


def test_calibrated_ranges_are_made_in_the_run_and_saved_with_it(trainer):
    """At steps 1 and 5: a run that resumes between goes on with those of step 1."""
    how = ["quantization=fp8", "quantization_calibrate_every=4", "compute_dtype=bfloat16"]
    how += ["steps=6", "checkpoint_every=4"]
    whole = trainer.train(*how)
    saved, after = ranges_of_step(trainer, 4, *how), ranges_of_step(trainer, 6, *how)
    assert saved["layers.wq"].shape == (2, 2)
    assert all((np.asarray(r) > 0).all() for r in saved.values())
    assert any((np.asarray(after[n]) != np.asarray(saved[n])).any() for n in saved)
    shutil.rmtree(trainer.folder / "run" / "checkpoints" / "6")
    again = trainer.train(*how)
    assert [(r["step"], r["loss"]) for r in again] == [(r["step"], r["loss"]) for r in whole]
    resumed = ranges_of_step(trainer, 6, *how)
    jax.tree.map(np.testing.assert_array_equal, resumed, after)


def test_frozen_matrices_are_calibrated_beside_their_adapters():
    how = ["quantization=fp8", "quantization_calibrate_every=4", "lora_rank=4", "initial_weights=x"]
    config = load_config(None, [*TINY, *how]).config
    step = build_train_step(config, build_mesh(config, by_slice(jax.devices()[:1])))
    given = (step.abstract_state, step.abstract_batch)
    with jax.set_mesh(step.mesh):
        ranges, (state, _) = jax.eval_shape(step.calibrate, *given), jax.eval_shape(step.update, *given)
    assert ranges["layers.wq"].shape == (2, 2)
    assert ranges.keys() == state.ranges.keys()


def ranges_of_step(trainer, number, *overrides):
    config = load_config(None, trainer.overrides(*overrides)).config
    step = build_train_step(config, build_mesh(config, by_slice(jax.devices()[:1])))
    store = CheckpointStore(f"{config.directory}/checkpoints", keep=9)
    try:
        wanted = {"ranges": step.abstract_state.ranges}
        return store.restore(number, wanted, partial=True).state["ranges"]
    finally:
        store.close()
