import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from slicewise.model.linear import linear

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "contract", "equation"),
    [
        ((2, 3, 4), (4, 5), 1, "abc,cd->abd"),
        ((2, 3, 4), (4, 5, 6), 1, "abc,cde->abde"),
        ((2, 3, 4, 5), (4, 5, 6), 2, "abcd,cde->abe"),
    ],
)
def test_value_and_gradients_equal_einsum(x_shape, w_shape, contract, equation):
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate((x_shape, w_shape)))
    out = jnp.einsum(equation, x, w)
    weights = jax.random.normal(jax.random.key(2), out.shape)
    ours = jax.value_and_grad(
        lambda x, w: (linear(x, w, P(), contract=contract) * weights).sum(), argnums=(0, 1)
    )
    theirs = jax.value_and_grad(lambda x, w: (jnp.einsum(equation, x, w) * weights).sum(), argnums=(0, 1))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), ours(x, w), theirs(x, w)
    )
