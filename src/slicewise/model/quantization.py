"""Products of activations and weights in 8 bits: qwix quantises, the backward pass and the gathers are spelled out.

Weights are quantised where they are stored, so an all-gather moves one byte a weight, in either pass. Sums are in
float32 (int32 for int8), gradients of weights in the weights' type. Routed experts are in quantized_experts.py.

Scales wait for no other device where they need not: each has its own for its activations and gradients, since what
devices add up is scaled before, and those of weights are found for all layers at once, before the first.
"""

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slicewise.costs import scales
from slicewise.costs.adapters import check_pattern
from slicewise.errors import UserError
from slicewise.parallel.rules import partition, unscattered

MATRICES = re.compile(r"(.*\.)?(w[qkvo]|wq_a|wq_b|wkv_a|wk_b|wv_b|w_gate|w_up|w_down)")
EXPERTS = re.compile(r"(.*\.)?moe\.w_.*")  # routed ones, whose product is another kernel's
# Over the largest value of a calibration, so that later ones fit too; a floating type hardly feels it. Ranges are kept
# without it, so that they serve whatever type a run is resumed in.
HEADROOM = {"fp8": 2.0, "fp8_e4m3": 2.0, "int8": 1.0}
TYPES = {  # of weights and activations, of gradients
    "fp8": ("float8_e4m3fn", "float8_e5m2"),
    "fp8_e4m3": ("float8_e4m3fn", "float8_e4m3fn"),
    "int8": ("int8", "int8"),
}
TINY = 2.0**-63  # instead of a largest magnitude of 0


@dataclass(frozen=True)
class Quantization:
    """How the matrices whose name matches ``layers`` are multiplied."""

    name: Literal["fp8", "fp8_e4m3", "int8"]
    layers: str = ".*"
    scaling: Literal["tensor", "axis", "tile"] = "tensor"
    tile: int = 128
    fixed_range: float = 0.0  # of weights and activations; 0 = from their largest value at each step
    stochastic: bool = False  # rounding of gradients
    calibrated: bool = False  # the range of weights and activations is that of the last calibration
    calibrates: bool = (
        False  # the gradient of a range is the largest values seen; every scale is this step's own
    )


@dataclass(frozen=True)
class Marked:
    """A stored weight that is to be multiplied in 8 bits; of several layers, everything has a leading L.

    ``range_2`` are the largest activation and weight of the last calibration, None where scales are each step's own.
    ``limit`` is the largest weight of this step, of each expert's matrix where it is one of experts; None where it is
    not known or no scale is made from it.
    """

    weight: jax.Array
    range_2: jax.Array | None
    how: Quantization
    limit: jax.Array | None = None


jax.tree_util.register_dataclass(Marked, ["weight", "range_2", "limit"], ["how"])


@dataclass(frozen=True)
class Stored:
    """A Marked weight in the compute type, as its device keeps it: linear quantises and gathers it."""

    weight: jax.Array
    dims: tuple[str, ...]
    how: Quantization
    range_2: jax.Array | None = None
    limit: jax.Array | None = None


@dataclass(frozen=True)
class Type:
    """An 8-bit type and its largest number."""

    dtype: Any
    largest: float


def of_type(name: str, *, is_gradient: bool) -> Type:
    dtype = jnp.dtype(TYPES[name][is_gradient])
    is_whole = jnp.issubdtype(dtype, jnp.integer)
    return Type(dtype, 127.0 if is_whole else float(jnp.finfo(dtype).max))


def check(how: Quantization, layers: Any) -> None:
    """Raises UserError for a pattern that is none or that names no matrix of ``layers``, or without qwix."""
    check_pattern("quantization_layers", how.layers)
    if importlib.util.find_spec("qwix") is None:
        raise UserError(f"quantization = '{how.name}' needs qwix; pip install 'slicewise[quantization]'.")
    scales.check(fixed_range=how.fixed_range, calibrate_every=int(how.calibrated), scaling=how.scaling)
    leaves = jax.tree.leaves(marked(layers, how), is_leaf=lambda leaf: isinstance(leaf, Marked))
    if not any(isinstance(leaf, Marked) for leaf in leaves):
        raise UserError(
            f"quantization_layers = '{how.layers}' matches no matrix; the names are {', '.join(_names(layers))}."
        )


