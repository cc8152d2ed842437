"""What is kept out of products changes no number, and is only where two cores share a product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from slicewise.model.layers import apart

X = jnp.arange(4.0)


@pytest.fixture
def on(monkeypatch):
    def use(kind, cores):
        mesh = AbstractMesh((1,), ("data",), abstract_device=AbstractDevice(kind, cores, "tpu"))
        monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)

    return use


def loss(x):
    return apart(jnp.sin(x)).sum() ** 2


def test_on_two_cores_the_backward_pass_before_is_behind_a_barrier(on):
    on("TPU v5", 2)
    text = str(jax.make_jaxpr(jax.grad(loss))(X))
    assert "cos" in text[: text.index("optimization_barrier")]  # of the forward pass
    assert "mul" in text[text.index("optimization_barrier") :]
    assert "barrier" not in str(jax.make_jaxpr(loss)(X))


@pytest.mark.parametrize("cores", [1, None])
def test_on_one_core_there_is_none(on, cores):
    on("TPU v6 lite", cores)
    assert "barrier" not in str(jax.make_jaxpr(jax.grad(loss))(X))


def test_the_gradient_is_the_same(on):
    alone = jax.grad(loss)(X)
    on("TPU v5", 2)
    np.testing.assert_array_equal(jax.grad(loss)(X), alone)
