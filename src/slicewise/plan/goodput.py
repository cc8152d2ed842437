"""Expected goodput of a long run that checkpoints, fails and restarts; the best interval; spot against
reserved.

Failures are a Poisson process over the whole job, also while it restarts. A segment is ``interval_s`` of
training and one checkpoint; a failure loses the segment so far and costs a restart. Sources: J. W. Young, "A
first order approximation to the optimum checkpoint interval" (1974); J. T. Daly, "A higher order estimate of
the optimum checkpoint interval for restart dumps" (2006), whose complete model is used here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slicewise.catalog.chips import Chip
from slicewise.costs.units import duration
from slicewise.errors import UserError


def job_mtbf_s(unit_mtbf_s: float, units: int, preemptions_per_s: float = 0.0) -> float:
    """Mean time between interruptions of a job of ``units`` hosts that fail on their own, and is preempted as
    a whole.

    Rates add: 1 / M = units / M_unit + preemptions. inf when nothing ever fails.
    """
    rate = units / unit_mtbf_s + preemptions_per_s
    return 1 / rate if rate > 0 else math.inf


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Training time between checkpoints to first order: sqrt(2 delta M)."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Daly's higher-order optimum: sqrt(2 delta M) (1 + sqrt(delta / 2M) / 3 + delta / 18M) - delta; M for
    delta >= 2M."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    x = checkpoint_s / (2 * mtbf_s)
    return young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - checkpoint_s


def segment_s(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Expected wall time to finish one segment: M e^(R/M) (e^((tau + delta)/M) - 1). inf when it practically
    never does."""
    if math.isinf(mtbf_s):
        return interval_s + checkpoint_s
    try:
        return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    except OverflowError:
        return math.inf


