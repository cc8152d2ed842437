"""Silent corruption: replicas must hold the same bits, and a step that is taken twice must give the same bits.

The first finds what is stored or sent wrongly: weights, optimiser state, the result of an all-reduce. A gradient that
is computed wrongly reaches all replicas alike through the all-reduce, so only the second finds it.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec, Sharding, SingleDeviceSharding

from slicewise.checkpoint.digest import array_digest
from slicewise.checkpoint.store import flatten
from slicewise.errors import ExitCode, UserError
from slicewise.parallel.cluster import SliceDevices
from slicewise.train.elastic import Fitted

SHOWN = 4  # arrays and devices that a message names


@dataclass(frozen=True)
class Difference:
    """One array whose copies differ."""

    path: str
    devices: tuple[jax.Device, ...]  # that are wrong; all that hold the copies, when no majority tells
    certain: bool


class Checksums:
    """Digests of what each device holds of each array of a tree like ``abstract``, on one mesh.

    Only of arrays in more than one copy; of all arrays with ``whole``.
    """

    def __init__(self, abstract: Any, mesh: Mesh, *, whole: bool = False):
        groups = {path: copies(x, mesh) for path, x in flatten(abstract).items()}
        self.devices: list[jax.Device] = list(mesh.devices.flat)
        self.groups = {p: g for p, g in groups.items() if whole or any(len(c) > 1 for c in g)}
        self._compute = jax.jit(lambda arrays: _digests(arrays, mesh))

    def __call__(self, tree: Any) -> np.ndarray:
        """uint32 [arrays, devices], the same on every process; waits for the devices."""
        arrays = flatten(tree)
        return np.asarray(self._compute([arrays[path] for path in self.groups]))

    def differences(self, sums: np.ndarray) -> list[Difference]:
        """Arrays whose copies differ in ``sums``."""
        found = []
        for (path, groups), row in zip(self.groups.items(), sums, strict=True):
            wrong, certain = odd_ones_out(row, groups)
            if wrong:
                found.append(Difference(path, tuple(self.devices[n] for n in wrong), certain))
        return found


def copies(x: Any, mesh: Mesh) -> list[list[int]]:
    """Which devices, as places in ``mesh.devices.flat``, hold the same part of ``x``."""
    place = {device: n for n, device in enumerate(mesh.devices.flat)}
    groups: dict[tuple, list[int]] = {}
    for device, index in x.sharding.devices_indices_map(tuple(x.shape)).items():
        key = tuple(part.indices(size) for part, size in zip(index, x.shape, strict=True))
        groups.setdefault(key, []).append(place[device])
    return [sorted(group) for group in groups.values()]


def odd_ones_out(row: np.ndarray, groups: Sequence[Sequence[int]]) -> tuple[list[int], bool]:
    """Devices whose digest in ``row`` [devices] differs from that of most of their group, and whether most agree.

    Without a majority, as with two copies, all of the group.
    """
    wrong, certain = [], True
    for group in groups:
        counts = Counter(int(row[n]) for n in group)
        if len(counts) == 1:
            continue
        usual, count = counts.most_common(1)[0]
        if 2 * count > len(group):
            wrong += [n for n in group if int(row[n]) != usual]
        else:
            wrong, certain = [*wrong, *group], False
    return sorted(wrong), certain


def _digests(arrays: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """uint32 [arrays, devices]; nothing but the digests leaves a device."""
    everywhere = tuple(mesh.axis_names)
    on_device = [jax.device_put(x, jax.memory.Space.Device) for x in arrays]  # some may be kept on the host
    own = jax.shard_map(
        lambda shards: jnp.stack([array_digest(x) for x in shards])[:, None],
        mesh=mesh,
        in_specs=([jax.typeof(x).sharding.spec for x in on_device],),
        out_specs=PartitionSpec(None, everywhere),
        check_vma=False,
    )(on_device)
    return jax.sharding.reshard(own, PartitionSpec())


class Checks:
    """The checks that a run asks for, around its steps. Every process makes the same calls."""

    def __init__(self, fitted: Fitted, abstract_state: Any, mesh: Mesh, slices: SliceDevices):
        self._every = fitted.asked.checkpoint.replica_check_every
        self._replay_every = fitted.asked.checkpoint.replay_check_every
        self._slice_of = {device: n for n, group in enumerate(slices.array) for device in group}
        self._copies = Checksums(abstract_state, mesh) if self._every else None
        self._whole = Checksums(abstract_state, mesh, whole=True) if self._replay_every else None
        if self._copies and not self._copies.groups:
            if fitted.is_shrunk:  # to a single replica, until slices are back
                self._copies = None
                return
            raise UserError(
                f"replica_check_every = {self._every} compares replicas, and this layout has none;"
                " set it to 0, or use data parallelism."
            )

    def step(
        self, number: int, update: Callable, state: Any, batch: Mapping[str, jax.Array]
    ) -> tuple[Any, dict]:
        """``update(state, batch)``, checked where it is time.

        Raises UserError with ExitCode.CORRUPTION, which names devices.
        """
        if self._whole and number % self._replay_every == 0:
            state, metrics = self._twice(number, update, state, batch)
        else:
            state, metrics = update(state, batch)
        if self._copies and number % self._every == 0:
            self._compare(number, state)
        return state, metrics

    def before_save(self, number: int, state: Any) -> None:
        """As after ``step``, where it was not time: no checkpoint is to hold what replicas disagree on."""
        if self._copies and number % self._every:
            self._compare(number, state)

    def _compare(self, number: int, state: Any) -> None:
        assert self._copies
        found = self._copies.differences(self._copies(state))
        if not found:
            return
        devices = dict.fromkeys(device for one in found for device in one.devices)
        certain = all(one.certain for one in found)
        paths = _several([one.path for one in found])
        who = "differs from its other copies on" if certain else "differs between"
        more = "" if certain else "; which of them is right is not known, as there is no majority"
        raise UserError(
            f"silent corruption after step {number}: {paths} {who} {self._named(list(devices))}{more}."
            " Replace the machine; earlier checkpoints are good.",
            code=ExitCode.CORRUPTION,
        )

    def _twice(self, number: int, update: Callable, state: Any, batch: Any) -> tuple[Any, dict]:
        """The step from the same state and batch again. The first result goes before the second comes: there may be
        no room for two states."""
        assert self._whole
        before = jax.tree.map(_to_host, state)
        state, metrics = update(state, batch)
        first, first_metrics = self._whole(state), jax.device_get(metrics)
        jax.tree.map(lambda x: x.delete(), state)
        state, metrics = update(jax.tree.map(_to_devices, before, is_leaf=_is_copy), batch)
        second, second_metrics = self._whole(state), jax.device_get(metrics)
        differ = [self._whole.devices[n] for n in np.flatnonzero((first != second).any(axis=0))]
        values = [name for name in first_metrics if not _same(first_metrics[name], second_metrics[name])]
        if not differ and not values:
            return state, metrics
        where = f"the state on {self._named(differ)}" if differ else f"only {_several(values)}"
        more = (
            " on all devices alike, so the wrong value came to them through a collective"
            if len(differ) == len(self._whole.devices) > 1
            else ""
        )
        raise UserError(
            f"silent corruption: step {number} was taken twice from the same state, and its results differ{more}:"
            f" {where}. Replace the machine; earlier checkpoints may hold what came before it.",
            code=ExitCode.CORRUPTION,
        )

    def _named(self, devices: list[jax.Device]) -> str:
        return _several(
            [f"device {d.id} (slice {self._slice_of[d]}, process {d.process_index})" for d in devices]
        )


@dataclass(frozen=True)
class _Copy:
    shape: tuple[int, ...]
    sharding: Sharding
    shards: tuple[tuple[jax.Device, np.ndarray], ...]


def _same(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()  # a value that is no number equals itself


def _is_copy(x: Any) -> bool:
    return isinstance(x, _Copy)


def _to_host(x: jax.Array) -> _Copy:
    shards = tuple((s.device, np.array(s.data)) for s in x.addressable_shards)  # no view: x will be donated
    return _Copy(x.shape, x.sharding, shards)


def _to_devices(copy: _Copy) -> jax.Array:
    kind = copy.sharding.memory_kind
    shards = [jax.device_put(x, SingleDeviceSharding(d, memory_kind=kind)) for d, x in copy.shards]
    return jax.make_array_from_single_device_arrays(copy.shape, copy.sharding, shards)


def _several(words: Sequence[str]) -> str:
    shown = ", ".join(words[:SHOWN])
    return shown + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")
