"""Grouped matmul by tokamax's TPU kernel, with its backward products; the FLOPs are those of the rows, not of G times.

Dims in names as in api: M rows, G groups, E in, F out.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

# Rows, summed and other columns of a tile: operands twice, the sum in float32 and the result take 12 MiB of VMEM, the
# least that a compiler gives a kernel being 16 MiB.
TILE = (512, 1024, 1024)
LANES = 128
SUBLANES = 16  # rows of a register of bfloat16


def grouped_matmul(
    x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array, interpret: bool = False
) -> jax.Array:
    """As the function of the same name in api, on one device; rows past the groups are garbage, and their gradients."""
    M = len(x_ME)
    rows = min(TILE[0], M + -M % SUBLANES)
    padded_ME = jnp.pad(x_ME, ((0, -M % rows), (0, 0)))
    return _grouped_matmul(padded_ME, w_GEF, group_sizes_G, interpret)[:M]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(
    x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array, interpret: bool
) -> jax.Array:
    return _product(x_ME, w_GEF, group_sizes_G, interpret, transposed=False)


def _forward(x_ME: jax.Array, w_GEF: jax.Array, group_sizes_G: jax.Array, interpret: bool) -> tuple:
    return _grouped_matmul(x_ME, w_GEF, group_sizes_G, interpret), (x_ME, w_GEF, group_sizes_G)


def _backward(interpret: bool, saved: tuple, grad_MF: jax.Array) -> tuple:
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as kernel

    x_ME, w_GEF, group_sizes_G = saved
    dw_GEF = kernel.tgmm(
        x_ME.T,
        grad_MF,
        group_sizes_G,
        _precision(x_ME),
        w_GEF.dtype,
        tiling=_tile(len(x_ME), x_ME.shape[1], grad_MF.shape[1]),
        interpret=_how(interpret),
        manual_axis_type=jax.typeof(grad_MF).mat,
    )
    return _product(grad_MF, w_GEF, group_sizes_G, interpret, transposed=True), dw_GEF, None


_grouped_matmul.defvjp(_forward, _backward)


def _product(
    x: jax.Array, w: jax.Array, group_sizes_G: jax.Array, interpret: bool, *, transposed: bool
) -> jax.Array:
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu_kernel as kernel

    return kernel.gmm(
        x,
        w,
        group_sizes_G,
        _precision(x),
        x.dtype,
        tiling=_tile(len(x), x.shape[1], w.shape[1 if transposed else 2]),
        transpose_rhs=transposed,
        interpret=_how(interpret),
        manual_axis_type=jax.typeof(x).mat,
    )


def _how(interpret: bool) -> Any:
    """The interpreter of TPU programs: the general one cannot read tiles of a size known at run time."""
    from jax.experimental.pallas import tpu

    return tpu.InterpretParams() if interpret else False


def _precision(x: jax.Array) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def _tile(rows: int, summed: int, columns: int) -> tuple[int, int, int]:
    """Rows are padded to tiles."""
    return min(rows, TILE[0]), _part(summed, TILE[1]), _part(columns, TILE[2])


def _part(size: int, most: int) -> int:
    """A divisor in whole registers of at least half of ``most``, or else ``most``: the last tile may stand over."""
    fitting = [part for part in range(LANES, min(size, most) + 1, LANES) if size % part == 0]
    return fitting[-1] if fitting and fitting[-1] >= min(size, most // 2) else min(size, most)
