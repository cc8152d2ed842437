"""Where the seconds of a run went: as a table, and as a page with the timeline."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from slicewise.costs.units import count, duration
from slicewise.report import charts
from slicewise.report.console import say
from slicewise.report.page import Card, Chart, Figure, Grid, Tile, render
from slicewise.report.tables import table
from slicewise.train.goodput import CATEGORIES, PHASES, Account, Restart, Segment
from slicewise.train.goodput_expected import expectation

MOST_BARS = 2000  # of a timeline: more is more than a screen has columns
SHOWN_RESTARTS = 20
_COLORS = {"step": "@green", "data": "@yellow", "checkpoint": "@teal", "evaluation": "@blue2", "init": "@grey",
           "compile": "@purple", "restore": "@blue", "lost": "@red", "restart": "@orange", "waiting": "@grey3",
           "end": "@grey2"}  # fmt: skip


def explain(run: str, account: Account) -> list[str]:
    """How much of the time was training, what it took, and what the planner expects of a run like it."""
    starts = f"{account.starts} start{'' if account.starts == 1 else 's'}"
    again = f", {account.lost_steps} steps taken again" if account.lost_steps else ""
    lines = [
        f"{run}: goodput {account.goodput:.1%} of {duration(account.wall_us / 1e6)}",
        f"step {account.steps}, {starts}{again}",
    ]
    if plan := expectation(account):
        lines.append(
            f"plan goodput expects {plan.goodput:.1%} of such a run: interrupted every {duration(plan.mtbf_s)},"
            f" restarted in {duration(plan.restart_s)}, checkpoint of {duration(plan.checkpoint_s)} every"
            f" {duration(plan.interval_s)}"
        )
    return lines


def text(out: Console, run: str, account: Account) -> None:
    heading, *rest = explain(run, account)
    say(out, heading, "bold")
    for line in rest:
        say(out, line)
    say(out, "")
    made = table("where the time went", "time", "share")
    for row in _parts(account):
        made.add_row(*row)
    out.print(made)
    if account.restarts:
        say(out, "")
        phases = _phases(account.restarts)
        made = table("restart", *phases, "total")
        for row in _restart_rows(account.restarts[-SHOWN_RESTARTS:], phases):
            made.add_row(*row)
        out.print(made)
        if len(account.restarts) > SHOWN_RESTARTS:
            say(out, f"the last {SHOWN_RESTARTS} of {len(account.restarts)}; --json shows all", "dim")


def document(run: str, account: Account) -> dict[str, Any]:
    """As JSON. Times are whole microseconds, which add up."""
    return {
        "run": run,
        "goodput": account.goodput,
        "expected_goodput": plan.goodput if (plan := expectation(account)) else None,
        "wall_us": account.wall_us,
        "parts_us": dict(account.parts_us),
        "starts": account.starts,
        "steps": account.steps,
        "lost_steps": account.lost_steps,
        "restarts": [
            {
                "starts": r.starts,
                "from_step": r.from_step,
                "total_us": r.total_us,
                "phases_us": dict(r.phases_us),
            }
            for r in account.restarts
        ],
    }


def page(run: str, account: Account) -> str:
    """Raises UserError when plotly is not installed."""
    tiles = [
        Tile(f"{account.goodput:.1%}", "goodput"),
        Tile(duration(account.wall_us / 1e6), "wall time"),
        Tile(count(account.starts), "starts"),
        Tile(count(account.lost_steps), "steps taken again"),
    ]
    note = "What the run did from its first stamp to its last; time in which it was finished is left out."
    cards: list[Card] = [
        Chart("Timeline", note, timeline(account.segments), wide=True),
        Grid("Where the time went", "Adds up to the wall time.", ["part", "time", "share"], _parts(account)),
    ]
    if account.restarts:
        phases = _phases(account.restarts)
        rows = _restart_rows(account.restarts, phases)
        said = "From the end of training to the end of the first step after it."
        cards.append(Grid("Restarts", said, ["restart", *phases, "total"], rows, marked=None))
    return render(f"Goodput of {run}", "; ".join(explain(run, account)[1:]), tiles, cards)


def _parts(account: Account) -> list[list[str]]:
    rows = [
        [name, duration(us / 1e6), f"{us / max(1, account.wall_us):.1%}"]
        for key, name in CATEGORIES.items()
        if (us := account.parts_us[key])
    ]
    return [*rows, ["wall time", duration(account.wall_us / 1e6), "100.0%" if account.wall_us else "-"]]


def _phases(restarts: Sequence[Restart]) -> list[str]:
    return [name for name in PHASES if any(r.phases_us.get(name) for r in restarts)]


def _restart_rows(restarts: Sequence[Restart], phases: Sequence[str]) -> list[list[str]]:
    return [
        [
            f"from step {r.from_step}" if r.from_step else "from the start",
            *(duration(us / 1e6) if (us := r.phases_us.get(name)) else "-" for name in phases),
            duration(r.total_us / 1e6),
        ]
        for r in restarts
    ]


def timeline(segments: Sequence[Segment]) -> Figure:
    """One bar a segment along the time since the first; segments of one category that touch are one."""
    merged = _merged(segments)
    origin_us = segments[0].begin_us if segments else 0
    traces = []
    for key, name in CATEGORIES.items():
        mine = [s for s in merged if s.category == key]
        if not mine:
            continue
        traces.append({
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": ["run"] * len(mine),
            "base": [(s.begin_us - origin_us) / 1e6 for s in mine],
            "x": [s.duration_us / 1e6 for s in mine],
            "marker": {"color": _COLORS[key], "line": {"width": 0}},
            "hovertemplate": f"{name}: %{{x:.3g}} s<extra></extra>",
        })  # fmt: skip
    axes = {"xaxis": {"title": "seconds"}, "yaxis": {"showticklabels": False}}
    return {"data": traces, "layout": charts.layout(220, barmode="overlay", bargap=0.3, **axes)}


def _merged(segments: Sequence[Segment]) -> list[Segment]:
    """At most MOST_BARS bars: those shorter than a column of the screen go into their neighbours."""
    if not segments:
        return []
    least_us = (segments[-1].end_us - segments[0].begin_us) / MOST_BARS
    bars: list[Segment] = []
    for s in segments:
        last = bars[-1] if bars else None
        touches = last is not None and last.end_us == s.begin_us
        if last is not None and touches and (s.category == last.category or s.duration_us < least_us):
            bars[-1] = Segment(last.begin_us, s.end_us, last.category, last.phase, last.start)
        else:
            bars.append(s)
    return bars
