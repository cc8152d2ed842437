"""Where the numbers of a run go: JSON lines, TensorBoard event files, and figures a person reads."""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slicewise.catalog import chips
from slicewise.errors import ExitCode, UserError

EVENTS_FLUSH_S = 20.0  # how old an event is at most before TensorBoard can see it


def peak_flops_per_s(mesh: Mesh) -> float:
    """Peak FLOP/s of one device: the catalog's for a chip it knows, measured on anything else (all devices at once)."""
    chip = chips.of_device_kind(mesh.devices.flat[0].device_kind)
    return chip.peak_flops_per_s("bf16") / chip.jax_devices if chip else _measured_peak(mesh)


def _measured_peak(mesh: Mesh, size: int = 768, repeats: int = 3) -> float:
    """The best rate of a float32 ``size`` x ``size`` matrix product on each of ``mesh``'s devices."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    shape = (mesh.devices.size, size, size)
    ones = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=sharding)
    multiply = jax.jit(lambda a, b: jnp.einsum("Nij,Njk->Nik", a, b))
    with jax.set_mesh(mesh):
        a = ones()
        multiply(a, a).block_until_ready()
        best_s = math.inf
        for _ in range(repeats):
            start_s = time.perf_counter()
            multiply(a, a).block_until_ready()
            best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * size**3 / best_s


def make_directory(directory: Path) -> None:
    """Makes ``directory``; raises UserError (INTERNAL) when nothing can be written there."""
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)


class MetricWriter:
    """Appends records to metrics.jsonl and, when asked, to TensorBoard event files under ``directory``.

    Records after ``from_step`` are dropped first: they belong to steps that were lost and are taken again.
    Raises UserError (INTERNAL), here and from every method, when a file cannot be written.
    """

    def __init__(self, directory: Path, *, from_step: int, tensorboard: bool):
        self._path = directory / "metrics.jsonl"
        make_directory(directory)
        with _writing(self._path):
            self._file = self._path.open("ab", buffering=0)
            self._file.truncate(_kept_bytes(self._path, from_step))  # at once: no kill can lose what is kept
        self._events = _EventFile(directory / "tensorboard", from_step) if tensorboard else None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = memoryview((json.dumps({"step": step, **finite}) + "\n").encode())
        with _writing(self._path):
            while line:  # a nearly full disk takes a part
                line = line[self._file.write(line) :]
        if self._events:
            self._events.write(step, {name: value for name, value in finite.items() if value is not None})

    def rewind(self, step: int) -> None:
        """Drops the records after ``step``: the steps are taken again."""
        with _writing(self._path):
            self._file.truncate(_kept_bytes(self._path, step))
        if self._events:
            self._events.start(step)

    def flush(self) -> None:
        """Makes durable what was written: before a checkpoint, so that a run resumed from it has no gap."""
        with _writing(self._path):
            os.fsync(self._file.fileno())
        if self._events:
            self._events.flush()

    def close(self) -> None:
        self._file.close()
        if self._events:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _kept_bytes(path: Path, from_step: int) -> int:
    """The size of the records up to ``from_step``. They end at a line cut off when its writer was killed."""
    kept = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            break
        if step > from_step or not line.endswith(b"\n"):
            break
        kept += len(line)
    return kept


class _EventFile:
    """A TensorBoard event file. tensorboardX's own writer is a thread whose death, on a full disk, nobody hears of."""

    def __init__(self, directory: Path, from_step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        self._directory, self._protos = directory, (event_pb2, summary_pb2)
        with _writing(directory):
            directory.mkdir(exist_ok=True)
            self._file = EventsWriter(str(directory / "events"), filename_suffix=f".{from_step}")
        self._flushed_s = time.monotonic()
        self.start(from_step)

    def start(self, step: int) -> None:
        """Hides the events of steps after ``step``, which were lost."""
        event_pb2, _ = self._protos
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        with _writing(self._directory):
            self._file.write_event(event_pb2.Event(step=step + 1, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        event_pb2, summary_pb2 = self._protos
        scalars = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=scalars))
        with _writing(self._directory):
            self._file.write_event(event)
        if time.monotonic() - self._flushed_s > EVENTS_FLUSH_S:
            self.flush()

    def flush(self) -> None:
        self._flushed_s = time.monotonic()
        with _writing(self._directory):
            self._file.flush()

    def close(self) -> None:
        with _writing(self._directory):
            self._file.close()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise UserError(
            f"{e.filename or path} cannot be written: {e.strerror}."
            " Once that is mended, the same command continues from the newest checkpoint.",
            code=ExitCode.INTERNAL,
        ) from e
