"""One attempt of a gang: which failure is the cause, what it means for the others, and the exit code.

The first failure in time is the cause; what ends after it is a consequence, noted in one line.
"""

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from slicewise.errors import ExitCode
from slicewise.launch import oom_kills
from slicewise.launch.output import without_gloo
from slicewise.launch.processes import KILL_WAIT_S, Asked, Child, Exited, Gang, Happening, Lines, Reported
from slicewise.launch.watchdog import Watchdog
from slicewise.train.progress import ProgressDisplay

FAILURE_GRACE_S = 3.0  # for the others after a failure: most can only hang or abort
PREEMPTED_GRACE_S = 30.0  # after one that saved its state: the others take part in the same save
DONE_GRACE_S = 90.0  # after the first that finished: longer than the barrier at which all leave (30 s)
STOP_GRACE_S = 60.0  # after SIGTERM, to agree on a step and save it
MAX_WAIT_S = 3600.0
ORDERS_INTERVAL_S = 1.0  # between two looks at what a supervisor wants
_ORDERLY = (ExitCode.RESTART, ExitCode.PREEMPTED)


class Supervision(Protocol):
    """Who watches over an attempt: hears of it, and may want it to end."""

    def saw(self, worker: int, event: Mapping[str, Any]) -> None: ...

    def orders(self) -> Literal["", "stop", "grow", "abandon"]:
        """ "stop" and "grow": let it save and end. "abandon": another one goes on elsewhere, so it must end at once."""
        ...

    def gone(self) -> Sequence[int]:
        """Workers whose machine is no more: an emulated one goes on until it is killed."""
        ...


