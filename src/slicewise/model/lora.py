"""Low-rank adapters (LoRA, Hu et al. 2021): y = x W + (alpha / r) (x A) B, with W frozen, A random and B zero at first.

Dims in names: L layers, C dims that the product sums over, O dims of its result, r rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slicewise.catalog.model import ModelSpec
from slicewise.costs.adapters import Lora, check_names
from slicewise.model.params import Params, Weight, leaves, mapped
from slicewise.model.quantization import EXPERTS, MATRICES
from slicewise.parallel.rules import partition

WHOLE_EMBED = {
    "embed": "activation",
    "latent": "activation",
}  # dims that a layer gathers before it uses a weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapter:
    lora_a: Any  # LCr
    lora_b: Any  # LrO


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A frozen matrix in 8 bits, with one scale for each column."""

    values: Any  # int8
    scale: Any  # float32, size 1 along C


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A matrix that is not trained, and its adapter where it has one."""

    base: Any  # array, Packed, or what quantization makes of an array
    adapter: Any  # Adapter or None
    scale: float = field(metadata={"static": True})


def in_layer(name: str) -> str:
    """The name within its layer of a weight of Params; empty for one that is in no layer."""
    return name.partition("layers.")[2]


def is_dense(name: str) -> bool:
    """Whether the weight ``name`` of Params is a matrix that linear multiplies."""
    inner = in_layer(name)
    return bool(MATRICES.fullmatch(inner)) and not EXPERTS.fullmatch(inner)


def _summed(name: str) -> int:
    """How many dims the product with a matrix sums over."""
    return 2 if in_layer(name) == "wo" else 1


def check(lora: Lora, spec: ModelSpec, layout: Params) -> None:
    """Raises UserError for a pattern that is none, that names routed experts, or no matrix of the model."""
    names = dict.fromkeys(in_layer(name) for name in leaves(layout) if in_layer(name))
    dense = [name for name in names if is_dense(f"layers.{name}")]
    check_names(lora, spec.name, dense, [name for name in names if EXPERTS.fullmatch(name)])


def adapters(layout: Params, lora: Lora) -> dict[str, Adapter]:
    """The Weights of all adapters by the name of their matrix. Their dims are its own, and a rank that is whole."""
    return {
        name: _adapter(name, weight, lora.rank)
        for name, weight in leaves(layout).items()
        if is_dense(name) and lora.adapts(in_layer(name))
    }


def _adapter(name: str, weight: Weight, rank: int) -> Adapter:
    split = 1 + _summed(name)
    into, out = weight.shape[1:split], weight.shape[split:]
    layers, into_dims, out_dims = weight.dims[0], weight.dims[1:split], weight.dims[split:]
    std = 1 / math.sqrt(math.prod(into))
    return Adapter(
        Weight((weight.shape[0], *into, rank), (layers, *into_dims, "lora"), std=std),
        Weight((weight.shape[0], rank, *out), (layers, "lora", *out_dims)),
    )


def adapted(frozen: Params, trained: dict[str, Adapter], lora: Lora) -> Params:
    """The parameters that a forward pass takes: ``frozen`` with its dense matrices as Adapted."""

    def join(name: str, leaf: Any) -> Any:
        return Adapted(leaf, trained.get(name), lora.scale) if is_dense(name) else leaf

    return mapped(join, frozen)


def adapter_dims(pair: Adapter, dims: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dims of A and of B, beside a matrix with ``dims``. Both may have more in front, such as layers."""
    more = (pair.lora_a.ndim + pair.lora_b.ndim - 2 - len(dims)) // 2
    summed = pair.lora_a.ndim - more - 1
    return (*dims[:summed], "lora"), ("lora", *dims[summed:])


def by_array(change: Callable[[jax.Array, tuple[str, ...]], Any], w: Any, dims: tuple[str, ...]) -> Any:
    """A weight with ``dims``, any of those that adapted makes, with ``change(array, its dims)`` for each array of it.

    Arrays may have more dims in front. Those of a scale that are not those of its values are whole.
    """
    if isinstance(w, Adapted):
        pair = w.adapter
        if pair is not None:
            arrays = zip((pair.lora_a, pair.lora_b), adapter_dims(pair, dims), strict=True)
            pair = Adapter(*(change(x, own) for x, own in arrays))
        return Adapted(by_array(change, w.base, dims), pair, w.scale)
    if isinstance(w, Packed):
        sizes = zip(w.values.shape[-len(dims) :], w.scale.shape[-len(dims) :], dims, strict=True)
        scaled = tuple(dim if size == of_scale else "activation" for size, of_scale, dim in sizes)
        return Packed(change(w.values, dims), change(w.scale, scaled))
    return change(w, dims)


def _narrow(name: str, weight: Weight) -> bool:
    """Whether a weight is kept in the type that the config says: vectors and routers stay float32."""
    return bool(weight.std) and not name.endswith("router")


def _packs(name: str, lora: Lora) -> bool:
    return lora.base_dtype == "int8" and (is_dense(name) or bool(EXPERTS.fullmatch(in_layer(name))))


def freeze(name: str, weight: Weight, x: jax.Array, lora: Lora) -> Any:
    """A float32 weight as it is kept: in ``lora.base_dtype`` (what is no matrix of a layer in bfloat16 beside int8)."""
    if not _narrow(name, weight) or lora.base_dtype == "float32":
        return x
    if not _packs(name, lora):
        return x.astype(jnp.bfloat16)
    lead = 2 if EXPERTS.fullmatch(in_layer(name)) else 1
    summed = tuple(range(lead, lead + _summed(name)))
    largest = jnp.abs(x).max(summed, keepdims=True)
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return Packed(jnp.round(x / scale).astype(jnp.int8), scale)


def unpacked(w: Any, dtype: jnp.dtype) -> jax.Array:
    """A frozen matrix in ``dtype``, where it lies."""
    if isinstance(w, Packed):
        return (w.values.astype(jnp.float32) * w.scale).astype(dtype)
    return w.astype(dtype)


def gathered_packed(w: Packed, dims: tuple[str, ...], dtype: jnp.dtype) -> jax.Array:
    """``w`` [*dims] whole along embed and latent, in ``dtype``: what travels has 8 bits."""

    def gather(x: jax.Array) -> jax.Array:
        spec = partition(*(WHOLE_EMBED.get(dim, dim) for dim in dims))
        axes = (axis if size > 1 else None for axis, size in zip(spec, x.shape, strict=True))
        return jax.sharding.reshard(x, PartitionSpec(*axes))

    return unpacked(Packed(gather(w.values), gather(w.scale)), dtype)


def merged(name: str, base: Any, adapter: Adapter | None, lora: Lora) -> jax.Array:
    """W + (alpha / r) A B of all layers in float32, laid out as W."""
    weight = unpacked(base, jnp.dtype("float32"))
    if adapter is None:
        return weight
    split = 1 + _summed(name)
    dims = (((split,), (1,)), ((0,), (0,)))
    spec = jax.typeof(weight).sharding.spec
    a, b = (
        jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim)) for x in (adapter.lora_a, adapter.lora_b)
    )
    return weight + lora.scale * jax.lax.dot_general(a, b, dims, out_sharding=spec)


def merged_params(params: Params, lora: Lora) -> Params:
    """``params`` of adapted as plain float32 weights; jit it."""

    def merge(name: str, leaf: Any) -> jax.Array:
        if isinstance(leaf, Adapted):
            return merged(name, leaf.base, leaf.adapter, lora)
        return unpacked(leaf, jnp.dtype("float32"))

    return mapped(merge, params)
