"""Products of activations and weights in 8 bits: qwix quantises, the backward pass and the gathers are spelled out.

Weights are quantised where they are stored, so an all-gather moves one byte a weight, in either pass. Sums are in
float32 (int32 for int8), gradients of weights in the weights' type.
"""

import functools
import importlib.util
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slicewise.catalog.chips import Chip
from slicewise.errors import UserError
from slicewise.parallel.rules import partition, unscattered

MATRICES = re.compile(r"(.*\.)?(w[qkvo]|wq_a|wq_b|wkv_a|wk_b|wv_b|w_gate|w_up|w_down)")
EXPERTS = re.compile(r"moe\.w_.*")  # their product is another kernel's
TYPES = {  # of weights and activations, of gradients
    "fp8": ("float8_e4m3fn", "float8_e5m2"),
    "fp8_e4m3": ("float8_e4m3fn", "float8_e4m3fn"),
    "int8": ("int8", "int8"),
}


@dataclass(frozen=True)
class Quantization:
    """How the matrices whose name matches ``layers`` are multiplied."""

    name: Literal["fp8", "fp8_e4m3", "int8"]
    layers: str = ".*"
    scaling: Literal["tensor", "axis", "tile"] = "tensor"
    tile: int = 128
    fixed_range: float = 0.0  # of weights and activations; 0 = from their largest value at each step
    stochastic: bool = False  # rounding of gradients


@dataclass(frozen=True)
class Marked:
    """A stored weight that is to be multiplied in 8 bits."""

    weight: jax.Array
    how: Quantization


@dataclass(frozen=True)
class Stored:
    """A Marked weight in the compute type, as its device keeps it: linear quantises and gathers it."""

    weight: jax.Array
    dims: tuple[str, ...]
    how: Quantization


def check(how: Quantization, layers: Any) -> None:
    """Raises UserError for a pattern that is none or that names no matrix of ``layers``, or without qwix."""
    try:
        re.compile(how.layers)
    except re.error as e:
        raise UserError(f"quantization_layers = '{how.layers}' is no regular expression: {e}.") from e
    if importlib.util.find_spec("qwix") is None:
        raise UserError(f"quantization = '{how.name}' needs qwix; pip install 'slicewise[quantization]'.")
    leaves = jax.tree.leaves(marked(layers, how), is_leaf=lambda leaf: isinstance(leaf, Marked))
    if not any(isinstance(leaf, Marked) for leaf in leaves):
        raise UserError(
            f"quantization_layers = '{how.layers}' matches no matrix; the names are {', '.join(_names(layers))}."
        )


def _names(layers: Any) -> list[str]:
    named = (_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(layers))
    return [name for name in named if MATRICES.fullmatch(name) and not EXPERTS.fullmatch(name)]


def _name(path: tuple) -> str:
    return ".".join(key.name for key in path)


def slower(how: Quantization, chip: Chip) -> str | None:
    """What to know where ``chip`` multiplies no faster in 8 bits than in bfloat16."""
    precision: Literal["int8", "fp8"] = "int8" if how.name == "int8" else "fp8"
    rate = chip.int8_flops_per_s if precision == "int8" else chip.fp8_flops_per_s
    if rate is not None and rate > chip.bf16_flops_per_s:
        return None
    return (
        f"{chip.name} has no {precision} matrix unit faster than bfloat16: quantization = '{how.name}' halves the bytes"
        " of gathered weights there and saves no time in products."
    )


def marked(layers: Any, how: Quantization | None) -> Any:
    """``layers`` with the matrices that ``how`` names wrapped as Marked."""
    if how is None:
        return layers

    def mark(path: tuple, weight: jax.Array) -> Any:
        name = _name(path).removesuffix(".base")  # of one that is Adapted
        is_meant = MATRICES.fullmatch(name) and not EXPERTS.fullmatch(name) and re.fullmatch(how.layers, name)
        return Marked(weight, how) if is_meant else weight

    return jax.tree_util.tree_map_with_path(mark, layers)


