"""Where the numbers of a run go: JSON lines, TensorBoard event files, and figures a person reads."""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
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
    multiply = jax.jit(lambda a, b: jnp.einsum("Nij,Njk->Nik", a, b))
    with jax.set_mesh(mesh):
        a = jax.make_array_from_callback(shape, sharding, lambda _: np.ones((1, size, size), np.float32))
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
    """A TensorBoard event file, opened and written by a thread of its own: loading its library takes a second.

    What the thread could not write is raised by the next call. tensorboardX's own thread dies of a full disk unheard.
    """

    def __init__(self, directory: Path, from_step: int):
        self._directory, self._from_step = directory, from_step
        self._thread = ThreadPoolExecutor(1)
        self._jobs: list[Future[None]] = []
        self._flushed_s = time.monotonic()
        self._file: Any = None

    def start(self, step: int) -> None:
        """Hides the events of steps after ``step``, which were lost."""
        self._do(self._restart, step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._do(self._append, time.time(), step, dict(values))
        if time.monotonic() - self._flushed_s > EVENTS_FLUSH_S:
            self._flushed_s = time.monotonic()
            self._do(lambda: self._file.flush())

    def flush(self) -> None:
        """Returns once all that was written is in the file."""
        if self._jobs or self._file:
            self._do(lambda: self._file.flush())
        self._check(self._jobs)

    def close(self) -> None:
        self._thread.shutdown()
        try:
            self._check(self._jobs)
        finally:
            if self._file:
                with _writing(self._directory):
                    self._file.close()

    def _do(self, job: Callable[..., None], *args: Any) -> None:
        self._check([j for j in self._jobs if j.done()])
        self._jobs.append(self._thread.submit(job, *args))

    def _check(self, jobs: Iterable[Future[None]]) -> None:
        for job in list(jobs):
            self._jobs.remove(job)
            with _writing(self._directory):
                job.result()

    def _append(self, wall_time_s: float, step: int, values: dict[str, float]) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        if not self._file:
            self._directory.mkdir(exist_ok=True)
            self._file = EventsWriter(str(self._directory / "events"), filename_suffix=f".{self._from_step}")
            self._restart(self._from_step)
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._file.write_event(Event(wall_time=wall_time_s, step=step, summary=Summary(value=scalars)))

    def _restart(self, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._from_step = step
        if self._file:
            self._file.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))


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
