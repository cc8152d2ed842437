"""The layouts that a search compiled, as a table and as JSON."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slicewise.costs.units import duration
from slicewise.report.console import say
from slicewise.report.jsonable import SCHEMA
from slicewise.report.tables import table

if TYPE_CHECKING:
    from slicewise.compile.analysis import CompiledStep
    from slicewise.compile.search import Found, Trial


def memory(step: "CompiledStep") -> str:
    """Such as '17.4 of 95.7 GiB'."""
    m = step.memory
    if step.out_of_memory:
        return f"more than the {m.limit_bytes / 2**30:.1f} GiB there are"
    return f"{m.total_bytes / 2**30:.1f} of {m.limit_bytes / 2**30:.1f} GiB"


@contextlib.contextmanager
def progress(out: Console) -> Iterator[Callable[[int, int, "Trial"], None]]:
    """A bar of trials done, with the last one's name."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("compiling", total=None)

        def advance(done: int, of: int, trial: "Trial") -> None:
            bar.update(task, completed=done, total=of, description=trial.name)

        yield advance


def show(out: Console, found: "Found") -> None:
    if found.best:
        say(out, f"Fastest that fits: {found.best.name}.", "bold")
    elif any(t.step for t in found.trials):
        say(out, "None of these layouts fits; --fix looks for a change of the config that does.", "bold")
    else:
        say(out, "No layout was compiled.", "bold")
    problems: list[str] = []
    made = table("layout", "predicted", "MFU", "memory", "planned", "compiled in", words=1)
    for t in found.trials:
        planned = duration(t.planned_s) if t.planned_s is not None else "-"
        if t.step is None:
            made.add_row(t.name, "not compiled", "", "", planned, "")
            problems.append(f"{t.name}: {t.problem}")
            continue
        e = t.step.estimate
        spent = "cached" if t.step.from_cache else f"{t.step.cpu_s:.0f} CPU s"
        seconds = duration(e.step_time_s) if t.counts else t.problem
        made.add_row(t.name, seconds, f"{e.mfu:.1%}", memory(t.step), planned, spent)
    made.columns[0].min_width = 24  # a narrow terminal folds names, and does not lose them
    out.print(made)
    for problem in problems:
        say(out, problem)
    if found.skipped:
        say(out, f"{found.skipped} more were left when time was up; the same command goes on with them.")


def document(found: "Found") -> str:
    """The trials as JSON, the best first."""
    rows = []
    for t in found.trials:
        row: dict[str, Any] = {"layout": t.name, "planned_s": t.planned_s, "fits": t.counts}
        row |= {"problem": t.problem, "changed": dict(t.changed)}
        if t.step:
            e = t.step.estimate
            row |= {"step_time_s": e.step_time_s, "mfu": e.mfu, "hbm_bytes": t.step.memory.total_bytes}
        rows.append(row)
    return json.dumps(
        {"kind": "compiled search", "schema": SCHEMA, "trials": rows, "skipped": found.skipped}, indent=1
    )
