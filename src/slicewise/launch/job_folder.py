"""What a job keeps in the folder ``job`` of its run: what to do, its attempts, how it ended, its logs.

    job.json                              JobSpec: what was submitted last
    code-DIGEST.tar.gz                    the code that goes with it, if any
    cancel.json                           somebody wants it to end
    attempts/0001/claim.json              who leads the attempt; created once, so that it has one leader
    attempts/0001/phase.json              written by the leader: gather, run, over
    attempts/0001/workers/s0h0.ready.TOKEN.json    an agent is there for the attempt, and its address
    attempts/0001/workers/s0h0.ended.TOKEN.json    how its trainer ended
    attempts/0001/progress.json           the newest step
    attempts/0001/ended.json              why it ended
    result.json                           how the job ended
    leader.json                           of an elastic job: a sign of life of the leader
    absent.json                           slices of an emulated cluster that are not there
    slices.json                           state of the queued resource, and what it lost when; by the supervisor
    roster/s0h0.json                      which agent holds this place in the gang; the last to come has it
    logs/attempt-0001/s0h0.log            output of a trainer; in a bucket in pieces, s0h0.0000.log and so on

The highest attempt is the one that counts. Whoever works on a lower one is stale, and stops.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from slicewise.config import Part
from slicewise.errors import UserError
from slicewise.launch.policy import Budgets, Fault, Tally, Watch
from slicewise.launch.storage import Folder, StorageError, create_json, open_folder, read_json, write_json

FOLDER = "job"  # below the run's
PIECE_BYTES = 1024 * 1024  # of a log in a bucket, whose objects cannot grow: the last piece is written anew
NAME = (
    r"^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$"  # what Queued Resources, Kubernetes, Slurm and a file may be called
)
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"

Target = Literal["local", "queued-resource", "jobset", "slurm"]


class JobSpec(Part):
    """What every worker of a job needs to know."""

    name: str = Field(pattern=NAME)
    submission: str = Field(pattern=r"^[0-9a-f]{12}$")
    """Tells this submission from earlier ones of the same run."""
    target: Target
    command: tuple[str, ...]
    """Arguments of Python, in each worker; {config} stands for the file with ``config``."""
    config: str
    """TOML of the run."""
    slices: PositiveInt
    hosts_per_slice: PositiveInt
    elastic_sizes: tuple[PositiveInt, ...] = ()
    """Smaller numbers of slices with which it may go on, the largest first."""
    cpu_devices: int = Field(0, ge=0)
    """Devices a host emulated on the CPU; 0 uses the devices that are there."""
    budgets: Budgets = Budgets()
    watch: Watch = Watch()
    environment: dict[str, str] = Field({})
    code: str = Field("", pattern=r"^(code-[0-9a-f]{16}\.tar\.gz)?$")
    working_directory: str = ""
    """Where the trainer starts; by default where the code is, or the agent's own."""

    @property
    def workers(self) -> int:
        return self.slices * self.hosts_per_slice

    def place(self, worker: int) -> str:
        """Short name of a worker's place: s1h0."""
        slice_id, host = divmod(worker, self.hosts_per_slice)
        return f"s{slice_id}h{host}"


@dataclass(frozen=True)
class Claim:
    """One attempt, and who leads it."""

    attempt: int
    submission: str
    holder: str
    tally: Tally
    reason: str  # why there is another attempt; empty for the first
    started: float  # Unix time

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tally": vars(self.tally)}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Claim":
        return Claim(**{**document, "tally": Tally(**document["tally"])})


@dataclass(frozen=True)
class Report:
    """What an agent says of itself, in the name of a file. ``token`` is of one start of one agent."""

    place: str
    kind: str  # ready, ended
    token: str

    @property
    def file(self) -> str:
        return f"{self.place}.{self.kind}.{self.token}.json"

    @staticmethod
    def parse(file: str) -> "Report | None":
        parts = file.split(".")
        return Report(*parts[:3]) if len(parts) == 4 else None


@dataclass(frozen=True)
class Ending:
    """How an attempt, or a job, ended."""

    fault: Fault
    code: int
    why: str  # in words, with the worker that was first; empty when done
    attempt: int
    submission: str
    ended: float = 0.0  # Unix time

    @property
    def state(self) -> str:
        """Of a job that ended so."""
        return {Fault.NONE: "done", Fault.CANCELLED: "cancelled"}.get(self.fault, "failed")

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "ended": self.ended or time.time()}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> "Ending":
        return Ending(**{**document, "fault": Fault(document["fault"])})


