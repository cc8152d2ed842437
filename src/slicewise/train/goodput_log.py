"""What a run does, second by second: stamps in RUN/goodput.jsonl, appended by trainers and by what starts them.

    {"at": 1764460000123456, "by": "trainer", "start": "5f1c9a20", "state": "step", "step": 6, "data_us": 310}

``at`` is Unix time in microseconds; ``state`` is what the run does from then on, until the next stamp; ``start`` tells
the starts of a run apart. ``step`` is the last step that was finished in the state before, ``data_us`` how long its
steps waited for data. The first stamp of state "step" has the step that was restored in ``from``.

    by launcher    start     processes are being started
                   stop      a failure was seen: the others are being ended
                   delay     nothing runs, on purpose
                   wait      nothing runs, for want of machines or of somebody who starts it
    by trainer     imports, join, restore, compile, prepare, step, save, evaluate, finish
    by both        done      nothing more to do

A stamp is one write to a file opened for appending, so a kill leaves whole lines, and several processes may write.
No JAX here: launchers use it.
"""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from slicewise.train import injection

FILE = "goodput.jsonl"
START = "SLICEWISE_START"  # environment: the start that a launcher has stamped
FLUSH_US = 1_000_000  # between two stamps of finished steps
BEGIN = '{"at": '  # of every line: what follows a line that a full disk cut off can be read again

Who = Literal["launcher", "trainer"]


class Sink(Protocol):
    """Who else hears of the states of a run, such as a service that collects them."""

    def now(self, state: str, at_us: int) -> None: ...
    def begins(self, step: int, at_us: int) -> None: ...
    def waited(self, begin_us: int, end_us: int) -> None: ...
    def close(self) -> None: ...


def now_us() -> int:
    return time.time_ns() // 1000


def new_start() -> str:
    return secrets.token_hex(4)


def append(directory: Path, stamp: Mapping[str, Any]) -> None:
    """Adds one stamp; ``at`` is its first key. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory / FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        whole = not size or os.pread(fd, 1, size - 1) == b"\n"
        os.write(fd, ("" if whole else "\n").encode() + _line(stamp))
    finally:
        os.close(fd)


def _line(stamp: Mapping[str, Any]) -> bytes:
    return (json.dumps(stamp) + "\n").encode()


class LaunchLog:
    """Stamps of a launcher. It goes on without them where they cannot be written: the trainers will say so."""

    def __init__(self, directory: Path | None):
        """``directory``: of the run; None where it is not on this machine."""
        self._directory = directory
        self.start = ""

    def begin(self) -> dict[str, str]:
        """Stamps a new start; the environment that makes the trainers part of it."""
        self.start = new_start()
        self.stamp("start")
        return {START: self.start}

    def stamp(self, state: str, **more: Any) -> None:
        if self._directory is not None and self.start:
            with contextlib.suppress(OSError):
                stamp = {"at": now_us(), "by": "launcher", "start": self.start, "state": state, **more}
                append(self._directory, stamp)


class Ledger:
    """Stamps of one trainer, as a context manager. Only the first process of a run writes.

    Who is first shows when the processes have joined; stamps wait until then where no launcher has said it before.
    ``warn`` gets one line when the file cannot be written; training goes on.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] = os.environ,
        *,
        clock: Callable[[], int] = now_us,
        began_us: int | None = None,
    ):
        """``began_us``: when this process started; its first state is "imports"."""
        self._directory, self._clock = directory, clock
        self._start = environment.get(START) or new_start()
        self._writes = environment.get("SLICEWISE_PROCESS_ID") == "0"
        self._waiting: list[dict[str, Any]] | None = None if self._writes else []
        self._ended: dict[str, int] = {}  # what the next stamp says of steps
        self._data_us = 0
        self._written_us = 0
        self.state = ""
        self.is_complete = False  # the run, at the end of this process
        self._sinks: list[Sink] = []
        self._past: list[tuple[str, int]] | None = []  # for sinks that come late
        self.warn: Callable[[str], None] | None = None
        self._reached = injection.armed(directory, environment)
        self._step = 0  # that was begun last
        self._write("imports", process_began_us(clock) if began_us is None else began_us)

    def joined(self, is_first: bool) -> None:
        """Who is first is known now."""
        self._past = None
        waiting, self._waiting, self._writes = self._waiting or [], None, is_first
        for stamp in waiting if is_first else ():
            self._append(stamp)

    def attach(self, sink: Sink) -> None:
        """``sink`` hears of everything from the start of this process; before ``joined`` only."""
        self._sinks.append(sink)
        assert self._past is not None
        for state, at_us in self._past:
            sink.now(state, at_us)

    def now(self, state: str, *, from_step: int | None = None) -> None:
        """The run does ``state`` from now on; ``from_step`` goes with the first "step"."""
        self._write(state, self._clock(), **({} if from_step is None else {"from": from_step}))

    def begins(self, step: int) -> None:
        """Step ``step`` is about to be taken."""
        self._step = step
        for sink in self._sinks:
            sink.begins(step, self._clock())
        if self._reached:
            self._reached("step", step)

    def waited(self, since_us: int) -> None:
        """The devices waited for data from ``since_us`` until now."""
        now = self._clock()
        self._data_us += max(0, now - since_us)
        for sink in self._sinks:
            sink.waited(since_us, now)

    def stepped(self, step: int, *, at_once: bool = False) -> None:
        """Step ``step`` is finished. Stamps are a second apart unless one is wanted ``at_once``."""
        self._ended = {"step": step, "data_us": self._data_us}
        now = self._clock()
        if at_once or now - self._written_us >= FLUSH_US:
            self._write("step", now)

    def _write(self, state: str, at_us: int, **more: Any) -> None:
        ended, self._ended, self._data_us = self._ended, {}, 0
        self.state, self._written_us = state, at_us
        by: Who = "trainer"
        stamp = {"at": at_us, "by": by, "start": self._start, "state": state, **ended, **more}
        if self._waiting is not None:
            self._waiting.append(stamp)
        elif self._writes:
            self._append(stamp)
        for sink in self._sinks:
            sink.now(state, at_us)
        if self._past is not None:
            self._past.append((state, at_us))
        if self._reached and state != "step":
            self._reached(state, self._step)

    def _append(self, stamp: Mapping[str, Any]) -> None:
        try:
            append(self._directory, stamp)
        except OSError as error:
            if self.warn:
                self.warn(f"warning: {self._directory / FILE} has a gap from here on: {error.strerror}")
                self.warn = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.now("done" if self.is_complete else "wait")
        for sink in self._sinks:
            sink.close()


def process_began_us(clock: Callable[[], int] = now_us) -> int:
    """When this process was started, to 10 ms; now where the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return clock()
    return clock() - int(1e6 * (up_s - ticks / os.sysconf("SC_CLK_TCK")))
