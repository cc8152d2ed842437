"""What a run shows: lines of the chosen workers, and on a terminal a table of states that stays below them.

A thread of its own writes to the terminal: one that takes no output (Ctrl-S, a dead pipe) must not stop the
heartbeats by which workers know that the runner lives.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slicewise.launch.runner.members import Member, State, elapsed
from slicewise.train.progress import ProgressDisplay, metrics_text

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

QUEUED = 500  # batches of lines; what comes while the terminal is that far behind is in the logs only
REFRESH_S = 0.25
CLOSE_S = 3.0
MAX_ROWS = 16  # workers get a row each up to here, slices beyond
_STYLES = {State.RUNNING: "cyan", State.DONE: "green", State.FAILED: "red", State.LOST: "red"}


class Display:
    """Closed by the end of its ``with``; ``on_broken`` is called once, in the thread, when nobody can read it."""

    def __init__(
        self,
        console: "Console",
        members: Sequence[Member],
        title: str,
        started_s: float,
        on_broken: Callable[[], object],
    ):
        self._console, self._members, self._title = console, members, title
        self._started_s, self._on_broken = started_s, on_broken
        self._queue: queue.Queue[str | dict[str, Any] | None] = queue.Queue(QUEUED)
        self._dropped = 0
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._plain = ProgressDisplay(console) if not self._live else None
        self._figures = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="display")

    def __enter__(self) -> "Display":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return  # the terminal is blocked; the thread ends with the process
        self._thread.join(CLOSE_S)

    def say(self, text: str) -> None:
        """Lines as they are. Never waits."""
        self._put(text)

    def event(self, event: dict[str, Any]) -> None:
        """Progress of the first worker, as slicewise.train.progress defines it."""
        self._put(event)

    def _put(self, what: str | dict[str, Any]) -> None:
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        try:
            if not self._live:
                self._loop(None)
                return
            from rich.live import Live

            with Live(console=self._console, get_renderable=self._table, auto_refresh=False) as live:
                self._loop(live)
        except (OSError, ValueError, SystemExit):  # a lost terminal; SystemExit is rich's for a closed pipe
            self._on_broken()

    def _loop(self, live: Any) -> None:
        printer = self._plain or ProgressDisplay(self._console)
        while True:
            try:
                what = self._queue.get(timeout=REFRESH_S)
            except queue.Empty:
                if live:
                    live.refresh()
                continue
            if what is None:
                return
            if isinstance(what, str):
                printer.print(what)
            elif self._plain:
                self._plain(what)
            elif what.get("event") == "step":
                self._figures = f"step {what.get('step')}/{what.get('steps')}  {metrics_text(what)}"
            elif what.get("event") in ("phase", "text"):
                printer.print(str(what.get("name") or what.get("text") or ""))
            if self._dropped and self._queue.empty():
                printer.print(f"({self._dropped} pieces of output are in the logs only)")
                self._dropped = 0

    def _table(self) -> "Group":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        caption = "  ".join(filter(None, [self._title, elapsed(self._started_s), self._figures]))
        table = Table(expand=False, box=None)
        (_by_worker if len(self._members) <= MAX_ROWS else _by_slice)(table, self._members)
        return Group(table, Text(caption, no_wrap=True, overflow="ellipsis"))


def _by_worker(table: "Table", members: Sequence[Member]) -> None:
    from rich.text import Text

    for head in ("worker", "host", "state", "last line"):
        table.add_column(head, no_wrap=True, overflow="ellipsis")
    for member in members:
        state = member.state + (f" {member.code}" if member.code else "")
        table.add_row(
            Text(member.name),
            Text(member.worker.host),
            Text(state, style=_STYLES.get(member.state, "")),
            Text(member.last_line),
        )


def _by_slice(table: "Table", members: Sequence[Member]) -> None:
    """One row a slice, at most MAX_ROWS: those with trouble first, the rest in a last row."""
    from rich.text import Text

    counts: dict[int, Counter[State]] = {}
    for member in members:
        counts.setdefault(member.worker.slice_index, Counter())[member.state] += 1
    shown = [state for state in State if any(state in count for count in counts.values())]
    table.add_column("slice")
    for state in shown:
        table.add_column(Text(state, style=_STYLES.get(state, "")), justify="right")
    trouble = sorted(counts, key=lambda s: (-(counts[s][State.FAILED] + counts[s][State.LOST]), s))
    rows = trouble if len(trouble) <= MAX_ROWS else trouble[: MAX_ROWS - 1]
    for index in sorted(rows):
        table.add_row(str(index), *(str(counts[index][state] or "") for state in shown))
    if rest := trouble[len(rows) :]:
        total = sum((counts[index] for index in rest), Counter[State]())
        table.add_row(f"{len(rest)} more", *(str(total[state] or "") for state in shown))
