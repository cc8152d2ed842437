"""What a search of settings found, as tables and as JSON."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
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
    steps = [t for t in found.trials if t.is_of_step]
    if steps:
        say(out, "")
        _show_steps(out, steps)
    for problem in _problems(found.trials):
        say(out, problem)
    if found.step_s:
        say(out, _best(found.overrides, *found.step_s))
    if found.skipped:
        say(out, f"{found.skipped} more were left when time was up; the same command goes on with them.")


def _best(overrides: Sequence[str], before_s: float | None, after_s: float) -> str:
    if not overrides:
        return "The step is best as it is."
    said = " ".join(overrides)
    if before_s is None:
        return f"{said}: a step that does not fit as it is takes {duration(after_s)}."
    gain = f"{1 - after_s / before_s:.1%}"
    return f"{said}: {duration(before_s)} a step becomes {duration(after_s)}, {gain} less."


def _problems(trials: "Sequence[Trial]") -> Iterator[str]:
    """What failed, a line each; of kernels those that were not judged, and those of which nothing compiles."""
    for t in trials:
        if t.is_accident or (t.is_of_step and t.seconds is None and not t.does_not_fit):
            again = " The same command tries it again." if t.is_accident else ""
            yield f"{t.name}: {t.problem}{again}"
    for of in dict.fromkeys(t.of for t in trials if not t.is_of_step):
        here = [t for t in trials if t.of == of]
        if all(t.seconds is None and not t.is_accident for t in here):
            yield f"{of}: none of {len(here)} settings compiles; {here[0].setting}: {here[0].problem}"


def _show_steps(out: Console, steps: "list[Trial]") -> None:
    made = table("step", "time", "memory", words=1)
    made.columns[0].min_width = 24
    for t in steps:
        short = t.problem if t.does_not_fit else "failed"
        made.add_row(t.setting or t.of, duration(t.seconds) if t.seconds else short, t.note)
    out.print(made)


def _values(e: "Entry") -> str:
    return " ".join(f"{name} {value}" for name, value in e.values.items())


def document(found: "Outcome") -> dict[str, Any]:
    return {
        "entries": [e.model_dump() for e in found.entries],
        "trials": [dataclasses.asdict(t) for t in found.trials],
        "overrides": list(found.overrides),
        "step_s": list(found.step_s) if found.step_s else None,
        "skipped": found.skipped,
    }
