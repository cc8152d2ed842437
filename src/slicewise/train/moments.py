"""How optimiser state is kept between steps: its type, its memory, and whether the data axis shares it out.

State that is as large as a weight may be kept in 16 or 8 bits. Both round at random to one of the two nearest values,
with the exact value as the mean: rounding to the nearest would stop averages that change by less than half a step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from slicewise.errors import UserError
from slicewise.parallel.rules import partition

PER_OCTAVE = 6  # levels of the 8-bit code between a value and its double
EMBED_DIMS = ("embed", "expert_embed")  # of weights, the dim that data may share out too
SECOND_MOMENTS = frozenset({"nu", "v"})  # fields of optax's states that hold means of squares


@dataclass(frozen=True)
class Keeping:
    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    memory: Literal["device", "host"] = "device"
    over_data: bool = False  # ZeRO-1: parameters are whole on each replica, their state is not

    def check(self, layout: Any, degrees: Mapping[str, int]) -> None:
        """Raises UserError when a dim that is to be shared out over data does not divide evenly."""
        for weight in jax.tree.leaves(layout) if self.over_data else ():
            spec = _over_data(weight.dims)
            for size, entry in zip(weight.shape, spec, strict=True):
                axes = [axis for axis in _axes(entry) if degrees.get(axis, 1) > 1]
                ways = math.prod(degrees[axis] for axis in axes)
                if "data" in axes and size % ways:
                    raise UserError(
                        f"shard_optimizer_over_data needs d_model = {size} to be a multiple of"
                        f" {' x '.join(axes)} parallelism = {ways}; set it to false."
                    )


class Kept(NamedTuple):
    steps: jax.Array  # taken: seeds the rounding
    inner: Any  # state of the optimiser, coded


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Coded:
    """An array in 8 bits: the exponent in sixths of octaves below the largest magnitude of each row, and the sign.

    Second moments have no sign, hence twice the range, and no code for zero: a division by a mean of squares that
    was rounded to zero would throw the weight away.
    """

    codes: Any  # int8, of the array's shape
    largest: Any  # float32, last dim 1


def keep(tx: optax.GradientTransformation, layout: Any, keeping: Keeping) -> optax.GradientTransformation:
    """``tx`` with its state kept as asked. ``layout``: the tree of Weight of the parameters."""
    if keeping == Keeping():
        return tx
    named = {_path(path): weight for path, weight in jax.tree.leaves_with_path(layout)}
    spread = _Resharded(layout, keeping.over_data)

    def init(params: Any) -> Kept:
        inner = _encoded(tx.init(spread(params)), named, keeping.dtype, jax.random.key(0))
        return Kept(jnp.zeros((), jnp.int32), _moved(inner, keeping, jax.memory.Space.Host))

    def update(gradients: Any, state: Kept, params: Any = None) -> tuple[Any, Kept]:
        inner = _decoded(_moved(state.inner, keeping, jax.memory.Space.Device), named)
        updates, inner = tx.update(spread(gradients), inner, spread(params))
        inner = _encoded(inner, named, keeping.dtype, jax.random.fold_in(jax.random.key(0), state.steps))
        inner = _moved(inner, keeping, jax.memory.Space.Host)
        return spread.back(updates), Kept(state.steps + 1, inner)

    return optax.GradientTransformation(init, update)


@dataclass(frozen=True)
class _Resharded:
    """Trees like the parameters, with the embed dim of each shared out over the data axis as well."""

    layout: Any
    over_data: bool

    def __call__(self, tree: Any) -> Any:
        return self._to(tree, _over_data)

    def back(self, tree: Any) -> Any:
        return self._to(tree, lambda dims: partition(*dims))

    def _to(self, tree: Any, spec_of: Callable[[tuple[str, ...]], PartitionSpec]) -> Any:
        if not self.over_data:
            return tree
        return jax.tree.map(lambda w, x: jax.sharding.reshard(x, spec_of(w.dims)), self.layout, tree)


def _over_data(dims: tuple[str, ...]) -> PartitionSpec:
    spec = partition(*dims)
    return PartitionSpec(
        *(
            (*_axes(entry), "data") if dim in EMBED_DIMS else entry
            for entry, dim in zip(spec, dims, strict=True)
        )
    )


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def on_host(abstract: Any, keeping: Keeping) -> Any:
    """Abstract state (ShapeDtypeStruct with shardings) with the memory in which ``keeping`` has it."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = x.sharding.with_memory_kind("pinned_host")
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if x.ndim else x

    return jax.tree.map(place, abstract) if keeping.memory == "host" else abstract


