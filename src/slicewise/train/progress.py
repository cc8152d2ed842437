"""Progress of a run as events: written to the process that started this one, or drawn on this terminal.

An event is a dict with the key ``event``:

    phase  name                                         what the run does now: "compile", "save", ...
    step   step, steps, loss, step_time_s, tokens_per_s, tflops_per_s_per_device, mfu (0 to 1, or None)
    progress  step                                      a finished step that is not worth a record, now and then
    text   text                                         a line for the reader
    error  code, message                                why this process is about to end

``step`` counts finished steps, so the last one of a run has ``step == steps``.
"""

import faulthandler
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:  # rich takes a tenth of a second to import, and ranks of a cluster never draw
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress

Event = Mapping[str, Any]

EVENTS_FD = "SLICEWISE_EVENTS_FD"
STACKS_SIGNAL = signal.SIGUSR1  # a trainer that gets it prints the Python stacks of its threads and goes on
PLAIN_INTERVAL_S = 5.0  # between two step lines where no bar can be drawn: a CI log stays short
SPEED_WINDOW_S = 3600.0  # the time that remains is judged from the steps of this long

_write_lock = threading.Lock()


class Sink(Protocol):
    """Takes events until closed; leaves the terminal as it should stay."""

    def __call__(self, event: Event) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...


def emit(event: Event) -> bool:
    """Write one event, as a line of JSON, to the file descriptor in SLICEWISE_EVENTS_FD.

    False when there is no such reader or it has gone. Events of several threads never mix.
    """
    try:
        fd = int(os.environ[EVENTS_FD])
    except (KeyError, ValueError):
        return False
    line = memoryview((json.dumps(event, default=float) + "\n").encode())  # float: numpy and JAX scalars
    try:
        with _write_lock:
            while line:
                line = line[os.write(fd, line) :]
    except OSError:
        return False
    return True


def dump_stacks_when_asked() -> None:
    """From now on STACKS_SIGNAL prints stacks, also while the interpreter is stuck in a library."""
    faulthandler.register(STACKS_SIGNAL, all_threads=True)


def reporter() -> Sink:
    """Where the events of this process go: to its parent when that listens, else onto this terminal."""
    return _Emitter() if EVENTS_FD in os.environ else ProgressDisplay()


class _Emitter:
    def __call__(self, event: Event) -> None:
        emit(event)

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class ProgressDisplay:
    """Renders events: one live bar on a terminal; elsewhere a plain line now and then.

    Lines that are printed to the same console while the bar is live appear above it.
    """

    def __init__(self, console: "Console | None" = None, *, clock: Callable[[], float] = time.monotonic):
        if console is None:
            from rich.console import Console

            console = Console()
        self.console = console
        self._clock = clock
        self._bar = _Bar(console) if console.is_terminal and not console.is_dumb_terminal else None
        self._last_line_s: float | None = None
        self._unprinted: Event | None = None

    def __call__(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "step" and self._bar:
            self._bar.step(event)
        elif kind == "step":
            self._plain_step(event)
        elif kind == "phase" and self._bar:
            self._bar.phase(str(event.get("name", "")))
        elif kind == "phase":
            self.print(f"{event.get('name', '')} ...")
        elif kind == "text":
            self.print(str(event.get("text", "")))
        elif kind == "error":
            self.print(f"error: {event.get('message', '')}")

    def print(self, text: str) -> None:
        """Print lines as they are: no markup, no wrapping. They appear above the bar."""
        from rich.segment import Segment, Segments

        # as one segment: rich's handling of text costs ten times as much, and a process may print a flood
        self.console.print(Segments([Segment(text + "\n")]), soft_wrap=True)

    def close(self) -> None:
        """Leave the bar at its last state, or print the last step if its line was held back."""
        if self._bar:
            self._bar.close()
        if self._unprinted:
            self._print_step(self._unprinted)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _plain_step(self, event: Event) -> None:
        last_of_run = event.get("step") == event.get("steps")
        recent = self._last_line_s is not None and self._clock() - self._last_line_s < PLAIN_INTERVAL_S
        if recent and not last_of_run:
            self._unprinted = event
        else:
            self._print_step(event)

    def _print_step(self, event: Event) -> None:
        self._last_line_s, self._unprinted = self._clock(), None
        self.print(f"step {event.get('step')}/{event.get('steps')}  {metrics_text(event)}")


def metrics_text(event: Event) -> str:
    """The figures of a step event on one line, each with its unit; absent ones are left out."""
    shown = (
        ("loss", "loss {:.4f}"),
        ("step_time_s", "{:.3g} s/step"),
        ("tokens_per_s", "{:,.0f} tokens/s"),
        ("tflops_per_s_per_device", "{:.3g} TFLOP/s/device"),
        ("mfu", "MFU {:.1%}"),
    )
    return "  ".join(form.format(event[key]) for key, form in shown if event.get(key) is not None)


class _Bar:
    """A progress bar over a line of figures, drawn from the first event on."""

    def __init__(self, console: "Console"):
        self._console = console
        self._progress: Progress | None = None
        self._live: Live | None = None
        self._figures = ""

    def phase(self, name: str) -> None:
        progress = self._start()
        if progress.tasks:
            progress.update(progress.tasks[0].id, description=name)
        else:
            progress.add_task(name, total=None)

    def step(self, event: Event) -> None:
        progress = self._start()
        self._figures = metrics_text(event)
        done, total = event.get("step"), event.get("steps")
        if not progress.tasks:
            progress.add_task("train", total=total, completed=done or 0)
        elif progress.tasks[0].total is None:
            # a resumed run starts far from zero: what went before must not count as speed
            progress.reset(progress.tasks[0].id, total=total, completed=done or 0, description="train")
        else:
            progress.update(progress.tasks[0].id, total=total, completed=done, description="train")

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _start(self) -> "Progress":
        if self._progress is None:
            from rich.live import Live
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                TextColumn("remaining"),
                TimeRemainingColumn(),
                console=self._console,
                speed_estimate_period=SPEED_WINDOW_S,
            )
            self._live = Live(console=self._console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        return self._progress

    def _render(self):
        from rich.console import Group
        from rich.text import Text

        assert self._progress is not None
        figures = Text(self._figures, no_wrap=True, overflow="ellipsis")
        return Group(self._progress.get_renderable(), *([figures] if self._figures else []))
