"""Agents that restart their gang themselves. They meet in the job's folder only, so any may vanish at any moment.

The agent of host 0 of slice 0 leads: it claims an attempt, waits until every place has an agent, says go, watches
for the first failure, and judges the end. An agent holds its place until another one takes it: the last to start
has it. One that has lost its place, or sees a newer attempt than its own, is stale and stops its trainer.
"""

import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slicewise.errors import ExitCode
from slicewise.launch.attempt import DONE_GRACE_S
from slicewise.launch.elastic import chosen
from slicewise.launch.environment import coordinator_port
from slicewise.launch.job_folder import Claim, Ending, JobFolder, JobSpec, Report, Superseded, continued
from slicewise.launch.leader import Ended, Verdict, judge
from slicewise.launch.place import Place
from slicewise.launch.policy import Fault, Stop, decide
from slicewise.launch.storage import StorageError
from slicewise.launch.trainer import Trainer
from slicewise.launch.worker import (
    gang_environment,
    gang_workers,
    name_of,
    poll_interval_s,
    run_trainer,
    say,
    slices_of,
)

REPORT_WAIT_S = 10.0  # for the reports of others, after all must have ended: who is silent is lost
LEASE_S = 300.0  # a worker that cannot reach the folder for so long may be stale without knowing it
RETURN_WAIT_S = 5.0  # for slices that the last attempt did without, in case they are just coming back
WAITING_NOTE_S = 30.0  # between two lines that say who is waited for


