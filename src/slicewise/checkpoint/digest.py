"""A 32-bit digest of each array over its bits and their positions, whatever its sharding and processes."""

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from slicewise.parallel.compiling import compile_in_turn, lower

GOLDEN_RATIO = 0x9E3779B9  # 2^32 / golden ratio, odd: distinct positions give distinct keys


@jax.jit
def array_digest(x: jax.Array) -> jax.Array:
    """The sum modulo 2^32 over all elements of mix(bits xor key(position)): any shape to uint32 [].

    ``mix`` is a bijection of 32 bits (the finaliser of MurmurHash3, Appleby 2011, public domain), so changing
    any one element always changes the digest; any other change is missed with probability 2^-32. Integer sums
    are exact in every order, hence the same on any mesh. An 8-byte element counts as two of 4 bytes.
    """
    bits = _bits(jax.device_put(x, jax.memory.Space.Device))  # it may be kept on the host
    position = jnp.uint32(0)
    for dim, size in enumerate(bits.shape):  # no reshape: that would gather a sharded array
        position = position * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    mixed = bits ^ (position * jnp.uint32(GOLDEN_RATIO))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool:
        return x.astype(jnp.uint32)
    assert jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, jnp.floating), x.dtype
    word = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def digests(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    """The digest of each array as 8 hexadecimal digits, the same on every process; waits for the devices.

    Every process calls it with the same global arrays.
    """
    on_device: dict[str, jax.Array] = {}
    for group in _by_devices(arrays):  # all dispatched before the first wait
        on_device |= _program(_key(group))(group)
    return {name: f"{int(on_device[name]):08x}" for name in arrays}


def compile_for(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """What ``digests`` of such arrays would compile first; in any thread."""
    for group in _by_devices(abstract):
        _program(_key(group))


def _by_devices(arrays: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """One program runs on one set of devices."""
    groups: dict[frozenset, dict[str, Any]] = {}
    for name, x in arrays.items():
        groups.setdefault(frozenset(x.sharding.device_set), {})[name] = x
    return groups.values()


def _key(arrays: Mapping[str, Any]) -> tuple:
    return tuple((name, x.shape, x.dtype, x.sharding) for name, x in arrays.items())


@functools.lru_cache(maxsize=8)
def _program(key: tuple) -> jax.stages.Compiled:
    """All digests in one program: compiled faster than one for each shape, and kept in JAX's cache on disk."""
    abstract = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=place) for name, shape, dtype, place in key}

    def all_of(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {name: array_digest(x) for name, x in arrays.items()}

    devices = sorted(key[0][-1].device_set, key=lambda device: device.id)
    name = hashlib.sha256(repr((key, devices)).encode()).hexdigest()
    return compile_in_turn(f"digests/{name}", lower(jax.jit(all_of), abstract), devices)
