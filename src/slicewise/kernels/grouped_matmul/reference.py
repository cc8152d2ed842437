"""Grouped matmul by JAX's own operation: the definition that every kernel is tested against."""

import jax
import jax.numpy as jnp


def grouped_matmul(x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
    """As the function of the same name in api; a TPU spends G times the needed FLOPs on it."""
    return jax.lax.ragged_dot(x_ME, w_GEF, group_sizes_G)


def product(x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
    """As the function of the same name in api; operands of 8 bits are exact in float32."""
    return jax.lax.ragged_dot(x_ME.astype(jnp.float32), w_GEF.astype(jnp.float32), group_sizes_G)


def weight_gradient(x_ME: jax.Array, grad_MF: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
    """As the function of the same name in api, in float32."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    operands = (x_ME.astype(jnp.float32), grad_MF.astype(jnp.float32))
    return jax.lax.ragged_dot_general(*operands, group_sizes_G, numbers)
