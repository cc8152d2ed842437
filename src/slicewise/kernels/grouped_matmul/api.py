"""Rows in groups, each group times a matrix of its own: the product of a mixture of experts without padding.

Dims in names: M rows, G groups, E in, F out.
"""

import jax
import jax.numpy as jnp

from slicewise.kernels.grouped_matmul import reference


def grouped_matmul(x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
    """Rows of ``x`` in the order of their groups, times the matrix of the group; [M, F] in the dtype of ``x``.

    Operands are those of one device: call it inside shard_map where there is a mesh.

    ``group_sizes_G`` (int32) may sum to less than M. Rows past the groups give zero and get a zero gradient, whatever
    an implementation leaves there.
    """
    rows_M1 = jnp.arange(len(x_ME))[:, None] < group_sizes_G.sum()
    out_MF = reference.grouped_matmul(jnp.where(rows_M1, x_ME, 0), w_GEF, group_sizes_G)
    return jnp.where(rows_M1, out_MF, 0)
