"""An agent where the platform restarts the gang (JobSet, Slurm): one attempt, fenced against earlier ones."""

import time

from slicewise.errors import ExitCode, UserError
from slicewise.launch.job_folder import Claim, Ending, JobFolder, JobSpec, Superseded, Tally
from slicewise.launch.place import Place
from slicewise.launch.policy import Fault, fault_of
from slicewise.launch.trainer import Trainer
from slicewise.launch.worker import name_of, platform_environment, poll_interval_s, run_trainer, say


def run_once(job: JobFolder, spec: JobSpec, place: Place, generation: int, coordinator: str) -> int:
    """Runs the trainer once; its exit code, which is what the platform goes by.

    ``generation``: how often the platform has restarted the gang. ``coordinator``: host:port of worker 0.
    A worker of an earlier generation stops as soon as a later one has begun, and ends with DONE.
    """
    holder, stale = f"{spec.submission}/{generation}", []
    try:
        claim = _claim(job, spec, place, holder, generation)
    except Superseded as newer:
        say(f"{newer}: this worker stops")
        return ExitCode.DONE

    def look(trainer: Trainer) -> None:
        if not job.is_current(claim):
            stale.append(True)
            trainer.end_within(0)
        elif job.is_cancelled(spec.submission) and trainer.asked is None:
            trainer.cancel(spec.watch.stop_grace_s)

    ended = run_trainer(job, spec, place, claim, platform_environment(spec, place, coordinator), look)
    if stale:
        say("a later attempt has begun: this worker stops")
        return ExitCode.DONE
    if name_of(spec, place) == spec.place(0):
        _write_down(job, spec, claim, ended.code, ended.message, cancelled=job.is_cancelled(spec.submission))
    return ended.code


def _claim(job: JobFolder, spec: JobSpec, place: Place, holder: str, generation: int) -> Claim:
    """The attempt of this generation: made by worker 0, waited for by the others."""
    leads, end_s = name_of(spec, place) == spec.place(0), time.monotonic() + spec.watch.start_timeout_s
    while True:
        current = job.current()
        if current and current.holder == holder:
            return current
        if current and current.submission == spec.submission and _generation(current) > generation:
            raise Superseded(f"restart {_generation(current)} of the gang has begun, this is {generation}")
        if leads:
            reason = f"restart {generation} by the platform" if generation else ""
            return job.claim(spec.submission, holder, Tally(preemptions=generation), reason, after=current)
        if time.monotonic() > end_s:
            raise UserError(
                f"worker 0 did not begin attempt {holder} within {spec.watch.start_timeout_s:g} s.",
                code=ExitCode.INTERNAL,
            )
        time.sleep(poll_interval_s(job))


def _generation(claim: Claim) -> int:
    _, _, text = claim.holder.partition("/")
    return int(text) if text.isdecimal() else -1


def _write_down(job: JobFolder, spec: JobSpec, claim: Claim, code: int, why: str, *, cancelled: bool) -> None:
    """Whether the job ends with this attempt is the platform's to decide, but for these."""
    fault = Fault.CANCELLED if cancelled and code != ExitCode.DONE else fault_of(code)
    ending = Ending(fault, code, why, claim.attempt, claim.submission)
    job.end_attempt(ending)
    if fault in (Fault.NONE, Fault.USER, Fault.CANCELLED):
        job.finish(ending)
