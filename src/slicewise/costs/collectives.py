"""Times of collectives and point-to-point copies on a torus of chips (ICI), and across slices (DCN).

``bytes_`` is always the *whole gathered (or unreduced) array as one group sees it*: its bytes divided by the
mesh axes that shard it and take no part in the collective. W1 is a link one way, W2 = 2 W1 an axis both ways.
Sources: How to Scale Your Model, chapters "TPUs" and "sharding"; JAX's roofline (all-to-all over several
axes).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slicewise.catalog.slices import Slice

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
OPS: tuple[Op, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Axis:
    """One physical axis of the torus: ``size`` chips in a ring (``wrap``) or a line."""

    size: int
    wrap: bool = True

    @property
    def directions(self) -> int:
        """How many ways round a shard can take: a ring 2, a line 1."""
        return 2 if self.wrap else 1

    @property
    def hops(self) -> float:
        """Hops until every chip has heard every other: half of a ring, all of a line."""
        return self.size / 2 if self.wrap else self.size - 1


@dataclass(frozen=True)
class Collective:
    """One collective over ``axes``; its time is the larger of the bandwidth term and the latency floor."""

    op: Op
    bytes_: float
    axes: tuple[Axis, ...]
    bandwidth_s: float
    latency_s: float

    @property
    def time_s(self) -> float:
        return max(self.bandwidth_s, self.latency_s)

    @property
    def bound(self) -> Literal["bandwidth", "latency"]:
        return "bandwidth" if self.bandwidth_s >= self.latency_s else "latency"

    @property
    def group(self) -> int:
        """Chips that take part."""
        return math.prod(a.size for a in self.axes)

    @property
    def shard_bytes(self) -> float:
        """What one chip holds of the array."""
        return self.bytes_ / self.group


def axes_of(slice_: Slice, indices: Sequence[int] | None = None) -> tuple[Axis, ...]:
    """The physical axes ``indices`` (default all) of ``slice_``, longer than one chip."""
    chosen = range(len(slice_.topology)) if indices is None else indices
    every = [Axis(slice_.topology[i], slice_.wrap[i]) for i in chosen]
    return tuple(a for a in every if a.size > 1)


def collective(
    op: Op,
    bytes_: float,
    axes: Sequence[Axis],
    link_bytes_per_s: float,
    *,
    hop_s: float = 1e-6,
    exact: bool = False,
) -> Collective:
    """Time of ``op`` on ``bytes_`` over ``axes`` of links of ``link_bytes_per_s`` (one way).

    ``exact`` keeps the share (n-1)/n that a ring really moves, which the usual V / W2 rounds to one; a line,
    whose shards go one way only, is always exact: (n-1)/n V / W1.
    """
    used = tuple(a for a in axes if a.size > 1)
    if not used:
        return Collective(op, bytes_, (), 0.0, 0.0)
    latency_s = hop_s * sum(a.hops for a in used)
    if op == "all_to_all":
        return Collective(op, bytes_, used, _all_to_all_s(bytes_, used, link_bytes_per_s, exact), latency_s)
    group = math.prod(a.size for a in used)
    moved = (group - 1) / group if exact or not all(a.wrap for a in used) else 1.0
    bandwidth_s = moved * bytes_ / (link_bytes_per_s * sum(a.directions for a in used))
    rounds = 2 if op == "all_reduce" else 1
    return Collective(op, bytes_, used, rounds * bandwidth_s, rounds * latency_s)


def _all_to_all_s(bytes_: float, axes: Sequence[Axis], link_bytes_per_s: float, exact: bool) -> float:
    """A quarter of the array crosses the middle of each axis each way, on n / size rows of links."""
    group = math.prod(a.size for a in axes)

    def across(axis: Axis) -> float:
        share = (axis.size // 2) * ((axis.size + 1) // 2) / axis.size**2 if exact else 1 / 4
        return share * bytes_ * axis.size / (group * link_bytes_per_s * axis.directions)

    return max(map(across, axes))


def all_gather(
    bytes_: float, axes: Sequence[Axis], link_bytes_per_s: float, *, hop_s: float = 1e-6, exact: bool = False
) -> Collective:
    """V / (m W2) over m rings; (n-1)/n V / W1 on a line. See `collective`."""
    return collective("all_gather", bytes_, axes, link_bytes_per_s, hop_s=hop_s, exact=exact)


def reduce_scatter(
    bytes_: float, axes: Sequence[Axis], link_bytes_per_s: float, *, hop_s: float = 1e-6, exact: bool = False
) -> Collective:
    """The transpose of an all-gather, and as long."""
    return collective("reduce_scatter", bytes_, axes, link_bytes_per_s, hop_s=hop_s, exact=exact)


def all_reduce(
    bytes_: float, axes: Sequence[Axis], link_bytes_per_s: float, *, hop_s: float = 1e-6, exact: bool = False
) -> Collective:
    """A reduce-scatter and an all-gather: 2V / (m W2) over m rings."""
    return collective("all_reduce", bytes_, axes, link_bytes_per_s, hop_s=hop_s, exact=exact)


def all_to_all(
    bytes_: float, axes: Sequence[Axis], link_bytes_per_s: float, *, hop_s: float = 1e-6, exact: bool = False
) -> Collective:
    """V max(sizes) / (4 n W2) over rings of n chips: V / (4 W2) on one; twice that on a line."""
    return collective("all_to_all", bytes_, axes, link_bytes_per_s, hop_s=hop_s, exact=exact)


def ring_link_elements(op: Op, elements: float, devices: int, *, bidirectional: bool = True) -> float:
    """Elements that cross one link, one way, of a ring of ``devices`` for an array of ``elements``.

    One-way all-gather: elements (1 - 1/n), all-to-all half of it. Both ways: half, and an eighth of them.
    """
    share = 1 - 1 / devices
    if op == "all_to_all":
        both = (devices // 2) * ((devices + 1) // 2) / devices**2 / 2
        return elements * (both if bidirectional else share / 2)
    rounds = 2 if op == "all_reduce" else 1
    return rounds * elements * share / (2 if bidirectional else 1)


def latency_bound_shard_bytes(link_bytes_per_s: float, hop_s: float = 1e-6) -> float:
    """A shard smaller than W1 hop_s takes a whole hop anyway: 45 kB on v5e."""
    return link_bytes_per_s * hop_s


@dataclass(frozen=True)
class Copy:
    """Bytes from one chip to another (or from all chips to one)."""

    bytes_: float
    ports: int  # links of the busiest end that work in parallel
    hops: int
    time_s: float


def distance(a: int, b: int, axis: Axis) -> int:
    """Hops from coordinate ``a`` to ``b`` along ``axis``, the shorter way round a ring."""
    there = abs(a - b)
    return min(there, axis.size - there) if axis.wrap else there


def point_to_point(
    bytes_: float,
    source: Sequence[int],
    target: Sequence[int],
    axes: Sequence[Axis],
    link_bytes_per_s: float,
    *,
    hop_s: float = 1e-6,
) -> Copy:
    """A copy between the chips at two coordinates: bytes over one link per axis they differ in, plus a hop
    each.

    All axes that lead nearer carry a part: bytes / (ports W1) + hops hop_s.
    """
    distances = [distance(s, t, a) for s, t, a in zip(source, target, axes, strict=True)]
    ports, hops = sum(d > 0 for d in distances), sum(distances)
    time_s = bytes_ / (ports * link_bytes_per_s) + hops * hop_s if ports else 0.0
    return Copy(bytes_, ports, hops, time_s)


def links(at: Sequence[int], axes: Sequence[Axis]) -> int:
    """ICI links of the chip at a coordinate: a corner of an unwrapped 4x4 has two."""
    return sum(_links_along(c, a) for c, a in zip(at, axes, strict=True))


def _links_along(coordinate: int, axis: Axis) -> int:
    if axis.size == 1:
        return 0
    if axis.wrap:
        return 2 if axis.size > 2 else 1
    return 1 if coordinate in (0, axis.size - 1) else 2


def gather_to_one(
    bytes_: float, at: Sequence[int], axes: Sequence[Axis], link_bytes_per_s: float, *, hop_s: float = 0.0
) -> Copy:
    """Least time to bring an array sharded over every chip of ``axes`` to the chip ``at``.

    What the others hold, (n-1)/n of ``bytes_``, must pass the links of that chip.
    """
    group = math.prod(a.size for a in axes)
    ports = links(at, axes)
    hops = sum(
        max(distance(c, 0, a), distance(c, a.size - 1, a), a.size // 2 if a.wrap else 0)
        for c, a in zip(at, axes, strict=True)
    )
    moved = bytes_ * (group - 1) / group
    return Copy(bytes_, ports, hops, moved / (ports * link_bytes_per_s) + hops * hop_s if ports else 0.0)


def dcn_s(op: Op, bytes_: float, num_slices: int, chips_per_slice: float, dcn_bytes_per_s: float) -> float:
    """Time of ``op`` across slices on an array of ``bytes_`` that the chips of each slice share among them.

    Every slice sends (n-1)/n of the array through the egress of all its chips, twice for an all-reduce; for
    an all-to-all (n-1)/n of the part that the slice holds. ``dcn_bytes_per_s`` is egress per chip.
    """
    share = (num_slices - 1) / num_slices * (2 if op == "all_reduce" else 1)
    held = bytes_ / num_slices if op == "all_to_all" else bytes_
    return share * held / (chips_per_slice * dcn_bytes_per_s)


@dataclass(frozen=True)
class Hierarchical:
    """An all-reduce over chips of several slices: reduce-scatter inside, all-reduce across, all-gather
    inside."""

    ici_s: float
    dcn_s: float

    @property
    def time_s(self) -> float:
        """Without overlap of the three parts."""
        return self.ici_s + self.dcn_s


def hierarchical_all_reduce(
    bytes_: float,
    axes: Sequence[Axis],
    link_bytes_per_s: float,
    num_slices: int,
    dcn_bytes_per_s: float,
    *,
    hop_s: float = 1e-6,
) -> Hierarchical:
    """``bytes_`` as one group of ``axes`` sees them, reduced over that group and over ``num_slices``."""
    inside = all_reduce(bytes_, axes, link_bytes_per_s, hop_s=hop_s)
    return Hierarchical(inside.time_s, dcn_s("all_reduce", bytes_, num_slices, inside.group, dcn_bytes_per_s))