class Over(Exception):
    """The job has ended, with this exit code."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Overtaken(Exception):
    """An attempt that this leader did not claim has begun, though the place is its own: it has to lead anew."""


def run_in_gang(job: JobFolder, spec: JobSpec, place: Place) -> int:
    """Attempts until the job has ended; its exit code, or DONE for an agent that is no longer wanted."""
    try:
        return _agent(job, spec, place).run()
    except Over as over:
        return over.code
    except Superseded as newer:
        say(f"{newer}: the agent of {name_of(spec, place)} stops")
        return ExitCode.DONE


def _agent(job: JobFolder, spec: JobSpec, place: Place) -> "Agent":
    if place == Place(0, 0, place.address):
        return Leader(job, spec, place)
    if spec.elastic_sizes and place.host == 0:
        from slicewise.launch.deputy import Deputy

        return Deputy(job, spec, place)
    return Agent(job, spec, place)


class Agent:
    """Of a worker that does not lead."""

    def __init__(self, job: JobFolder, spec: JobSpec, place: Place):
        self.job, self.spec, self.place = job, spec, place
        self.name, self.token = name_of(spec, place), secrets.token_hex(6)
        self.poll_s = poll_interval_s(job)
        self.reached_s = time.monotonic()

    def run(self) -> int:
        note = {"token": self.token, "time": time.time()}
        self.patiently(self.job.take_place, self.name, note)
        self.patiently(self.check)
        claim: Claim | None = None
        while True:
            claim = self.next_claim(claim)
            self.report(claim, "ready", {"address": self.place.address})
            try:
                go = self.wait_for_go(claim)
                if go is not None:
                    self.attempt(claim, go)
            except Overtaken:
                claim = None

    # ------------------------------------------------------------ waiting

    def patiently[T](self, action: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """``action(...)``, tried until the storage answers."""
        told = False
        while True:
            try:
                result = action(*arguments, **named)
                self.reached_s = time.monotonic()
                return result
            except StorageError as error:
                if not told:
                    say(f"{error} Trying again.")
                told = True
                time.sleep(self.poll_s)

    def check(self) -> None:
        """Raises Over when the job has ended, Superseded when another agent has this place."""
        self.job.check_place(self.name, self.token)
        if result := self.job.result(self.spec.submission):
            raise Over(result.code)

    def pause(self) -> None:
        """Between two looks while no trainer runs."""
        time.sleep(self.poll_s)
        self.patiently(self.check)

    def next_claim(self, previous: Claim | None) -> Claim:
        """The newest attempt, once it is another one than ``previous``."""
        while True:
            if claim := self.newer_claim(previous):
                return claim
            self.pause()

    def newer_claim(self, previous: Claim | None) -> Claim | None:
        """The attempt after ``previous``, or the newest there is, if any."""
        read = (lambda: self.job.next_claim(previous)) if previous else self.job.current
        claim = self.patiently(read)
        if claim and claim.submission == self.spec.submission:
            return claim
        if claim and self.patiently(self.job.spec).submission != self.spec.submission:
            raise Superseded("the run was submitted again")
        return None

    def wait_for_go(self, claim: Claim) -> dict[str, Any] | None:
        """What the leader says about the gang; None when this attempt goes on, or ends, without this agent."""
        while True:
            go = self.patiently(self.job.phase, claim)
            if go["phase"] == "run" and go["tokens"].get(self.name) == self.token:
                return go
            if not self.patiently(self.job.is_current, claim) or self.gives_up():
                return None
            self.pause()

    def gives_up(self) -> bool:
        """Whether to wait no longer for whoever leads."""
        return False

    # ------------------------------------------------------------ one attempt

    def report(self, claim: Claim, kind: str, document: dict[str, Any]) -> None:
        report = Report(self.name, kind, self.token)
        self.patiently(self.job.report, claim, report, document)

    def attempt(self, claim: Claim, go: Mapping[str, Any]) -> Ended:
        say(f"attempt {claim.attempt} begins")
        state = Look()
        environment = gang_environment(self.spec, self.place, go["addresses"], go["port"])
        ended = run_trainer(
            self.job, self.spec, self.place, claim, environment, lambda t: self._look(claim, go, t, state)
        )
        if state.superseded:
            raise Superseded(state.superseded)
        if state.overtaken and isinstance(self, Leader):
            raise Overtaken
        ended = replace(ended, stopped=state.stopped)
        self.report(claim, "ended", vars(ended))
        if ended.asked:  # the machine is about to go
            raise Over(ended.code)
        return ended

    def _look(self, claim: Claim, go: Mapping[str, Any], trainer: Trainer, state: "Look") -> None:
        try:
            if trainer.asked and not state.told:
                state.told = True
                self.job.report(claim, Report(self.name, "asked", self.token), {})
            self._fence(claim, trainer, state)
            self.look(claim, go, trainer, state)
            self.reached_s = time.monotonic()
        except StorageError as error:
            if time.monotonic() - self.reached_s > LEASE_S and not state.stopped:
                say(f"{error} No contact for {LEASE_S:g} s: this worker may be replaced by now, and stops.")
                state.stopped = True
                trainer.end_within(0)

    def _fence(self, claim: Claim, trainer: Trainer, state: "Look") -> None:
        """A stale trainer must not go on writing."""
        try:
            self.job.check_place(self.name, self.token)
            state.overtaken = not self.job.is_current(claim)
            state.stopped = state.stopped or state.overtaken
        except Superseded as newer:
            state.superseded = str(newer)
        if state.superseded or state.overtaken:
            trainer.end_within(0)

    def look(self, claim: Claim, go: Mapping[str, Any], trainer: Trainer, state: "Look") -> None:
        """What the leader wants."""
        phase = self.job.phase(claim)
        if phase["phase"] == "over" and not state.stopped and trainer.asked is None:
            state.stopped = True
            _end(trainer, phase)


class Look:
    """What an agent has seen and done during an attempt."""

    def __init__(self) -> None:
        self.stopped = False  # the trainer has to end because of others
        self.overtaken = False  # a newer attempt has begun
        self.told = False  # the leader, that the platform asked to stop
        self.superseded = ""


def _end(trainer: Trainer, phase: Mapping[str, Any]) -> None:
    if phase.get("signal"):
        trainer.stop(float(phase.get("grace_s", 0)))
    else:
        trainer.end_within(float(phase.get("grace_s", 0)))


class Leader(Agent):
    """Of worker 0. All that decides is written by it, into the folder of an attempt that only it claimed."""

    def __init__(self, job: JobFolder, spec: JobSpec, place: Place):
        super().__init__(job, spec, place)
        self.over_by_s: float | None = None  # when all must have reported, once the attempt is over
        self.cancelled = False
        self.saved = False  # every trainer of the attempt has ended by saving
        self.grows = False  # the attempt ends because lost slices are back
        self.without: set[str] = set()  # places that the last attempt had to do without
        self.beats = 0

    @property
    def predecessor(self) -> str:
        """Who led before this agent did."""
        return self.name

    def beat(self) -> None:
        """A sign of life for deputies, of which there are some in elastic jobs."""
        if self.spec.elastic_sizes:
            self.beats += 1
            self.job.set_beat({"token": self.token, "beat": self.beats})

    def pause(self) -> None:
        super().pause()
        self.patiently(self.beat)
        if self.patiently(self.job.is_cancelled, self.spec.submission):
            self.finish(Verdict(Fault.CANCELLED, 128 + signal.SIGTERM, "cancelled"), None)

    def next_claim(self, previous: Claim | None) -> Claim:
        """Claims the attempt after ``previous``; after a start of this agent, after whatever there is."""
        self.over_by_s = None
        while True:
            current = previous or self.patiently(self.job.current)
            try:
                return self.patiently(self._claim_after, current)
            except Superseded:  # by a stale leader that woke up for a moment, unless it is us who are stale
                self.patiently(self.check)
                previous = None

    def _claim_after(self, current: Claim | None) -> Claim:
        submission, tally, reason = self.spec.submission, continued(current, self.spec.submission), ""
        if current and current.submission == submission:
            ending = self.job.attempt_ending(current.attempt)
            if ending is None:  # its leader did not live to write it down
                why = self._why_lost(current)
                ending = Ending(Fault.PREEMPTION, ExitCode.PREEMPTED, why, current.attempt, submission)
                self.job.end_attempt(ending)
            decision = decide(ending.fault, ending.code, current.tally, self.spec.budgets)
            if isinstance(decision, Stop):
                verdict = Verdict(ending.fault, decision.code, ending.why)
                raise self.finished(verdict, current, decision.why)
            tally, reason = decision.tally, f"{ending.fault}: {ending.why}"
            self._wait_s(decision.delay_s)
        self.check()
        claim = self.job.claim(submission, self.token, tally, reason, after=current)
        say(f"attempt {claim.attempt}" + (f", after {reason}" if reason else ""))
        return claim

    def _why_lost(self, claim: Claim) -> str:
        """Why the leader of ``claim`` did not see its end: in the words of the supervisor, which sees the slices."""
        noted = self.job.slices()
        if noted.get("lost_at", 0.0) >= claim.started:
            return str(noted["lost"])
        others = " as all machines are when a slice is replaced" if self.spec.slices > 1 else ""
        return f"{self.predecessor} was lost, or restarted{others}"

    def _wait_s(self, delay_s: float) -> None:
        end_s = time.monotonic() + delay_s
        while time.monotonic() < end_s:
            self.pause()

    def wait_for_go(self, claim: Claim) -> dict[str, Any] | None:
        """Waits for an agent at every place, or in an elastic job for enough of them, and says go."""
        began_s = told_s = time.monotonic()
        places = {self.spec.place(worker) for worker in range(self.spec.workers)}
        while True:
            ready = [r for r in self.patiently(self.job.reports, claim) if r.kind == "ready"]
            absent = places - {r.place for r in ready}
            if slices := self._enough(absent, time.monotonic() - began_s):
                self.without = absent
                go = self.patiently(self._go, claim, [r for r in ready if _slice_of(r.place) in slices])
                self.patiently(self.job.set_phase, claim, "run", **go)
                return go
            if time.monotonic() - told_s > WAITING_NOTE_S:
                told_s = time.monotonic()
                say(f"waiting for {len(absent)} workers: {', '.join(sorted(absent)[:8])}")
            if not self.patiently(self.job.is_current, claim):
                raise Overtaken
            self.pause()

    def _enough(self, absent: set[str], waited_s: float) -> tuple[int, ...]:
        """The slices to begin with; none yet while it is worth waiting for more."""
        everything = tuple(range(self.spec.slices))
        if not absent:
            return everything
        wait_s = self.spec.watch.replacement_wait_s
        if absent <= self.without:  # they have been waited for before
            wait_s = min(wait_s, RETURN_WAIT_S)
        if not self.spec.elastic_sizes or waited_s < wait_s:
            return ()
        return chosen(self.spec, set(everything) - {_slice_of(place) for place in absent})

    def _go(self, claim: Claim, ready: list[Report]) -> dict[str, Any]:
        """Who takes part, where each is, and the port of JAX's coordinator. Of two at a place its holder counts."""
        chosen: dict[str, Report] = {}
        for report in ready:
            if report.place in chosen:
                holder = self.job.place_holder(report.place) or {}
                if holder.get("token") != report.token:
                    continue
            chosen[report.place] = report
        addresses = {
            place: str(self.job.reported(claim, report).get("address", ""))
            for place, report in chosen.items()
        }
        return {
            "tokens": {place: report.token for place, report in chosen.items()},
            "addresses": addresses,
            "port": coordinator_port(gang_workers(self.spec, addresses)),
        }

    def attempt(self, claim: Claim, go: Mapping[str, Any]) -> Ended:
        try:
            own = super().attempt(claim, go)
        except Over as over:  # asked to stop by the platform, as the machine of the leader goes
            self._end_all(claim, self.spec.watch.failure_grace_s, signalled=True)
            raise over
        if own.code != ExitCode.DONE:
            self._end_all(claim, self.spec.watch.failure_grace_s)
        verdict = self._judge(claim, go)
        if self.grows and verdict.fault not in (Fault.NONE, Fault.USER):
            verdict = Verdict(Fault.RESTART, ExitCode.RESTART, "lost slices are back")
        self.grows = False
        if self.cancelled and verdict.fault != Fault.NONE:
            code = ExitCode.PREEMPTED if self.saved else 128 + signal.SIGTERM
            verdict = Verdict(Fault.CANCELLED, code, "cancelled")
        ending = Ending(verdict.fault, verdict.code, verdict.why, claim.attempt, claim.submission)
        self.patiently(self.job.end_attempt, ending)
        return own

    def look(self, claim: Claim, go: Mapping[str, Any], trainer: Trainer, state: Look) -> None:
        """Ends the attempt everywhere once it has failed anywhere, or is to be stopped."""
        self.beat()
        if self.over_by_s is None:
            self._watch(claim, go, self.job.reports(claim), own_asked=trainer.asked is not None)
        if self.over_by_s is not None and not state.stopped and trainer.asked is None:
            state.stopped = True
            _end(trainer, self.job.phase(claim))

    def _watch(
        self, claim: Claim, go: Mapping[str, Any], reports: list[Report], *, own_asked: bool = False
    ) -> None:
        if not self.cancelled and self.job.is_cancelled(self.spec.submission):
            self.cancelled = True
        if self.cancelled or own_asked or any(r.kind == "asked" for r in reports):
            self._end_all(claim, self.spec.watch.stop_grace_s, signalled=True)
            return
        ended = self._ended(claim, go, reports)
        if _lost(reports, go) or any(end.code != ExitCode.DONE for end in ended.values()):
            self._end_all(claim, self.spec.watch.failure_grace_s)
        elif not ended and self._may_grow(reports, go):
            self.grows = True
            self._end_all(claim, self.spec.watch.stop_grace_s, signalled=True)

    def _may_grow(self, reports: list[Report], go: Mapping[str, Any]) -> bool:
        """Whether slices that are back would make a larger gang."""
        ready = {r.place for r in reports if r.kind == "ready"}
        now, could = slices_of(self.spec, go["tokens"]), chosen(self.spec, slices_of(self.spec, ready))
        return len(could) > len(now)

    def _end_all(self, claim: Claim, grace_s: float, *, signalled: bool = False) -> None:
        if self.over_by_s is None:
            self.patiently(self.job.set_phase, claim, "over", grace_s=grace_s, signal=signalled)
            self.over_by_s = time.monotonic() + grace_s + REPORT_WAIT_S

    def _ended(self, claim: Claim, go: Mapping[str, Any], reports: list[Report]) -> dict[str, Ended]:
        return {
            report.place: Ended.from_json(self.job.reported(claim, report))
            for report in reports
            if report.kind == "ended" and go["tokens"].get(report.place) == report.token
        }

    def _judge(self, claim: Claim, go: Mapping[str, Any]) -> Verdict:
        """After this worker's trainer has ended: waits for the reports of the others."""
        done_by_s = time.monotonic() + DONE_GRACE_S
        while True:
            reports = self.patiently(self.job.reports, claim)
            ended = self.patiently(self._ended, claim, go, reports)
            lost = {*_lost(reports, go)}
            silent = {*go["tokens"]} - {*ended} - lost
            if not silent or (self.over_by_s is not None and time.monotonic() > self.over_by_s):
                codes = {end.code for end in ended.values()}
                self.saved = not lost | silent and codes <= {ExitCode.DONE, ExitCode.PREEMPTED}
                return judge(ended, sorted(lost | silent))
            if time.monotonic() > done_by_s:
                self._end_all(claim, 0.0)
            self.patiently(self._watch, claim, go, reports)
            self.patiently(self.beat)
            Agent.pause(self)

    def finish(self, verdict: Verdict, claim: Claim | None) -> None:
        raise self.finished(verdict, claim)

    def finished(self, verdict: Verdict, claim: Claim | None, more: str = "") -> Over:
        """Writes down how the job ended."""
        why = "; ".join(filter(None, [verdict.why, more]))
        attempt = claim.attempt if claim else 0
        result = Ending(verdict.fault, verdict.code, why, attempt, self.spec.submission)
        self.patiently(self.job.finish, result)
        say(f"job {result.state}" + (f": {why}" if why else ""))
        return Over(result.code)


def _lost(reports: list[Report], go: Mapping[str, Any]) -> list[str]:
    """Places where another agent has come since: their machine was replaced or started again."""
    return [r.place for r in reports if r.kind == "ready" and go["tokens"].get(r.place, r.token) != r.token]


def _slice_of(place: str) -> int:
    return int(place.removeprefix("s").partition("h")[0])
