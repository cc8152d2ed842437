"""Search over layouts, recipes, chips, slice shapes and slice counts: exhaustive, pruned by memory, deterministic."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slicewise.catalog import slices
from slicewise.catalog.chips import Chip
from slicewise.catalog.slices import Cluster, Slice
from slicewise.costs.device import Device, device_of
from slicewise.costs.layout import Layout, Recipe
from slicewise.costs.memory import MARGIN, device_total, memory_bytes
from slicewise.costs.remat import POLICIES, RematPolicy, custom
from slicewise.costs.shapes import ModelShape
from slicewise.costs.step import StepEstimate, estimate, price
from slicewise.errors import UserError
from slicewise.plan.layouts import (
    DCN_AXES,
    ICI_ORDER,
    Table,
    combine,
    dcn_rows,
    ici_rows,
    joined,
    limits_of,
    network_for,
    network_of_rows,
)

OFFLOAD_INPUT = {"decoder_layer_input": "offload"}
OFFLOAD_QKV = dict.fromkeys(("query_proj", "key_proj", "value_proj"), "offload")
SEARCHED_POLICIES: tuple[RematPolicy, ...] = (
    POLICIES["full"],
    POLICIES["save_out_proj"],
    POLICIES["save_qkv_proj"],
    POLICIES["save_dot_except_mlp"],
    POLICIES["save_dot_with_context_except_mlp"],
    POLICIES["minimal"],
    POLICIES["minimal_with_context"],
    POLICIES["qkv_proj_offloaded"],
    replace(custom({"context": "device"}), name="custom context=device"),
    replace(custom(OFFLOAD_INPUT), name="custom input=offload"),
    replace(custom({**OFFLOAD_INPUT, **OFFLOAD_QKV}), name="custom input,qkv=offload"),
    replace(
        custom({**OFFLOAD_INPUT, **OFFLOAD_QKV, "out_proj": "offload"}), name="custom input,qkv,out=offload"
    ),
    replace(
        custom({"context": "device", **dict.fromkeys(OFFLOAD_QKV, "device")}), name="custom context,qkv=device"
    ),
)


@dataclass(frozen=True)
class Workload:
    """What is to be trained: a global batch of ``global_batch`` sequences of ``seq`` tokens each step."""

    shape: ModelShape
    seq: int
    global_batch: int

    @property
    def tokens(self) -> int:
        return self.seq * self.global_batch


@dataclass(frozen=True)
class Candidate:
    """A layout with its price."""

    cluster: Cluster
    layout: Layout
    recipe: Recipe
    estimate: StepEstimate


@dataclass(frozen=True)
class Family:
    """The layouts that use the same axes for more than data: the best of them that fits, or the smallest."""

    axes: tuple[str, ...]  # such as ('fsdp', 'tensor', 'dcn fsdp')
    layouts: int
    fitting: int
    best: Candidate  # the fastest that fits, or the one that needs least memory when none does


@dataclass(frozen=True)
class SearchResult:
    """``ranked`` fastest first; every member fits with the margin. ``families`` by their best time."""

    workload: Workload
    cluster: Cluster
    ranked: tuple[Candidate, ...]
    families: tuple[Family, ...]
    considered: int
    fitting: int
    margin: float = MARGIN


@dataclass(frozen=True)
class Scan:
    """Times and memory of every layout under one recipe."""

    recipe: Recipe
    table: Table
    seconds: np.ndarray  # infinite where it does not fit
    bytes_: np.ndarray = field(repr=False)


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    recipe: Recipe = Recipe(),
    policies: Sequence[RematPolicy] = SEARCHED_POLICIES,
    precisions: Sequence[str] = ("bf16",),
    top: int = 20,
    margin: float = MARGIN,
    families: bool = True,
) -> SearchResult:
    """The fastest layouts of ``workload`` on ``cluster``; ``recipe`` gives what is not searched.

    Raises UserError when no layout is legal or none fits, with the nearest that would.
    """
    device = device_of(cluster.chip)
    limits = limits_of(workload.shape, workload.seq, workload.global_batch)
    ici = ici_rows(workload.shape, cluster.slice, limits)
    links, hops, placed = network_of_rows(ici, cluster.slice, device)
    recipes = [replace(recipe, remat=r, precision=p) for p in precisions for r in policies]  # type: ignore[arg-type]
    ids = np.flatnonzero(placed)
    table = combine(ici[ids], ids, dcn_rows(cluster.num_slices, limits, fsdp=False), limits)
    fits = [fitting(workload, device, table, r, margin) for r in recipes]
    if cluster.num_slices > 1:
        # Sharding weights over the data-centre network only where replicas of them do not fit.
        crowded = np.setdiff1d(ids, table.ici_id[np.logical_or.reduce([ok for ok, _ in fits])])
        more = combine(ici[crowded], crowded, dcn_rows(cluster.num_slices, limits, fsdp=True), limits)
        fits = [_both(f, fitting(workload, device, more, r, margin)) for f, r in zip(fits, recipes, strict=True)]
        table = joined(table, more)
    if not len(table):
        raise UserError(no_layout(workload, cluster))
    scans = [
        scan(workload, device, table, links, hops, r, *f) for r, f in zip(recipes, fits, strict=True)
    ]
    ranked = tuple(_candidate(workload, cluster, s, k) for s, k in _fastest(scans, top))
    if not ranked:
        raise UserError(nothing_fits(workload, cluster, scans, device, margin))
    return SearchResult(
        workload, cluster, ranked, _families(workload, cluster, scans) if families else (),
        len(table) * len(recipes), sum(int(ok.sum()) for ok, _ in fits), margin,
    )  # fmt: skip


def fitting(
    workload: Workload, device: Device, table: Table, recipe: Recipe, margin: float
) -> tuple[np.ndarray, np.ndarray]:
    """Which layouts of ``table`` fit on the device and its share of the host, and the device bytes they need."""
    memory = memory_bytes(workload.shape, table.layout(workload.global_batch), recipe, workload.seq)
    total = np.broadcast_to(device_total(memory), (len(table),))
    host = np.broadcast_to(memory["host"], total.shape)
    return (total <= (1 - margin) * device.hbm_bytes) & (host <= device.host_memory_bytes), total


def _both(first: tuple[np.ndarray, np.ndarray], second: tuple[np.ndarray, np.ndarray]):
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def scan(
    workload: Workload,
    device: Device,
    table: Table,
    links: np.ndarray,
    hops: np.ndarray,
    recipe: Recipe,
    fits: np.ndarray,
    bytes_: np.ndarray,
) -> Scan:
    """The time of every layout of ``table`` that fits and is not beaten by its twin.

    Accumulating over more microbatches saves memory and never time (each gathers the weights again), so of
    layouts that differ only in that the one with the fewest that fits is priced. Pipelines are priced for all.
    """
    which = np.flatnonzero(fits & _fewest_microbatches(table, fits))
    seconds = np.full(len(table), np.inf)
    if len(which):
        few = table.take(which)
        net = network_for(few, links, hops, device)
        costs = price(workload.shape, device, few.layout(workload.global_batch), net, recipe, workload.seq)
        seconds[which] = costs.total_s
    return Scan(recipe, table, seconds, bytes_)


def _fewest_microbatches(table: Table, fits: np.ndarray) -> np.ndarray:
    """True for pipelines, and for the layout with the fewest microbatches that fits among its twins."""
    most = np.iinfo(np.int64).max
    fewest = np.full(int(table.twin.max()) + 1, most)
    np.minimum.at(fewest, table.twin, np.where(fits, table.micro, most))
    return table.staged | (table.micro == fewest[table.twin])


def _fastest(scans: Sequence[Scan], top: int) -> list[tuple[Scan, int]]:
    """The ``top`` fastest over all scans; ties go to fewer axes, then to the order of search."""
    found = []
    for rank, s in enumerate(scans):
        finite = np.flatnonzero(np.isfinite(s.seconds))
        if len(finite) > top:
            finite = finite[np.argpartition(s.seconds[finite], top - 1)[:top]]
        axes = (s.table.ici > 1).sum(1) + (s.table.dcn > 1).sum(1)
        found += [(round(float(s.seconds[k]), 9), int(axes[k]), rank, int(k)) for k in finite]
    return [(scans[rank], k) for _, _, rank, k in sorted(found)[:top]]


def _candidate(workload: Workload, cluster: Cluster, scan: Scan, k: int) -> Candidate:
    layout = scan.table.row(k, workload.global_batch)
    priced = estimate(workload.shape, cluster, layout, scan.recipe, workload.seq)
    return Candidate(cluster, layout, scan.recipe, priced)


def _families(workload: Workload, cluster: Cluster, scans: Sequence[Scan]) -> tuple[Family, ...]:
    """Layouts grouped by the axes they use."""
    table = scans[0].table
    used = np.concatenate([table.ici > 1, table.dcn > 1], axis=1)
    codes = used @ (1 << np.arange(used.shape[1]))
    names = [*ICI_ORDER, *(f"dcn {axis}" for axis in DCN_AXES)]
    seconds = np.stack([s.seconds for s in scans])
    needed = np.stack([s.bytes_ for s in scans])
    result = []
    for code in np.unique(codes):
        members = np.flatnonzero(codes == code)
        times, bytes_ = seconds[:, members], needed[:, members]
        key = times if np.isfinite(times).any() else bytes_
        which, k = np.unravel_index(int(np.argmin(key)), key.shape)
        axes = tuple(name for bit, name in enumerate(names) if code >> bit & 1)
        best = _candidate(workload, cluster, scans[int(which)], int(members[k]))
        result.append(Family(axes, times.size, int(np.isfinite(times).sum()), best))
    fits = sorted((f for f in result if f.fitting), key=lambda f: (f.best.estimate.step_time_s, f.axes))
    rest = sorted((f for f in result if not f.fitting), key=lambda f: (f.best.estimate.hbm_total_bytes, f.axes))
    return (*fits, *rest)


def no_layout(workload: Workload, cluster: Cluster) -> str:
    """Why no layout is legal, and the nearest global batch that makes one."""
    need = cluster.devices
    near = [b for b in (need, workload.global_batch // need * need) if b]
    return (
        f"a global batch of {workload.global_batch} sequences cannot be divided over {cluster.num_slices} slices of"
        f" {cluster.slice.devices} devices with the axes {workload.shape.name} allows;"
        f" the nearest batches that always can: {', '.join(str(b) for b in sorted(set(near)))} sequences."
    )


def nothing_fits(
    workload: Workload, cluster: Cluster, scans: Iterable[Scan], device: Device, margin: float
) -> str:
    """How much the smallest layout needs, and how many slices would do."""
    least = min(float(s.bytes_.min()) for s in scans)
    have = (1 - margin) * device.hbm_bytes
    return (
        f"{workload.shape.name} does not fit on {cluster.num_slices} x {cluster.slice.name} {cluster.chip.name} at any"
        f" layout: the smallest needs {least / 2**30:.1f} GiB a device and {have / 2**30:.1f} GiB can be used"
        f" ({margin:.0%} kept free); about {math.ceil(least / have * cluster.chips)} chips would hold it."
    )


@dataclass(frozen=True)
class Goal:
    """What a free search should reach: ``tokens`` in all, by ``deadline_s`` or within ``budget``; else cheapest."""

    tokens: float
    deadline_s: float | None = None
    budget: float | None = None


@dataclass(frozen=True)
class Offer:
    """One cluster with its best layout, and what the whole run takes there."""

    candidate: Candidate
    run_s: float
    cost: float | None  # None without a price

    @property
    def chips(self) -> int:
        return self.candidate.cluster.chips


def clusters_of(chip: Chip, *, topology: tuple[int, ...] | None, num_slices: int | None, max_chips: int) -> list[Cluster]:
    """Every cluster of ``chip`` within ``max_chips``: legal shapes times powers of two of slices, unless given."""
    shapes = [topology] if topology else slices.legal_shapes(chip)
    found = []
    for shape in shapes:
        one = Slice(chip, shape)
        counts = [num_slices] if num_slices else [2**k for k in range(9)]
        found += [Cluster(one, n) for n in counts if one.chips * n <= max_chips]
    return found


def run_cost(cluster: Cluster, seconds: float) -> float | None:
    price_ = cluster.chip.price_per_chip_hour
    return None if price_ is None else cluster.chips * price_ * seconds / 3600


def free_search(
    workload: Workload,
    clusters: Sequence[Cluster],
    goal: Goal,
    *,
    recipe: Recipe = Recipe(),
    policies: Sequence[RematPolicy] = SEARCHED_POLICIES,
) -> tuple[Offer, ...]:
    """The offers that meet ``goal``, best first: cheapest by the deadline, fastest within the budget, else cheapest
    (by chip-hours where a chip has no price). Raises UserError when none does, with the nearest."""
    offers = []
    for cluster in clusters:
        try:
            result = search(workload, cluster, recipe=recipe, policies=policies, top=1, families=False)
        except UserError:
            continue  # this cluster cannot hold the model or divide the batch
        best = result.ranked[0]
        seconds = goal.tokens / best.estimate.tokens_per_s
        offers.append(Offer(best, seconds, run_cost(cluster, seconds)))
    if not offers:
        raise UserError(f"no cluster among {len(clusters)} can train {workload.shape.name} with this batch.")
    met = [o for o in offers if _meets(o, goal)]
    if not met:
        raise UserError(_nearest(offers, goal))
    return tuple(sorted(met, key=lambda o: _order(o, goal)))


def _meets(offer: Offer, goal: Goal) -> bool:
    in_time = goal.deadline_s is None or offer.run_s <= goal.deadline_s
    in_budget = goal.budget is None or (offer.cost is not None and offer.cost <= goal.budget)
    return in_time and in_budget


def _order(offer: Offer, goal: Goal) -> tuple[float, ...]:
    chip_s = offer.chips * offer.run_s
    cost = offer.cost if offer.cost is not None else math.inf
    if goal.budget is not None and goal.deadline_s is None:
        return (offer.run_s, cost, chip_s)
    return (cost, chip_s, offer.run_s)


def _nearest(offers: Sequence[Offer], goal: Goal) -> str:
    fastest = min(offers, key=lambda o: o.run_s)
    priced = [o for o in offers if o.cost is not None]
    text = f"no cluster meets the goal; the fastest takes {fastest.run_s / 86400:.1f} days"
    if priced:
        cheapest = min(priced, key=lambda o: o.cost or math.inf)
        text += f", the cheapest costs {cheapest.cost:,.0f}"
    elif goal.budget is not None:
        text += "; none of these chips has a price (give a price file)"
    return text + "."
