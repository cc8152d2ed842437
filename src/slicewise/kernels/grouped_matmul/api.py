"""Rows in groups, each group times a matrix of its own: the product of a mixture of experts without padding.

Dims in names: M rows, G groups, E in, F out.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from slicewise.catalog import chips
from slicewise.errors import UserError
from slicewise.kernels.grouped_matmul import mosaic, reference


@dataclass(frozen=True)
class Kernel:
    """How rows meet their matrices: settled before tracing, by the devices of the mesh."""

    name: Literal["reference", "mosaic"] = "reference"
    interpret: bool = False  # mosaic on a CPU, slowly: for tests
    chip: str = ""  # of the catalog; tiles are tuned for it
    vmem_limit_kib: int = 0  # that the program is compiled with; 0 = the compiler's


REFERENCE = Kernel()


def choose(mesh: Mesh, vmem_limit_kib: int = 0) -> Kernel:
    """Mosaic where the devices of ``mesh`` are TPUs, which need not be there. Raises UserError without tokamax."""
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return REFERENCE
    if importlib.util.find_spec("tokamax") is None:
        raise UserError("experts on a TPU need tokamax; pip install 'slicewise[tpu]'.")
    chip = chips.of_device_kind(device.device_kind)
    return Kernel("mosaic", chip=chip.name if chip else "", vmem_limit_kib=vmem_limit_kib)


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
        out_MF = mosaic.grouped_matmul(x_ME, w_GEF, group_sizes_G, kernel)
    else:
        out_MF = reference.grouped_matmul(x_ME, w_GEF, group_sizes_G)
    return jnp.where(rows_M1, out_MF, 0)


def product(
    x: jax.Array, w: jax.Array, group_sizes_G: jax.Array, kernel: Kernel, *, transposed: bool = False
) -> jax.Array:
    """Rows times the matrix of their group, or with ``transposed`` times its transpose, summed in float32.

    Without a gradient of its own; operands may have 8 bits, int8 ones beside int8 only. Rows past the groups are
    garbage.
    """
    if kernel.name == "mosaic":
        return mosaic.product(mosaic.padded(x), w, group_sizes_G, kernel, jnp.float32, transposed=transposed)[
            : len(x)
        ]
    return reference.product(x, w.swapaxes(1, 2) if transposed else w, group_sizes_G)


def weight_gradient(
    x_ME: jax.Array, grad_MF: jax.Array, group_sizes_G: jax.Array, kernel: Kernel, dtype: Any
) -> Any:
    """The products of each group's rows, transposed, and their gradients: [G, E, F]. Operands as those of product;
    rows past the groups do not count."""
    if kernel.name == "mosaic":
        padded = (mosaic.padded(x_ME), mosaic.padded(grad_MF))
        return mosaic.weight_gradient(*padded, group_sizes_G, kernel, dtype)
    return reference.weight_gradient(x_ME, grad_MF, group_sizes_G).astype(dtype)
