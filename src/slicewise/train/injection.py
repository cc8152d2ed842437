"""Faults on purpose: a trainer does to itself, or to the process that started it, what its environment says.

``slicewise chaos`` sets SLICEWISE_FAULTS; without it none of this is there. No JAX here: launchers write it.
"""

import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

FAULTS = "SLICEWISE_FAULTS"
FIRED = "faults.jsonl"  # in the run's folder: the faults that happened
DISK_FULL_BYTES = 512  # how much of a file can be written once the disk is full

Kind = Literal["kill", "stop", "exception", "terminate", "corrupt", "disk-full"]
Moment = Literal["imports", "compile", "step", "save", "restore", "finish"]
DAMAGES = ("truncate", "zero", "flip", "remove", "empty")


class InjectedError(RuntimeError):
    """What a trainer raises that is to fail by an exception."""


@dataclass(frozen=True)
class Fault:
    """``ranks`` do it to themselves; none means that rank 0 does it to the process that started it.

    It happens in attempt ``attempt`` (1 is the first), ``delay_s`` after the state ``moment`` was reached at step
    ``step`` or a later one. ``seed`` decides what is damaged, and how.
    """

    attempt: int
    kind: Kind
    ranks: tuple[int, ...]
    moment: Moment
    step: int = 0
    delay_s: float = 0.0
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> "Fault":
        return Fault(**{**raw, "ranks": tuple(raw["ranks"])})


class Armed:
    """The faults of this process. ``directory``: of the run, on this machine."""

    def __init__(self, faults: tuple[Fault, ...], rank: int, directory: Path):
        self._faults = [f for f in faults if rank in (f.ranks or (0,))]
        self._rank, self._directory = rank, directory

    def reached(self, state: str, step: int) -> None:
        """Raises InjectedError, or does not return, or what is to happen later is begun."""
        for fault in [f for f in self._faults if f.moment == state and step >= f.step]:
            self._faults.remove(fault)
            if fault.delay_s and fault.kind != "exception":
                timer = threading.Timer(fault.delay_s, self._fire, (fault, state, step))
                timer.daemon = True
                timer.start()
            else:
                self._fire(fault, state, step)

    def _fire(self, fault: Fault, state: str, step: int) -> None:
        if fault.kind == "corrupt" and damage_newest(self._directory / "checkpoints", fault.seed) is None:
            return
        fired = {
            "attempt": fault.attempt,
            "kind": fault.kind,
            "rank": self._rank,
            "state": state,
            "step": step,
        }
        with (self._directory / FIRED).open("a") as file:
            file.write(json.dumps({**fired, "at": time.time()}) + "\n")
        victim = os.getpid() if fault.ranks else os.getppid()
        match fault.kind:
            case "kill" | "corrupt":
                os.kill(victim, signal.SIGKILL)
            case "stop":
                os.kill(victim, signal.SIGSTOP)
            case "terminate":
                os.kill(victim, signal.SIGTERM)
            case "exception":
                raise InjectedError(f"injected at step {step}")
            case "disk-full":
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_FULL_BYTES, hard))


def armed(directory: Path, environment: Mapping[str, str] = os.environ) -> Callable[[str, int], None] | None:
    """What a trainer calls at each state that it reaches; None, as a rule, when nothing is to happen."""
    if FAULTS not in environment:
        return None
    attempt = int(environment.get("SLICEWISE_ATTEMPT", "1"))
    faults = (Fault.from_json(raw) for raw in json.loads(environment[FAULTS]))
    mine = tuple(fault for fault in faults if fault.attempt == attempt)
    return Armed(mine, int(environment.get("SLICEWISE_PROCESS_ID", "0")), directory).reached


def damage_newest(checkpoints: Path, seed: int) -> str | None:
    """Damages one file of the newest complete checkpoint, or empties it; what was done.

    None, and nothing is done, unless there is an older one: a run whose only checkpoint is damaged stops and says so.
    """
    from slicewise.checkpoint.manifest import complete_steps

    steps = complete_steps(str(checkpoints))
    if len(steps) < 2:
        return None
    chosen = random.Random(seed)
    how, folder = chosen.choice(DAMAGES), checkpoints / str(steps[-1])
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if how == "empty":
        for path in files:
            path.unlink()
        return f"emptied {folder}"
    path = chosen.choice(files)
    damage(path, how, chosen)
    return f"{how} {path}"


def damage(path: Path, how: str, chosen: random.Random) -> None:
    """Truncates, zeroes or removes a file that is not empty, or flips one bit of it."""
    data = bytearray(path.read_bytes())
    place = chosen.randrange(len(data))
    match how:
        case "truncate":
            path.write_bytes(data[:place])
        case "zero":
            path.write_bytes(bytes(len(data)))
        case "flip":
            data[place] ^= 1 << chosen.randrange(8)
            path.write_bytes(data)
        case "remove":
            path.unlink()
        case _:
            raise AssertionError(how)
