"""One trainer process of an agent: started, watched, asked to stop, killed."""

import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from slicewise.errors import ExitCode
from slicewise.launch import oom_kills
from slicewise.launch.output import without_gloo
from slicewise.launch.policy import Watch
from slicewise.launch.processes import Asked, Child, Command, Exited, Gang, Happening, Lines, Reported
from slicewise.launch.watchdog import Watchdog
from slicewise.launch.worker_files import WorkerFiles


class Trainer:
    """As a context manager in the main thread, whose stop signals it takes; nothing is left when it ends.

    ``code`` is None while it runs. It is INTERNAL when the trainer was killed by a signal, or by us because it
    was stuck; ``message`` says so, or is the error that the trainer reported.
    """

    def __init__(
        self,
        files: WorkerFiles,
        place: str,
        environment: Mapping[str, str],
        watch: Watch,
        saw: Callable[[Mapping[str, Any]], None],
        say: Callable[[str], None],
    ):
        self._watch, self._saw, self._say = watch, saw, say
        arguments = [sys.executable, *files.command]
        self._command = Command(place, "", arguments, environment, files.log(place), files.directory)
        self._watchdog = Watchdog(watch)
        self._gang = Gang()
        self._kill_at_s: float | None = None
        self._is_told = False  # to save and stop: a second SIGTERM would end it before it has
        self._error_code: int | None = None  # which says more than how the process ended afterwards
        self.code: int | None = None
        self._kills = oom_kills.count()
        self.message = ""
        self.asked: signal.Signals | None = None  # by the platform, to stop
        self.ended = 0.0  # Unix time

    def __enter__(self) -> Self:
        """Raises UserError when it cannot be started."""
        self._gang.__enter__()
        try:
            self._gang.start([self._command])
        except BaseException:
            self._gang.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._gang.__exit__(*exception)

    @property
    def tail(self) -> list[str]:
        """Its last lines."""
        return [line for child in self._gang.children for line in child.output.tail]

    def poll(self, timeout_s: float) -> None:
        """Handles what happens within ``timeout_s``."""
        end_s = time.monotonic() + timeout_s
        while self.code is None:
            left_s = end_s - time.monotonic()
            for happening in self._gang.poll(max(0.0, min(left_s, *self._deadlines()))):
                self._handle(happening)
            self._enforce()
            if left_s <= 0:
                return

    def stop(self, grace_s: float) -> None:
        """SIGTERM now, unless it had one before, and SIGKILL after ``grace_s``."""
        if not self._is_told:
            self._is_told = True
            self._gang.ask_to_stop()
        self.end_within(grace_s)

    def cancel(self, grace_s: float) -> None:
        """As ``stop``, once."""
        if self._kill_at_s is None:
            self.stop(grace_s)

    def end_within(self, grace_s: float) -> None:
        """SIGKILL after ``grace_s``, unless it ends before or less was left."""
        kill_at_s = time.monotonic() + grace_s
        self._kill_at_s = kill_at_s if self._kill_at_s is None else min(kill_at_s, self._kill_at_s)

    def _deadlines(self) -> list[float]:
        now_s = time.monotonic()
        if self._kill_at_s is not None:
            return [self._kill_at_s - now_s]
        return [max(0.0, min(3600.0, self._watchdog.latest()[1]))]

    def _enforce(self) -> None:
        if self.code is not None:
            return
        if self._kill_at_s is not None:
            if time.monotonic() >= self._kill_at_s:
                self._gang.kill()
                self._kill_at_s = time.monotonic() + 3600.0  # what is left is up to the kernel
        elif self._watchdog.latest()[1] <= 0:
            self.message = self._watchdog.reason()
            self._say(f"{self.message}: its stacks are in its log")
            self._gang.dump_stacks()
            self.end_within(self._watch.failure_grace_s)

    def _handle(self, happening: Happening) -> None:
        match happening:
            case Lines(_, lines):
                for line in map(without_gloo, lines):
                    if line is not None:
                        self._say(line)
            case Reported(child, event):
                self._on_event(child, event)
            case Exited(child):
                self._on_exit(child.returncode)
            case Asked(number):
                self.asked = self.asked or number
                self.stop(self._watch.stop_grace_s)

    def _on_event(self, child: Child, event: Mapping[str, Any]) -> None:
        self._watchdog.saw(event)
        self._saw(event)
        if event.get("event") == "error":
            self.message = self.message or str(event.get("message", ""))
            self._error_code = self._error_code or event.get("code")
        if line := child.note(event):
            self._say(line)

    def _on_exit(self, returncode: int | None) -> None:
        assert returncode is not None
        for happening in self._gang.finish():
            if not isinstance(happening, Exited):
                self._handle(happening)
        if returncode < 0 and not self.message:
            is_out = returncode == -signal.SIGKILL and oom_kills.count() > self._kills
            self.message = f"was killed by signal {-returncode}" + (f"; {oom_kills.ADVICE}" if is_out else "")
        elif returncode > 0 and not self.message:
            self.message = f"exited with code {returncode}"
        code = self._error_code if self._error_code and returncode != ExitCode.DONE else returncode
        self.ended = time.time()
        self.code = code if code in list(ExitCode) else ExitCode.INTERNAL
