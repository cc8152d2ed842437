"""The outcomes of schedules as lines, as a table and as JSON."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from slicewise.costs.units import counted, duration
from slicewise.launch.chaos.run import Outcome
from slicewise.launch.chaos.schedule import KINDS, MOMENTS, WORDS
from slicewise.report.console import say
from slicewise.report.tables import table


def line(outcome: Outcome) -> str:
    """One line for one schedule."""
    verdict = "; ".join(outcome.violations) or "as undisturbed"
    attempts, asked = counted(outcome.attempts, "attempt"), len(outcome.schedule.faults)
    happened = len({one["attempt"] for one in outcome.fired})
    missing = f", {happened} of {counted(asked, 'fault')} happened" if happened < asked else ""
    return f"seed {outcome.schedule.seed}: {outcome.schedule}: {attempts}{missing}, {outcome.wall_s:.1f} s: {verdict}"


def text(out: Console, outcomes: Sequence[Outcome]) -> None:
    """How often each fault happened at each moment, what restarts took, and every violation with its seed."""
    fired = _fired(outcomes)
    made = table("faults that happened", *(WORDS[moment] for moment in MOMENTS), "in all")
    for kind in KINDS:
        counts = [fired[kind, moment] for moment in MOMENTS]
        if any(counts):
            made.add_row(kind, *map(str, counts), str(sum(counts)))
    totals = [sum(fired[kind, moment] for kind in KINDS) for moment in MOMENTS]
    made.add_row("in all", *map(str, totals), str(sum(totals)))
    out.print(made)
    if restarts_s := _restarts_s(outcomes):
        middle, most = duration(statistics.median(restarts_s)), duration(max(restarts_s))
        say(out, f"{counted(len(restarts_s), 'restart')}: {middle} in the middle, {most} at most")
    bad = [outcome for outcome in outcomes if outcome.violations]
    count = counted(len(outcomes), "schedule")
    if not bad:
        say(out, f"{count}, no violation: each ended bit for bit as the undisturbed run")
    for outcome in bad:
        say(out, f"violation: {'; '.join(outcome.violations)}", "bold")
        say(out, f"  --seed {outcome.schedule.seed} --schedules 1 repeats it; its run is in {outcome.folder}")


def document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "schedules": [
            {
                "seed": outcome.schedule.seed,
                "faults": [fault.to_json() for fault in outcome.schedule.faults],
                "fired": list(outcome.fired),
                "attempts": outcome.attempts,
                "wall_s": outcome.wall_s,
                "goodput": outcome.account.goodput if outcome.account else None,
                "restarts_s": _restarts_s([outcome]),
                "violations": list(outcome.violations),
            }
            for outcome in outcomes
        ],
        "violations": sum(len(outcome.violations) for outcome in outcomes),
    }


def _fired(outcomes: Sequence[Outcome]) -> Counter[tuple[str, str]]:
    """A fault of several ranks counts once."""
    return Counter(
        (kind, state)
        for outcome in outcomes
        for _, kind, state in {(one["attempt"], one["kind"], one["state"]) for one in outcome.fired}
    )


def _restarts_s(outcomes: Sequence[Outcome]) -> list[float]:
    return [r.total_us / 1e6 for outcome in outcomes if outcome.account for r in outcome.account.restarts]
