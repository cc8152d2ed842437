"""A training plan as text: the ranked layouts, where their time and memory go, and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from slicewise.costs.units import count, duration, quantity
from slicewise.plan.explain import Explanation
from slicewise.plan.search import Candidate, SearchResult, fits
from slicewise.plan.training import ScalingPoint, TrainingPlan
from slicewise.report import training
from slicewise.report.console import say
from slicewise.report.tables import table

if TYPE_CHECKING:
    from slicewise.plan.run_config import Change

GIB = 2**30
DETAILED = 5  # layouts whose parts are shown


def plan(out: Console, made: TrainingPlan, curve: Sequence[ScalingPoint] = (), shown: int = 10) -> None:
    if made.offers:
        offers(out, made, shown)
    heading(out, made.result)
    out.print(ranked(made, shown))
    say(out, "batch: sequences of a device in one microbatch x microbatches; HBM: of a device", "dim")
    say(out, "")
    out.print(details(made.result.ranked[: min(shown, DETAILED)]))
    if curve:
        say(out, "")
        scaling(out, curve)
    if made.run_tokens:
        _run_line(out, made)
    why(out, made.reasons)


def heading(out: Console, r: SearchResult) -> None:
    w, c = r.workload, r.cluster
    say(
        out,
        f"{w.shape.name} on {training.place(c)} ({count(c.chips)} chips),"
        f" {count(w.tokens)} tokens a step in {count(w.global_batch)}"
        f" sequence{'' if w.global_batch == 1 else 's'} of {count(w.seq)}",
        "bold",
    )
    say(
        out, f"{count(r.considered)} layouts and recipes, {count(r.fitting)} fit with {r.margin:.0%} to spare"
    )
    say(out, "")


def ranked(made: TrainingPlan, shown: int) -> Table:
    """The layouts, fastest first. Memory is of one device, exposed communication in seconds of a step."""
    run = made.run_tokens is not None
    t = table(
        "#", "ICI axes", "DCN axes", "remat", "batch", "step", "tokens/s", "MFU", "HBM GiB",
        *(("days", "cost") if run else ()), words=4,
    )  # fmt: skip
    for k, c in enumerate(made.result.ranked[:shown], 1):
        e = c.estimate
        t.add_row(
            str(k),
            training.axes(c.layout.ici),
            training.axes(c.layout.dcn),
            training.recipe(c),
            training.batch(c),
            duration(e.step_time_s),
            quantity(e.tokens_per_s),
            f"{e.mfu:.1%}",
            f"{e.hbm_total_bytes / GIB:.1f}",
            *(_days_and_cost(made, c) if run else ()),
        )
    return t


def _days_and_cost(made: TrainingPlan, c: Candidate) -> tuple[str, str]:
    seconds, cost = made.run_s(c), made.cost(c)
    assert seconds is not None
    return f"{seconds / 86400:.1f}", "no price" if cost is None else quantity(cost)


def details(candidates: Sequence[Candidate], titles: Sequence[str] = ()) -> Table:
    """Where the seconds of a step and the bytes of a device go, one column a layout."""
    t = table("", *(titles or [f"#{k}" for k in range(1, len(candidates) + 1)]))
    unit = ""
    for row in training.parts_table([c.estimate for c in candidates]):
        if unit and not row[0].endswith(unit):
            t.add_section()
        unit = row[0].rpartition(", ")[2]
        t.add_row(*row)
    return t


def scaling(out: Console, curve: Sequence[ScalingPoint]) -> None:
    """The best layout on other numbers of the same slice, with the same global batch."""
    say(out, "Other numbers of slices, same global batch", "bold")
    t = table("slices", "ICI axes", "DCN axes", "remat", "chips", "step", "tokens/s", "MFU", words=4)
    for p in curve:
        c = p.candidate
        e = c.estimate
        t.add_row(
            str(p.num_slices),
            training.axes(c.layout.ici),
            training.axes(c.layout.dcn),
            training.recipe(c),
            count(p.chips),
            duration(e.step_time_s),
            quantity(e.tokens_per_s),
            f"{e.mfu:.1%}",
        )
    out.print(t)


def _run_line(out: Console, made: TrainingPlan) -> None:
    best, tokens = made.best, made.run_tokens or 0.0
    seconds, cost = made.run_s(best), made.cost(best)
    assert seconds is not None
    chip = best.cluster.chip
    said = f"{quantity(tokens)} tokens take {duration(seconds)} on {count(best.cluster.chips)} chips"
    if cost is None:
        said += f"; no price for {chip.name}: give a price file to see the cost"
    else:
        said += f" and cost {cost:,.0f} at {chip.price_per_chip_hour:g} a chip-hour"
    say(out, "")
    say(out, f"{said}; failures not counted, see 'slicewise plan goodput'.")


def why(out: Console, reasons: Explanation) -> None:
    say(out, "")
    say(out, "Why", "bold")
    say(out, reasons.winner_text)
    for inequality in reasons.winner:
        say(out, f"  {'holds' if inequality.holds else 'broken'}: {inequality.text}")
    for title, texts in (
        ("Between slices", reasons.multislice),
        ("Decision table", (reasons.table,) if reasons.table else ()),
        ("Not chosen", [v.text for v in reasons.rejected]),
    ):
        if texts:
            say(out, title, "bold")
            for text in texts:
                say(out, f"  {text}")


def offers(out: Console, made: TrainingPlan, shown: int) -> None:
    say(out, f"{count(len(made.offers))} clusters reach the goal, the best first", "bold")
    t = table("#", "cluster", "ICI axes", "DCN axes", "chips", "step", "MFU", "days", "cost", words=4)
    for k, o in enumerate(made.offers[:shown], 1):
        c = o.candidate
        t.add_row(
            str(k),
            training.place(c.cluster),
            training.axes(c.layout.ici),
            training.axes(c.layout.dcn),
            count(o.chips),
            duration(c.estimate.step_time_s),
            f"{c.estimate.mfu:.1%}",
            f"{o.run_s / 86400:.1f}",
            "no price" if o.cost is None else quantity(o.cost),
        )
    out.print(t)
    say(out, "")


def comparison(
    out: Console,
    made: TrainingPlan,
    now: Candidate,
    changes: "Sequence[Change]",
    curve: Sequence[ScalingPoint] = (),
) -> None:
    """What a config asks for, and what the plan would change."""
    heading(out, made.result)
    best, e = made.best, now.estimate
    say(
        out,
        f"The config: {duration(e.step_time_s)} a step, {quantity(e.tokens_per_s)} tokens/s,"
        f" {e.mfu:.1%} of peak",
    )
    if not fits(now):
        usable = (1 - made.result.margin) * e.hbm_limit_bytes
        say(
            out,
            f"It does not fit: {e.hbm_total_bytes / GIB:.1f} GiB a device, and {usable / GIB:.1f} GiB can be"
            f" used ({made.result.margin:.0%} kept free).",
            "bold",
        )
    say(out, "")
    out.print(details([now, best], ["config", "plan"]))
    say(out, "")
    if curve:
        scaling(out, curve)
        say(out, "")
    if not changes:
        say(out, "The plan would change nothing.")
        return
    gain = e.step_time_s / best.estimate.step_time_s - 1
    say(
        out,
        f"The plan would change ({duration(best.estimate.step_time_s)} a step, {gain:+.1%} tokens/s):",
        "bold",
    )
    t = table("what", "key", "config", "plan", words=2)
    for column in t.columns[2:]:
        column.no_wrap = False  # a custom remat policy is a long one
    for change in changes:
        t.add_row(change.what, change.key, change.now, change.then)
    out.print(t)
    why(out, made.reasons)