def _names(layers: Any) -> list[str]:
    named = (_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(layers))
    return [name for name in named if MATRICES.fullmatch(name)]


def _name(path: tuple) -> str:
    return ".".join(key.name for key in path)


def marked(
    layers: Any, how: Quantization | None, ranges: Mapping[str, jax.Array] | None = None, prefix: str = ""
) -> Any:
    """``layers`` with the matrices that ``how`` names wrapped as Marked; ``ranges`` by ``prefix`` and name."""
    if how is None:
        return layers

    def mark(path: tuple, weight: jax.Array) -> Any:
        name = _name(path).removesuffix(".base")  # of one that is Adapted
        if not (MATRICES.fullmatch(name) and re.fullmatch(how.layers, name)):
            return weight
        return Marked(weight, None if ranges is None else ranges.get(f"{prefix}{name}"), how)

    return jax.tree_util.tree_map_with_path(mark, layers)


def all_marked(params: Any, how: Quantization | None, ranges: Mapping[str, jax.Array] | None) -> Any:
    """Params with the matrices of all its layers marked, and the largest values of all that need them found."""
    if how is None:
        return params
    params = _all_marked(params, how, ranges)
    is_own = how.scaling == "tensor" and (how.calibrates or not how.calibrated)

    def found(path: tuple, leaf: Any) -> Any:
        is_expert = EXPERTS.fullmatch(_name(path)) is not None
        if not isinstance(leaf, Marked) or how.fixed_range or not (is_own or is_expert):
            return leaf
        weight, kept = jax.lax.stop_gradient(leaf.weight), range(1 + is_expert)
        limit = largest(weight, kept).squeeze(range(len(kept), weight.ndim))
        return dataclasses.replace(leaf, limit=limit)

    return jax.tree_util.tree_map_with_path(found, params, is_leaf=lambda leaf: isinstance(leaf, Marked))


def _all_marked(params: Any, how: Quantization, ranges: Mapping[str, jax.Array] | None) -> Any:
    changed = {
        stack: marked(getattr(params, stack), how, ranges, f"{stack}.")
        for stack in ("layers", "dense_layers")
        if getattr(params, stack) is not None
    }
    if params.prediction is not None:
        layers = marked(params.prediction.layers, how, ranges, "prediction.layers.")
        changed["prediction"] = dataclasses.replace(params.prediction, layers=layers)
    return dataclasses.replace(params, **changed)


def ranges_of(params: Any, how: Quantization) -> dict[str, jax.Array]:
    """Zeros [L, 2] by name for each stack of matrices whose range is calibrated; routed experts have none."""
    everything = jax.tree_util.tree_leaves_with_path(
        _all_marked(params, how, None), is_leaf=lambda leaf: isinstance(leaf, Marked)
    )
    return {
        _name(path): jnp.zeros((leaf.weight.shape[0], 2), jnp.float32)
        for path, leaf in everything
        if isinstance(leaf, Marked) and not EXPERTS.fullmatch(_name(path))
    }


def linear(x: jax.Array, w: Stored, out_sharding: PartitionSpec, contract: int) -> jax.Array:
    """As model.linear.linear, with the weight ``w`` [*C, *O] still as it is stored."""
    return _linear(x, w.weight, w.range_2, w.limit, w.dims, tuple(out_sharding), contract, w.how)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _linear(
    x: jax.Array,
    weight: jax.Array,
    range_2: jax.Array | None,
    limit: jax.Array | None,
    dims: tuple,
    out_sharding: tuple,
    contract: int,
    how: Quantization,
) -> jax.Array:
    lead, inner = x.ndim - contract, range(contract)
    x_limit, weight_limit = _limits(range_2, limit, how)
    q_x = _quantized(x, range(lead), how, x_limit)
    q_weight = _gathered(weight, range(contract, weight.ndim), how, weight_limit, dims)
    return _product(q_x, q_weight, (range(lead, x.ndim), inner), out_sharding, x.dtype, how, x.dtype)


