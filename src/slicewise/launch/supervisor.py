"""Runs a job to its end: attempt after attempt, until it is done, hopeless, cancelled, or somebody else's.

``python -m slicewise.launch.supervisor JOBFOLDER`` is what 'slicewise job submit' leaves running.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from slicewise.errors import ExitCode, UserError
from slicewise.launch.job_folder import Claim, Ending, JobFolder, JobSpec, Superseded, continued
from slicewise.launch.policy import Fault, Stop, decide
from slicewise.launch.processes import STOP_SIGNALS
from slicewise.launch.storage import StorageError

PROGRESS_INTERVAL_S = 1.0  # between two notes of the newest step
CHECK_INTERVAL_S = 0.5  # of a cancellation, while waiting

RunAttempt = Callable[[Claim], Ending | None]


def holder() -> str:
    """A name for this process that no other has, also after a reboot."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


class Supervised:
    """Connects an attempt with the job's folder. A folder that cannot be reached for a while changes nothing."""

    def __init__(self, job: JobFolder, claim: Claim):
        self._job, self._claim = job, claim
        self._noted_s = float("-inf")

    def saw(self, worker: int, event: Mapping[str, Any]) -> None:
        if worker or event.get("event") != "step":
            return
        is_last = event.get("step") == event.get("steps")
        if not is_last and time.monotonic() - self._noted_s < PROGRESS_INTERVAL_S:
            return
        self._noted_s = time.monotonic()
        with contextlib.suppress(StorageError):
            self._job.report_progress(self._claim, event)

    def orders(self) -> Literal["", "stop", "grow", "abandon"]:
        try:
            if not self._job.is_current(self._claim):
                return "abandon"
            return "stop" if self._job.is_cancelled(self._claim.submission) else ""
        except StorageError:
            return ""

    def gone(self) -> Sequence[int]:
        return ()


def supervise(job: JobFolder, spec: JobSpec, run: RunAttempt, say: Callable[[str], None]) -> Ending:
    """Attempts until one is the last; how the job ended, which is written down as its result too.

    ``run`` returns None when a newer attempt took over. Raises Superseded then, and nothing is written.
    """
    me, previous = holder(), job.current()
    tally = continued(previous, spec.submission)
    reason = "the supervisor was started again" if previous and previous.submission == spec.submission else ""
    with stop_requests() as stop:
        while True:
            claim = job.claim(spec.submission, me, tally, reason, after=previous)
            say(f"attempt {claim.attempt}" + (f", after {reason}" if reason else ""))
            ending = _attempted(run, claim)
            job.end_attempt(ending)
            decision = decide(ending.fault, ending.code, claim.tally, spec.budgets)
            if isinstance(decision, Stop):
                return _finish(job, ending, decision, say)
            previous, tally, reason = claim, decision.tally, f"{ending.fault}: {ending.why}"
            if decision.delay_s:
                say(f"starts again in {decision.delay_s:g} s")
            if _cancelled_within(decision.delay_s, job, spec, stop):
                code = 128 + signal.SIGTERM
                ending = Ending(Fault.CANCELLED, code, "cancelled", claim.attempt, spec.submission)
                return _finish(job, ending, Stop(code, ""), say)


def _attempted(run: RunAttempt, claim: Claim) -> Ending:
    """Raises Superseded."""
    try:
        ending = run(claim)
    except UserError as error:
        fault = Fault.USER if error.code == ExitCode.USER else Fault.FAILURE
        return Ending(fault, error.code, str(error), claim.attempt, claim.submission)
    if ending is None:
        raise Superseded(f"attempt {claim.attempt} was taken over")
    return ending


def _finish(job: JobFolder, ending: Ending, stop: Stop, say: Callable[[str], None]) -> Ending:
    why = "; ".join(filter(None, [ending.why, stop.why]))
    result = Ending(ending.fault, stop.code, why, ending.attempt, ending.submission)
    job.finish(result)
    say(f"job {result.state}" + (f": {why}" if why else ""))
    return result


@contextlib.contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Set by SIGINT, SIGTERM and SIGHUP between attempts; during one they are the attempt's."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in handlers.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda *_: asked.set())
    try:
        yield asked
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cancelled_within(delay_s: float, job: JobFolder, spec: JobSpec, stop: threading.Event) -> bool:
    """Waits ``delay_s``, unless the job is cancelled or this process is asked to stop."""
    end_s = time.monotonic() + delay_s
    while True:
        with contextlib.suppress(StorageError):
            if job.is_cancelled(spec.submission):
                return True
        left_s = end_s - time.monotonic()
        if stop.wait(max(0.0, min(left_s, CHECK_INTERVAL_S))):
            return True
        if left_s <= 0:
            return False


def main(arguments: Sequence[str]) -> int:
    """Supervises the job in the folder ``arguments[0]``; the exit code of the job."""
    from rich.console import Console

    console = Console(width=200)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    try:
        job = JobFolder(arguments[0])
        return _supervise(job, job.spec(), console, say).code
    except Superseded as newer:
        say(f"{newer}: this supervisor stops")
        return ExitCode.DONE
    except UserError as error:
        say(f"slicewise: {error}")
        return error.code


def _supervise(job: JobFolder, spec: JobSpec, console: Any, say: Callable[[str], None]) -> Ending:
    if spec.target == "local":
        from slicewise.launch.targets import local

        return supervise(job, spec, lambda claim: local.run_attempt(job, spec, claim, console), say)
    if spec.target == "queued-resource":
        from slicewise.launch.targets.queued_resource import supervise_slices

        return supervise_slices(job, spec, say)
    raise UserError(f"{job.root}: a job on {spec.target} needs no supervisor, the platform restarts it.")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
