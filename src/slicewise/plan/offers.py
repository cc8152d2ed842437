"""Free search: which chips, slice shape and slice count reach a goal, with the best layout on each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slicewise.catalog import slices
from slicewise.catalog.chips import Chip
from slicewise.catalog.slices import Cluster, Slice
from slicewise.costs.layout import Recipe
from slicewise.costs.remat import RematPolicy
from slicewise.errors import UserError
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


def clusters_of(
    chip: Chip, *, topology: tuple[int, ...] | None, num_slices: int | None, max_chips: int
) -> list[Cluster]:
    """Every cluster of ``chip`` within ``max_chips``: legal shapes times powers of two of slices, unless
    given."""
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
    recipe: Recipe = DEFAULT_RECIPE,
    policies: Sequence[RematPolicy] = SEARCHED_POLICIES,
    precisions: Sequence[str] = ("bf16",),
) -> tuple[Offer, ...]:
    """The offers that meet ``goal``, best first: cheapest by the deadline, fastest within the budget, else
    cheapest (by chip-hours where a chip has no price). Raises UserError when none does, with the nearest."""
    offers = []
    for cluster in clusters:
        try:
            result = search(
                workload,
                cluster,
                recipe=recipe,
                policies=policies,
                precisions=precisions,
                top=1,
                families=False,
            )
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
