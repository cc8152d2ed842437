"""Grouped matmul by tokamax's TPU kernel, with its backward products; the FLOPs are those of the rows, not of G times.

Dims in names as in api: M rows, G groups, E in, F out.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from slicewise.kernels.grouped_matmul import tiles, visits

if TYPE_CHECKING:
    from slicewise.kernels.grouped_matmul.api import Kernel


def grouped_matmul(
    x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array, kernel: "Kernel"
) -> jax.Array:
    """As the function of the same name in api, on one device; rows past the groups are garbage, and their gradients."""
    return _grouped_matmul(padded(x_ME), w_GEF, group_sizes_G, kernel)[: len(x_ME)]


def padded(x_ME: jax.Array) -> jax.Array:
    """``x`` with rows of zeros at its end, as many as its tiles need."""
    return jnp.pad(x_ME, ((0, tiles.padded(len(x_ME)) - len(x_ME)), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(
    x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array, kernel: "Kernel"
) -> jax.Array:
    return product(x_ME, w_GEF, group_sizes_G, kernel, x_ME.dtype)


def _forward(x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array, kernel: "Kernel") -> tuple:
    return _grouped_matmul(x_ME, w_GEF, group_sizes_G, kernel), (x_ME, w_GEF, group_sizes_G)


def _backward(kernel: "Kernel", saved: tuple, grad_MF: jax.Array) -> tuple:
    x_ME, w_GEF, group_sizes_G = saved
    return (
        product(grad_MF, w_GEF, group_sizes_G, kernel, x_ME.dtype, transposed=True),
        weight_gradient(x_ME, grad_MF, group_sizes_G, kernel, w_GEF.dtype),
        None,
    )


_grouped_matmul.defvjp(_forward, _backward)


def product(
    x: jax.Array,
    w: jax.Array,
    group_sizes_G: jax.Array,
    kernel: "Kernel",
    dtype: Any,
    *,
    transposed: bool = False,
    tile: tiles.Tile | None = None,
) -> jax.Array:
    """Rows times the matrix of their group, or with ``transposed`` times its transpose; rows fill whole tiles."""
    columns = w.shape[1 if transposed else 2]
    return _tokamax().gmm(
        x,
        w,
        group_sizes_G,
        _precision(x),
        dtype,
        tiling=tile or _tile("gmm_t" if transposed else "gmm", x, columns, len(w), kernel),
        transpose_rhs=transposed,
        interpret=_how(kernel.interpret),
        manual_axis_type=jax.typeof(x).mat,
    )


def weight_gradient(
    x_ME: jax.Array,
    grad_MF: jax.Array,
    group_sizes_G: jax.Array,
    kernel: "Kernel",
    dtype: Any,
    *,
    tile: tiles.Tile | None = None,
) -> jax.Array:
    """The products of each group's rows, transposed, and their gradients: [G, E, F]; rows fill whole tiles."""
    return _tokamax().tgmm(
        x_ME.T,
        grad_MF,
        group_sizes_G,
        _precision(x_ME),
        dtype,
        tiling=tile or _tile("tgmm", x_ME, grad_MF.shape[1], len(group_sizes_G), kernel),
        interpret=_how(kernel.interpret),
        manual_axis_type=jax.typeof(grad_MF).mat,
    )


def _tokamax() -> Any:
    """The module of its kernels, whose list of the grid's steps is ours (see visits.py)."""
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel

    pallas_mosaic_tpu_kernel.make_group_metadata = visits.metadata
    return pallas_mosaic_tpu_kernel


def _tile(name: tiles.Product, x: jax.Array, columns: int, groups: int, kernel: "Kernel") -> tiles.Tile:
    rows, summed = x.shape
    key = tiles.key(name, kernel.chip, rows, summed, columns, groups, str(x.dtype), kernel.vmem_limit_kib)
    return tiles.chosen(key, rows)


def _how(interpret: bool) -> Any:
    """The interpreter of TPU programs: the general one cannot read tiles of a size known at run time."""
    from jax.experimental.pallas import tpu

    return tpu.InterpretParams() if interpret else False


def _precision(x: jax.Array) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
