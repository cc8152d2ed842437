"""What is kept out of products changes no number."""

import jax
import jax.numpy as jnp
import numpy as np

from slicewise.model.layers import apart


def loss(x, is_apart):
    h = jnp.sin(x)
    return (jnp.ones(4) @ (apart(h) if is_apart else h)) ** 2


def test_the_backward_pass_before_is_behind_a_barrier_with_the_same_gradient():
    x = jnp.arange(4.0)
    np.testing.assert_array_equal(*(jax.grad(loss)(x, is_apart) for is_apart in (True, False)))
    text = str(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(x, True))
    assert "cos" in text[: text.index("optimization_barrier")]  # of the forward pass
    assert "mul" in text[text.index("optimization_barrier") :]


def test_a_forward_pass_has_no_barrier():
    assert "barrier" not in str(jax.make_jaxpr(lambda x: loss(x, True))(jnp.ones(4)))
