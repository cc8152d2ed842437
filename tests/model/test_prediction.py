"""Multi-token prediction: at depth d a token sees those up to d ahead of it, and is asked for the one after."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.catalog.model import load
from slicewise.kernels.attention.api import Tokens
from slicewise.model import transformer
from slicewise.parallel.rules import partition

SPEC = load("demo-tiny").model_copy(update={"prediction_layers": 2})
T = 10


def by_row(x):
    return jax.sharding.reshard(jnp.asarray(x, jnp.int32), partition("batch", "sequence"))


@pytest.mark.usefixtures("one_device")
def test_a_prediction_layer_sees_one_token_more_than_the_layer_before():
    params = transformer.init(SPEC, jax.random.key(0))
    positions = by_row(np.arange(T)[None])
    where = Tokens(positions, jnp.ones_like(positions))

    @jax.jit
    def states(tokens):
        found = transformer.states(params, SPEC, tokens, where, dtype=jnp.float32, predict=True)
        return [found.x_BTD, *found.predicted]

    ids = np.arange(T)[None] + 20
    before = states(by_row(ids))
    assert len(before) == 3
    ids[0, 6] = 99
    for depth, (a, b) in enumerate(zip(before, states(by_row(ids)), strict=True)):
        changed = np.abs(a - b).max(-1)[0] > 1e-6
        # The last `depth` places look past the row.
        assert changed[: T - depth].tolist() == [i + depth >= 6 for i in range(T - depth)], depth


@pytest.mark.usefixtures("one_device")
def test_prediction_layers_are_left_out_where_nobody_asks():
    params = transformer.init(SPEC, jax.random.key(0))
    tokens = by_row(np.arange(T)[None])
    found = transformer.states(params, SPEC, tokens, Tokens(tokens, jnp.ones_like(tokens)), dtype=jnp.float32)
    assert (found.predicted, found.usage, found.cache) == ([], None, None)
