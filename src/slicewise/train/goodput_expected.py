"""What ``slicewise plan goodput`` expects of a run that fails as often, and saves and restarts as fast, as this one."""

import statistics

from slicewise.plan.goodput import Goodput, expected
from slicewise.train.goodput import Account, Segment


def expectation(account: Account) -> Goodput | None:
    """From the run's own rate of failures, restart time, checkpoint stall and interval; None without one of each.

    The plan begins when training does, so the first start is left out until its first step, as is the time in which
    the run waited for capacity or for somebody to start it. The restart time is the mean of those that no other
    failure broke off.
    """
    segments = _planned(account)
    whole = [
        sum(us for phase, us in r.phases_us.items() if phase not in ("wait", "first step"))
        for r in account.restarts
        if r.starts == 1
    ]
    saves = [s.duration_us for s in segments if s.phase == "save"]
    if not whole or not saves:
        return None
    training_us = sum(s.duration_us for s in segments if s.steps or s.category in ("data", "lost"))
    failures = sum(r.starts for r in account.restarts)
    return expected(
        sum(s.duration_us for s in segments) / 1e6 / failures,
        statistics.mean(saves) / 1e6,
        statistics.mean(whole) / 1e6,
        interval_s=training_us / 1e6 / len(saves),
    )


def measured(account: Account) -> float:
    """Goodput of the time that ``expectation`` is about, 0 to 1."""
    planned_us = sum(s.duration_us for s in _planned(account))
    return account.parts_us["step"] / planned_us if planned_us else 0.0


def _planned(account: Account) -> list[Segment]:
    begins = next((k for k, s in enumerate(account.segments) if s.steps), len(account.segments))
    return [s for s in account.segments[begins:] if s.category != "waiting"]
