"""An agent where the platform restarts the gang (JobSet, Slurm): one attempt, fenced against earlier ones."""

import contextlib
import time

from slicewise.errors import ExitCode, UserError
from slicewise.launch.attempt import DONE_GRACE_S
from slicewise.launch.job_folder import (
    Claim,
    Ending,
    JobFolder,
    JobSpec,
    Report,
    Superseded,
    Tally,
    continued,
)
from slicewise.launch.leader import Ended, Verdict, judge
from slicewise.launch.place import Place
from slicewise.launch.policy import Fault, Restart, decide
from slicewise.launch.storage import StorageError
from slicewise.launch.trainer import Trainer
from slicewise.launch.worker import name_of, platform_environment, poll_interval_s, run_trainer, say

TOKEN = "once"  # of reports: the attempt's number says enough


def run_once(job: JobFolder, spec: JobSpec, place: Place, generation: int, coordinator: str) -> int:
    """Runs the trainer once; its exit code, which is what the platform goes by.

    ``generation``: how often the platform has restarted the gang. ``coordinator``: host:port of worker 0.
    A worker of an earlier generation stops as soon as a later one has begun, and ends with DONE. One that failed
    because of another ends with that one's code: the platform may see its end first.
    """
    try:
        claim = _claim(job, spec, place, generation)
    except Superseded as newer:
        say(f"{newer}: this worker stops")
        return ExitCode.DONE
    look = _Look(job, spec, claim)
    ended = run_trainer(job, spec, place, claim, platform_environment(spec, place, coordinator), look)
    if look.stale:
        say("a later attempt has begun: this worker stops")
        return ExitCode.DONE
    report = Ended(ended.code, ended.ended, ended.message, ended.asked, look.stopped)
    name = name_of(spec, place)
    with contextlib.suppress(StorageError):
        job.report(claim, Report(name, "ended", TOKEN), vars(report))
    code = ended.code if ended.code in _OWN else _cause(job, spec, claim, ended.code)
    if name == spec.place(0) and spec.target != "slurm":  # whose batch script concludes
        with contextlib.suppress(StorageError):
            _note_end(job, spec, claim, code)
    return code


_OWN = (ExitCode.DONE, ExitCode.USER, ExitCode.RESTART, ExitCode.PREEMPTED)


class _Look:
    def __init__(self, job: JobFolder, spec: JobSpec, claim: Claim):
        self._job, self._spec, self._claim = job, spec, claim
        self.stale = self.stopped = False

    def __call__(self, trainer: Trainer) -> None:
        """A failure anywhere ends the gang, as does a cancellation, or a later attempt."""
        if not self._job.is_current(self._claim):
            self.stale = True
            trainer.end_within(0)
        elif self._job.is_cancelled(self._spec.submission):
            trainer.cancel(self._spec.watch.stop_grace_s)
        elif not self.stopped and any(end.code for end in _ends(self._job, self._claim).values()):
            self.stopped = True
            trainer.end_within(self._spec.watch.failure_grace_s)


def _claim(job: JobFolder, spec: JobSpec, place: Place, generation: int) -> Claim:
    """The attempt of this generation: made by worker 0, waited for by the others."""
    holder = f"{spec.submission}/{generation}"
    leads, end_s = name_of(spec, place) == spec.place(0), time.monotonic() + spec.watch.start_timeout_s
    while True:
        current = job.current()
        if current and current.holder == holder:
            return current
        if current and current.submission == spec.submission and _generation(current) > generation:
            raise Superseded(f"restart {_generation(current)} of the gang has begun, this is {generation}")
        if leads:
            tally, reason = _tally(job, spec, current)
            return job.claim(spec.submission, holder, tally, reason, after=current)
        if time.monotonic() > end_s:
            raise UserError(
                f"worker 0 did not begin restart {generation} within {spec.watch.start_timeout_s:g} s.",
                code=ExitCode.INTERNAL,
            )
        time.sleep(poll_interval_s(job))


