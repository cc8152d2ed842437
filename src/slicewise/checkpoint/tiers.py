"""The local tier: newest states on the disks of the hosts, so that a lost host or slice restores from the others.

Every host keeps the shards that its own devices hold. Under data parallelism over slices each slice then has the whole
state. Shards that a single slice holds are sent to the host of the same number in the next slice too. At a restart the
hosts compare what they have; the newest step that is whole in their union counts, and hosts that lack something get it
from those that have it, over the devices' network. Every block has a checksum, and every array its digest.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from slicewise.checkpoint import exchange, local
from slicewise.checkpoint.digest import digests
from slicewise.checkpoint.exchange import Block
from slicewise.checkpoint.local import Index, Stored
from slicewise.checkpoint.store import Restored, flatten
from slicewise.errors import ExitCode, UserError

KEEP = 2  # steps: until all hosts have finished the newest, only the one before it is whole


@dataclass(frozen=True)
class _Picked:
    """A step of which every block is on some host."""

    index: Index  # without blocks
    held: dict[Block, np.ndarray]  # as bytes: what this host has
    have: list[set[Block]]  # by process


class LocalTier:
    """Saves and restores in step with all other processes; every one makes the same calls from its main thread.

    Failures of a disk are told by ``say`` and end nothing: the shared storage holds older checkpoints.
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        slices: np.ndarray,
        say: Callable[[str], None],
        done: Callable[[int], None],
    ):
        """run: an identity that another run of the same name does not have; empty takes that of what it picks.

        slices: devices [slices, devices of a slice]. done: called, in another thread, with a step that is durable here.
        """
        self.directory, self._run, self._say, self._done = directory, run, say, done
        self._processes = [list(dict.fromkeys(device.process_index for device in group)) for group in slices]
        self._pending: Future[None] | None = None
        self._picked: _Picked | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="local-checkpoint")

    # ------------------------------------------------------------ saving

    def save(self, step: int, state: Any, *, data_state: np.ndarray, metadata: Mapping[str, Any]) -> None:
        """Returns after the copy off the devices, and to the next slice where that is needed."""
        self.wait()
        arrays = flatten(state)
        sums = digests(arrays)
        stored = {path: _stored(x, sums[path]) for path, x in arrays.items()}
        held = {block: data for path, x in arrays.items() for block, data in _own(path, x, stored[path])}
        if to_peers := self._to_peers(arrays, stored):
            held |= exchange.send(to_peers, held, _sizes(stored))
        index = Index(self._run, step, stored, data_state.tolist(), metadata, {})
        self._pending = self._background.submit(self._write, index, held)

    def _to_peers(self, arrays: Mapping[str, jax.Array], stored: Mapping[str, Stored]) -> exchange.Round:
        """What each process sends to its peer: blocks that no other slice has."""
        if len(self._processes) == 1:
            return {}
        slice_of = {process: n for n, group in enumerate(self._processes) for process in group}
        alone: dict[int, list[Block]] = {}
        for path, x in arrays.items():
            for number, holders in sorted(_holders(x.sharding, stored[path]).items()):
                if len({slice_of[process] for process in holders}) == 1:
                    alone.setdefault(min(holders), []).append((path, number))
        sent = {}
        for n, group in enumerate(self._processes):
            peers = self._processes[(n + 1) % len(self._processes)]
            for process, peer in zip(group, peers, strict=True):
                if blocks := alone.get(process):
                    sent[peer] = process, tuple(blocks)
        return sent

    def _write(self, index: Index, held: Mapping[Block, np.ndarray]) -> None:
        local.write(self.directory, index, held, keep=KEEP)
        self._done(index.step)

    def wait(self) -> None:
        """Returns when nothing is being written."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except OSError as error:
            where = error.filename or self.directory
            self._say(
                f"warning: no local checkpoint on process {jax.process_index()}: {error.strerror} ({where})."
            )

    def drop_after(self, step: int) -> None:
        """Removes newer steps: a run that went back to ``step`` takes another way from there."""
        self.wait()
        for newer in [n for n in local.found(self.directory) if n > step]:
            shutil.rmtree(self.directory / str(newer), ignore_errors=True)

    def clear(self) -> None:
        """Removes all steps: those of a finished run are of no use."""
        self.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        self.wait()
        self._background.shutdown()

    # ------------------------------------------------------------ restoring

    def pick(self, beyond: int) -> int | None:
        """The newest step, not before ``beyond``, that is whole in the union of the hosts with all checksums right.

        The same on every process. Its blocks wait in memory for ``restore``.
        """
        mine = local.found(self.directory)
        mine = {step: index for step, index in mine.items() if not self._run or index.run == self._run}
        every = exchange.gathered([(index.step, index.content) for index in mine.values()])
        candidates = {(step, content) for steps in every for step, content in steps if step >= beyond}
        for step, content in sorted(candidates, reverse=True):
            index = mine.get(step)
            index = index if index and index.content == content else None
            held = local.read(self.directory, index) if index else {}
            have = [{(path, n) for path, n in blocks} for blocks in exchange.gathered([*held])]
            agreed = _first(exchange.gathered(index and Index(**{**vars(index), "blocks": {}}).to_json()))
            if len(set().union(*have)) == sum(math.prod(a.grid) for a in agreed.arrays.values()):
                self._picked = _Picked(agreed, held, have)
                self._run = agreed.run
                return step
        return None

    @property
    def has_picked(self) -> bool:
        return self._picked is not None

    def restore(self, abstract_state: Any) -> Restored:
        """What was picked, in whatever layout ``abstract_state`` (ShapeDtypeStructs with shardings) asks for.

        Raises UserError, which names the array, when tree, shape or dtype differ, or a digest is not as it was.
        """
        assert self._picked, "nothing was picked"
        index, held, have = self._picked.index, self._picked.held, self._picked.have
        self._picked = None
        wanted = flatten(abstract_state)
        _check_same(index, wanted)
        for this in exchange.rounds(have, _needed(wanted, index.arrays)):
            held |= exchange.send(this, held, _sizes(index.arrays))
        arrays = {path: _assembled(x, path, index.arrays[path], held) for path, x in wanted.items()}
        for path, digest in digests(arrays).items():
            if digest != index.arrays[path].digest:
                raise UserError(
                    f"the local checkpoint of step {index.step} is damaged: {path} has digest {digest}, saved was"
                    f" {index.arrays[path].digest}. Delete {self.directory} on all hosts: the run then continues"
                    " from the shared storage.",
                    code=ExitCode.INTERNAL,
                )
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in wanted])
        data_state = np.array(index.data_state, np.int64).reshape(-1, 2)
        return Restored(index.step, state, data_state, index.metadata)


def _first(documents: Sequence[dict[str, Any] | None]) -> Index:
    return Index.from_json(next(document for document in documents if document))


def _stored(x: jax.Array, digest: str) -> Stored:
    block = x.sharding.shard_shape(x.shape)
    grid = tuple(size // part for size, part in zip(x.shape, block, strict=True))
    return Stored(tuple(x.shape), str(x.dtype), grid, digest)


def _own(path: str, x: jax.Array, stored: Stored) -> list[tuple[Block, np.ndarray]]:
    """The blocks of ``x`` on this process's devices, each once, copied: ``x`` will be donated."""
    shards = {_number(shard.index, stored): shard for shard in x.addressable_shards}
    return [((path, number), np.array(shard.data)) for number, shard in shards.items()]