@dataclass
class _Failure:
    """Why a process ended, or is about to: the error it reported, its code, or that we had to stop it."""

    child: Child
    error: dict[str, Any] | None = None
    overdue_s: float | None = None
    stalled: str = ""
    out_of_memory: bool = False  # in which the kernel kills whom it likes

    @property
    def code(self) -> ExitCode:
        code = self.error.get("code") if self.error else self.child.returncode
        ours = self.overdue_s is not None or self.stalled
        known = code in list(ExitCode) and code != ExitCode.DONE and not ours
        return ExitCode(code) if known else ExitCode.INTERNAL  # type: ignore[arg-type]

    @property
    def message(self) -> str:
        return str(self.error.get("message", "")) if self.error else ""

    @property
    def ending(self) -> str:
        if self.stalled:
            return self.stalled
        if self.overdue_s is not None:
            return f"was still running {self.overdue_s:g} s after another process had finished"
        code = self.child.returncode
        if code is None:
            return "reported an error and did not end"
        if code < 0:
            why = f"; {oom_kills.ADVICE}" if self.out_of_memory else ""
            return f"was killed by {_signal_name(-code)}{why}"
        meaning = {
            ExitCode.RESTART: " (asks for a restart)",
            ExitCode.PREEMPTED: " (was asked to stop, and no step is lost)",
        }
        return f"exited with code {code}" + (meaning[ExitCode(code)] if code in _ORDERLY else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


@dataclass
class Attempt:
    """What has happened to the gang so far, and the policy that follows from it."""

    gang: Gang
    display: ProgressDisplay
    failure_grace_s: float
    stop_grace_s: float
    watchdog: Watchdog | None = None
    supervision: Supervision | None = None
    on_failure: Callable[[], None] | None = None  # hears of the first
    failures: dict[int, _Failure] = field(default_factory=dict)  # by process id, in order of time
    asked: signal.Signals | None = None  # to stop, before anything had failed
    signals: int = 0
    killed: list[Child] = field(default_factory=list)  # by us, for which they are not to blame
    deadline_s: float | None = None
    overdue: bool = False  # the deadline is for stragglers after others were done: missing it is a failure
    has_stepped: bool = False  # any of them has
    heard: set[int] = field(default_factory=set)  # those that have reported anything: they have begun
    abandoned: bool = False  # another attempt has taken its place
    next_orders_s: float = 0.0
    kills: int = field(default_factory=oom_kills.count)  # for want of memory, before this attempt

    def watch(self) -> None:
        """Returns when all processes have ended, or could not be killed."""
        while self.gang.running:
            self._handle(self.gang.poll(self._wait_s()))
            self._watch_over()
            if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
                if self.killed:
                    break
                self._kill()
        self._handle(self.gang.finish())
        stopped = [child.name for child in self.killed if child.index not in self.failures]
        if stopped and self.cause:
            self.display.print(f"stopped as a consequence: {', '.join(stopped)}")
        elif stopped:
            self.display.print(f"killed before all had stopped by themselves: {', '.join(stopped)}")
        if self.gang.running:
            names = ", ".join(f"{child.name} (pid {child.process.pid})" for child in self.gang.running)
            self.display.print(f"could not be killed: {names}")

    def _wait_s(self) -> float | None:
        waits_s = [] if self.deadline_s is None else [self.deadline_s - time.monotonic()]
        if self.watchdog and self.deadline_s is None:
            waits_s.append(min(self.watchdog.latest()[1], MAX_WAIT_S))
        if self.supervision:
            waits_s.append(ORDERS_INTERVAL_S)
        return min(waits_s, default=None)

    def _watch_over(self) -> None:
        """Ends a gang that is stuck, or that its supervisor wants to end."""
        if self.watchdog and self.deadline_s is None:
            worker, left_s = self.watchdog.latest()
            if left_s <= 0:
                self._on_stall(self.gang.children[worker], self.watchdog.reason(worker))
        if self.supervision and time.monotonic() >= self.next_orders_s:
            self.next_orders_s = time.monotonic() + ORDERS_INTERVAL_S
            orders = self.supervision.orders()
            if orders == "abandon" and not self.abandoned:
                self.abandoned = True
                self._kill()
            elif orders in ("stop", "grow") and not self.asked and not self.cause:
                why = "the job is cancelled" if orders == "stop" else "lost slices are back"
                self._ask_to_stop(signal.SIGTERM, why)
            for worker in self.supervision.gone():
                if self.gang.children[worker].returncode is None:
                    self.gang.children[worker].process.kill()

    def _on_stall(self, child: Child, reason: str) -> None:
        """The stacks go into the logs during the grace that follows a failure."""
        self.display.print(f"{child.name} {reason}: the stacks of all processes are in their output")
        self.gang.dump_stacks()
        self._on_failure(_Failure(child, stalled=reason))

    def _handle(self, happenings: Iterable[Happening]) -> None:
        for happening in happenings:
            match happening:
                case Lines(child, lines):
                    self._print_lines(child, lines)
                case Reported(child, event):
                    self._on_event(child, event)
                case Exited(child):
                    self._on_exit(child)
                case Asked(number):
                    self._on_signal(number)

    def _print_lines(self, child: Child, lines: Sequence[str]) -> None:
        shown = [child.prefix + line for line in map(without_gloo, lines) if line is not None]
        if shown:
            self.display.print("\n".join(shown))

    def _on_event(self, child: Child, event: dict[str, Any]) -> None:
        if self.watchdog:
            self.watchdog.saw(event, child.index)
        if self.supervision:
            self.supervision.saw(child.index, event)
            child.note(event)
        self.heard.add(child.index)
        self.has_stepped = self.has_stepped or event.get("event") in ("step", "progress")
        if event.get("event") == "error":
            self._on_failure(_Failure(child, error=event))
        elif child.index == 0:
            self.display(event)
        elif event.get("event") == "text":
            self._print_lines(child, str(event.get("text", "")).splitlines())

    def _on_exit(self, child: Child) -> None:
        if self.watchdog:
            self.watchdog.finished(child.index)
        if child.returncode == ExitCode.DONE:
            if self.deadline_s is None:
                self.deadline_s, self.overdue = time.monotonic() + DONE_GRACE_S, True
        elif child in self.killed or (self.asked and child.returncode == ExitCode.PREEMPTED):
            pass
        elif self.asked and child.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM):
            self._allow(self.failure_grace_s)  # it saved nothing, so the others cannot either
        elif child.index not in self.failures:  # else its report came first
            is_killed = child.returncode == -signal.SIGKILL
            self._on_failure(_Failure(child, out_of_memory=is_killed and oom_kills.count() > self.kills))

    def _on_failure(self, failure: _Failure) -> None:
        if failure.child.index in self.failures:
            return
        self.failures[failure.child.index] = failure
        assert self.cause is not None
        if failure is not self.cause:
            if failure.code == self.cause.code == ExitCode.PREEMPTED:
                return  # it took part in the save
            if not failure.message:
                self.display.print(f"{failure.child.name} {failure.ending} (a consequence)")
            elif failure.message != self.cause.message:
                self.display.print(f"{failure.child.name} (a consequence): {failure.message}")
            return
        if self.on_failure:
            self.on_failure()
        has_saved = failure.code == ExitCode.PREEMPTED and self.has_stepped
        self._allow(PREEMPTED_GRACE_S if has_saved else self.failure_grace_s)

    def _allow(self, grace_s: float) -> None:
        """All have this long to end, unless less was left."""
        deadline_s = time.monotonic() + grace_s
        if self.deadline_s is None or self.overdue or deadline_s < self.deadline_s:
            self.deadline_s, self.overdue = deadline_s, False

    def _on_signal(self, number: signal.Signals) -> None:
        self.signals += 1
        if self.signals > 1:  # the gang has killed them already, in the signal's handler
            self.killed = self.killed or self.gang.running
            self.deadline_s, self.overdue = time.monotonic() + KILL_WAIT_S, False
        if self.signals > 1 or self.cause:  # after a failure they are about to end anyway
            return
        self._ask_to_stop(number, number.name, "; a second signal kills them")

    def _ask_to_stop(self, number: signal.Signals, why: str, more: str = "") -> None:
        self.asked = number
        self.display.print(
            f"{why}: asking all processes to save and stop, for at most {self.stop_grace_s:g} s{more}."
        )
        self.gang.ask_to_stop()
        self._allow(self.stop_grace_s)

    def _kill(self) -> None:
        running = self.gang.running
        if self.overdue and running:
            self._on_failure(_Failure(running[0], overdue_s=DONE_GRACE_S))
        self.killed = running
        self.gang.kill()
        self.deadline_s = time.monotonic() + KILL_WAIT_S

    def _is_unbegun(self, child: Child) -> bool:
        """Whether it was asked to stop before it could listen: it has lost no step."""
        return bool(self.asked) and child.returncode == -signal.SIGTERM and child.index not in self.heard

    @property
    def cause(self) -> _Failure | None:
        return next(iter(self.failures.values()), None)

    def exit_code(self) -> int:
        """See run_local."""
        ended = {ExitCode.PREEMPTED if self._is_unbegun(c) else c.returncode for c in self.gang.children}
        if self.asked and not ended <= {ExitCode.DONE, ExitCode.PREEMPTED}:
            return 128 + self.asked
        if self.cause:
            return self.cause.code
        return ExitCode.PREEMPTED if ExitCode.PREEMPTED in ended else ExitCode.DONE

    def why(self) -> str:
        """The first failure in one line; empty when there was none."""
        cause = self.cause
        if cause is None:
            return ""
        return (
            f"{cause.child.name}: {cause.message}" if cause.message else f"{cause.child.name} {cause.ending}"
        )

    def print_cause(self) -> None:
        """The first failure, as the last thing on the terminal."""
        cause = self.cause
        if cause is None:
            return
        if cause.message:
            same = [failure for failure in self.failures.values() if failure.message == cause.message]
            where = "" if len(same) == len(self.gang.children) else f" on {cause.child.name}"
            self.display.print(f"error{where}: {cause.message}")
            return
        self.display.print(f"first failure: {cause.child.name} {cause.ending}")
        if cause.code in _ORDERLY:
            return
        tail = list(cause.child.output.tail)
        log = f" ({cause.child.log.path})" if cause.child.log.path else ""
        if tail:
            self.display.print(
                f"its last {len(tail)} lines{log}:\n" + "\n".join("  " + line for line in tail)
            )
        else:
            self.display.print(f"it printed nothing{log}")
