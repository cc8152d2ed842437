"""Search over layouts, recipes, chips, slice shapes and slice counts: exhaustive, pruned by memory,
deterministic."""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slicewise.catalog.slices import Cluster
from slicewise.costs.batch import check_positions
from slicewise.costs.device import Device, device_of
from slicewise.costs.layout import CONTEXT_EXCHANGES, ContextExchange, Layout, Recipe
from slicewise.costs.memory import MARGIN, device_total, memory_bytes, peak_bytes
from slicewise.costs.remat import POLICIES, RematPolicy, custom
from slicewise.costs.shapes import ModelShape
from slicewise.costs.step import StepEstimate, estimate, price
from slicewise.errors import UserError
from slicewise.plan.check import check_layout, check_recipe, heads_allow
from slicewise.plan.layouts import (
    DCN_AXES,
    ICI_ORDER,
    MICROBATCHES,
    Placements,
    Table,
    combine,
    dcn_rows,
    joined,
    limits_of,
    placed_rows,
)

OFFLOAD_INPUT = {"decoder_layer_input": "offload"}
OFFLOAD_QKV = dict.fromkeys(("query_proj", "key_proj", "value_proj"), "offload")
DEFAULT_RECIPE = Recipe(loss_in_chunks=True, as_compiled_here=True, summed_bytes=2)
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
    replace(custom({**OFFLOAD_INPUT, "out_proj": "offload"}), name="custom input,out=offload"),
    replace(custom({**OFFLOAD_INPUT, "context": "device"}), name="custom input=offload context=device"),
    replace(
        custom({**OFFLOAD_INPUT, **OFFLOAD_QKV, "context": "offload"}),
        name="custom input,qkv,context=offload",
    ),
    replace(
        custom({**OFFLOAD_INPUT, **OFFLOAD_QKV, "out_proj": "offload"}), name="custom input,qkv,out=offload"
    ),
    replace(
        custom({"context": "device", **dict.fromkeys(OFFLOAD_QKV, "device")}),
        name="custom context,qkv=device",
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


def fits(candidate: Candidate, margin: float = MARGIN) -> bool:
    """Whether the layout leaves ``margin`` of the device's usable memory free."""
    e = candidate.estimate
    return e.hbm_total_bytes <= (1 - margin) * e.hbm_limit_bytes


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


Fit = tuple[np.ndarray, np.ndarray]  # which layouts fit, and the bytes each needs


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    recipe: Recipe = DEFAULT_RECIPE,
    policies: Sequence[RematPolicy] = SEARCHED_POLICIES,
    precisions: Sequence[str] = ("bf16",),
    top: int = 20,
    margin: float = MARGIN,
    families: bool = True,
) -> SearchResult:
    """The fastest layouts of ``workload`` on ``cluster``; ``recipe`` gives what is not searched.

    Raises UserError when no layout is legal or none fits, with the nearest that would.
    """
    _check(workload, cluster, precisions)
    device = device_of(cluster.chip)
    limits = limits_of(workload.shape, workload.seq, workload.global_batch)
    ici, places = placed_rows(cluster.slice, limits)
    recipes = [
        replace(recipe, context_exchange=x, precision=p, remat=r)  # type: ignore[arg-type]
        for x in sorted(CONTEXT_EXCHANGES, key=lambda x: x != recipe.context_exchange)
        for p in precisions
        for r in policies
    ]
    ids = np.flatnonzero(places.legal)
    table = combine(ici[ids], ids, dcn_rows(cluster.num_slices, limits, fsdp=False), limits)
    fits = fitting(workload, device, table, recipes, margin)
    if cluster.num_slices > 1:
        # Weights are sharded over the data-centre network only when memory asks: no replica a slice fits.
        replica_fits = bool((np.logical_or.reduce([ok for ok, _ in fits]) & (table.dcn[:, 0] == 1)).any())
        crowded = ids[:0] if replica_fits else ids
        more = combine(ici[crowded], crowded, dcn_rows(cluster.num_slices, limits, fsdp=True), limits)
        extra = fitting(workload, device, more, recipes, margin)
        fits = [_both(f, e) for f, e in zip(fits, extra, strict=True)]
        table = joined(table, more)
    if not len(table):
        raise UserError(no_layout(workload, cluster))
    scans = [
        scan(workload, device, table, places, r, ok, bytes_, beaten)
        for r, (ok, bytes_), beaten in zip(recipes, fits, _beaten(recipes, fits), strict=True)
    ]
    ranked = tuple(_candidate(workload, cluster, s, k) for s, k in _fastest(scans, top))
    if not ranked:
        raise UserError(nothing_fits(workload, cluster, scans, device, margin))
    return SearchResult(
        workload, cluster, ranked, _families(workload, cluster, scans) if families else (),
        sum(int(np.isfinite(b).sum()) for _, b in fits), sum(int(ok.sum()) for ok, _ in fits), margin,
    )  # fmt: skip


