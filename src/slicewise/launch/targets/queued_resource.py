"""A job on a queued resource: agents on its VMs run the gang, and a supervisor elsewhere keeps slices under it.

Slices that are repaired come back by themselves, and their startup script starts the agent again. A queued resource
that is SUSPENDED or FAILED never gets slices again: it is deleted and asked for anew, under the same name.
"""

import contextlib
import secrets
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import slicewise
from slicewise.errors import ExitCode, UserError
from slicewise.launch import queued_resources as qr
from slicewise.launch.job_folder import Ending, JobFolder, JobSpec
from slicewise.launch.policy import Fault
from slicewise.launch.storage import StorageError, read_json, write_json

REQUEST = "request.json"
SUPERVISOR = "supervisor"  # its place in the roster
POLL_S, EMULATOR_POLL_S = 10.0, 0.5
MAX_DELAY_S = 300.0  # between two requests for slices that are not given
CANCEL_WAIT_S = 60.0  # for agents to end their trainers and say so, beyond what a trainer may take to save
# google.rpc.Code of an error that the same request would meet again
HOPELESS = {3, 5, 6, 7, 9, 11, 12, 16}
PASSING = (
    ExitCode.INTERNAL,
    ExitCode.UNAVAILABLE,
    ExitCode.RATE_LIMITED,
    ExitCode.CONFLICT,
    ExitCode.TIMEOUT,
)
PYTHON_VERSION = "3.12"
IDLE_MARGIN_S = 300.0  # beyond what agents wait before they act, after which they cannot be there any more
# states of a node whose machines are gone, or new: the API shows them while a slice is replaced
LOST_STATES = ("PREEMPTED", "TERMINATED", "REPAIRING", "STOPPED", "DELETING", "CREATING")
MAX_RESETS = 2  # in a row without any progress; then the slices are asked for anew


@dataclass(frozen=True)
class Slices:
    """What to ask for, and where; kept beside the job so that any supervisor can ask again."""

    request: qr.Request
    project: str = ""
    zone: str = ""
    emulator: str = ""  # its state directory; empty for Google Cloud

    def connect(self, say: Callable[[str], None]) -> qr.Client:
        if self.emulator:
            return qr.connect(qr.emulator_target(Path(self.emulator)), say=say)
        return qr.connect(qr.cloud_target(self.project, self.zone), say=say)


def write_slices(job: JobFolder, slices: Slices) -> None:
    write_json(job.folder, REQUEST, asdict(slices))


def read_slices(job: JobFolder) -> Slices:
    """Raises StorageError when what is there cannot be read."""
    document = read_json(job.folder, REQUEST)
    try:
        assert document is not None
        request = document.pop("request")
        return Slices(qr.Request(**{**request, "tags": tuple(request["tags"])}), **document)
    except (AssertionError, KeyError, TypeError, UserError) as error:
        raise StorageError(f"{job.root}/{REQUEST} is absent or damaged: submit the job again.") from error


def refuse_existing(slices: Slices) -> None:
    """Raises UserError when there is a queued resource of that name: it is not this job's."""
    client = slices.connect(lambda line: None)
    try:
        found = qr.get(client, slices.request.name)
    except UserError as error:
        if error.code == ExitCode.NOT_FOUND:
            return
        raise
    raise UserError(
        f"a queued resource {slices.request.name} exists, and is {found.state.state.name}: delete it, or choose"
        " another --name.",
        code=ExitCode.CONFLICT,
    )


