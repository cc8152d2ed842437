"""A stored result to hold a config to: it still compiles, fits, and is no slower."""

import json
from dataclasses import dataclass
from pathlib import Path

from slicewise.compile.analysis import CompiledStep
from slicewise.errors import UserError

SLOWER = 0.02  # that a predicted step may be slower than the stored one
LARGER = 0.02  # that peak memory may be larger


@dataclass(frozen=True)
class Stored:
    """What a check compares with."""

    slice: str
    num_slices: int
    depth: str
    step_time_s: float
    hbm_bytes: float

    @classmethod
    def of(cls, step: CompiledStep) -> "Stored":
        r = step.request
        return cls(
            r.slice_text, r.cluster.num_slices, r.depth, step.estimate.step_time_s, step.memory.total_bytes
        )


def problems(step: CompiledStep, stored: Stored | None) -> list[str]:
    """What is worse than it may be, a sentence each; empty when the check passes."""
    found = []
    if not step.fits:
        over = step.memory.total_bytes / step.memory.limit_bytes
        found.append(f"it does not fit: {over:.0%} of the device's memory.")
    if stored is None:
        return found
    now = Stored.of(step)
    if (now.slice, now.num_slices, now.depth) != (stored.slice, stored.num_slices, stored.depth):
        return [
            *found,
            f"the stored result is of {stored.num_slices} x {stored.slice} at {stored.depth} depth,"
            f" this one of {now.num_slices} x {now.slice} at {now.depth} depth.",
        ]
    if now.step_time_s > (1 + SLOWER) * stored.step_time_s:
        slower = now.step_time_s / stored.step_time_s - 1
        found.append(
            f"a step of {now.step_time_s:.4g} s is {slower:.1%} slower than the stored"
            f" {stored.step_time_s:.4g} s; at most {SLOWER:.0%} is allowed."
        )
    if now.hbm_bytes > (1 + LARGER) * stored.hbm_bytes:
        larger = now.hbm_bytes / stored.hbm_bytes - 1
        found.append(
            f"peak memory of {now.hbm_bytes / 2**30:.4g} GiB is {larger:.1%} above the stored"
            f" {stored.hbm_bytes / 2**30:.4g} GiB; at most {LARGER:.0%} is allowed."
        )
    return found


def read(path: str) -> Stored | None:
    """The stored result; None when there is no such file yet. Raises UserError for one that cannot be read."""
    try:
        return Stored(**json.loads(Path(path).read_text()))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise UserError(f"stored result {path}: {e.strerror}.") from e
    except (ValueError, TypeError) as e:
        raise UserError(f"stored result {path} is none of slicewise compile --check: {e}.") from e


def write(path: str, step: CompiledStep) -> None:
    """Stores ``step``. Raises UserError when the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(vars(Stored.of(step)), indent=1) + "\n")
    except OSError as e:
        raise UserError(f"stored result {path}: {e.strerror}.") from e