def linear(x: jax.Array, weight: Stored, out_sharding: PartitionSpec, contract: int) -> jax.Array:
    """As model.linear.linear, with ``weight`` [*C, *O] still as it is stored."""
    return _linear(x, weight.weight, weight.dims, tuple(out_sharding), contract, weight.how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _linear(
    x: jax.Array, weight: jax.Array, dims: tuple, out_sharding: tuple, contract: int, how: Quantization
) -> jax.Array:
    lead, inner = x.ndim - contract, range(contract)
    q_x = _quantized(x, range(lead), how)
    q_weight = _gathered(_quantized(weight, range(contract, weight.ndim), how), dims)
    return _product(q_x, q_weight, (range(lead, x.ndim), inner), out_sharding, x.dtype, how)


def _forward(
    x: jax.Array, weight: jax.Array, dims: tuple, out_sharding: tuple, contract: int, how: Quantization
) -> tuple:
    return _linear(x, weight, dims, out_sharding, contract, how), (x, weight)


def _backward(
    dims: tuple, out_sharding: tuple, contract: int, how: Quantization, saved: tuple, grad: jax.Array
) -> tuple:
    x, weight = saved
    grad = unscattered(grad, x, x.ndim - contract)
    lead, outer = range(x.ndim - contract), range(contract, weight.ndim)
    of_grad = range(len(lead), grad.ndim)
    q_weight = _gathered(_quantized(weight, range(contract), how), dims)
    q_x = _quantized(x, range(len(lead), x.ndim), how)
    d_x = _product(
        _quantized(grad, lead, how, is_gradient=True),
        q_weight,
        (of_grad, outer),
        jax.typeof(x).sharding.spec,
        x.dtype,
        how,
    )
    d_weight = _product(
        q_x,
        _quantized(grad, of_grad, how, is_gradient=True),
        (lead, lead),
        jax.typeof(weight).sharding.spec,
        weight.dtype,
        how,
    )
    return d_x, d_weight


_linear.defvjp(_forward, _backward)


def _quantized(x: jax.Array, kept: Collection[int], how: Quantization, *, is_gradient: bool = False) -> Any:
    """``x`` as qwix's QArray for a product that sums over all dims but ``kept``: its scale never varies along those."""
    import qwix

    dtype = jnp.dtype(TYPES[how.name][is_gradient])
    method = "absmax"
    if how.fixed_range and not is_gradient:
        method = f"fixed,{-how.fixed_range},{how.fixed_range}"
    summed = [dim for dim in range(x.ndim) if dim not in kept]
    tiles = {summed[-1]: _tile(x.shape[summed[-1]], how.tile)} if how.scaling == "tile" else {}
    channels = () if how.scaling == "tensor" else tuple(kept)
    array = qwix.quantize(
        x,
        dtype,
        channelwise_axes=channels,
        tiled_axes=tiles,
        calibration_method=method,
        scale_dtype=jnp.float32,
    )
    if how.stochastic and is_gradient:
        array = array.replace(qvalue=_rounded_at_random(x, array, dtype))
    return array


def _tile(size: int, asked: int) -> int:
    """The largest tile up to ``asked`` that divides ``size``."""
    return max(tile for tile in range(1, min(asked, size) + 1) if size % tile == 0)


def _rounded_at_random(x: jax.Array, array: Any, dtype: jnp.dtype) -> jax.Array:
    """``x`` over the scale of ``array``, up or down with the odds that make the mean right.

    The random bits follow from the sum of ``x``: other at every layer and step, the same when a run is repeated.
    """
    import qwix

    ones = array.replace(qvalue=jnp.ones_like(array.qvalue))
    y = x.astype(jnp.float32) / qwix.dequantize(ones)
    seed = jax.lax.bitcast_convert_type(jnp.sum(x, dtype=jnp.float32), jnp.uint32)
    key = jax.random.key(seed, impl="unsafe_rbg")
    bits = jax.random.bits(key, x.shape, jnp.uint32, out_sharding=jax.typeof(x).sharding)
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.floor(y + bits.astype(jnp.float32) * 2.0**-32), -127, 127).astype(dtype)
    info = jnp.finfo(dtype)
    # A step of the type at y, and at least the one of its subnormal numbers.
    exponent = jnp.maximum(jnp.frexp(jnp.abs(y))[1] - 1, info.minexp)
    step = jnp.ldexp(jnp.float32(1), exponent - info.nmant)
    rounded = jnp.floor(y / step + bits.astype(jnp.float32) * 2.0**-32) * step
    return jnp.clip(rounded, float(info.min), float(info.max)).astype(dtype)


def _gathered(array: Any, dims: tuple[str, ...]) -> Any:
    """``array`` with its embed dim whole on every device: the all-gather moves bytes."""
    spec = partition(*("activation" if dim == "embed" else dim for dim in dims))

    def gather(x: jax.Array) -> jax.Array:
        axes = (axis if size > 1 else None for axis, size in zip(spec, x.shape, strict=True))
        return jax.sharding.reshard(x, PartitionSpec(*axes))

    return jax.tree.map(gather, array)


def _product(
    a: Any,
    b: Any,
    summed: tuple[Collection[int], Collection[int]],
    out_sharding: Any,
    dtype: Any,
    how: Quantization,
) -> jax.Array:
    """The product of two QArrays over the dims ``summed`` of each; the kept dims of ``a``, then those of ``b``."""
    import qwix

    numbers = ((tuple(summed[0]), tuple(summed[1])), ((), ()))
    spec = PartitionSpec(*out_sharding)
    if how.scaling == "tile":  # no unit scales its partial sums: only the operands are those of 8 bits
        a, b = (qwix.dequantize(q).astype(dtype) for q in (a, b))
        return jax.lax.dot_general(a, b, numbers, out_sharding=spec)
    total = jnp.int32 if how.name == "int8" else jnp.float32
    out = jax.lax.dot_general(a.qvalue, b.qvalue, numbers, preferred_element_type=total, out_sharding=spec)
    a_kept = [size for dim, size in enumerate(a.scale.shape) if dim not in summed[0]]
    b_kept = [size for dim, size in enumerate(b.scale.shape) if dim not in summed[1]]
    scale = a.scale.reshape(*a_kept, *[1] * len(b_kept)) * b.scale.reshape(*[1] * len(a_kept), *b_kept)
    return (out.astype(jnp.float32) * scale).astype(dtype)
