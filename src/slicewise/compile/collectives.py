"""What a collective of a compiled program moves: from replica groups to mesh axes, physical links and seconds."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slicewise.catalog.slices import Cluster
from slicewise.compile.hlo import Instruction
from slicewise.costs.device import Device
from slicewise.costs.network import network_of
from slicewise.costs.torus import AxisLinks

DIMS = "xyz"
DCN = "dcn"
OPS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_MESH = re.compile(r"mesh\[([^\]]*)\]\s*\{([^}]*)\}(?:, device_ids=\((.*?)\))?")
_MESH_SIZE = re.compile(r"'?([\w.]+)'?=(\d+)")
_MESH_AXIS = re.compile(r"'?([A-Za-z_][\w.]*)'?(?::\((\d+)\)(\d+))?")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


@dataclass(frozen=True)
class Layout:
    """Where the partitions of a program are: mesh axes, and of each partition its slice, chip and core."""

    cluster: Cluster
    mesh: dict[str, int]  # axis -> size, slowest first
    places: np.ndarray  # int [partitions, slice + coordinates + core]

    def axes(self, group: Sequence[int] | np.ndarray) -> tuple[str, ...]:
        """The mesh axes along which the partitions of ``group`` differ."""
        where = np.array(np.unravel_index(np.asarray(group), tuple(self.mesh.values())))
        return tuple(axis for axis, row in zip(self.mesh, where, strict=True) if len(set(row.tolist())) > 1)


@dataclass(frozen=True)
class Collective:
    """One collective as a device sees it. ``resources`` are the links that it keeps busy: x, y, z or dcn, with + or -
    where it uses one direction only."""

    op: str
    axes: tuple[str, ...]
    network: str  # 'ici', or 'dcn' when it crosses slices
    bytes_: float  # that a device sends
    seconds: float
    resources: tuple[str, ...]

    @property
    def label(self) -> str:
        """Such as 'fsdp', or 'dcn data'."""
        name = " x ".join(self.axes) or "all"
        return f"dcn {name}" if self.network == "dcn" else name


def replica_groups(text: str) -> np.ndarray:
    """Partition ids [groups, members] of what follows replica_groups=. Raises ValueError for an unknown form."""
    if found := _MESH.match(text):
        return _mesh_groups(found[1], found[2], found[3])
    if found := _IOTA.match(text):
        shape, dims = (tuple(map(int, found[i].split(","))) for i in (1, 2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if found[3]:
            ids = ids.transpose(tuple(map(int, found[3].split(","))))
        return ids.reshape(shape)
    if text.startswith("{{"):
        return np.array(
            [list(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", text[: text.index("}}") + 1])]
        )
    raise ValueError(f"replica groups of an unknown form: {text[:80]}")


def _mesh_groups(sizes: str, axes: str, order: str | None) -> np.ndarray:
    """Groups that vary over ``axes`` of a mesh; an axis may be a part of one: name:(size before it)size."""
    mesh = [(name, int(size)) for name, size in _MESH_SIZE.findall(sizes)]
    parts = {name: (int(before), int(size)) for name, before, size in _MESH_AXIS.findall(axes) if size}
    chosen = {name for name, _, _ in _MESH_AXIS.findall(axes)}
    dims: list[int] = []
    varying: list[int] = []
    for name, size in mesh:
        before, part = parts.get(name, (1, size))
        for n, varies in ((before, False), (part, name in chosen), (size // (before * part), False)):
            if varies:
                varying.append(len(dims))
            dims.append(n)
    ids = np.arange(math.prod(dims))
    if order and (found := _IOTA.match(order)):
        ids = replica_groups(found[0]).reshape(-1)
    ids = np.moveaxis(ids.reshape(dims), varying, range(-len(varying), 0))
    return ids.reshape(-1, math.prod(dims[i] for i in varying))


def collective(instruction: Instruction, operand_bytes: float, layout: Layout, device: Device) -> Collective:
    """The collective that ``instruction`` is, for ``operand_bytes`` that enter it on each device."""
    op = next(o for o in OPS if instruction.opcode.startswith(o))
    op = "all-to-all" if op == "ragged-all-to-all" else op
    if op == "collective-permute":
        return _permute(instruction, operand_bytes, layout, device)
    return of_group(op, first_group(instruction), operand_bytes, layout, device)


def first_group(instruction: Instruction) -> np.ndarray:
    """The partitions of one group of a collective."""
    return replica_groups(instruction.attributes.partition("replica_groups=")[2])[0]


def of_group(op: str, group: np.ndarray, operand_bytes: float, layout: Layout, device: Device) -> Collective:
    """``op`` over the partitions ``group``. Volumes of a ring: (n-1)/n of the whole array, twice for an all-reduce; a
    quarter of it for an all-to-all over a torus (see costs.collectives)."""
    places, n = layout.places[group], len(group)
    slices = len(set(places[:, 0].tolist()))
    inside = n // slices
    whole = operand_bytes * (inside if op in ("all-gather", "all-to-all") else 1)
    links, resources = _links(places[places[:, 0] == places[0, 0]], layout)
    seconds, sent = 0.0, 0.0
    if inside > 1:
        _, rate, latency = network_of(device, {"group": links}).group({"group": inside})
        rounds = 2 if op == "all-reduce" else 1
        moved = whole / 4 if op == "all-to-all" else whole * (inside - 1) / inside
        seconds = rounds * max(float(moved / rate), float(latency))
        sent = rounds * whole * (inside - 1) / inside / (inside if op == "all-to-all" else 1)
    if slices == 1:
        return Collective(op, layout.axes(group), "ici", sent, seconds, resources)
    held = whole / inside if op in ("all-reduce", "reduce-scatter") else operand_bytes * slices
    crossing = (2 if op == "all-reduce" else 1) * held * (slices - 1) / slices
    seconds += crossing / device.dcn_bytes_per_s
    return Collective(op, layout.axes(group), "dcn", sent + crossing, seconds, (*resources, DCN))


def _links(places: np.ndarray, layout: Layout) -> tuple[AxisLinks, tuple[str, ...]]:
    """The links of a chip that a group inside one slice keeps busy, and their names."""
    links, hops, names = 0.0, 0.0, []
    slice_ = layout.cluster.slice
    for dim, (size, wraps) in enumerate(zip(slice_.topology, slice_.wrap, strict=True)):
        values = sorted(set(places[:, 1 + dim].tolist()))
        if len(values) == 1:
            continue
        stride = min(b - a for a, b in itertools.pairwise(values))
        is_ring = wraps and len(values) * stride == size
        links += (2 if is_ring else 1) / stride
        hops += len(values) * stride / 2 if is_ring else (len(values) - 1) * stride
        names += [f"{DIMS[dim]}+", f"{DIMS[dim]}-"]
    cores = len(set(places[:, -1].tolist())) > 1
    return AxisLinks(links, hops, cores), tuple(names)


def _permute(instruction: Instruction, operand_bytes: float, layout: Layout, device: Device) -> Collective:
    """Bytes over the links of the busiest pair: one direction of each dim in which its ends differ."""
    found = re.findall(r"\{(\d+),(\d+)\}", instruction.attribute("source_target_pairs"))
    pairs = [(int(a), int(b)) for a, b in found if a != b]  # a device that sends to itself uses no link
    slice_ = layout.cluster.slice
    worst, crosses = 0.0, False
    resources: tuple[str, ...] = ()
    for source, target in pairs[:64]:
        here, there = layout.places[source], layout.places[target]
        if here[0] != there[0]:
            crosses = True
            continue
        hops, names = 0, []
        for dim, (size, wraps) in enumerate(zip(slice_.topology, slice_.wrap, strict=True)):
            forward = int(there[1 + dim] - here[1 + dim])
            if wraps and abs(forward) > size / 2:
                forward -= int(math.copysign(size, forward))
            if forward:
                hops += abs(forward)
                names.append(f"{DIMS[dim]}{'+' if forward > 0 else '-'}")
        if hops > worst:
            worst, resources = hops, tuple(names)
    axes = layout.axes(pairs[0]) if pairs else ()
    if crosses:
        seconds = operand_bytes / device.dcn_bytes_per_s
        return Collective("collective-permute", axes, "dcn", operand_bytes, seconds, (DCN,))
    link = device.link_bytes_per_s * device.calibration.ici_efficiency
    if not resources:  # between the devices of one chip
        return Collective("collective-permute", axes, "ici", operand_bytes, operand_bytes / (6 * link), ())
    # A transfer of several hops passes as many links of the same direction, which all chips use at once.
    seconds = operand_bytes * worst / link / len(resources) + worst * device.hop_s
    return Collective("collective-permute", axes, "ici", operand_bytes, seconds, resources)
