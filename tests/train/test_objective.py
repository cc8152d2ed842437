import jax
import numpy as np
import pytest

from slicewise.config import load_config
from slicewise.model.moe import BALANCE_STEP
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.train.objective import targets_ahead
from slicewise.train.step import BATCH_KEYS, build_train_step

MODEL = """
name = "balanced"
source = "test"
layers = 2
d_model = 32
heads = 2
kv_heads = 2
head_dim = 16
d_ff = 64
vocab = 96
prediction_layers = 1
[experts]
experts = 4
per_token = 1
d_ff = 32
score = "sigmoid"
balancing_bias = true
"""


@pytest.mark.usefixtures("one_device")
def test_targets_ahead_stay_within_their_document():
    part = {
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0]]),
        "targets": np.array([[10, 11, -1, 12, -1, -1]]),
    }
    ahead = {by: targets_ahead(jax.tree.map(jax.numpy.asarray, part), by).tolist() for by in (1, 2)}
    assert ahead == {1: [[11, -1, -1, -1, -1, -1]], 2: [[-1, -1, -1, -1, -1, -1]]}


def test_a_step_moves_biases_by_counting_and_reports_every_term(tmp_path):
    path = tmp_path / "balanced.toml"
    path.write_text(MODEL)
    overrides = [
        f"model={path}",
        "compute_dtype=float32",
        "global_batch_size=4",
        "sequence_length=16",
        "steps=9",
    ]
    config = load_config(None, [*overrides, "ici_expert_parallelism=2"]).config
    step = build_train_step(config, build_mesh(config, by_slice(jax.devices()[:2])))
    tokens = np.random.default_rng(0).integers(0, 96, (4, 17)).astype(np.int32)
    rows = (
        tokens[:, :-1],
        tokens[:, 1:],
        np.ones((4, 16), np.int32),
        np.tile(np.arange(16, dtype=np.int32), (4, 1)),
    )
    with jax.set_mesh(step.mesh):
        batch = {
            k: jax.device_put(v, step.abstract_batch[k].sharding)
            for k, v in zip(BATCH_KEYS, rows, strict=True)
        }
        state, metrics = step.update(step.init(), batch)
    for layers in (state.params.layers, state.params.prediction.layers):
        moved = np.asarray(layers.moe.balance_bias) / BALANCE_STEP
        assert set(np.round(moved, 3).ravel()) <= {-1.0, 0.0, 1.0}
        assert moved.min() == -1
        assert moved.max() == 1
    assert set(metrics) == {"loss", "prediction_loss", "balance_loss", "gradient_norm", "learning_rate"}
    assert float(metrics["prediction_loss"]) == pytest.approx(np.log(96), rel=0.1)
    assert 1 <= float(metrics["balance_loss"]) < 2