def _number(index: tuple[slice, ...], stored: Stored) -> int:
    """Which block of the grid starts where ``index`` does."""
    starts = [part.start or 0 for part in index]
    place = [start // size for start, size in zip(starts, stored.block_shape, strict=True)]
    return int(np.ravel_multi_index(place, stored.grid)) if place else 0


def _holders(sharding: jax.sharding.Sharding, stored: Stored) -> dict[int, set[int]]:
    """Block -> processes that hold it."""
    holders: dict[int, set[int]] = {}
    devices: Mapping[Any, tuple] = sharding.devices_indices_map(stored.shape)
    for device, index in devices.items():
        holders.setdefault(_number(index, stored), set()).add(device.process_index)
    return holders


def _sizes(arrays: Mapping[str, Stored]) -> dict[str, int]:
    """Bytes of a block of each array."""
    return {p: math.prod(s.block_shape) * jax.numpy.dtype(s.dtype).itemsize for p, s in arrays.items()}


def _needed(wanted: Mapping[str, jax.ShapeDtypeStruct], arrays: Mapping[str, Stored]) -> list[set[Block]]:
    """The blocks that each process needs for its devices' parts of ``wanted``."""
    need: list[set[Block]] = [set() for _ in range(jax.process_count())]
    for path, x in wanted.items():
        for device, index in x.sharding.devices_indices_map(x.shape).items():
            parts = _overlapping(index, arrays[path])
            need[device.process_index] |= {(path, number) for number, _, _ in parts}
    return need


def _overlapping(index: tuple[slice, ...], stored: Stored) -> list[tuple[int, tuple, tuple]]:
    """(block, part of the block, where that lies in the array at ``index``) of each block that ``index`` meets."""
    ranges = [part.indices(size)[:2] for part, size in zip(index, stored.shape, strict=True)]
    first = [start // size for (start, _), size in zip(ranges, stored.block_shape, strict=True)]
    last = [(stop - 1) // size for (_, stop), size in zip(ranges, stored.block_shape, strict=True)]
    found = []
    for offset in np.ndindex(*(b - a + 1 for a, b in zip(first, last, strict=True))):
        place = [a + o for a, o in zip(first, offset, strict=True)]
        inside, outside = [], []
        for (start, stop), number, size in zip(ranges, place, stored.block_shape, strict=True):
            low, high = max(start, number * size), min(stop, (number + 1) * size)
            inside.append(slice(low - number * size, high - number * size))
            outside.append(slice(low - start, high - start))
        number = int(np.ravel_multi_index(place, stored.grid)) if place else 0
        found.append((number, tuple(inside), tuple(outside)))
    return found


def _assembled(
    x: jax.ShapeDtypeStruct, path: str, stored: Stored, held: Mapping[Block, np.ndarray]
) -> jax.Array:
    """The array of which ``held`` has the bytes of all blocks that this process's devices need."""

    def block(number: int) -> np.ndarray:
        data = held[path, number]
        if data.dtype != x.dtype or data.shape != stored.block_shape:
            data = np.frombuffer(data.tobytes(), x.dtype).reshape(stored.block_shape)
        return data

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        pieces = _overlapping(index, stored)
        if len(pieces) == 1:
            return block(pieces[0][0])[pieces[0][1]]
        shape = [len(range(*i.indices(size))) for i, size in zip(index, x.shape, strict=True)]
        whole = np.empty(shape, x.dtype)
        for number, inside, outside in pieces:
            whole[outside] = block(number)[inside]
        return whole

    return jax.make_array_from_callback(x.shape, x.sharding, part)


def _check_same(index: Index, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raises UserError for arrays that are not those of this run's config."""
    for path in dict.fromkeys([*wanted, *index.arrays]):
        here = f"{wanted[path].dtype}{list(wanted[path].shape)}" if path in wanted else "absent"
        stored = index.arrays.get(path)
        there = f"{stored.dtype}{list(stored.shape)}" if stored else "absent"
        if here != there:
            raise UserError(
                f"{path} is {there} in the local checkpoint of step {index.step}, but {here} here:"
                " resume with the config that saved it, or choose another run_name."
            )


def host_directory(root: str, run_directory: str, place: str) -> Path:
    """Where the host at ``place`` keeps the local tier of the run in ``run_directory``."""
    name = run_directory.rstrip("/").rpartition("/")[2]
    digest = hashlib.sha256(run_directory.encode()).hexdigest()[:8]
    return Path(root).expanduser().absolute() / f"{name}-{digest}" / place
