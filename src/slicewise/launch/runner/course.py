"""How a running command is watched: its output, the first failure, requests to stop, and the end."""

import asyncio
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from slicewise.errors import ExitCode, UserError
from slicewise.launch.output import Log
from slicewise.launch.runner.display import Display
from slicewise.launch.runner.fleet import Fleet
from slicewise.launch.runner.members import TRACEBACK, Member, State, failures, names

MAX_TRACEBACK_LINES = 200  # of one, with what its process still prints before it ends
KILL_S = 15.0  # for agents to report that killed processes have gone


class Course:
    """A Listener that applies the policy.

    After the first failure the others have a grace, then get SIGTERM, then SIGKILL. A signal to the runner is
    SIGTERM for all, with a longer grace; a second one is SIGKILL. Nothing waits without a bound.
    """

    def __init__(self, fleet: Fleet, display: Display, shown: frozenset[int] | None, folder: Path | None):
        """``shown``: indices of workers whose lines go to the terminal; None: all. Raises UserError."""
        self._fleet, self._display, self._shown = fleet, display, shown
        self._prefixed = shown is None or len(shown) > 1
        self._logs = _open_logs(fleet.members, folder)
        self._changed = asyncio.Event()
        self._told = ""  # what the workers were told last: "", "stop" or "kill"
        self._told_s: float | None = None
        self._deadline_s: float | None = None
        self.asked: signal.Signals | None = None

    # ---------------------------------------------------------------- Listener

    def on_output(self, member: Member, there_s: float, data: bytes) -> None:
        problem = self._logs[member.index].write(data)
        self._lines(member, there_s, member.output.feed(data) + ([problem] if problem else []))

    def _lines(self, member: Member, there_s: float, lines: Sequence[str]) -> None:
        if not lines:
            return
        for line in lines:
            member.lines_after_traceback += 1
            if line.startswith(TRACEBACK):
                member.traceback_there_s, member.lines_after_traceback = there_s, 0
        member.last_line = lines[-1]
        if self._shown is None or member.index in self._shown:
            place = member.worker
            prefix = f"s{place.slice_index}w{place.worker_index} | " if self._prefixed else ""
            self._display.say("\n".join(prefix + line for line in lines))

    def on_event(self, member: Member, there_s: float, data: bytes) -> None:
        for line in member.events.feed(data):
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if not isinstance(event, dict):
                continue
            if event.get("event") == "error":
                member.error, member.error_there_s = event, there_s
                self._failing(member, f"{member.name}: {event.get('message', '')}")
            elif member.index == 0:
                self._display.event(event)

    def on_change(self, member: Member) -> None:
        """It ended, by itself or because we said so."""
        self._lines(member, member.ended_there_s or 0.0, member.output.feed(b""))
        if member.lines_after_traceback > MAX_TRACEBACK_LINES:  # handled long ago
            member.traceback_there_s = None
        if member.state == State.FAILED and self._may_follow(member, member.first_sign_s):
            # what ends at our word is not to blame, and one that saved its state did what it was asked to
            member.state = State.DONE if member.code == ExitCode.PREEMPTED else State.STOPPED
        elif member.state in (State.FAILED, State.LOST):
            ended_s = (member.ended_there_s or 0.0) - member.clock.ahead_s
            member.stopped = self._may_follow(member, ended_s)
            if not member.error:
                self._failing(member, f"{member.name} {member.ending}")
        self._changed.set()

    def _may_follow(self, member: Member, seen_s: float) -> bool:
        """Whether what happened then may come of what we told it: where answers are slow, its clock is a guess."""
        return self._told_s is not None and seen_s >= self._told_s - member.clock.error_s

    def _failing(self, member: Member, line: str) -> None:
        if len(failures(self._fleet.members)) <= 1 or member.index == 0:
            self._display.say(line)
        if self._deadline_s is None:
            timing = self._fleet.timing  # the others take part in saving what a preempted one saved
            grace_s = timing.stop_grace_s if member.code == ExitCode.PREEMPTED else timing.failure_grace_s
            self._deadline_s = time.monotonic() + grace_s
            self._changed.set()

    # ---------------------------------------------------------------- policy

    def ask(self, number: signal.Signals) -> None:
        """The runner got a signal, or lost its terminal."""
        if self.asked or self._deadline_s is not None:
            self.asked = self.asked or number
            self._tell("kill")
        else:
            self.asked = number
            grace_s = self._fleet.timing.stop_grace_s
            self._display.say(
                f"{number.name}: asking all workers to save and stop, for at most {grace_s:g} s; "
                "a second signal kills them."
            )
            self._tell("stop")
        self._changed.set()

    def _tell(self, what: str) -> None:
        timing = self._fleet.timing
        self._told, self._told_s = what, self._told_s or time.time()
        self._fleet.signal(signal.SIGTERM if what == "stop" else 0)
        stop_s = timing.stop_grace_s if self.asked else timing.orphan_grace_s
        self._deadline_s = time.monotonic() + (stop_s if what == "stop" else KILL_S)

    async def watch(self) -> None:
        """Returns when every worker's command has ended, or has not been heard to end after it was killed."""
        while running := [member for member in self._fleet.members if not member.ended]:
            wait_s = None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                if self._told == "kill":
                    self._display.say(f"not heard to end after it was killed: {names(running)}")
                    for member in running:
                        member.state = State.STOPPED
                    break
                self._tell("kill" if self._told else "stop")
            self._changed.clear()
        for log in self._logs:
            log.close()


def _open_logs(members: Sequence[Member], folder: Path | None) -> list[Log]:
    """``slice0-worker0.log`` and so on. Raises UserError."""
    logs = []
    for member in members:
        place = member.worker
        path = folder / f"slice{place.slice_index}-worker{place.worker_index}.log" if folder else None
        try:
            logs.append(Log(path))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}.", code=ExitCode.INTERNAL) from error
        member.log_path = str(path or "")
    return logs
