"""What ``slicewise plan goodput`` expects of a run that fails as often, and saves and restarts as fast, as this one."""

import statistics

from slicewise.plan.goodput import Goodput, expected
from slicewise.train.goodput import Account


def expectation(account: Account) -> Goodput | None:
    """From the run's own rate of failures, restart time, checkpoint stall and interval; None without one of each.

    The restart time is the mean of those that no other failure broke off. Time in which the run waited for capacity
    or for somebody to start it is left out, as it is of the plan.
    """
    whole = [r.total_us - r.phases_us.get("wait", 0) for r in account.restarts if r.starts == 1]
    saves = [s.duration_us for s in account.segments if s.phase == "save"]
    if not whole or not saves:
        return None
    training_us = sum(s.duration_us for s in account.segments if s.steps or s.category in ("data", "lost"))
    present_us = account.wall_us - account.parts_us["waiting"]
    failures = sum(r.starts for r in account.restarts)
    return expected(
        present_us / 1e6 / failures,
        statistics.mean(saves) / 1e6,
        statistics.mean(whole) / 1e6,
        interval_s=training_us / 1e6 / len(saves),
    )


def measured(account: Account) -> float:
    """Goodput of the time in which the run did not wait for capacity, 0 to 1: what ``expectation`` is about."""
    present_us = account.wall_us - account.parts_us["waiting"]
    return account.parts_us["step"] / present_us if present_us else 0.0
