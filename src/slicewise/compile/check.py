"""A stored result to hold a config to: it still compiles, fits, and is no slower."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from slicewise.compile.analysis import CompiledStep
from slicewise.compile.compiler import Request
from slicewise.errors import UserError, write_whole
from slicewise.interop.huggingface import load_spec

SLOWER = 0.02  # that a predicted step may be slower than the stored one
LARGER = 0.02  # that peak memory may be larger


class Stored(BaseModel):
    """What a check compares with."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    what: str  # model, program, batch, slices and depth, as a sentence says them
    step_time_s: float = Field(gt=0, allow_inf_nan=False)
    hbm_bytes: float = Field(gt=0, allow_inf_nan=False)

    @classmethod
    def of(cls, step: CompiledStep) -> "Stored":
        what = subject(step.request)
        return cls(what=what, step_time_s=step.estimate.step_time_s, hbm_bytes=step.memory.total_bytes)


def subject(request: Request) -> str:
    """What a result of ``request`` is of: results of different subjects are not compared."""
    r, data = request, request.config.data
    return (
        f"{r.program} of {load_spec(r.config.model.model).name}, {data.global_batch_size} sequences of"
        f" {data.sequence_length}, on {r.cluster.num_slices} x {r.slice_text} at {r.depth} depth"
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
    assert now.what == stored.what, "read refuses it"
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


def read(path: str, request: Request) -> Stored | None:
    """The stored result; None when there is no such file yet.

    Raises UserError for one that cannot be read, and for one of something else than ``request``.
    """
    if Path(path).exists() and not Path(path).is_file():  # a device may never end
        raise UserError(f"stored result {path}: expected the path of a file.")
    try:
        stored = Stored.model_validate_json(Path(path).read_text())
    except FileNotFoundError:
        return None
    except OSError as e:
        raise UserError(f"stored result {path}: {e.strerror}.") from e
    except ValueError as e:
        raise UserError(
            f"stored result {path} is none of slicewise compile --check; delete it to store a new one."
        ) from e
    if stored.what != subject(request):
        raise UserError(
            f"stored result {path} is of {stored.what}; this is {subject(request)}. Name another file, or delete it."
        )
    return stored


def write(path: str, step: CompiledStep) -> None:
    """Stores ``step``. Raises UserError when the file cannot be written."""
    write_whole(path, (Stored.of(step).model_dump_json(indent=1) + "\n").encode(), f"--check {path}")
