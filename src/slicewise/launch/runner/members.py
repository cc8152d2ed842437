"""The workers of one run as the runner sees them, and which failure came first."""

import asyncio
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from slicewise.errors import ExitCode
from slicewise.launch.output import LineReader
from slicewise.launch.runner.link import Link
from slicewise.launch.workers import Worker

TRACEBACK = "Traceback (most recent call last):"
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as shells say it
MAX_NAMED = 8


class State(StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"


@dataclass
class Clock:
    """How far a worker's clock is ahead of ours, from the quickest exchange so far; right to half its length."""

    ahead_s: float = 0.0
    round_trip_s: float = float("inf")

    def exchanged(self, sent_s: float, there_s: float, received_s: float) -> None:
        if received_s - sent_s < self.round_trip_s:
            self.round_trip_s = received_s - sent_s
            self.ahead_s = there_s - (sent_s + received_s) / 2

    @property
    def error_s(self) -> float:
        """How far ``ahead_s`` may be off."""
        return self.round_trip_s / 2


@dataclass(eq=False)
class Member:
    """One worker of a run. Times named ``there`` are of its own clock."""

    worker: Worker
    index: int
    state: State = State.CONNECTING
    link: Link | None = None
    host: tuple[Any, ...] = ()
    root: str = ""
    python: str = ""
    clock: Clock = field(default_factory=Clock)
    unanswered: int = 0  # heartbeats in a row
    reply: "asyncio.Future[Any] | None" = None
    output: LineReader = field(default_factory=LineReader)
    events: LineReader = field(default_factory=LineReader)
    last_line: str = ""
    log_path: str = ""
    code: int | None = None  # as a shell gives it: 128 + n after signal n
    problem: str = ""  # why it was lost, or could not start
    error: dict[str, Any] | None = None  # the event by which it said why it is about to end
    killed: bool = False  # by a signal
    left: Sequence[int] = ()  # processes that could not be killed
    ended_there_s: float | None = None
    traceback_there_s: float | None = None
    lines_after_traceback: int = 0
    stopped: bool = False  # by us, after it had begun to fail
    error_there_s: float | None = None
    lost_s: float | None = None  # our clock

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def ended(self) -> bool:
        return self.state in (State.DONE, State.FAILED, State.LOST, State.STOPPED)

    @property
    def first_sign_s(self) -> float:
        """When it began to fail, by our clock: its error, its last traceback, its end, or the lost link.

        Right to ``clock.error_s``.

        A Python process that raised may hang for minutes in a barrier before it ends; others abort meanwhile.
        """
        there = [self.error_there_s, self.traceback_there_s, self.ended_there_s]
        seen = [t - self.clock.ahead_s for t in there if t is not None]
        return min([*seen, *([self.lost_s] if self.lost_s is not None else []), float("inf")])

    @property
    def ending(self) -> str:
        """What happened to it, to follow its name."""
        if self.state == State.LOST:
            return f"was lost: {self.problem}"
        if self.problem:
            return f"could not start: {self.problem}"
        assert self.code is not None
        if self.stopped:
            what = str(self.error.get("message", "")) if self.error else "raised an exception"
            return f"did not end by itself: {what}" if self.error else f"{what} and did not end by itself"
        if self.error and self.error.get("message"):
            return f"exited with code {self.code}: {self.error['message']}"
        return (
            f"was killed by {signal_name(self.code - 128)}"
            if self.killed
            else f"exited with code {self.code}"
        )

    def restart(self) -> None:
        """Forget how the last command ended: another one follows."""
        self.state, self.code, self.problem, self.error, self.killed, self.left = (
            State.READY,
            None,
            "",
            None,
            False,
            (),
        )
        self.ended_there_s = self.traceback_there_s = self.error_there_s = None
        self.output, self.events = LineReader(), LineReader()

    def end(self, status: int) -> None:
        """From a wait status."""
        self.killed = status & 0x7F != 0
        self.code = 128 + (status & 0x7F) if self.killed else status >> 8 & 0xFF


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


class Placed(Protocol):
    @property
    def worker(self) -> Worker: ...


def names(members: Iterable[Placed]) -> str:
    """``"slice 0 workers 0-3, 7, slice 1 worker 2"``."""
    places: dict[int, list[int]] = {}
    for member in members:
        places.setdefault(member.worker.slice_index, []).append(member.worker.worker_index)
    parts = []
    for slice_index, indices in sorted(places.items()):
        plural = "s" if len(indices) > 1 else ""
        parts.append(f"slice {slice_index} worker{plural} {_ranges(sorted(indices))}")
    hidden = len(parts) - MAX_NAMED
    return ", ".join(parts[:MAX_NAMED]) + (f" and workers of {hidden} more slices" if hidden > 0 else "")


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number, number])
    shown = [f"{a}-{b}" if b > a + 1 else f"{a}, {b}" if b > a else str(a) for a, b in runs]
    return ", ".join(shown[:MAX_NAMED]) + (" ..." if len(shown) > MAX_NAMED else "")


def failures(members: Iterable[Member]) -> list[Member]:
    """Those that failed or were lost, in order of time."""
    failed = [member for member in members if member.state in (State.FAILED, State.LOST)]
    return sorted(failed, key=lambda member: (member.first_sign_s, member.index))


def exit_code(members: Sequence[Member], asked: signal.Signals | None) -> int:
    """Of the whole run: the first failing worker's; UNAVAILABLE for a lost one; 128 + n when asked to stop."""
    ended = {member.code for member in members if member.state in (State.DONE, State.FAILED)}
    if asked and (
        ended - {ExitCode.DONE, ExitCode.PREEMPTED} or any(m.state == State.STOPPED for m in members)
    ):
        return 128 + asked
    failed = failures(members)
    if not failed:
        return ExitCode.PREEMPTED if ExitCode.PREEMPTED in ended else ExitCode.DONE
    cause = failed[0]
    said = cause.error.get("code") if cause.error else None
    if isinstance(said, int) and 0 < said < 256:
        return said
    if cause.state == State.LOST:
        return ExitCode.UNAVAILABLE
    return ExitCode.INTERNAL if cause.stopped or not cause.code else cause.code


def verdict(members: Sequence[Member]) -> list[str]:
    """The last lines of a run: consequences, what could not be ended, and the first failure with its log's tail."""
    lines = [
        f"{member.name}: could not be killed: pid {', '.join(map(str, member.left))}"
        for member in members
        if member.left
    ]
    failed = failures(members)
    if not failed:
        return lines
    cause, *others = failed
    groups: dict[str, list[Member]] = {}
    for other in others:
        groups.setdefault(other.ending, []).append(other)
    lines += [f"{names(group)} {ending} (a consequence)" for ending, group in groups.items()]
    if stopped := [member for member in members if member.state == State.STOPPED]:
        lines.append(f"stopped as a consequence: {names(stopped)}")
    lines.append(f"first failure: {cause.name} ({cause.worker.host}) {cause.ending}")
    if cause.error and cause.error.get("message"):  # it has said why, in words for the user
        return lines
    tail = list(cause.output.tail)
    where = f" ({cause.log_path})" if cause.log_path else ""
    if tail:
        lines.append(f"its last {len(tail)} lines{where}:")
        lines += [f"  {line}" for line in tail]
    elif cause.code not in (None, NOT_FOUND, NOT_EXECUTABLE):
        lines.append(f"it printed nothing{where}")
    return lines


def elapsed(since_s: float) -> str:
    seconds = time.monotonic() - since_s
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
