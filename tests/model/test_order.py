"""The order of gradients changes no number, and leaves frozen weights alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.model import order
from slicewise.model.lora import Adapted
from slicewise.model.params import Layers, Moe

X = jnp.arange(4.0)


def layers(**given):
    return Layers(**dict.fromkeys(Layers.__dataclass_fields__) | given)


def experts(matrix):
    return Moe(**dict.fromkeys(Moe.__dataclass_fields__) | {"w_up": matrix})


def loss(wq, up, tie, kind):
    w = layers(w_up=up) if kind == "dense" else layers(moe=experts(up))
    q = X * wq
    if tie:
        (q,), w = order.behind_mlp((q,), w)
    up = w.w_up if kind == "dense" else w.moe.w_up
    return (jnp.tanh(q) * up).sum()


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_gradients_are_the_same_and_those_of_the_mlp_come_first(kind):
    given = jnp.float32(0.3), jnp.ones(4)
    tied = jax.value_and_grad(loss, (0, 1))
    for a, b in zip(
        jax.tree.leaves(tied(*given, True, kind)), jax.tree.leaves(tied(*given, False, kind)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    text = str(jax.make_jaxpr(lambda a, b: jax.grad(loss, (0, 1))(a, b, True, kind))(*given))
    barrier = text.index("optimization_barrier")
    assert "reduce_sum" in text[barrier:]  # the gradient of wq is made behind it


def test_a_forward_pass_has_no_barrier():
    assert "barrier" not in str(jax.make_jaxpr(lambda a, b: loss(a, b, True, "dense"))(1.0, jnp.ones(4)))


def test_frozen_matrices_order_nothing():
    w = layers(w_up=Adapted(X, None, 1.0))
    values, same = order.behind_mlp((X,), w)
    assert values[0] is X
    assert same is w


def test_sums_over_copies_of_the_weights_are_left_to_the_compiler():
    mesh = jax.make_mesh(
        (2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Explicit,)
    )
    w = layers(w_up=X)
    with jax.set_mesh(mesh):
        assert order.behind_mlp((X,), w)[1] is w
