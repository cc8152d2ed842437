"""Jobs as their user sees them: submitted, listed, looked into, cancelled. What runs them is elsewhere.

A record of each job lies in the user's state directory ($XDG_STATE_HOME/slicewise/jobs); what happens to it, in the
folder of its run.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slicewise.config import LoadedConfig, describe
from slicewise.errors import ExitCode, UserError, did_you_mean
from slicewise.launch.job_folder import FOLDER, NAME, Ending, JobFolder, JobSpec
from slicewise.launch.policy import Fault
from slicewise.launch.storage import open_folder, write_json

SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE_?KEY|ACCESS_?KEY)", re.I)
FOLLOW_INTERVAL_S = 1.0  # between two looks into a folder
PLATFORM_INTERVAL_S = 5.0  # between two questions to a platform
SUPERVISED = ("local", "queued-resource")
UNSUPERVISED = ("jobset", "slurm")  # where the platform decides, and may know more than the folder


@dataclass(frozen=True)
class Record:
    """A job that this user submitted. ``platform`` is what its target needs to find it again."""

    name: str
    target: str
    root: str  # the job's folder
    submission: str
    submitted: float  # Unix time
    platform: Mapping[str, Any] = field(default_factory=dict)
    supervisor: int | None = None  # process id
    supervisor_started: str = ""  # when it started, as the kernel counts, so that a reused id is not mistaken

    @property
    def folder(self) -> JobFolder:
        return JobFolder(self.root)


def state_directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base).absolute() / "slicewise" / "jobs"


def save(record: Record) -> None:
    write_json(open_folder(str(state_directory())), f"{record.name}.json", asdict(record))


def records() -> list[Record]:
    """All jobs of this user, the newest first. What is no record is passed over."""
    found = []
    for path in state_directory().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Record(**json.loads(path.read_text())))
    return sorted(found, key=lambda record: -record.submitted)


def find(name: str) -> Record:
    """Raises UserError for a name that is none, or that no job has."""
    check_name(name)
    known = {record.name: record for record in records()}
    if name not in known:
        listed = f" Known: {', '.join(list(known)[:8])}." if known else " None was submitted from here."
        raise UserError(
            f"there is no job '{name}'.{did_you_mean(name, known)}{listed}", code=ExitCode.NOT_FOUND
        )
    return known[name]


def check_name(name: str) -> None:
    if not re.fullmatch(NAME, name):
        raise UserError(
            f"job name {name!r}: expected at most 40 lower-case letters, digits and hyphens, first a letter and"
            " last no hyphen."
        )


def name_of_run(run_name: str) -> str:
    """The job's name where none is given. Raises UserError when the run's name cannot be one."""
    name = re.sub(r"[^a-z0-9-]+", "-", run_name.lower()).strip("-")
    if not re.fullmatch(NAME, name):
        raise UserError(f"run_name {run_name!r} makes no name for a job: give one with --name.")
    return name


# ---------------------------------------------------------------- submitting


def run_directory(config_directory: str, target: str, *, shared: bool) -> str:
    """The run's folder as its workers see it. ``shared``: they run on this machine, or on the same disks.

    Raises UserError for a folder that machines elsewhere could not share.
    """
    if "://" in config_directory:
        return config_directory
    if shared:
        return str(Path(config_directory).absolute())
    if Path(config_directory).is_absolute():
        return config_directory
    raise UserError(
        f"output_directory: {config_directory} is a path of this machine, and the workers of a {target} job are"
        " elsewhere: use a bucket (gs://...), or the absolute path of a disk that all of them mount."
    )


def config_text(loaded: LoadedConfig, directory: str) -> str:
    """The resolved config as TOML, with the run in ``directory``."""
    parent = json.dumps(directory.rpartition("/")[0] or "/")
    lines: list[str] = []
    section = ""
    for row in describe(loaded):
        if row.section != section:
            section = row.section
            lines.append(f"[{section}]")
        lines.append(f"{row.key} = {parent if row.key == 'output_directory' else row.value}")
    return "\n".join(lines) + "\n"


def environment_of(words: list[str]) -> dict[str, str]:
    """``NAME=VALUE`` words. Raises UserError for other words, and for what looks like a secret."""
    found = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {name!r}: expected NAME=VALUE.")
        if SECRET.search(name):
            raise UserError(
                f"--env {name}: this looks like a secret, which would lie readable beside the run. Keep it where"
                " the workers are: a service account, a Kubernetes secret (--secret), a file only you can read."
            )
        if name.startswith("SLICEWISE_"):
            raise UserError(f"--env {name}: names that begin with SLICEWISE_ are set by the agent.")
        found[name] = value
    return found


def new_submission() -> str:
    return secrets.token_hex(6)


def refuse_running(name: str, root: str) -> None:
    """Raises UserError when a job of this name, or in this folder, goes on."""
    for record in records():
        if (record.name == name or record.root == root) and not _has_ended(record):
            raise UserError(
                f"job '{record.name}' goes on in {record.root}: 'slicewise job cancel {record.name}' ends it, another"
                " run_name or --name leaves it alone.",
                code=ExitCode.CONFLICT,
            )


def _has_ended(record: Record) -> bool:
    with contextlib.suppress(UserError):
        return status(record).code is not None or (record.target == "local" and not is_supervised(record))
    return False


def start_supervisor(record: Record) -> Record:
    """The supervisor of a job in the background, in a session of its own; its output goes to a file."""
    directory = state_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(supervisor_log(record.name)), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    command = [sys.executable, "-m", "slicewise.launch.supervisor", record.root]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
    started = Record(**{**asdict(record), "supervisor": pid, "supervisor_started": _start_of(pid)})
    save(started)
    return started


def supervisor_log(name: str) -> Path:
    return state_directory() / f"{name}.log"


def is_supervised(record: Record) -> bool:
    """Whether the supervisor that was started here still runs."""
    if record.supervisor is None:
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitpid(record.supervisor, os.WNOHANG)  # where it is a child of ours, it must not linger
    try:
        os.kill(record.supervisor, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # the id is another user's by now
    return _start_of(record.supervisor) == record.supervisor_started


def _start_of(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


# ---------------------------------------------------------------- looking


@dataclass(frozen=True)
class Status:
    """``state``: waiting, starting, running, done, failed, cancelled, or stalled when nobody looks after it."""

    record: Record
    state: str
    attempt: int
    failures: int
    preemptions: int
    step: int | None
    steps: int | None
    loss: float | None
    step_age_s: float | None
    code: int | None  # of the job, once it has ended
    why: str  # it ended, or the last attempt did
    slices: str  # state of the queued resource, JobSet or Slurm job


def status(record: Record) -> Status:
    """Raises UserError when the job's folder cannot be read."""
    job = record.folder
    result, claim = job.result(record.submission), job.current()
    claim = claim if claim and claim.submission == record.submission else None
    slices = _platform_state(record)
    if result is None and record.target in UNSUPERVISED:
        result = _ended_by_platform(record, job, slices)
    progress = (job.progress(claim.attempt) if claim else None) or {}
    last = job.attempt_ending(claim.attempt) if claim else None
    age_s = time.time() - progress["time"] if "time" in progress else None
    return Status(
        record,
        result.state if result else _state(record, claim is not None, bool(progress), slices),
        claim.attempt if claim else 0,
        claim.tally.failures if claim else 0,
        claim.tally.preemptions if claim else 0,
        progress.get("step"),
        progress.get("steps"),
        progress.get("loss"),
        age_s,
        result.code if result else None,
        result.why if result else (last.why if last else (claim.reason if claim else "")),
        slices,
    )