def remat_candidates(workload: Workload, base: Candidate) -> list[Candidate]:
    """The mesh of ``base`` under every remat policy with which it fits, the fastest first.

    Each with the fewest accumulation steps that fit; a pipeline keeps its microbatches.
    """
    shape, seq, cluster = workload.shape, workload.seq, base.cluster
    is_staged = base.layout.total("pipeline") > 1
    host_bytes = device_of(cluster.chip).host_memory_bytes
    found = []
    for policy in {(p.saved, p.offloaded): p for p in (*POLICIES.values(), *SEARCHED_POLICIES)}.values():
        recipe = replace(base.recipe, remat=policy)
        for steps in (base.layout.accumulation_steps,) if is_staged else MICROBATCHES:
            layout = replace(base.layout, accumulation_steps=steps)
            try:
                check_layout(shape, cluster, layout, seq)
                check_recipe(shape, layout, recipe, seq)
            except UserError:
                break
            one = Candidate(cluster, layout, recipe, estimate(shape, cluster, layout, recipe, seq))
            if fits(one) and one.estimate.host_bytes <= host_bytes:
                found.append(one)
                break
    return sorted(found, key=lambda c: c.estimate.step_time_s)


def _check(workload: Workload, cluster: Cluster, precisions: Sequence[str]) -> None:
    if workload.global_batch < 1:
        raise UserError(
            f"the global batch is below one sequence of {workload.seq} tokens;"
            f" expected {workload.seq} tokens or more."
        )
    check_positions(workload.shape.name, workload.seq, workload.shape.learned_positions)
    for precision in precisions:
        cluster.chip.peak_flops_per_s(precision)


def fitting(
    workload: Workload, device: Device, table: Table, recipes: Sequence[Recipe], margin: float
) -> list[Fit]:
    """For each recipe: which layouts of ``table`` fit on the device and its share of the host, and the device
    bytes they need: infinite where the layout does not go with the recipe."""
    found = []
    for exchange, group in itertools.groupby(recipes, key=lambda r: r.context_exchange):
        first, *_ = rest = list(group)
        crossed = _crossed_by(workload, table, exchange, is_default=first == recipes[0])
        which = np.flatnonzero(crossed & _shared_by(workload, table, first))
        few = table if len(which) == len(table) else table.take(which)
        layout = few.layout(workload.global_batch)
        peak = peak_bytes(workload.shape, layout, first, workload.seq)
        for recipe in rest:
            memory = memory_bytes(workload.shape, layout, recipe, workload.seq, peak=peak)
            total, fits = np.full(len(table), np.inf), np.zeros(len(table), bool)
            total[which] = device_total(memory)
            if recipe.remat.offloaded:
                total[which[few.staged]] = np.inf  # see costs.pipeline.check_remat
            host = np.broadcast_to(memory["host"], which.shape)
            fits[which] = (total[which] <= (1 - margin) * device.hbm_bytes) & (
                host <= device.host_memory_bytes
            )
            found.append((fits, total))
    return found


def _crossed_by(
    workload: Workload, table: Table, exchange: ContextExchange, *, is_default: bool
) -> np.ndarray:
    """The layouts whose context axis can be crossed in this way; those without one count to the first way."""
    layout = table.layout(workload.global_batch)
    able = np.broadcast_to(heads_allow(workload.shape, layout, exchange), (len(table),))
    return np.where(layout.ici.context > 1, able, is_default)


def _shared_by(workload: Workload, table: Table, recipe: Recipe) -> np.ndarray:
    """The layouts that the experts of ``recipe`` go with, as plan.check.check_recipe says."""
    has_places = bool(workload.shape.routed_parameters and recipe.expert_capacity_factor)
    return ~(has_places & (table.layout(workload.global_batch).ici.context > 1))