def _tally(job: JobFolder, spec: JobSpec, current: Claim | None) -> tuple[Tally, str]:
    """What has been used of the budgets, and why there is another attempt."""
    if current is None or current.submission != spec.submission:
        return continued(current, spec.submission), ""
    ending = job.attempt_ending(current.attempt)
    fault, code = (ending.fault, ending.code) if ending else (Fault.PREEMPTION, ExitCode.PREEMPTED)
    decision = decide(fault, code, current.tally, spec.budgets)
    tally = decision.tally if isinstance(decision, Restart) else current.tally
    return tally, f"{fault}: {ending.why}" if ending else "the platform took the gang"


def _generation(claim: Claim) -> int:
    _, _, text = claim.holder.partition("/")
    return int(text) if text.isdecimal() else -1


def _ends(job: JobFolder, claim: Claim) -> dict[str, Ended]:
    found = (report for report in job.reports(claim) if report.kind == "ended")
    return {report.place: Ended.from_json(job.reported(claim, report)) for report in found}


def _cause(job: JobFolder, spec: JobSpec, claim: Claim, code: int) -> int:
    """The code of a worker whose end explains a failure here, once it has reported; else ``code``."""
    end_s = time.monotonic() + spec.watch.failure_grace_s + 2 * poll_interval_s(job)
    while True:
        ends: dict[str, Ended] = {}
        with contextlib.suppress(StorageError):
            ends = _ends(job, claim)
            for place, end in sorted(ends.items(), key=lambda item: item[1].ended):
                if end.code in (ExitCode.USER, ExitCode.RESTART, ExitCode.PREEMPTED):
                    say(f"a consequence of {place}: {end.message}")
                    return end.code
        if len(ends) == spec.workers or time.monotonic() >= end_s:
            return code
        time.sleep(poll_interval_s(job))


def _note_end(job: JobFolder, spec: JobSpec, claim: Claim, code: int) -> None:
    """Whether the job ends with this attempt is the platform's to decide, but for these."""
    end_s = time.monotonic() + (DONE_GRACE_S if code == ExitCode.DONE else 0.0)
    while len(ended := _ends(job, claim)) < spec.workers and time.monotonic() < end_s:
        time.sleep(poll_interval_s(job))
    if code == ExitCode.DONE and len(ended) < spec.workers:
        return
    verdict = judge(ended, [])
    cancelled = job.is_cancelled(spec.submission) and verdict.fault != Fault.NONE
    fault = Fault.CANCELLED if cancelled else verdict.fault
    ending = Ending(fault, verdict.code, verdict.why, claim.attempt, claim.submission)
    job.end_attempt(ending)
    if fault in (Fault.NONE, Fault.USER, Fault.CANCELLED):
        job.finish(ending)


def conclude(job: JobFolder, spec: JobSpec, generation: int) -> str:
    """What the batch script of Slurm does after the gang has ended: "again S", "requeue 0" or "end CODE"."""
    claim = job.current()
    if claim is None or claim.holder != f"{spec.submission}/{generation}":
        return f"end {int(ExitCode.INTERNAL)}"
    ended = _ends(job, claim)
    lost = [place for worker in range(spec.workers) if (place := spec.place(worker)) not in ended]
    verdict = judge(ended, lost)
    if job.is_cancelled(spec.submission) and verdict.fault != Fault.NONE:
        verdict = Verdict(Fault.CANCELLED, ExitCode.PREEMPTED, "cancelled")
    ending = Ending(verdict.fault, verdict.code, verdict.why, claim.attempt, claim.submission)
    job.end_attempt(ending)
    decision = decide(verdict.fault, verdict.code, claim.tally, spec.budgets)
    if isinstance(decision, Restart):
        taken = verdict.fault == Fault.PREEMPTION
        return "requeue 0" if taken else f"again {decision.delay_s:g}"
    why = "; ".join(filter(None, [verdict.why, decision.why]))
    job.finish(Ending(verdict.fault, decision.code, why, claim.attempt, claim.submission))
    return f"end {int(decision.code)}"
