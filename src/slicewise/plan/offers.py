"""Free search: which chips, slice shape and slice count reach a goal, with the best layout on each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slicewise.catalog import slices
from slicewise.catalog.chips import Chip
from slicewise.catalog.slices import Cluster, Slice
from slicewise.costs.device import device_of
from slicewise.costs.flops import model_flops
from slicewise.costs.layout import Recipe
from slicewise.costs.remat import RematPolicy
from slicewise.errors import UserError
from slicewise.plan.layouts import DCN_PIPELINES
from slicewise.plan.search import DEFAULT_RECIPE, SEARCHED_POLICIES, Candidate, Workload, search


@dataclass(frozen=True)
class Goal:
    """What a free search should reach: ``tokens`` in all, by ``deadline_s`` or within ``budget``; else
    cheapest."""

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


MAX_SLICES = 256  # of a free search, unless their number is given


def clusters_of(
    chip: Chip,
    *,
    topology: tuple[int, ...] | None,
    num_slices: int | None,
    max_chips: int,
    global_batch: int | None = None,
) -> list[Cluster]:
    """Every cluster of ``chip`` within ``max_chips``: legal shapes times numbers of slices, unless given.

    Numbers of slices are powers of two, and those that divide ``global_batch`` (or do so by the replicas of a
    pipeline over them).
    """
    shapes = [topology] if topology else slices.legal_shapes(chip)
    counts = [num_slices] if num_slices else slice_counts(global_batch or MAX_SLICES)
    found = []
    for shape in shapes:
        one = Slice(chip, shape)
        found += [Cluster(one, n) for n in counts if one.chips * n <= max_chips]
    return found


def slice_counts(global_batch: int) -> list[int]:
    """Numbers of slices over which a batch can be shared out whole, up to `MAX_SLICES`."""
    return [
        n
        for n in range(1, MAX_SLICES + 1)
        if any(n % depth == 0 and global_batch % (n // depth) == 0 for depth in DCN_PIPELINES)
    ]


def run_cost(cluster: Cluster, seconds: float) -> float | None:
    price_ = cluster.chip.price_per_chip_hour
    return None if price_ is None else cluster.chips * price_ * seconds / 3600


def free_search(
    workload: Workload,
    clusters: Sequence[Cluster],
    goal: Goal,
    *,
    recipe: Recipe = DEFAULT_RECIPE,
    policies: Sequence[RematPolicy] = SEARCHED_POLICIES,
    precisions: Sequence[str] = ("bf16",),
) -> tuple[Offer, ...]:
    """The offers that meet ``goal``, best first: cheapest by the deadline, fastest within the budget, else
    cheapest (by chip-hours where a chip has no price). Raises UserError when none does, with the nearest.

    Clusters that cannot hold the state of the model, or could not keep the deadline at full peak, are left
    out unpriced.
    """
    options = {"recipe": recipe, "policies": policies, "precisions": precisions}
    holding = [c for c in clusters if _holds_state(workload, c, recipe)]
    deadline_s = math.inf if goal.deadline_s is None else goal.deadline_s
    soon = [c for c in holding if least_run_s(workload, c, goal.tokens, precisions) <= deadline_s]
    offers = _offers(workload, soon, goal, options)
    met = [o for o in offers if _meets(o, goal)]
    if met:
        return tuple(sorted(met, key=lambda o: _order(o, goal)))
    offers += _offers(workload, [c for c in holding if c not in soon], goal, options)
    if not offers:
        raise UserError(_why_none(workload, clusters, options))
    raise UserError(_nearest(offers, goal))


def _offers(
    workload: Workload, clusters: Sequence[Cluster], goal: Goal, options: Mapping[str, Any]
) -> list[Offer]:
    """The best layout on each of ``clusters`` that can hold the model and divide the batch."""
    found = []
    for cluster in clusters:
        try:
            best = search(workload, cluster, top=1, families=False, **options).ranked[0]
        except UserError:
            continue
        seconds = goal.tokens / best.estimate.tokens_per_s
        found.append(Offer(best, seconds, run_cost(cluster, seconds)))
    return found


def _holds_state(workload: Workload, cluster: Cluster, recipe: Recipe) -> bool:
    """Whether weights and optimiser state, spread over every device, leave room for anything else."""
    frozen = workload.shape.frozen_bytes
    each = recipe.weight_bytes + recipe.moment_bytes if frozen is None else frozen
    state = each * workload.shape.parameters
    return state / cluster.devices < device_of(cluster.chip).hbm_bytes


def least_run_s(workload: Workload, cluster: Cluster, tokens: float, precisions: Sequence[str]) -> float:
    """The length of the run at the peak of the fastest precision: no layout is faster."""
    device = device_of(cluster.chip)
    peak = max(device.peak_flops_per_s(p) for p in (*precisions, "bf16"))
    flops = model_flops(workload.shape, workload.tokens, workload.seq)
    return flops / workload.tokens * tokens / (peak * cluster.devices)


def _why_none(workload: Workload, clusters: Sequence[Cluster], options: Mapping[str, Any]) -> str:
    """What stops the largest cluster."""
    largest = max(clusters, key=lambda c: (c.chips, c.slice.chips))
    try:
        search(workload, largest, top=1, families=False, **options)
    except UserError as error:
        reason = str(error)
    else:
        raise AssertionError(largest)
    return (
        f"no cluster among {len(clusters)} can train {workload.shape.name} with this batch; of the largest:"
        f" {reason}"
    )


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