def _both(first: Fit, second: Fit) -> Fit:
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def scan(
    workload: Workload,
    device: Device,
    table: Table,
    places: Placements,
    recipe: Recipe,
    fits: np.ndarray,
    bytes_: np.ndarray,
    beaten: np.ndarray,
) -> Scan:
    """The time of every layout of ``table`` that fits, and is not ``beaten`` by another recipe or by its twin.

    Accumulating over more microbatches saves memory and never time (each gathers the weights again), so of
    layouts that differ only in that the one with the fewest that fits is priced. Pipelines are priced for
    all.
    """
    which = np.flatnonzero(fits & ~beaten & _fewest_microbatches(table, fits))
    seconds = np.full(len(table), np.inf)
    if len(which):
        few = table.take(which)
        net = places.network(few.ici_id, device)
        costs = price(workload.shape, device, few.layout(workload.global_batch), net, recipe, workload.seq)
        seconds[which] = costs.total_s
    return Scan(recipe, table, seconds, bytes_)


def _beaten(recipes: Sequence[Recipe], fits: Sequence[Fit]) -> list[np.ndarray]:
    """For each recipe: the layouts for which another that fits keeps all it keeps, and on the device.

    Keeping more means less to recompute and less to send, so such a recipe is never slower. The first recipe
    is always priced: it wins ties.
    """
    found = []
    for k, one in enumerate(recipes):
        better = [
            ok
            for other, (ok, _) in zip(recipes, fits, strict=True)
            if k and _differ_in_remat(other, one) and _keeps_more(other.remat, one.remat)
        ]
        found.append(np.logical_or.reduce(better) if better else np.zeros_like(fits[k][0]))
    return found


def _differ_in_remat(a: Recipe, b: Recipe) -> bool:
    return (a.precision, a.context_exchange) == (b.precision, b.context_exchange)


def _keeps_more(a: RematPolicy, b: RematPolicy) -> bool:
    kept = b.saved | b.offloaded
    return not a.offloaded and a.saved >= kept and (a.saved > kept or bool(b.offloaded))


def _fewest_microbatches(table: Table, fits: np.ndarray) -> np.ndarray:
    """True for pipelines, and for the layout with the fewest microbatches that fits among its twins."""
    most = np.iinfo(np.int64).max
    fewest = np.full(int(table.twin.max()) + 1, most)
    np.minimum.at(fewest, table.twin, np.where(fits, table.micro, most))
    return table.staged | (table.micro == fewest[table.twin])


def _fastest(scans: Sequence[Scan], top: int) -> list[tuple[Scan, int]]:
    """The ``top`` fastest meshes, each with its best recipe and microbatches; ties go to fewer axes, then
    to the order of search."""
    table = scans[0].table
    seconds = np.stack([s.seconds for s in scans])
    recipe_of = seconds.argmin(0)
    best = seconds.min(0)
    axes = (table.ici > 1).sum(1) + (table.dcn > 1).sum(1)
    order = np.lexsort((np.arange(len(best)), axes, best))
    found: list[tuple[Scan, int]] = []
    seen: set[int] = set()
    for k in order[: 64 * top].tolist():
        if not np.isfinite(best[k]) or len(found) == top:
            break
        if int(table.twin[k]) not in seen:
            seen.add(int(table.twin[k]))
            found.append((scans[recipe_of[k]], k))
    return found


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
        result.append(Family(axes, int(np.isfinite(bytes_).sum()), int(np.isfinite(times).sum()), best))
    fits = sorted((f for f in result if f.fitting), key=lambda f: (f.best.estimate.step_time_s, f.axes))
    rest = sorted(
        (f for f in result if not f.fitting), key=lambda f: (f.best.estimate.hbm_total_bytes, f.axes)
    )
    return (*fits, *rest)


def no_layout(workload: Workload, cluster: Cluster) -> str:
    """Why no layout is legal, and the nearest global batches that make one."""
    need = cluster.devices
    near = sorted({b for b in (need, workload.global_batch // need * need) if b})
    place = f"{cluster.num_slices} slices of {cluster.slice.devices} devices"
    return (
        f"a global batch of {workload.global_batch} sequences cannot be divided over {place}"
        f" with the axes {workload.shape.name} allows; these can: {', '.join(map(str, near))} sequences."
    )


def nothing_fits(
    workload: Workload, cluster: Cluster, scans: Iterable[Scan], device: Device, margin: float
) -> str:
    """How much the smallest layout needs, and how many chips would do."""
    least = min(float(s.bytes_.min()) for s in scans)
    have = (1 - margin) * device.hbm_bytes
    place = f"{cluster.num_slices} x {cluster.slice.name} {cluster.chip.name}"
    return (
        f"{workload.shape.name} does not fit on {place} at any layout: the smallest needs"
        f" {least / 2**30:.1f} GiB a device and {have / 2**30:.1f} GiB can be used ({margin:.0%} kept free);"
        f" about {math.ceil(least / have * cluster.chips)} chips would hold it."
    )
