import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slicewise.catalog.model import load
from slicewise.config import load_config
from slicewise.model import transformer
from slicewise.model.params import Weight
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh
from slicewise.parallel.rules import partition
from slicewise.train.optimizer import optimizer

LAYOUT = {
    "up": Weight((2, 8, 16), ("layers", "embed", "mlp"), std=1.0),
    "down": Weight((2, 16, 8), ("layers", "mlp", "embed"), std=1.0),
    "norm": Weight((2, 8), ("layers", "activation"), constant=1.0),
    "embed": Weight((32, 8), ("vocab", "embed"), std=1.0),
}
KINDS = ["adamw", "adafactor", "lion", "muon"]
PLAIN = ["weight_decay=0", "gradient_clip_norm=0", "warmup_steps=0", "learning_rate=0.01"]


def stepped(kind, mesh_overrides, count, overrides=(), steps=3):
    """Weights after a few steps towards zero on a mesh, on the host."""
    config = load_config(None, [f"optimizer_type={kind}", *PLAIN, *mesh_overrides, *overrides]).config
    with jax.set_mesh(build_mesh(config, by_slice(jax.devices()[:count]))):
        keys = jax.random.split(jax.random.key(0), len(LAYOUT))
        params = {
            name: jax.random.normal(key, weight.shape, out_sharding=partition(*weight.dims))
            for key, (name, weight) in zip(keys, LAYOUT.items(), strict=True)
        }
        tx = optimizer(config, LAYOUT)

        @jax.jit
        def step(params, state):
            updates, state = tx.update(params, state, params)
            return optax.apply_updates(params, updates), state

        first, state = params, tx.init(params)
        for _ in range(steps):
            params, state = step(params, state)
        return jax.device_get(first), jax.device_get(params)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_gives_the_same_weights_in_every_layout(kind):
    _, alone = stepped(kind, [], 1)
    mesh = ["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"]
    _, spread = stepped(kind, mesh, 8, ["shard_optimizer_over_data=true"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), alone, spread)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_steps_about_as_far_as_the_rate_says(kind):
    """Down the gradient, so that one learning rate serves all."""
    first, now = stepped(kind, [], 1, steps=1)
    for name in LAYOUT:
        moved = first[name] - now[name]
        assert (moved * first[name]).sum() > 0
        assert 0.1 < np.sqrt((moved**2).mean()) / 0.01 < 2


def test_muon_makes_the_matrices_of_layers_orthogonal_and_no_others():
    first, now = stepped("muon", [], 1, steps=1)
    for name, is_matrix in (("up", True), ("down", True), ("embed", False)):
        moved = (first[name] - now[name]).reshape(-1, *first[name].shape[-2:])
        singular = np.linalg.svd(moved, compute_uv=False)
        assert (singular.max() < 2 * singular.min()) == is_matrix, name


def test_norms_and_biases_are_not_decayed():
    config = load_config(None, ["learning_rate=1", "warmup_steps=0", "weight_decay=0.5"]).config
    spec = load("demo-tiny")
    layout = transformer.weights(spec)
    params = jax.tree.map(lambda weight: jnp.ones(weight.shape), layout)
    tx = optimizer(config, layout)
    updates = jax.jit(lambda p: tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p)[0])(params)
    for name, update in transformer.leaves(updates).items():
        assert np.unique(update) == pytest.approx(0 if "norm" in name else -0.5), name
