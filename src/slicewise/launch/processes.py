"""A gang of processes on this machine: started together, read together, ended together.

Mechanism only; which failure is the cause and what follows from it is decided by the caller.
"""

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from slicewise.errors import ExitCode, UserError
from slicewise.launch.guardian import Guardian
from slicewise.launch.output import EventLines, LineReader, Log
from slicewise.train.progress import EVENTS_FD, STACKS_SIGNAL

READ_BYTES = 64 * 1024
MAX_DRAIN_READS = 32  # of one process at its exit: a pipe holds less, a grandchild may write for ever
KILL_WAIT_S = 10.0  # for a killed process to go: one in an uninterruptible system call stays longer
DRAIN_WAIT_S = 2.0  # for the end of all output after all have gone
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Command:
    """One process to start: its name is for sentences, its prefix for its lines. The log is emptied first."""

    name: str
    prefix: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path | None = None
    directory: Path | None = None  # where it starts; None: here


@dataclass(eq=False)
class Child:
    """A started process. ``returncode`` is None while it runs and negative for a signal, as in subprocess."""

    index: int
    name: str
    prefix: str
    process: subprocess.Popen
    output_fd: int
    events_fd: int
    log: Log
    output: LineReader = field(default_factory=LineReader)
    events: LineReader = field(default_factory=LineReader)
    event_lines: EventLines = field(default_factory=EventLines)
    returncode: int | None = None

    def note(self, event: Mapping[str, Any]) -> str | None:
        """Adds an event to the log as a line, which is returned; None for one that is not worth it."""
        line = self.event_lines.line(event)
        if line is not None:
            self.log.write(f"{line}\n".encode())
        return line


@dataclass(frozen=True)
class Lines:
    """Whole lines that a process printed, or that concern it."""

    child: Child
    lines: Sequence[str]


@dataclass(frozen=True)
class Reported:
    """An event that a process wrote to its SLICEWISE_EVENTS_FD."""

    child: Child
    event: dict[str, Any]


@dataclass(frozen=True)
class Exited:
    """A process ended; all it wrote has been handed out before."""

    child: Child


@dataclass(frozen=True)
class Asked:
    """This process received SIGINT, SIGTERM or SIGHUP."""

    signal: signal.Signals


Happening = Lines | Reported | Exited | Asked