def _limits(
    range_2: jax.Array | None, limit: jax.Array | None, how: Quantization
) -> tuple[jax.Array | None, jax.Array | None]:
    """The largest activation and weight that 8 bits hold, where they are known."""
    if how.fixed_range:
        return (jnp.float32(how.fixed_range),) * 2
    if range_2 is None or how.calibrates:
        return None, limit
    return HEADROOM[how.name] * range_2[0], HEADROOM[how.name] * range_2[1]


def _forward(
    x: jax.Array, weight: jax.Array, range_2: jax.Array | None, limit: jax.Array | None, *how: Any
) -> tuple:
    return _linear(x, weight, range_2, limit, *how), (x, weight, range_2, limit)


def _backward(
    dims: tuple, out_sharding: tuple, contract: int, how: Quantization, saved: tuple, grad: jax.Array
) -> tuple:
    x, weight, range_2, limit = saved
    x_limit, weight_limit = _limits(range_2, limit, how)
    if how.scaling == "tile":  # which would cross the parts that tokens are scattered in
        grad = unscattered(grad, x, x.ndim - contract)
    lead, outer = range(x.ndim - contract), range(contract, weight.ndim)
    of_grad = range(len(lead), grad.ndim)
    q_weight = _gathered(weight, range(contract), how, weight_limit, dims)
    q_x = _quantized(x, range(len(lead), x.ndim), how, x_limit)
    d_x = _product(
        _together(grad, lead, how, x, len(lead)),
        q_weight,
        (of_grad, outer),
        jax.typeof(x).sharding.spec,
        x.dtype,
        how,
        x.dtype,
    )
    d_weight = _product(
        q_x,
        _together(grad, of_grad, how, x, len(lead)),
        (lead, lead),
        jax.typeof(weight).sharding.spec,
        weight.dtype,
        how,
        x.dtype,
    )
    seen_2 = None if range_2 is None else jnp.stack([largest(y, ()).reshape(()) for y in (x, weight)])
    return d_x, d_weight, seen_2, None


_linear.defvjp(_forward, _backward)


def largest(x: jax.Array, kept: Collection[int]) -> jax.Array:
    """The largest magnitude over all dims but ``kept``, of size 1 in the others: float32, and above 0."""
    summed = tuple(dim for dim in range(x.ndim) if dim not in kept)
    return jnp.maximum(jnp.abs(x).max(summed, keepdims=True).astype(jnp.float32), TINY)


def rounded(x: jax.Array, scale: jax.Array, kind: Type, *, stochastic: bool = False) -> jax.Array:
    """``x`` over ``scale``, which broadcasts, in 8 bits; what lies outside becomes the largest number."""
    y = jnp.clip(x.astype(jnp.float32) / scale, -kind.largest, kind.largest)
    if stochastic:
        return _at_random(y, _bits(x, None), kind.dtype)
    return (jnp.round(y) if jnp.issubdtype(kind.dtype, jnp.integer) else y).astype(kind.dtype)


