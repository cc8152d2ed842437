"""A training plan: the ranked layouts with their reasons, the length and price of the run, and scaling."""

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slicewise.catalog import slices
from slicewise.catalog.chips import Chip
from slicewise.catalog.slices import Cluster
from slicewise.costs.layout import Precision, Recipe
from slicewise.costs.remat import RematPolicy
from slicewise.costs.shapes import ModelShape
from slicewise.errors import UserError, did_you_mean
from slicewise.plan.explain import Explanation, explain
from slicewise.plan.offers import Goal, Offer, clusters_of, free_search, run_cost
from slicewise.plan.search import DEFAULT_RECIPE, SEARCHED_POLICIES, Candidate, SearchResult, Workload, search

MAX_CHIPS = 4096  # of a free search, unless told otherwise
PRECISIONS = typing.get_args(Precision)


@dataclass(frozen=True)
class Choices:
    """What a search may choose from, apart from clusters, and how many layouts it ranks; ``recipe`` says the rest."""

    policies: Sequence[RematPolicy] = SEARCHED_POLICIES
    precisions: Sequence[str] = ("bf16",)
    top: int = 20
    recipe: Recipe = DEFAULT_RECIPE

    def __post_init__(self) -> None:
        for precision in self.precisions:
            if precision not in PRECISIONS:
                known = f"{', '.join(PRECISIONS)}.{did_you_mean(precision, PRECISIONS)}"
                raise UserError(f"precision '{precision}': expected {known}")


@dataclass(frozen=True)
class TrainingPlan:
    """``offers`` are those of a free search, best first; ``result`` is then that of the first."""

    result: SearchResult
    reasons: Explanation
    run_tokens: float | None  # of the whole run
    offers: tuple[Offer, ...] = ()
    choices: Choices = Choices()

    @property
    def best(self) -> Candidate:
        return self.result.ranked[0]

    def run_s(self, candidate: Candidate) -> float | None:
        """Seconds of the whole run without interruptions; None without a token budget."""
        return self.run_tokens / candidate.estimate.tokens_per_s if self.run_tokens else None

    def cost(self, candidate: Candidate) -> float | None:
        """Of the whole run; None without a token budget or a price."""
        seconds = self.run_s(candidate)
        return None if seconds is None else run_cost(candidate.cluster, seconds)


def workload(shape: ModelShape, seq: int, batch_tokens: int) -> Workload:
    """Raises UserError unless ``batch_tokens`` are whole sequences of ``seq``, with the nearest that are."""
    if batch_tokens < seq:
        raise UserError(
            f"a batch of {batch_tokens:,} tokens is below one sequence of {seq:,};"
            f" expected {seq:,} tokens or more."
        )
    if batch_tokens % seq:
        near = round(batch_tokens / seq) * seq
        raise UserError(
            f"a batch of {batch_tokens:,} tokens is not a whole number of sequences of {seq:,};"
            f" the nearest is {near:,}, {near // seq:,} sequences."
        )
    return Workload(shape, seq, batch_tokens // seq)


def plan_cluster(
    work: Workload, cluster: Cluster, *, run_tokens: float | None = None, choices: Choices = Choices()
) -> TrainingPlan:
    """The best layouts on ``cluster``. Raises UserError when none is legal or fits."""
    result = search(
        work,
        cluster,
        recipe=choices.recipe,
        policies=choices.policies,
        precisions=choices.precisions,
        top=choices.top,
    )
    return TrainingPlan(result, explain(result), run_tokens, choices=choices)


def plan_beside(
    now: Candidate, work: Workload, *, run_tokens: float, choices: Choices = Choices()
) -> TrainingPlan:
    """The best layouts on the cluster of ``now``, whose recipe is one of the choices and wins ties.

    What is not searched, such as optimiser state and static scales, is that of ``now``.
    """
    policies = dict.fromkeys((now.recipe.remat, *choices.policies))
    chosen = replace(choices, policies=tuple(policies), recipe=now.recipe)
    return plan_cluster(work, now.cluster, run_tokens=run_tokens, choices=chosen)


def clusters(
    chips: Sequence[Chip],
    *,
    topology: str | None,
    num_slices: int | None,
    max_chips: int = MAX_CHIPS,
    global_batch: int | None = None,
) -> list[Cluster]:
    """Every cluster of ``chips`` that the user leaves open. Raises UserError for an illegal topology or a
    bound that leaves none."""
    found = []
    for chip in chips:
        shape = slices.parse(topology, chip).topology if topology else None
        found += clusters_of(
            chip, topology=shape, num_slices=num_slices, max_chips=max_chips, global_batch=global_batch
        )
    if not found:
        raise UserError(f"no slice shape within {max_chips} chips; allow more with --max-chips.")
    return found


def plan_free(
    work: Workload, candidates: Sequence[Cluster], goal: Goal, *, choices: Choices = Choices()
) -> TrainingPlan:
    """The best layouts on the cluster that reaches ``goal`` best. Raises UserError when none does."""
    offers = free_search(
        work,
        candidates,
        goal,
        recipe=choices.recipe,
        policies=choices.policies,
        precisions=choices.precisions,
    )
    first = plan_cluster(work, offers[0].candidate.cluster, run_tokens=goal.tokens, choices=choices)
    return TrainingPlan(first.result, first.reasons, goal.tokens, offers, choices)


@dataclass(frozen=True)
class ScalingPoint:
    """The best layout on ``num_slices`` slices with the same global batch."""

    num_slices: int
    chips: int
    candidate: Candidate


def scaling(plan: TrainingPlan, *, counts: Sequence[int] = ()) -> tuple[ScalingPoint, ...]:
    """The same workload on other numbers of the same slice: powers of two up to four times as many, unless
    ``counts`` are given. Counts that cannot hold the model or divide the batch are left out."""
    n = plan.result.cluster.num_slices
    points = []
    for count in counts or sorted({n, *(2**k for k in range((4 * n).bit_length()))}):
        cluster = Cluster(plan.result.cluster.slice, count)
        try:
            result = search(
                plan.result.workload,
                cluster,
                recipe=plan.choices.recipe,
                policies=plan.choices.policies,
                precisions=plan.choices.precisions,
                top=1,
                families=False,
            )
        except UserError:
            continue
        points.append(ScalingPoint(count, cluster.chips, result.ranked[0]))
    return tuple(points)
