"""A long run on a cluster that fails now and then: the best checkpoint interval, and the cheapest offer."""

from collections.abc import Sequence
from dataclasses import dataclass

from slicewise.catalog.slices import Cluster
from slicewise.costs.units import duration
from slicewise.errors import UserError
from slicewise.plan import goodput
from slicewise.plan.goodput import Goodput, Offer, OfferResult

LEAST_GOODPUT = 1e-6
CURVE_POINTS = 41
CURVE_REACH = 10.0  # times the chosen interval, both ways


@dataclass(frozen=True)
class Faults:
    """How often a job is interrupted and what an interruption costs; see `goodput.expected`."""

    host_mtbf_s: float
    checkpoint_s: float
    restart_s: float
    save_latency_s: float = 0.0
    interval_s: float | None = None  # None = the best


@dataclass(frozen=True)
class GoodputPlan:
    """``offers`` cheapest first; empty without prices or without a length of training."""

    cluster: Cluster
    faults: Faults
    chosen: Goodput  # of the cheapest offer, or without preemptions
    offers: tuple[OfferResult, ...]
    step_time_s: float | None

    @property
    def checkpoint_every(self) -> int | None:
        """The interval in steps, at least one; None without a step time or when nothing ever fails."""
        if self.step_time_s is None or self.chosen.interval_s == float("inf"):
            return None
        return max(1, round(self.chosen.interval_s / self.step_time_s))

    def explain(self) -> list[str]:
        c = self.cluster
        lines = [f"{c.num_slices} x {c.chip.name} {c.slice.name}: {c.chips:,} chips on {c.hosts:,} hosts"]
        lines += self.chosen.explain()
        if self.checkpoint_every is not None:
            lines.append(f"checkpoint_every = {self.checkpoint_every} steps of {self.step_time_s:g} s")
        return lines


def plan_goodput(
    cluster: Cluster,
    faults: Faults,
    *,
    training_s: float | None = None,
    offers: Sequence[Offer] = (),
    step_time_s: float | None = None,
) -> GoodputPlan:
    """Compares ``offers`` for ``training_s`` of uninterrupted training, or prices failures alone.

    Raises UserError for times out of range, and where training never gets on.
    """
    if not faults.host_mtbf_s > 0:
        raise UserError(f"host MTBF {faults.host_mtbf_s} s: expected a time above 0.")
    results: tuple[OfferResult, ...] = ()
    if offers and training_s is not None:
        results = goodput.compare(
            offers,
            chips=cluster.chips,
            hosts=cluster.hosts,
            training_s=training_s,
            host_mtbf_s=faults.host_mtbf_s,
            checkpoint_s=faults.checkpoint_s,
            restart_s=faults.restart_s,
            interval_s=faults.interval_s,
            save_latency_s=faults.save_latency_s,
        )
    chosen = results[0].goodput if results else at_interval(cluster, faults, faults.interval_s)
    if chosen.goodput < LEAST_GOODPUT:
        raise UserError(
            f"one interruption every {duration(chosen.mtbf_s)} leaves no time to train: {cluster.hosts} hosts"
            f" that fail every {duration(faults.host_mtbf_s)} restart for {duration(faults.restart_s)} each time."
        )
    return GoodputPlan(cluster, faults, chosen, results, step_time_s)


def at_interval(cluster: Cluster, faults: Faults, interval_s: float | None) -> Goodput:
    """Failures of hosts alone."""
    mtbf_s = goodput.job_mtbf_s(faults.host_mtbf_s, cluster.hosts)
    return goodput.expected(
        mtbf_s,
        faults.checkpoint_s,
        faults.restart_s,
        interval_s=interval_s,
        save_latency_s=faults.save_latency_s,
    )


def curve(plan: GoodputPlan) -> tuple[Goodput, ...]:
    """Goodput at intervals around the chosen one, at its rate of interruptions."""
    middle, faults = plan.chosen.interval_s, plan.faults
    if middle == float("inf"):
        return ()
    steps = [CURVE_REACH ** (2 * k / (CURVE_POINTS - 1) - 1) for k in range(CURVE_POINTS)]
    return tuple(
        goodput.expected(
            plan.chosen.mtbf_s,
            faults.checkpoint_s,
            faults.restart_s,
            interval_s=middle * step,
            save_latency_s=faults.save_latency_s,
        )
        for step in steps
    )