class Superseded(Exception):
    """Somebody else works on a newer attempt: stop, and touch nothing."""


class JobFolder:
    """All reads and writes of the folder of one job. Every failure of the storage is a StorageError."""

    def __init__(self, root: str):
        """``root``: the folder itself, RUN/job: a path or a URL."""
        self.root = root
        self.folder: Folder = open_folder(root)

    @property
    def run(self) -> str:
        """The folder of the run: a path or a URL."""
        return self.root.rstrip("/").rpartition("/")[0]

    @property
    def run_directory(self) -> Path | None:
        """The same where it is on this machine's disks."""
        return None if "://" in self.root else Path(self.run)

    @property
    def environment(self) -> dict[str, str]:
        """For trainers, unless theirs says otherwise: compiled programs outlive the machine that compiled them."""
        return {"JAX_COMPILATION_CACHE_DIR": f"{self.run}/compiled"}

    # ------------------------------------------------------------ what to do

    def spec(self) -> JobSpec:
        """Raises UserError when no job was submitted there, or when it is not readable."""
        document = read_json(self.folder, "job.json")
        if document is None:
            raise UserError(f"{self.root} holds no job: slicewise job submit writes it.")
        try:
            return JobSpec.model_validate(document)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(f"{self.root}/job.json: {where}: {first['msg']}.") from error

    def submit(self, spec: JobSpec) -> None:
        """What was asked and answered of an earlier submission goes; its attempts stay, and their numbers."""
        self.folder.remove("cancel.json")
        self.folder.remove("result.json")
        write_json(self.folder, "job.json", spec.model_dump(mode="json"))

    def ask_to_cancel(self, submission: str) -> None:
        write_json(self.folder, "cancel.json", {"submission": submission, "time": time.time()})

    def is_cancelled(self, submission: str) -> bool:
        document = read_json(self.folder, "cancel.json")
        return document is not None and document.get("submission") == submission

    # ------------------------------------------------------------ attempts

    def current(self) -> Claim | None:
        """The newest attempt."""
        numbers = [int(name) for name in self.folder.names("attempts") if name.isdecimal()]
        for number in sorted(numbers, reverse=True):
            if document := read_json(self.folder, _attempt(number, "claim.json")):
                return _record(Claim, document, f"{self.root}/attempts/{number:04d}/claim.json")
        return None

    def is_current(self, claim: Claim) -> bool:
        """Whether no newer attempt has been claimed. Attempts are numbered without gaps."""
        return not self.folder.exists(_attempt(claim.attempt + 1, "claim.json"))

    def next_claim(self, claim: Claim) -> Claim | None:
        """The attempt after ``claim``, once it is there."""
        document = read_json(self.folder, name := _attempt(claim.attempt + 1, "claim.json"))
        return _record(Claim, document, f"{self.root}/{name}") if document else None

    def claim(self, submission: str, holder: str, tally: Tally, reason: str, *, after: Claim | None) -> Claim:
        """The attempt that follows ``after``, led by ``holder``. Raises Superseded when another was faster."""
        number = after.attempt + 1 if after else 1
        made = Claim(number, submission, holder, tally, reason, time.time())
        if not create_json(self.folder, _attempt(number, "claim.json"), made.to_json()):
            raise Superseded(f"attempt {number} has a leader already")
        return made

    def set_phase(self, claim: Claim, phase: str, **more: Any) -> None:
        write_json(self.folder, _attempt(claim.attempt, "phase.json"), {"phase": phase, **more})

    def phase(self, claim: Claim) -> dict[str, Any]:
        return read_json(self.folder, _attempt(claim.attempt, "phase.json")) or {"phase": ""}

    def report(self, claim: Claim, report: "Report", document: dict[str, Any]) -> None:
        write_json(self.folder, _attempt(claim.attempt, f"workers/{report.file}"), document)

    def reports(self, claim: Claim) -> list["Report"]:
        """What has been reported by whom, by names of files alone: one call however many workers."""
        names = self.folder.names(_attempt(claim.attempt, "workers"))
        return [report for report in map(Report.parse, names) if report]

    def reported(self, claim: Claim, report: "Report") -> dict[str, Any]:
        return read_json(self.folder, _attempt(claim.attempt, f"workers/{report.file}")) or {}

    def report_progress(self, claim: Claim, event: Mapping[str, Any]) -> None:
        shown = {key: event[key] for key in ("step", "steps", "loss", "step_time_s") if key in event}
        write_json(self.folder, _attempt(claim.attempt, "progress.json"), {**shown, "time": time.time()})

    def progress(self, attempt: int) -> dict[str, Any] | None:
        return read_json(self.folder, _attempt(attempt, "progress.json"))

    def end_attempt(self, ending: Ending) -> None:
        write_json(self.folder, _attempt(ending.attempt, "ended.json"), ending.to_json())

    def attempt_ending(self, attempt: int) -> Ending | None:
        document = read_json(self.folder, name := _attempt(attempt, "ended.json"))
        return _record(Ending, document, f"{self.root}/{name}") if document else None

    def set_beat(self, beat: dict[str, Any]) -> None:
        """A sign of life of whoever leads; another one each time."""
        write_json(self.folder, "leader.json", beat)

    def beat(self) -> dict[str, Any] | None:
        return read_json(self.folder, "leader.json")

    # ------------------------------------------------------------ slices

    def note_slices(self, **changes: Any) -> None:
        """``state`` of the queued resource; what was ``lost``, in words, and the Unix time ``lost_at``."""
        write_json(self.folder, "slices.json", {**self.slices(), **changes, "time": time.time()})

    def slices(self) -> dict[str, Any]:
        return read_json(self.folder, "slices.json") or {}

    # ------------------------------------------------------------ roster

    def take_place(self, place: str, document: dict[str, Any]) -> None:
        write_json(self.folder, f"roster/{place}.json", document)

    def place_holder(self, place: str) -> dict[str, Any] | None:
        return read_json(self.folder, f"roster/{place}.json")

    def check_place(self, place: str, token: str) -> None:
        """Raises Superseded when another has taken ``place``, or the folder was deleted."""
        holder = self.place_holder(place)
        if holder is None:
            raise Superseded(f"the folder {self.root} is gone")
        if holder.get("token") != token:
            raise Superseded(f"another one has taken the place {place}")

    # ------------------------------------------------------------ the end

    def finish(self, ending: Ending) -> None:
        write_json(self.folder, "result.json", ending.to_json())

    def result(self, submission: str) -> Ending | None:
        """How the submission ended, or None while it goes on."""
        document = read_json(self.folder, "result.json")
        ending = _record(Ending, document, f"{self.root}/result.json") if document else None
        return ending if ending and ending.submission == submission else None

    # ------------------------------------------------------------ logs

    def log_name(self, attempt: int, place: str) -> str:
        return f"logs/attempt-{attempt:04d}/{place}"

    def log_attempts(self) -> list[int]:
        names = (name.removeprefix("attempt-") for name in self.folder.names("logs"))
        return sorted(int(name) for name in names if name.isdecimal())

    def log_places(self, attempt: int) -> list[str]:
        names = self.folder.names(f"logs/attempt-{attempt:04d}")
        return sorted({name.partition(".")[0] for name in names if name.endswith(".log")})

    def log(self, attempt: int, place: str, start: int = 0) -> bytes:
        """Output of one worker from byte ``start`` on."""
        folder, found = f"logs/attempt-{attempt:04d}", b""
        for name in self.folder.names(folder):
            piece = name.removeprefix(f"{place}.").removesuffix("log").rstrip(".")
            if name != f"{place}.log" and not (name.startswith(f"{place}.") and piece.isdecimal()):
                continue
            begin = int(piece) * PIECE_BYTES if piece.isdecimal() else 0
            ahead = piece.isdecimal() and begin + PIECE_BYTES <= start
            if not ahead:
                found += self.folder.read(f"{folder}/{name}", max(0, start - begin)) or b""
        return found


def continued(claim: Claim | None, submission: str) -> Tally:
    """What an attempt after ``claim`` starts from: another submission has budgets of its own."""
    return claim.tally if claim and claim.submission == submission else Tally()


def _attempt(number: int, name: str) -> str:
    return f"attempts/{number:04d}/{name}"


def _record[T: (Claim, Ending)](kind: type[T], document: Mapping[str, Any], where: str) -> T:
    try:
        return kind.from_json(document)
    except (TypeError, KeyError, ValueError) as error:
        raise StorageError(f"{where} is damaged: {error}.") from error