def status_or_reason(record: Record) -> Status:
    """As ``status``, with the state "unknown" and the reason where its folder or platform cannot be asked."""
    try:
        return status(record)
    except UserError as error:
        return Status(record, "unknown", 0, 0, 0, None, None, None, None, None, str(error), "")


def _ended_by_platform(record: Record, job: JobFolder, state: str) -> Ending | None:
    if not state.startswith(("failed", "gone")):
        return None
    if job.is_cancelled(record.submission):
        return Ending(Fault.CANCELLED, 128 + signal.SIGTERM, "cancelled", 0, record.submission)
    why = f"{record.target}: {state}; see its events and the log of the last attempt"
    return Ending(Fault.FAILURE, ExitCode.INTERNAL, why, 0, record.submission)


def _is_stalled(record: Record) -> bool:
    return record.target in SUPERVISED and not is_supervised(record)


def _state(record: Record, claimed: bool, progressed: bool, slices: str) -> str:
    if _is_stalled(record):
        return "stalled"
    if not claimed:
        return "waiting"
    return "running" if progressed else "starting"


def _platform_state(record: Record) -> str:
    if record.target == "queued-resource":
        return str(record.folder.slices().get("state", ""))
    if record.target == "slurm":
        from slicewise.launch.targets import slurm

        return slurm.state(record.platform)
    if record.target == "jobset":
        from slicewise.launch.targets import jobset

        return jobset.state(record.platform, record.name)
    return ""


