"""What a search of settings found, as tables and as JSON."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from slicewise.costs.units import duration
from slicewise.report.console import say
from slicewise.report.tables import table

if TYPE_CHECKING:
    from slicewise.kernels.tuned import Entry
    from slicewise.tune.search import Outcome, Trial


@contextlib.contextmanager
def progress(out: Console) -> Iterator[Callable[[int, int, str], None]]:
    """A bar of settings tried, with the one that is under way."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("tuning", total=None)

        def advance(done: int, of: int, what: str) -> None:
            bar.update(task, completed=done, total=of, description=what)

        yield advance


def show(out: Console, found: "Outcome", where: str) -> None:
    """``where`` the entries were put."""
    if found.entries:
        made = table("kernel", "settings", "a call", "untuned", "gain", words=2)
        made.columns[0].min_width = 24
        for e in found.entries:
            untuned = duration(e.untuned_seconds) if e.untuned_seconds else "does not compile"
            gain = f"{1 - e.seconds / e.untuned_seconds:.1%}" if e.untuned_seconds else ""
            made.add_row(e.key.text, _values(e), duration(e.seconds), untuned, gain)
        out.print(made)
        say(out, f"Kept in {where}, for the versions that are installed here.")
    steps = [t for t in found.trials if t.of in ("as it is", "remat policy", "compiler flags")]
    if steps:
        say(out, "")
        _show_steps(out, steps)
    if found.step_s and found.overrides:
        before_s, after_s = found.step_s
        gain = f"{1 - after_s / before_s:.1%}"
        say(
            out,
            f"{' '.join(found.overrides)}: {duration(before_s)} a step becomes {duration(after_s)}, {gain} less.",
        )
    elif steps and found.step_s:
        say(out, "The step is best as it is.")
    if found.skipped:
        say(out, f"{found.skipped} more were left when time was up; the same command goes on with them.")


def _show_steps(out: Console, steps: "list[Trial]") -> None:
    made = table("step", "time", "memory", words=1)
    made.columns[0].min_width = 24
    for t in steps:
        made.add_row(t.setting or t.of, duration(t.seconds) if t.seconds else t.problem, t.note)
    out.print(made)


def _values(e: "Entry") -> str:
    return " ".join(f"{name} {value}" for name, value in e.values.items())


def document(found: "Outcome") -> dict[str, Any]:
    return {
        "entries": [e.model_dump() for e in found.entries],
        "trials": [
            {"of": t.of, "setting": t.setting, "seconds": t.seconds, "problem": t.problem, "note": t.note}
            for t in found.trials
        ],
        "overrides": list(found.overrides),
        "step_s": list(found.step_s) if found.step_s else None,
        "skipped": found.skipped,
    }
