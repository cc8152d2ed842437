"""What every implementation of the grouped matmul must do, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.kernels.grouped_matmul.api import grouped_matmul

SHAPES = {"rows": 24, "groups": 3, "into": 8, "out": 5}


def operands(seed=0):
    x, w = jax.random.split(jax.random.key(seed))
    return (
        jax.random.normal(x, (SHAPES["rows"], SHAPES["into"])),
        jax.random.normal(w, (SHAPES["groups"], SHAPES["into"], SHAPES["out"])),
    )


def definition(x_ME, w_GEF, sizes_G):
    """Row by row."""
    group = np.repeat(np.arange(len(sizes_G)), sizes_G)
    picked_MEF = np.concatenate([w_GEF[group], np.zeros((len(x_ME) - len(group), *w_GEF.shape[1:]))])
    return np.einsum("ME,MEF->MF", x_ME, picked_MEF)


sizes = st.lists(st.integers(0, 8), min_size=3, max_size=3)


@settings(deadline=None, max_examples=25)
@given(sizes)
def test_every_row_meets_the_matrix_of_its_group(sizes):
    x, w = operands()
    got = jax.jit(grouped_matmul)(x, w, jnp.array(sizes, jnp.int32))
    np.testing.assert_allclose(got, definition(np.asarray(x), np.asarray(w), sizes), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [[8, 8, 8], [0, 24, 0], [3, 0, 5]])
def test_gradients_are_those_of_the_definition(sizes):
    x, w = operands()
    weight = jax.random.normal(jax.random.key(9), (SHAPES["rows"], SHAPES["out"]))
    group = np.repeat(np.arange(3), sizes)
    valid = (np.arange(SHAPES["rows"]) < sum(sizes))[:, None]
    group = jnp.asarray(np.concatenate([group, np.zeros(SHAPES["rows"] - len(group), int)]))

    def plain(x, w):
        return (jnp.where(valid, jnp.einsum("ME,MEF->MF", x, w[group]), 0) * weight).sum()

    def ours(x, w):
        return (grouped_matmul(x, w, jnp.array(sizes, jnp.int32)) * weight).sum()

    got, wanted = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, w) for f in (ours, plain))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_rows_past_the_groups_are_zero_whatever_they_hold():
    x, w = operands()
    x = x.at[8:].set(jnp.nan)
    sizes = jnp.array([3, 0, 5], jnp.int32)
    out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
    x_gradient, w_gradient = pull(jnp.full_like(out, 1.0))
    assert not np.asarray(out[8:]).any()
    assert not np.asarray(x_gradient[8:]).any()
    assert np.isfinite(w_gradient).all()