def log(record: Record, place: str | None, attempt: int | None, *, follow: bool = False) -> Iterator[bytes]:
    """Output of the worker at ``place`` (default: the first) in ``attempt`` (default: the newest), in chunks.

    With ``follow`` until the job has ended, attempt after attempt. Raises UserError when there is none.
    """
    job, place = record.folder, place or "s0h0"
    if not re.fullmatch(r"s\d{1,4}h\d{1,4}", place):
        raise UserError(f"--worker {place}: expected a place such as s0h1, host 1 of slice 0.")
    shown = attempt
    sent, asked_s = 0, time.monotonic()
    while True:
        ended = job.result(record.submission) is not None
        if follow and record.target in UNSUPERVISED and time.monotonic() - asked_s > PLATFORM_INTERVAL_S:
            asked_s, ended = time.monotonic(), status(record).code is not None
        attempts = job.log_attempts()
        if shown is None and attempts:
            shown = attempts[-1]
        if shown is not None and (data := job.log(shown, place, sent)):
            sent += len(data)
            yield data
            continue
        newer = [number for number in attempts if shown is not None and number > shown]
        if follow and attempt is None and newer:
            shown, sent = newer[0], 0
        elif not follow or ended or (attempt is not None and newer) or _is_stalled(record):
            break
        else:
            time.sleep(FOLLOW_INTERVAL_S)
    if sent == 0 and not follow:
        raise UserError(_no_log(job, place, shown), code=ExitCode.NOT_FOUND)


def _no_log(job: JobFolder, place: str, attempt: int | None) -> str:
    if attempt is None:
        return f"{job.root} has no logs yet."
    there = ", ".join(job.log_places(attempt)[:8]) or "nobody"
    known = ", ".join(map(str, job.log_attempts()))
    return f"attempt {attempt} has no log of {place}; {there} wrote one, and there are attempts {known}."


# ---------------------------------------------------------------- ending


def cancel(record: Record) -> str:
    """Asks the job to save and end; what happens now, in a sentence. Raises UserError when it has ended already."""
    job = record.folder
    if result := job.result(record.submission):
        raise UserError(f"job '{record.name}' is {result.state} already.", code=ExitCode.CONFLICT)
    job.ask_to_cancel(record.submission)
    if record.target == "local" and not is_supervised(record):
        claim = job.current()
        code = 128 + signal.SIGTERM
        attempt = claim.attempt if claim else 0
        job.finish(Ending(Fault.CANCELLED, code, "cancelled", attempt, record.submission))
        return "cancelled: its supervisor was not running."
    if record.target == "queued-resource":
        if not is_supervised(record):
            start_supervisor(record)
        return "asked to save and end; then its queued resource is deleted."
    if record.target == "slurm":
        from slicewise.launch.targets import slurm

        slurm.cancel(record.platform)
    if record.target == "jobset":
        from slicewise.launch.targets import jobset

        jobset.cancel(record.platform, record.name)
    return "asked to save and end."


def wait(record: Record) -> Status:
    """Its status once it has ended, or is stalled."""
    while True:
        now = status(record)
        if now.code is not None or now.state == "stalled":
            return now
        time.sleep(PLATFORM_INTERVAL_S if record.target in UNSUPERVISED else FOLLOW_INTERVAL_S)


def new_record(name: str, target: str, root: str, spec: JobSpec, platform: Mapping[str, Any]) -> Record:
    return Record(name, target, root, spec.submission, time.time(), dict(platform))


def folder_of(directory: str) -> str:
    return f"{directory.rstrip('/')}/{FOLDER}"
