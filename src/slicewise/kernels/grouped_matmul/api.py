"""Rows in groups, each group times a matrix of its own: the product of a mixture of experts without padding.

Dims in names: M rows, G groups, E in, F out.
"""

import importlib.util
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from slicewise.errors import UserError
from slicewise.kernels.grouped_matmul import mosaic, reference


@dataclass(frozen=True)
class Kernel:
    """How rows meet their matrices: settled before tracing, by the devices of the mesh."""

    name: Literal["reference", "mosaic"] = "reference"
    interpret: bool = False  # mosaic on a CPU, slowly: for tests


REFERENCE = Kernel()


def choose(mesh: Mesh) -> Kernel:
    """Mosaic where the devices of ``mesh`` are TPUs, which need not be there. Raises UserError without tokamax."""
    if mesh.devices.flat[0].platform != "tpu":
        return REFERENCE
    if importlib.util.find_spec("tokamax") is None:
        raise UserError("experts on a TPU need tokamax; pip install 'slicewise[tpu]'.")
    return Kernel("mosaic")


def grouped_matmul(
    x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array, kernel: Kernel = REFERENCE
) -> jax.Array:
    """Rows of ``x`` in the order of their groups, times the matrix of the group; [M, F] in the dtype of ``x``.

    Operands are those of one device: call it inside shard_map where there is a mesh.

    ``group_sizes_G`` (int32) may sum to less than M. Rows past the groups give zero and get a zero gradient, whatever
    an implementation leaves there.
    """
    rows_M1 = jnp.arange(len(x_ME))[:, None] < group_sizes_G.sum()
    x_ME = jnp.where(rows_M1, x_ME, 0)
    if kernel.name == "mosaic":
        out_MF = mosaic.grouped_matmul(x_ME, w_GEF, group_sizes_G, kernel.interpret)
    else:
        out_MF = reference.grouped_matmul(x_ME, w_GEF, group_sizes_G)
    return jnp.where(rows_M1, out_MF, 0)