def optimal_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The interval with the highest expected goodput under the complete model; the restart time does not
    change it.

    d/dtau of tau / (e^((tau + delta)/M) - 1) = 0, solved by bisection. inf when nothing ever fails.
    """
    if math.isinf(mtbf_s):
        return math.inf
    if checkpoint_s == 0:
        return 0.0
    delta = checkpoint_s / mtbf_s
    low, high = 0.0, 1.0  # in units of M: the optimum never exceeds M
    for _ in range(200):
        x = (low + high) / 2
        if 1 - math.exp(-(x + delta)) > x:
            low = x
        else:
            high = x
    return (low + high) / 2 * mtbf_s


@dataclass(frozen=True)
class Goodput:
    """Shares of the wall time; they add up to one."""

    interval_s: float
    checkpoint_s: float  # that training stands still for one checkpoint
    restart_s: float  # from a failure until training runs again
    mtbf_s: float  # of the whole job
    goodput: float  # new training
    checkpointing: float
    lost: float  # training done again
    restarting: float

    @property
    def failures_per_day(self) -> float:
        return 86400 / self.mtbf_s

    def wall_s(self, training_s: float) -> float:
        """Expected wall time for ``training_s`` of uninterrupted training."""
        return training_s / self.goodput if self.goodput > 0 else math.inf

    def explain(self) -> list[str]:
        young, daly = (f(self.checkpoint_s, self.mtbf_s) for f in (young_interval_s, daly_interval_s))
        return [
            f"{self.failures_per_day:.3g} interruptions a day (one every {duration(self.mtbf_s)}),"
            f" {duration(self.restart_s)} to run again",
            f"checkpoint of {duration(self.checkpoint_s)} every {duration(self.interval_s)}"
            f" (best {duration(optimal_interval_s(self.checkpoint_s, self.mtbf_s))};"
            f" Young sqrt(2 delta M) = {duration(young)}, Daly {duration(daly)})",
            f"goodput {100 * self.goodput:.1f}%: {100 * self.checkpointing:.2g}% checkpoints,"
            f" {100 * self.lost:.2g}% training lost, {100 * self.restarting:.2g}% restarts",
        ]


def expected(
    mtbf_s: float,
    checkpoint_s: float,
    restart_s: float,
    *,
    interval_s: float | None = None,
    save_latency_s: float = 0.0,
) -> Goodput:
    """Expected goodput at ``interval_s`` (None = the best one).

    ``checkpoint_s`` is what a checkpoint stops training for; an asynchronous one becomes usable
    ``save_latency_s`` later, which every failure loses in addition. Raises UserError for a negative time or
    an interval of zero.
    """
    for name, value in (
        ("checkpoint_s", checkpoint_s),
        ("restart_s", restart_s),
        ("save_latency_s", save_latency_s),
    ):
        if not value >= 0 or math.isinf(value):
            raise UserError(f"{name} = {value}: expected 0 seconds or more.")
    if not mtbf_s > 0:
        raise UserError(f"mtbf_s = {mtbf_s}: expected a time above 0 between interruptions.")
    best = optimal_interval_s(checkpoint_s, mtbf_s)
    chosen = best if interval_s is None else interval_s
    if not chosen > 0:
        if interval_s is None:
            raise UserError("a checkpoint that costs nothing has no best interval: give the interval.")
        raise UserError(f"interval_s = {chosen}: expected a time above 0.")
    if math.isinf(mtbf_s):
        share = 1.0 if math.isinf(chosen) else chosen / (chosen + checkpoint_s)
        return Goodput(chosen, checkpoint_s, restart_s, mtbf_s, share, 1 - share, 0.0, 0.0)
    down = restart_s + save_latency_s
    wall = segment_s(chosen, checkpoint_s, down, mtbf_s)
    good, saving = chosen / wall, checkpoint_s / wall
    # every failure, also one while restarting, starts a restart that itself lasts min(R, next failure)
    stopped = -math.expm1(-down / mtbf_s)
    restarting = stopped * restart_s / down if down else 0.0
    return Goodput(
        interval_s=chosen,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        mtbf_s=mtbf_s,
        goodput=good,
        checkpointing=saving,
        lost=max(0.0, 1 - good - saving - restarting),
        restarting=restarting,
    )


@dataclass(frozen=True)
class Offer:
    """A way to rent chips: its price, how often it takes them away, and how long until others are found."""

    name: str
    price_per_chip_hour: float
    preemptions_per_day: float = 0.0  # of the whole job
    wait_s: float = 0.0  # from a preemption until chips are there again; nothing is paid meanwhile

    def __post_init__(self) -> None:
        if not 0 < self.price_per_chip_hour < math.inf:
            raise UserError(
                f"{self.name}: price {self.price_per_chip_hour}: expected a price above 0 per chip-hour."
            )
        for what, value in (
            ("preemptions a day", self.preemptions_per_day),
            ("wait in seconds", self.wait_s),
        ):
            if not 0 <= value < math.inf:
                raise UserError(f"{self.name}: {what} {value}: expected 0 or more.")


def offers(chip: Chip, *, preemptions_per_day: float, wait_s: float) -> tuple[Offer, ...]:
    """What the catalog or a price file knows of ``chip``: on demand, reserved, and spot, which alone is
    preempted.

    Raises UserError when no price is known.
    """
    known = [
        Offer(name, price, *(risk if name == "spot" else ()))
        for name, price, risk in (
            ("reserved", chip.reserved_price_per_chip_hour, ()),
            ("on demand", chip.price_per_chip_hour, ()),
            ("spot", chip.spot_price_per_chip_hour, (preemptions_per_day, wait_s)),
        )
        if price is not None
    ]
    if not known:
        raise UserError(
            f"no price of {chip.name} is known: give a price file with on_demand, spot or reserved."
        )
    return tuple(known)


@dataclass(frozen=True)
class OfferResult:
    """What an offer comes to for a given amount of training."""

    offer: Offer
    goodput: Goodput  # of the time that is paid for
    wall_s: float  # waiting included
    price: float  # of all chips
    price_per_useful_chip_hour: float

    def explain(self) -> list[str]:
        return [
            f"{self.offer.name}: {duration(self.wall_s)}, {self.price:,.0f} in all,"
            f" {self.price_per_useful_chip_hour:.3g} a useful chip-hour"
            f" ({self.offer.price_per_chip_hour:g} / goodput {self.goodput.goodput:.3f})",
            *(f"  {line}" for line in self.goodput.explain()),
        ]


def compare(
    offers: Sequence[Offer],
    *,
    chips: int,
    hosts: int,
    training_s: float,
    host_mtbf_s: float,
    checkpoint_s: float,
    restart_s: float,
    interval_s: float | None = None,
    save_latency_s: float = 0.0,
) -> tuple[OfferResult, ...]:
    """The offers for ``training_s`` of uninterrupted training on ``chips``, the cheapest first.

    Hosts fail everywhere alike; an offer adds its preemptions, each at its best interval unless one is given.
    Raises UserError without offers, or for one under which training never gets on.
    """
    if not offers:
        raise UserError("no offers to compare: give at least one price.")
    results = []
    for offer in offers:
        mtbf = job_mtbf_s(host_mtbf_s, hosts, offer.preemptions_per_day / 86400)
        good = expected(mtbf, checkpoint_s, restart_s, interval_s=interval_s, save_latency_s=save_latency_s)
        paid_s = good.wall_s(training_s)
        if math.isinf(paid_s):
            raise UserError(f"{offer.name}: one interruption every {duration(mtbf)} leaves no time to train.")
        wall_s = paid_s * (1 + offer.preemptions_per_day / 86400 * offer.wait_s)
        price = paid_s / 3600 * chips * offer.price_per_chip_hour
        results.append(OfferResult(offer, good, wall_s, price, offer.price_per_chip_hour / good.goodput))
    return tuple(sorted(results, key=lambda r: (r.price, r.wall_s)))