def startup_script(job_root: str, submission: str, *, python: str = "", package: str = "") -> str:
    """Starts the agent of a VM, which finds out by itself which worker it is. Holds no secrets.

    python: an interpreter that has slicewise; without one, ``package`` is installed for one, once a VM.
    An agent that dies of a defect is started again; how a job ends is not a defect.
    """
    package = package or f"slicewise[tpu,job]=={slicewise.__version__}"
    lines = ["#!/bin/bash", "# Starts the agent of a slicewise job.", 'export HOME="${HOME:-/root}"']
    if python:
        lines += [f"PYTHON={shlex.quote(python)}"]
    else:
        lines += [
            "PYTHON=/opt/slicewise/bin/python",
            f"PACKAGE={shlex.quote(package)}",
            "for try in 1 2 3 4 5; do",
            '  "$PYTHON" -c "import slicewise.launch.agent" 2>/dev/null && break',
            "  python3 -m pip install --quiet --upgrade uv",
            f"  python3 -m uv venv --quiet --allow-existing --python {PYTHON_VERSION} /opt/slicewise",
            '  python3 -m uv pip install --quiet --python "$PYTHON" "$PACKAGE" || sleep 20',
            "done",
        ]
    agent = f'"$PYTHON" -m slicewise.launch.agent --job {shlex.quote(job_root)} --submission {submission}'
    stopped = 128 + signal.SIGTERM
    lines += [
        "for try in 1 2 3 4 5; do",
        f"  {agent}",
        "  code=$?",
        f"  if [ $code != {ExitCode.INTERNAL} ] && [ $code -lt 128 ] || [ $code = {stopped} ]; then break; fi",
        "  sleep 10",
        "done",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def supervise_slices(job: JobFolder, spec: JobSpec, say: Callable[[str], None]) -> Ending:
    """Keeps slices under the job until it has ended, then gives them back; how it ended.

    Raises Superseded when another supervisor has taken over: nothing is given back then.
    """
    slices = read_slices(job)
    supervisor = _Supervisor(job, spec, slices, slices.connect(say), say)
    ending = supervisor.run()
    supervisor.give_back()
    return ending


class _Supervisor:
    def __init__(
        self, job: JobFolder, spec: JobSpec, slices: Slices, client: qr.Client, say: Callable[[str], None]
    ):
        self.job, self.spec, self.slices, self.client, self.say = job, spec, slices, client, say
        self.name = slices.request.name
        self.poll_s = EMULATOR_POLL_S if slices.emulator else POLL_S
        self.token = secrets.token_hex(6)
        self.state = ""
        self.was_active = False
        self.lost: set[str] = set()  # slices that the API shows as lost, and not yet replaced
        self.asked_again = 0  # times, for new slices, and of these in a row without getting any:
        self.in_vain = 0
        self.cancelled_s: float | None = None
        self.seen: tuple[Any, ...] = ()  # signs of life of the gang, and since when there is no new one:
        self.seen_s = time.monotonic()
        self.resets = 0

    def run(self) -> Ending:
        self.job.take_place(SUPERVISOR, {"token": self.token, "time": time.time()})
        while True:
            try:
                if ending := self._look():
                    return ending
            except qr.EmulatorGone as gone:
                return self._finish(Fault.FAILURE, gone.code, str(gone))
            except UserError as error:  # of the API or the folder
                if error.code not in PASSING:
                    return self._finish(Fault.USER, error.code, str(error))
                self.say(str(error))
            time.sleep(self.poll_s)

    def give_back(self) -> None:
        """Deletes the queued resource. A problem is told, and 'slicewise qr gc' takes what is left."""
        try:
            qr.delete(self.client, self.name, force=True)
            qr.wait_until_gone(self.client, self.name, timeout_s=600)
            self.say(f"{self.name}: deleted")
        except UserError as error:
            if error.code != ExitCode.NOT_FOUND and not isinstance(error, qr.EmulatorGone):
                self.say(f"{self.name} is not deleted: {error}")
                return
        # So that nobody takes the last state that was seen for the present.
        with contextlib.suppress(StorageError):
            self.job.note_slices(state="deleted")

    def _look(self) -> Ending | None:
        """One look at the job and its slices, and what follows. An ending when the job is over."""
        self.job.check_place(SUPERVISOR, self.token)
        if result := self.job.result(self.spec.submission):
            return result
        if self.job.is_cancelled(self.spec.submission) and (ending := self._cancel()):
            return ending
        found = self._find()
        if found is None:
            return None if self.cancelled_s else self._ask()
        self._note(found)
        if self.state == "ACTIVE":
            self.was_active, self.in_vain = True, 0
        if self.state == "FAILED" and found.state.failed_data.error.code in HOPELESS:
            return self._finish(Fault.USER, ExitCode.NO_SLICES, (qr.advice(found) or "").split("\n")[0])
        if self.state in ("SUSPENDED", "FAILED") and not self.cancelled_s:
            return self._replace(found)
        looked_s = time.monotonic()
        if self.state == "ACTIVE" and self._is_idle():
            return self._wake(found)
        if self.was_active and self.seen_s < looked_s:  # a gang that makes progress has lost nothing
            self._note_losses()
        self.seen_s = time.monotonic() if self.state != "ACTIVE" else self.seen_s
        return None

    def _is_idle(self) -> bool:
        """Whether agents that look after everything else have themselves shown no sign of life for too long."""
        claim = self.job.current()
        signs: tuple[Any, ...] = ()
        if claim:
            signs = (
                claim.attempt,
                self.job.phase(claim)["phase"],
                (self.job.progress(claim.attempt) or {}).get("step"),
            )
        if signs != self.seen:
            self.resets = 0 if len(signs) > 2 and signs[2] else self.resets
            self.seen, self.seen_s = signs, time.monotonic()
        watch = self.spec.watch
        limit_s = max(watch.start_timeout_s, watch.stall_timeout_s) + IDLE_MARGIN_S
        return time.monotonic() - self.seen_s > limit_s

    def _wake(self, found: Any) -> Ending | None:
        """A frozen host, or one without its agent: restarting all machines starts all agents."""
        self.say(f"{self.name}: no sign of life for {time.monotonic() - self.seen_s:.0f} s")
        self.seen_s = time.monotonic()
        if self.resets >= MAX_RESETS:
            self.resets = 0
            return self._replace(found)
        self.resets += 1
        qr.reset(self.client, self.name)
        self._tell("no sign of life, so all its machines are restarted")
        return None

    def _find(self) -> Any:
        """The queued resource; None when there is none."""
        try:
            return qr.get(self.client, self.name)
        except UserError as error:
            if error.code == ExitCode.NOT_FOUND:
                return None
            raise

    def _note(self, found: Any) -> None:
        if found.state.state.name != self.state:
            self.state = found.state.state.name
            self.say(f"{self.name}: {self.state}")
            with contextlib.suppress(StorageError):
                self.job.note_slices(state=self.state)

    def _note_losses(self) -> None:
        """All slices restart when one is replaced, so agents cannot know which one was lost: the API does."""
        try:
            found = qr.nodes(self.client, self.name)
        except UserError as error:
            if error.code == ExitCode.NOT_FOUND:  # deleted this moment
                return
            raise
        shown = {node.name.rsplit("/", 1)[1]: node.state.name for node in found}
        lost = {name: state for name, state in shown.items() if state in LOST_STATES}
        if new := lost.keys() - self.lost:
            names, states = sorted(new), sorted({lost[name] for name in new} - {"CREATING"})
            why = f"slice{'s' * (len(names) > 1)} {', '.join(names[:8])}"
            why += f" and {len(names) - 8} more" if len(names) > 8 else ""
            why += f" lost ({', '.join(states)})" if states else " replaced"
            self._tell(why)
        self.lost = set(lost)

    def _tell(self, lost: str) -> None:
        """Agents that start again find here why they had to."""
        self.say(f"{self.name}: {lost}")
        with contextlib.suppress(StorageError):
            self.job.note_slices(lost=lost, lost_at=time.time())

    def _ask(self) -> Ending | None:
        if self.was_active:
            return self._finish(Fault.CANCELLED, 128 + signal.SIGTERM, f"somebody deleted {self.name}")
        qr.create(self.client, self.slices.request)
        self.say(
            f"{self.name}: asked for {self.slices.request.node_count} x {self.slices.request.accelerator_type}"
        )
        return None

    def _replace(self, found: Any) -> Ending | None:
        """Deletes what is dead and asks anew, while the budget of preemptions lasts."""
        why = (qr.advice(found) or self.state).split("\n")[0]
        if self.asked_again >= self.spec.budgets.preemptions:
            more = f"{self.asked_again} requests for new slices are used up (--max-preemptions)"
            return self._finish(Fault.PREEMPTION, ExitCode.PREEMPTED, f"{why}; {more}")
        self.say(why)
        qr.delete(self.client, self.name, force=True)
        qr.wait_until_gone(self.client, self.name, timeout_s=600)
        delay_s = 0.0 if not self.in_vain else min(MAX_DELAY_S, self.poll_s * 2.0**self.in_vain)
        if delay_s:
            self.say(f"asks again in {delay_s:g} s")
            time.sleep(delay_s)
        self.asked_again, self.in_vain, self.was_active = self.asked_again + 1, self.in_vain + 1, False
        with contextlib.suppress(StorageError):
            self.job.note_slices(lost=f"{why} New ones were asked for.", lost_at=time.time())
        return self._ask()

    def _cancel(self) -> Ending | None:
        """Agents end the job themselves; where there are none, or they do not answer, it ends here."""
        if self.cancelled_s is None:
            self.cancelled_s = time.monotonic()
            self.say("cancelled")
        waited_s = time.monotonic() - self.cancelled_s
        if self.state == "ACTIVE" and waited_s < self.spec.watch.stop_grace_s + CANCEL_WAIT_S:
            return None
        return self._finish(Fault.CANCELLED, 128 + signal.SIGTERM, "cancelled")

    def _finish(self, fault: Fault, code: int, why: str) -> Ending:
        claim = self.job.current()
        ending = Ending(fault, code, why, claim.attempt if claim else 0, self.spec.submission)
        self.job.finish(ending)
        self.say(f"job {ending.state}: {why}")
        return ending