def _moved(tree: Any, keeping: Keeping, space: Any) -> Any:
    """Arrays of the state to ``space`` when it is kept on the host; its counters stay on the device."""
    if keeping.memory == "device":
        return tree
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, tree)


def _encoded(state: Any, named: Mapping[str, Any], dtype: str, key: jax.Array) -> Any:
    if dtype == "float32":
        return state
    leaves, treedef = jax.tree.flatten_with_path(state)

    def code(number: int, path: tuple, x: jax.Array) -> Any:
        field = _field(_path(path), x, named)
        if field is None:
            return x
        own = jax.random.fold_in(key, number)
        return (
            _to_bfloat16(x, own)
            if dtype == "bfloat16"
            else encode(x, own, signed=field not in SECOND_MOMENTS)
        )

    return jax.tree.unflatten(treedef, [code(i, path, x) for i, (path, x) in enumerate(leaves)])


def _decoded(state: Any, named: Mapping[str, Any]) -> Any:
    def plain(path: tuple, x: Any) -> Any:
        if isinstance(x, Coded):
            return decode(x, signed=_field(_path(path), x.codes, named) not in SECOND_MOMENTS)
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    return jax.tree.map_with_path(plain, state, is_leaf=lambda x: isinstance(x, Coded))


def _field(path: str, x: jax.Array, named: Mapping[str, Any]) -> str | None:
    """The field of the state to which the leaf at ``path`` belongs, when it is as large as the matrix it is about."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        weight = named.get(".".join(parts[i:]))
        if weight is not None:
            is_matrix = x.ndim - (weight.dims[0] in ("layers", "staged_layers")) > 1
            return parts[i - 1] if is_matrix and x.shape == weight.shape else None
    return None


def encode(x: jax.Array, key: jax.Array, *, signed: bool) -> Coded:
    """``x`` in 8 bits, each row relative to its largest magnitude."""
    top = 127 if signed else 254  # the level of the largest magnitude
    magnitude = jnp.abs(x)
    largest = magnitude.max(-1, keepdims=True)
    share = magnitude / jnp.where(largest > 0, largest, 1.0)
    level = jnp.floor(top + PER_OCTAVE * jnp.log2(jnp.where(share > 0, share, 1e-30)))
    level = jnp.clip(level, 0, top)
    below, above = _share(level, top, signed), _share(level + 1, top, signed)
    chance = (share - below) / (above - below)
    up = jax.random.uniform(key, x.shape, out_sharding=jax.typeof(x).sharding) < chance
    level = jnp.minimum(level + up, top)
    codes = jnp.where(x < 0, -level, level) if signed else level - 127
    return Coded(codes.astype(jnp.int8), largest)


def decode(coded: Coded, *, signed: bool) -> jax.Array:
    codes = coded.codes.astype(jnp.float32)
    if not signed:
        return coded.largest * _share(codes + 127, 254, signed)
    return coded.largest * jnp.sign(codes) * _share(jnp.abs(codes), 127, signed)


def _share(level: jax.Array, top: int, signed: bool) -> jax.Array:
    """The magnitude of ``level`` as a share of the largest; level 0 is zero where there is a sign."""
    share = jnp.exp2((level - top) / PER_OCTAVE)
    return jnp.where(level > 0, share, 0.0) if signed else share


def _to_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=jax.typeof(x).sharding)
    rounded = (bits + noise.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(rounded, jnp.float32).astype(jnp.bfloat16)


def _path(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