class Gang:
    """Processes that run together, as a context manager: on leaving it none of them is left.

    While it is entered in the main thread, SIGINT, SIGTERM and SIGHUP become ``Asked``, and the second of
    them kills the gang on the spot. Signals that this process ignores (nohup) stay ignored.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._posted: queue.SimpleQueue[Child | signal.Signals] = queue.SimpleQueue()  # re-entrant
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._handlers: dict[signal.Signals, Any] = {}
        self._guardian: Guardian | None = None
        self._waiters: list[threading.Thread] = []
        self._asked = 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.kill()
            deadline_s = time.monotonic() + KILL_WAIT_S
            while self.running and time.monotonic() < deadline_s:
                for _ in self.poll(deadline_s - time.monotonic()):
                    pass
        finally:
            if self._guardian:
                self._guardian.close(KILL_WAIT_S)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._close_files()

    def _close_files(self) -> None:
        self._selector.close()
        for child in self.children:
            os.close(child.output_fd)
            os.close(child.events_fd)
            child.log.close()
        if not self.running:  # else a thread still waits for a process that nothing can kill, and may write
            for waiter in self._waiters:
                waiter.join()
            os.close(self._wake_write)
            os.close(self._wake_read)

    @property
    def running(self) -> list[Child]:
        return [child for child in self.children if child.returncode is None]

    def start(self, commands: Sequence[Command]) -> None:
        """Start every command, each with a pipe in SLICEWISE_EVENTS_FD.

        Raises UserError (INTERNAL) when a process cannot be started or a log cannot be written.
        """
        try:
            self._guardian = Guardian()
            for command in commands:
                self._start(command)
        except OSError as error:
            what = f"{error.filename}: " if error.filename else ""
            raise UserError(
                f"cannot start {len(commands)} processes: {what}{error.strerror}. "
                "Free what is missing, or ask for fewer processes.",
                code=ExitCode.INTERNAL,
            ) from error

    def _start(self, command: Command) -> None:
        assert self._guardian is not None
        with contextlib.ExitStack() as undo:
            log = Log(command.log_path)
            undo.callback(log.close)
            output_read, output_write = os.pipe()
            events_read, events_write = os.pipe()
            for fd in (output_read, events_read):
                os.set_blocking(fd, False)
                undo.callback(os.close, fd)
            try:
                process = subprocess.Popen(
                    command.arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=output_write,
                    stderr=subprocess.STDOUT,
                    env={**command.environment, EVENTS_FD: str(events_write)},
                    pass_fds=[events_write],
                    cwd=command.directory,
                    process_group=self._guardian.group_id,
                )
            finally:
                os.close(output_write)
                os.close(events_write)
            undo.pop_all()
        name, prefix = command.name, command.prefix
        child = Child(len(self.children), name, prefix, process, output_read, events_read, log)
        self.children.append(child)
        self._selector.register(output_read, selectors.EVENT_READ, (child, False))
        self._selector.register(events_read, selectors.EVENT_READ, (child, True))
        # a thread each reports exits in their order, however much output waits to be read
        waiter = threading.Thread(target=self._wait, args=(child,), daemon=True)
        self._waiters.append(waiter)
        waiter.start()

    def ask_to_stop(self) -> None:
        """SIGTERM to all; one that was stopped goes on so that it can act on it."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def dump_stacks(self) -> None:
        """Python stacks of all threads onto the standard error of those that registered STACKS_SIGNAL."""
        for child in self.running:
            child.process.send_signal(STACKS_SIGNAL)

    def kill(self) -> None:
        """SIGKILL to all. Does not wait; safe in a signal handler."""
        self._signal(signal.SIGKILL)

    def poll(self, timeout_s: float | None) -> Iterator[Happening]:
        """What happened, in order; waits at most ``timeout_s`` (None: for ever) for something to happen."""
        ready = [key for key, _ in self._selector.select(None if timeout_s is None else max(0.0, timeout_s))]
        # before exits: the report of an error that is found together with the deaths it caused came first
        for child, is_events in [key.data for key in ready if key.data is not None]:
            yield from self._read(child, is_events, 1)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, READ_BYTES)
        with contextlib.suppress(queue.Empty):
            while True:
                posted = self._posted.get_nowait()
                if isinstance(posted, Child):
                    yield from self._read(posted, True, MAX_DRAIN_READS)
                    yield from self._read(posted, False, MAX_DRAIN_READS)
                    posted.returncode = posted.process.returncode
                    yield Exited(posted)
                else:
                    yield Asked(posted)

    def finish(self) -> Iterator[Happening]:
        """End what the processes left behind, and hand out the rest of their output."""
        self.kill()
        deadline_s = time.monotonic() + DRAIN_WAIT_S
        while len(self._selector.get_map()) > 1 and time.monotonic() < deadline_s:
            yield from self.poll(deadline_s - time.monotonic())

    def _read(self, child: Child, is_events: bool, max_reads: int) -> Iterator[Happening]:
        fd = child.events_fd if is_events else child.output_fd
        for _ in range(max_reads):
            if fd not in self._selector.get_map():
                return
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(fd)
            if is_events:
                yield from (_parse_event(child, line) for line in child.events.feed(data))
                continue
            problem = child.log.write(data)
            lines = child.output.feed(data) + ([problem] if problem else [])
            if lines:
                yield Lines(child, lines)

    def _wait(self, child: Child) -> None:
        child.process.wait()
        self._post(child)

    def _post(self, what: Child | signal.Signals) -> None:
        self._posted.put(what)
        with contextlib.suppress(BlockingIOError):  # full: it will wake without this byte
            os.write(self._wake_write, b".")

    def _on_signal(self, number: int, frame: object) -> None:
        self._asked += 1
        self._post(signal.Signals(number))
        if self._asked > 1:  # here, because the main loop may be blocked by a terminal that takes no output
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._guardian:
            self._guardian.signal(number)


def _parse_event(child: Child, line: str) -> Happening:
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return Reported(child, event) if isinstance(event, dict) else Lines(child, [line])
