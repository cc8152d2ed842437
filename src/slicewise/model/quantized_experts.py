"""Routed experts in 8 bits: their matrices gathered as bytes, and the three products of a grouped matmul on bytes.

Each expert's matrix has one scale, activations and gradients have one, or one for each row. Dims in names: R rows, G
experts of this device, S rows of one expert, I and O the sides of a matrix.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slicewise.kernels.grouped_matmul import api
from slicewise.model.quantization import Quantization, largest, of_type, rounded
from slicewise.model.remat import GATHERED


@dataclass(frozen=True)
class Whole:
    """One matrix of each of this device's experts. The gradient of the matrices flows through ``carrier``, zeros of
    their own type, for bytes can carry none."""

    values_GIO: Any
    scale_G: Any  # float32
    carrier_GIO: Any
    how: Quantization


jax.tree_util.register_dataclass(Whole, ["values_GIO", "scale_G", "carrier_GIO"], ["how"])


Shared = tuple[int, Any]  # the dim of matrices that is divided, and the mesh axes that divide it


def whole(w_GIO: jax.Array, limit_G: jax.Array | None, how: Quantization, shared: Shared | None) -> Whole:
    """This device's part of the matrices, in the compute type, as bytes, gathered as ``shared`` says (None = whole).

    ``limit_G`` is the largest weight of each, where it is known. Call it inside shard_map; the transpose
    reduce-scatters the gradient.
    """
    if how.fixed_range:
        limit_G = jnp.full(len(w_GIO), how.fixed_range, jnp.float32)
    elif limit_G is None:
        limit_G = largest(jax.lax.stop_gradient(w_GIO), (0,)).reshape(-1)
        limit_G = limit_G if shared is None else jax.lax.pmax(limit_G, shared[1])
    varying = tuple(jax.typeof(w_GIO).mat.varying - jax.typeof(limit_G).mat.varying)
    limit_G = jax.lax.pcast(limit_G, varying, to="varying") if varying else limit_G
    scale_G = limit_G / of_type(how.name, is_gradient=False).largest
    values_GIO = rounded(
        jax.lax.stop_gradient(w_GIO), scale_G[:, None, None], of_type(how.name, is_gradient=False)
    )
    if shared is not None:
        dim, axes = shared
        values_GIO = jax.lax.all_gather(values_GIO, axes, axis=dim, tiled=True)
    values_GIO = checkpoint_name(values_GIO, GATHERED)
    return Whole(values_GIO, scale_G, _carrier(w_GIO, shared), how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _carrier(w_GIO: jax.Array, shared: Shared | None) -> jax.Array:
    shape = list(w_GIO.shape)
    if shared is not None:
        shape[shared[0]] *= jax.lax.axis_size(shared[1])
    zeros_GIO, varying = jnp.zeros(shape, w_GIO.dtype), tuple(jax.typeof(w_GIO).mat.varying)
    return jax.lax.pcast(zeros_GIO, varying, to="varying") if varying else zeros_GIO


def _carrier_backward(shared: Shared | None, _: None, grad_GIO: jax.Array) -> tuple[jax.Array]:
    if shared is None:
        return (grad_GIO,)
    dim, axes = shared
    return (jax.lax.psum_scatter(grad_GIO, axes, scatter_dimension=dim, tiled=True),)


_carrier.defvjp(lambda w_GIO, shared: (_carrier(w_GIO, shared), None), _carrier_backward)


def grouped(x_RI: jax.Array, w: Whole, sizes_G: jax.Array, kernel: api.Kernel) -> jax.Array:
    """As kernels.grouped_matmul.api.grouped_matmul, on bytes."""
    real_R1 = jnp.arange(len(x_RI))[:, None] < sizes_G.sum()
    x_RI = jnp.where(real_R1, x_RI, 0)
    out_RO = _grouped(x_RI, w.values_GIO, w.scale_G, w.carrier_GIO, sizes_G, kernel, w.how)
    return jnp.where(real_R1, out_RO, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _grouped(
    x_RI: jax.Array,
    values_GIO: jax.Array,
    scale_G: jax.Array,
    carrier_GIO: jax.Array,
    sizes_G: jax.Array,
    kernel: api.Kernel,
    how: Quantization,
) -> jax.Array:
    x = _activations(x_RI, how)
    out_RO = api.product(x.values, values_GIO, sizes_G, kernel)
    return (out_RO * x.scale * _by_row(scale_G, sizes_G, len(x_RI))).astype(x_RI.dtype)


def _grouped_forward(
    x_RI: jax.Array, values: Any, scale: Any, carrier: Any, sizes_G: Any, *how: Any
) -> tuple:
    out_RO = _grouped(x_RI, values, scale, carrier, sizes_G, *how)
    return out_RO, (x_RI, values, scale, sizes_G)


def _grouped_backward(kernel: api.Kernel, how: Quantization, saved: tuple, grad_RO: jax.Array) -> tuple:
    x_RI, values_GIO, scale_G, sizes_G = saved
    real_R1 = jnp.arange(len(x_RI))[:, None] < sizes_G.sum()
    grad_RO = jnp.where(real_R1, grad_RO, 0)
    g = _gradients(grad_RO, how)
    dx_RI = api.product(g.values, values_GIO, sizes_G, kernel, transposed=True)
    dx_RI = dx_RI * g.scale * _by_row(scale_G, sizes_G, len(x_RI))
    x, g = _by_column(x_RI, grad_RO, how)
    dw_GIO = api.weight_gradient(x.values, g.values, sizes_G, kernel, x_RI.dtype)
    dw_GIO = (dw_GIO * x.scale.reshape(1, -1, 1) * g.scale.reshape(1, 1, -1)).astype(x_RI.dtype)
    return dx_RI.astype(x_RI.dtype), None, None, dw_GIO, None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def batched(x_GSI: jax.Array, w: Whole) -> jax.Array:
    """Equally many rows of each expert: [G, S, O] in the dtype of ``x``."""
    return _batched(x_GSI, w.values_GIO, w.scale_G, w.carrier_GIO, w.how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _batched(
    x_GSI: jax.Array, values_GIO: jax.Array, scale_G: jax.Array, carrier_GIO: jax.Array, how: Quantization
) -> jax.Array:
    x = _activations(x_GSI, how)
    out_GSO = _dot(x.values, values_GIO, 2, 1)
    return (out_GSO * x.scale * scale_G[:, None, None]).astype(x_GSI.dtype)


def _batched_forward(x_GSI: jax.Array, values: Any, scale: Any, carrier: Any, how: Quantization) -> tuple:
    return _batched(x_GSI, values, scale, carrier, how), (x_GSI, values, scale)


def _batched_backward(how: Quantization, saved: tuple, grad_GSO: jax.Array) -> tuple:
    x_GSI, values_GIO, scale_G = saved
    g = _gradients(grad_GSO, how)
    dx_GSI = _dot(g.values, values_GIO, 2, 2) * g.scale * scale_G[:, None, None]
    x, g = _by_column(x_GSI, grad_GSO, how)
    dw_GIO = _dot(x.values, g.values, 1, 1) * jnp.swapaxes(x.scale, -1, -2) * g.scale
    return dx_GSI.astype(x_GSI.dtype), None, None, dw_GIO.astype(x_GSI.dtype)


_batched.defvjp(_batched_forward, _batched_backward)


def _dot(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """Over one dim of each, G being a batch, in float32."""
    total = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
    numbers = (((a_dim,), (b_dim,)), ((0,), (0,)))
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=total).astype(jnp.float32)


@dataclass(frozen=True)
class _Bytes:
    values: jax.Array
    scale: jax.Array  # of as many dims, float32


def _activations(x: jax.Array, how: Quantization, rows: int = -2) -> _Bytes:
    limit = largest(x, () if how.scaling == "tensor" else (x.ndim + rows,))
    if how.fixed_range:
        limit = jnp.full_like(limit, how.fixed_range)
    kind = of_type(how.name, is_gradient=False)
    return _Bytes(rounded(x, limit / kind.largest, kind), limit / kind.largest)


def _gradients(grad: jax.Array, how: Quantization, rows: int = -2) -> _Bytes:
    kind = of_type(how.name, is_gradient=True)
    limit = largest(grad, () if how.scaling == "tensor" else (grad.ndim + rows,))
    return _Bytes(rounded(grad, limit / kind.largest, kind, stochastic=how.stochastic), limit / kind.largest)


def _by_column(x: jax.Array, grad: jax.Array, how: Quantization) -> tuple[_Bytes, _Bytes]:
    """Both for the gradient of matrices, which sums over rows: no scale may vary along these."""
    return _activations(x, how, -1), _gradients(grad, how, -1)


def _by_row(scale_G: jax.Array, sizes_G: jax.Array, rows: int) -> jax.Array:
    """The scale of each row's expert, [R, 1]; 0 for rows of none."""
    group_R = jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(rows), side="right", method="compare_all")
    return scale_G.at[group_R].get(mode="fill", fill_value=0)[:, None]
