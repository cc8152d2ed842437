import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.errors import UserError
from slicewise.model.params import Weight
from slicewise.train.moments import Keeping, decode, encode, keep

LAYOUT = {
    "up": Weight((2, 8, 16), ("layers", "embed", "mlp"), std=1.0),
    "norm": Weight((2, 8), ("layers", "activation"), constant=1.0),
}


def params():
    return {name: jnp.full(weight.shape, 0.5) for name, weight in LAYOUT.items()}


@functools.partial(jax.jit, static_argnums=2)
def round_trip(x, key, signed):
    return decode(encode(x, key, signed=signed), signed=signed)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**31 - 1), st.floats(-12, 12), st.booleans())
def test_eight_bits_are_right_to_an_eighth_at_any_scale(seed, exponent, signed):
    x = 10.0**exponent * jax.random.normal(jax.random.key(seed), (3, 50))
    x = x if signed else x**2
    got = round_trip(x, jax.random.key(1), signed)
    largest = np.abs(x).max(-1, keepdims=True)
    assert (np.abs(got - x) <= 0.125 * np.abs(x) + 2.0**-21 * largest).all()
    assert (np.sign(got) == np.sign(x))[np.abs(x) > 2.0**-20 * largest].all()


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_has_the_exact_value_as_its_mean(signed):
    x = jnp.linspace(0.011, 1.0, 24)[None]
    keys = jax.random.split(jax.random.key(0), 4000)
    mean = jax.vmap(lambda key: round_trip(x, key, signed))(keys).mean(0)
    np.testing.assert_allclose(mean, x, rtol=5e-3)


def test_a_mean_of_squares_is_never_rounded_to_zero():
    x = jnp.array([[1e-20, 1.0, 0.0]])
    assert (np.asarray(round_trip(x, jax.random.key(0), False)) > 0).all()
    assert round_trip(jnp.zeros((1, 3)), jax.random.key(0), False).sum() == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_slow_averages_are_not_stuck_in_few_bits(dtype, one_device):
    """A decay of one in a thousand a step is far below half a step of either type."""
    tx = keep(optax.scale_by_adam(b2=0.999), LAYOUT, Keeping(dtype))
    state = tx.init(params())
    ones, zeros = jax.tree.map(jnp.ones_like, params()), jax.tree.map(jnp.zeros_like, params())
    state = tx.update(ones, state, params())[1]
    first = nu(state)
    decay = jax.jit(lambda s: jax.lax.fori_loop(0, 500, lambda _, s: tx.update(zeros, s, params())[1], s))
    state = decay(state)
    assert nu(state) == pytest.approx(first * 0.999**500, rel=0.1)


def nu(state):
    """The mean over one matrix of its second moments."""
    kept = state.inner.nu["up"]
    whole = kept.astype(jnp.float32) if isinstance(kept, jax.Array) else decode(kept, signed=False)
    return float(whole.mean())


def test_only_state_as_large_as_a_matrix_is_narrowed(one_device):
    state = keep(optax.scale_by_adam(), LAYOUT, Keeping("bfloat16")).init(params())
    assert {name: x.dtype for name, x in state.inner.mu.items()} == {"up": "bfloat16", "norm": "float32"}
    factored = keep(optax.scale_by_factored_rms(min_dim_size_to_factor=8), LAYOUT, Keeping("bfloat16"))
    assert factored.init(params()).inner.v_row["up"].dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_same_step_gives_the_same_state(dtype, one_device):
    tx = keep(optax.adam(0.1), LAYOUT, Keeping(dtype, "host"))
    gradients = jax.tree.map(lambda x: 0.3 * x, params())
    steps = [jax.jit(tx.update)(gradients, tx.init(params()), params()) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(step) for step in steps))


def test_a_dim_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match="d_model = 8 to be a multiple of fsdp x data parallelism = 12"):
        Keeping(over_data=True).check(LAYOUT, {"data": 6, "fsdp": 2, "expert": 1, "tensor": 1})
    Keeping(over_data=True).check(LAYOUT, {"data": 2, "fsdp": 2, "expert": 2, "tensor": 1})
    Keeping().check(LAYOUT, {"data": 6, "fsdp": 2, "expert": 1, "tensor": 1})
