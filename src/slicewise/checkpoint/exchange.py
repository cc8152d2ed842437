"""Blocks of arrays from host to host over the devices' network: who sends what to whom, and the sending.

A block is one shard of one array, named by (array, place in its grid of equal blocks). Hosts that lack blocks get them
from hosts that have them, in rounds in which each process sends to at most one and receives from at most one. Whoever
has received sends too, so a block reaches n hosts in about log2(n) rounds.
"""

import functools
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Block = tuple[str, int]  # path of the array, index into its grid in row-major order
Round = Mapping[int, tuple[int, tuple[Block, ...]]]  # receiving process -> (sending process, what)

CHUNK_BYTES = 32 * 2**20  # most that a device sends at once: what a transfer needs beside the state, twice
_EACH = PartitionSpec("process", "device")


def rounds(have: Sequence[Collection[Block]], need: Sequence[Collection[Block]]) -> list[Round]:
    """The rounds after which process p has all of ``need[p]``; every block is somewhere in ``have``.

    The same on every process that calls it with the same arguments.
    """
    held = [set(blocks) for blocks in have]
    missing = [set(blocks) - held[p] for p, blocks in enumerate(need)]
    found: list[Round] = []
    while any(missing):
        sending: set[int] = set()
        this: dict[int, tuple[int, tuple[Block, ...]]] = {}
        for target in range(len(held)):
            source = _best_source(missing[target], held, sending) if missing[target] else None
            if source is not None:
                sending.add(source)
                this[target] = source, tuple(sorted(missing[target] & held[source]))
        assert this, "a block is nowhere"
        for target, (_, blocks) in this.items():
            held[target] |= set(blocks)
            missing[target] -= set(blocks)
        found.append(this)
    return found


def _best_source(wanted: set[Block], held: Sequence[set[Block]], busy: set[int]) -> int | None:
    """The process, not ``busy``, that has most of ``wanted``."""
    best, most = None, 0
    for source, blocks in enumerate(held):
        count = 0 if source in busy else len(wanted & blocks)
        if count > most:
            best, most = source, count
        if most == len(wanted):
            break
    return best


def send(this: Round, held: Mapping[Block, np.ndarray], sizes: Mapping[str, int]) -> dict[Block, np.ndarray]:
    """Takes part in one round; the blocks that this process receives, as bytes (uint8).

    held: at least the blocks that this process sends, in C order. sizes: bytes of a block of each array.
    Every process calls it with the same ``this`` and ``sizes``.
    """
    me = jax.process_index()
    longest = max(sum(sizes[path] for path, _ in blocks) for _, blocks in this.values())
    local = jax.local_device_count()
    chunk = min(CHUNK_BYTES, 1 << max(0, -(-longest // local) - 1).bit_length())
    mine = [blocks for source, blocks in this.values() if source == me]
    outgoing = b"".join(held[block].tobytes() for block in (mine[0] if mine else ()))
    pairs = tuple(sorted((source, target) for target, (source, _) in this.items()))
    incoming = bytearray()
    for start in range(0, longest, local * chunk):
        piece = np.zeros(local * chunk, np.uint8)
        part = np.frombuffer(outgoing[start : start + local * chunk], np.uint8)
        piece[: len(part)] = part
        incoming += _permuted(piece.reshape(1, local, chunk), pairs).tobytes()
    received, at = {}, 0
    for block in this[me][1] if me in this else ():
        received[block] = np.frombuffer(incoming, np.uint8, sizes[block[0]], at)
        at += sizes[block[0]]
    return received


def _permuted(piece: np.ndarray, pairs: tuple[tuple[int, int], ...]) -> np.ndarray:
    """uint8 [1, devices, bytes] of the process that sends to this one; zeros where none does."""
    mesh = _processes()
    with jax.set_mesh(mesh):
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, _EACH), piece)
        y = _permute(pairs, mesh)(x)
    shards = sorted(y.addressable_shards, key=lambda shard: shard.index[1].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards], axis=1)


@functools.cache
def _permute(pairs: tuple[tuple[int, int], ...], mesh: Mesh) -> Any:
    def one(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "process", pairs)

    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=_EACH, out_specs=_EACH, check_vma=False))


@functools.cache
def _processes() -> Mesh:
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    return Mesh(np.array(devices, object).reshape(jax.process_count(), -1), ("process", "device"))


def gathered(document: Any) -> list[Any]:
    """A JSON-able document of each process, in their order, on every process."""
    data = np.frombuffer(zlib.compress(json.dumps(document).encode()), np.uint8)
    if jax.process_count() == 1:
        return [document]
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(1 << int(sizes.max() - 1).bit_length(), np.uint8)  # few shapes: each is compiled
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(zlib.decompress(row[:size].tobytes())) for row, size in zip(rows, sizes, strict=True)]