def _quantized(
    x: jax.Array,
    kept: Collection[int],
    how: Quantization,
    limit: jax.Array | None = None,
    *,
    is_gradient: bool = False,
    alike: Collection[str] = (),
) -> Any:
    """``x`` as qwix's QArray for a product that sums over all dims but ``kept``: its scale never varies along those.

    Each device has scales for its own part of ``x``, the same along the mesh axes ``alike``. ``limit`` is a scalar, the
    largest magnitude that is held, where it is not that of ``x``.
    """
    import qwix

    kind = of_type(how.name, is_gradient=is_gradient)
    if limit is not None:
        scale = (jnp.maximum(limit, TINY) / kind.largest).reshape((1,) * x.ndim)
        return qwix.QArray(rounded(x, scale, kind), scale)

    def on_device(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if alike:
            scale = jax.lax.pmax(largest(x, _varies(kept, how)), tuple(alike)) / kind.largest
            array = qwix.QArray(rounded(x, scale, kind), scale)
        else:
            array = _by_qwix(x, kept, how, kind)
        if how.stochastic and is_gradient:
            array = array.replace(qvalue=_rounded_at_random(x, array, kind.dtype))
        return array.qvalue, array.scale

    if how.scaling == "tile":  # tiles may cross the parts of devices
        return qwix.QArray(*on_device(x))
    spec = jax.typeof(x).sharding.spec
    entries = _entries(spec, x.ndim)
    own = PartitionSpec(*(tuple(axis for axis in entry if axis not in alike) or None for entry in entries))
    return qwix.QArray(*jax.shard_map(on_device, in_specs=(spec,), out_specs=(spec, own))(x))


def _varies(kept: Collection[int], how: Quantization) -> Collection[int]:
    """The dims along which a device has several scales."""
    return kept if how.scaling == "axis" else ()


def _by_qwix(x: jax.Array, kept: Collection[int], how: Quantization, kind: Type) -> Any:
    import qwix

    summed = [dim for dim in range(x.ndim) if dim not in kept]
    return qwix.quantize(
        x,
        kind.dtype,
        channelwise_axes=() if how.scaling == "tensor" else tuple(kept),
        tiled_axes={summed[-1]: _tile(x.shape[summed[-1]], how.tile)} if how.scaling == "tile" else {},
        scale_dtype=jnp.float32,
    )


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
    return _at_random(y, _bits(x, jax.typeof(x).sharding), dtype)


def _bits(x: jax.Array, sharding: Any) -> jax.Array:
    seed = jax.lax.bitcast_convert_type(jnp.sum(x, dtype=jnp.float32), jnp.uint32)
    key = jax.random.key(seed, impl="unsafe_rbg")
    return jax.random.bits(key, x.shape, jnp.uint32, out_sharding=sharding)


def _at_random(y: jax.Array, bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``y`` up or down to a number of ``dtype``."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.floor(y + bits.astype(jnp.float32) * 2.0**-32), -127, 127).astype(dtype)
    info = jnp.finfo(dtype)
    # A step of the type at y, and at least the one of its subnormal numbers.
    exponent = jnp.maximum(jnp.frexp(jnp.abs(y))[1] - 1, info.minexp)
    step = jnp.ldexp(jnp.float32(1), exponent - info.nmant)
    near = jnp.floor(y / step + bits.astype(jnp.float32) * 2.0**-32) * step
    return jnp.clip(near, float(info.min), float(info.max)).astype(dtype)


def _gathered(
    weight: jax.Array,
    kept: Collection[int],
    how: Quantization,
    limit: jax.Array | None,
    dims: tuple[str, ...],
) -> Any:
    """``weight`` in 8 bits, with its embed dim whole on every device: the all-gather moves bytes."""
    spec = partition(*("activation" if dim in ("embed", "latent") else dim for dim in dims))
    return _relaid(weight, kept, how, spec, limit)


def _together(grad: jax.Array, kept: Collection[int], how: Quantization, x: jax.Array, lead: int) -> Any:
    """A gradient in 8 bits, its first ``lead`` dims laid out as those of ``x``: bytes are gathered, if need be."""
    ours, spec = jax.typeof(x).sharding.spec[:lead], jax.typeof(grad).sharding.spec
    return _relaid(grad, kept, how, PartitionSpec(*ours, *spec[lead:]), is_gradient=True)


def _relaid(
    x: jax.Array,
    kept: Collection[int],
    how: Quantization,
    spec: PartitionSpec,
    limit: jax.Array | None = None,
    *,
    is_gradient: bool = False,
) -> Any:
    """``x`` in 8 bits and gathered to ``spec``, with one scale for what is gathered."""
    had, now = (_entries(s, x.ndim) for s in (jax.typeof(x).sharding.spec, spec))
    dims = [] if how.scaling == "tile" else [dim for dim in range(x.ndim) if dim not in _varies(kept, how)]
    ways = jax.sharding.get_abstract_mesh().shape
    alike = [axis for dim in dims for axis in had[dim] if axis not in now[dim] and ways[axis] > 1]
    array = _quantized(x, kept, how, limit, is_gradient=is_gradient, alike=alike)

    of_scale = PartitionSpec(
        *(e if size > 1 else None for e, size in zip(now, array.scale.shape, strict=True))
    )
    return array.replace(
        qvalue=jax.sharding.reshard(array.qvalue, spec), scale=jax.sharding.reshard(array.scale, of_scale)
    )


def _product(
    a: Any,
    b: Any,
    summed: tuple[Collection[int], Collection[int]],
    out_sharding: Any,
    dtype: Any,
    how: Quantization,
    sums_in: Any,
) -> jax.Array:
    """The product of two QArrays over the dims ``summed`` of each; the kept dims of ``a``, then those of ``b``.

    What devices add up is scaled before, and of type ``sums_in``: the units' own sums are of 32 bits.
    """
    import qwix

    numbers = ((tuple(summed[0]), tuple(summed[1])), ((), ()))
    spec = PartitionSpec(*out_sharding)
    if how.scaling == "tile":  # no unit scales its partial sums: only the operands are those of 8 bits
        a, b = (qwix.dequantize(q).astype(dtype) for q in (a, b))
        return jax.lax.dot_general(a, b, numbers, out_sharding=spec)
    total = jnp.int32 if how.name == "int8" else jnp.float32
    over, scattered = _sums(a.qvalue, b.qvalue, summed, spec)

    def on_device(a: Any, b: Any) -> jax.Array:
        out = jax.lax.dot_general(a.qvalue, b.qvalue, numbers, preferred_element_type=total)
        a_kept = [size for dim, size in enumerate(a.scale.shape) if dim not in summed[0]]
        b_kept = [size for dim, size in enumerate(b.scale.shape) if dim not in summed[1]]
        scale = a.scale.reshape(*a_kept, *[1] * len(b_kept)) * b.scale.reshape(*[1] * len(a_kept), *b_kept)
        out = (out.astype(jnp.float32) * scale).astype(sums_in if over else dtype)
        for dim, axis in scattered:
            out = jax.lax.psum_scatter(out, axis, scatter_dimension=dim, tiled=True)
        rest = tuple(axis for axis in over if axis not in {axis for _, axis in scattered})
        return (jax.lax.psum(out, rest) if rest else out).astype(dtype)

    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (a, b))
    return jax.shard_map(on_device, in_specs=specs, out_specs=spec)(a, b)


def _sums(
    a: jax.Array, b: jax.Array, summed: tuple[Collection[int], Collection[int]], out: PartitionSpec
) -> tuple[tuple[str, ...], list[tuple[int, str]]]:
    """The mesh axes over which a product is a sum of those of devices, and the (dim, axis) where ``out`` divides it."""
    (a_spec, b_spec) = (_entries(jax.typeof(x).sharding.spec, x.ndim) for x in (a, b))
    over = tuple(axis for dim in summed[0] for axis in a_spec[dim])
    assert over == tuple(axis for dim in summed[1] for axis in b_spec[dim]), (a_spec, b_spec, summed)
    kept = [entry for dim, entry in enumerate(a_spec) if dim not in summed[0]]
    kept += [entry for dim, entry in enumerate(b_spec) if dim not in summed[1]]
    scattered = []
    for dim, (entry, had) in enumerate(zip(_entries(out, len(kept)), kept, strict=True)):
        further = entry[len(had) :]
        assert (*had, *further) == entry, (entry, had)
        assert set(further) <= set(over), (further, over)
        scattered += [(dim, axis) for axis in further]
    return over, scattered


def _entries(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """The mesh axes that divide each dim."""
    entries = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return [*entries, *[()] * (ndim - len(entries))]
