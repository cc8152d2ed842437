"""Runs the TPU compiler on a program in a process of its own, to the schedule or to the end, and keeps what it said."""

import contextlib
import errno
import functools
import gzip
import hashlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slicewise.catalog.slices import Cluster
from slicewise.config import RunConfig, check_effects, resolve_degrees
from slicewise.costs.layout import WEIGHT_AXES
from slicewise.costs.shapes import model_shape
from slicewise.errors import ExitCode, UserError
from slicewise.interop.huggingface import load_spec
from slicewise.kernels import tuned
from slicewise.train import identity

Depth = Literal["schedule", "full"]
POLL_S = 0.05
EXECUTABLE = "executable"  # the file of machine code in an entry of the cache, where it was asked for
MOST_SLICES = 256  # of a queued resource
# How the compiler calls the chips; two devices of TPU7x share a chip whatever is asked for.
COMPILER_NAMES = {"v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "tpu7x": "tpu7x"}
SETTINGS = {
    "JAX_PLATFORMS": "cpu",  # the compiler needs no device, and must not wait for one
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "x",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second compiler on this machine dies of the first one's lock
    "TPU_STDERR_LOG_LEVEL": "2",
}
DUMPS = "--xla_dump_hlo_as_text --xla_dump_compact_gte=false"
# What decides a program besides the config and what train.identity names: a change of any is another program.
COMPILING = ("child.py", "compiler.py", "programs.py", "target.py")  # the rest here only reads
IRRELEVANT = (
    "run",
    "checkpoint",
    "evaluation",
    "metrics",
)  # sections of the config that no program depends on


@dataclass(frozen=True)
class Request:
    """What to compile: one program of ``config`` on ``cluster``.

    ``schedule`` stops when the order of all instructions and the place of all buffers are known; ``full`` goes on to
    machine code, and so to the compiler's own cycles.
    """

    config: RunConfig
    cluster: Cluster
    program: str = "update"
    depth: Depth = "schedule"
    serialize: bool = False

    @property
    def slice_text(self) -> str:
        """One slice, as catalog.slices.parse reads it."""
        return f"{self.cluster.chip.name}:{'x'.join(map(str, self.cluster.slice.topology))}"

    @property
    def is_cached(self) -> bool:
        """Whether compiling it takes no time."""
        return _facts_of(cache_directory() / self.key) is not None

    @property
    def key(self) -> str:
        """Digest of everything that decides the outcome."""
        # Steps and seed are constants of a program, which only its machine code shows.
        irrelevant = IRRELEVANT[1:] if self.serialize or self.program == "init" else IRRELEVANT
        config = {k: v for k, v in self.config.model_dump().items() if k not in irrelevant}
        spec = load_spec(config["model"].pop("model")).model_dump()  # what its file says now
        parts = [
            config,
            spec,
            self.slice_text,
            self.cluster.num_slices,
            self.program,
            self.depth,
            self.serialize,
        ]
        # Settings of kernels that the user tuned for this chip decide as the package's sources do.
        parts += [identity.versions(), identity.source_digest(), _source_digest()]
        parts.append(tuned.digest(self.cluster.chip.name))
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


class CompileFailed(UserError):
    """This one program was not compiled: the compiler crashed or passed a limit. Others may well be."""

    left: Path | None = None  # the folder with the compiler's log, for whoever reads the message

    def forget(self) -> None:
        """Removes the log: for who shows the message to nobody."""
        if self.left is not None:
            shutil.rmtree(self.left, ignore_errors=True)


@dataclass(frozen=True)
class Compiled:
    """What the compiler left in ``directory``."""

    request: Request
    directory: Path
    facts: dict[str, Any]  # mesh, devices, cpu_s, wall_s, peak_rss_bytes, out_of_memory
    from_cache: bool

    def text(self, name: str) -> str:
        """``scheduled.hlo``, ``buffers.txt`` or ``live_ranges.txt``."""
        return gzip.decompress((self.directory / f"{name}.gz").read_bytes()).decode()

    @property
    def out_of_memory(self) -> str | None:
        """The compiler's sentence when the program does not fit."""
        return self.facts["out_of_memory"]


def compile_request(
    request: Request, *, timeout_s: float = 3600.0, memory_limit_bytes: float | None = None
) -> Compiled:
    """Compiles, or takes what an earlier call of the same content left.

    Raises UserError when the compiler is absent, refuses the program, crashes, or passes a limit; its log's path is in
    the message.
    """
    check(request)
    kept = cache_directory() / request.key
    if facts := _facts_of(kept):
        return Compiled(request, kept, facts, True)
    work = kept.with_name(f"{request.key}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        _sweep(kept.parent)
        (work / "dump").mkdir(parents=True)
        child = _Child(request, work)
        facts = child.run(timeout_s, memory_limit_bytes)
        _keep(work, facts, request.depth, child.schedule)
        _put(work, kept)
    except CompileFailed as e:
        shutil.rmtree(work / "dump", ignore_errors=True)  # the log stays: the message names it
        e.left = work
        raise
    except OSError as e:
        shutil.rmtree(work, ignore_errors=True)
        raise UserError(
            f"{e.filename or work} cannot be written: {e.strerror};"
            " set XDG_CACHE_HOME to a place that can be written.",
            code=ExitCode.INTERNAL,
        ) from e
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    kept_facts = _facts_of(kept)
    assert kept_facts is not None
    return Compiled(request, kept, kept_facts, False)


def _facts_of(kept: Path) -> dict[str, Any] | None:
    """The facts of a whole entry of the cache; None where there is none or it is damaged."""
    facts = _read(kept / "facts.json")
    sizes = facts.get("sizes") if facts else None
    if facts is None or not isinstance(sizes, dict) or not sizes:
        return None
    whole = all((kept / n).is_file() and (kept / n).stat().st_size == size for n, size in sizes.items())
    return facts if whole else None


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``; None where there is none, or not all of it."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _put(work: Path, kept: Path) -> None:
    """Makes ``work`` the entry ``kept``, unless another process did first; a damaged entry gives way."""
    if _facts_of(kept) is None:
        if kept.is_dir() and not kept.is_symlink():
            shutil.rmtree(kept)
        else:
            kept.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            work.replace(kept)
    shutil.rmtree(work, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """Removes what processes that were killed left behind, a day later: somebody may read their logs."""
    for path in cache.glob("*.*.*"):
        pid = path.name.split(".")[1]
        is_old = path.is_dir() and time.time() - path.stat().st_mtime > 86_400
        if is_old and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def check(request: Request) -> None:
    """Refuses, before anything is started, what the process that compiles would refuse."""
    cluster = request.cluster
    compiler_name(cluster)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("the TPU compiler is not installed: pip install 'slicewise[compile]'.")
    if cluster.num_slices > MOST_SLICES:
        raise UserError(f"{cluster.num_slices} slices: at most {MOST_SLICES} can be joined.")
    degrees = resolve_degrees(
        request.config, num_slices=cluster.num_slices, devices_per_slice=cluster.slice.devices
    )
    spec = load_spec(request.config.model.model)
    check_effects(request.config, model_shape(spec), degrees, cluster.num_slices)
    ways = math.prod(degrees.total(axis) for axis in WEIGHT_AXES)
    if ways == spec.d_model:
        raise UserError(
            f"{' x '.join(WEIGHT_AXES)} parallelism {ways} leaves a device one column of each weight, on which the TPU"
            f" compiler crashes; use {ways // 2} and 2 of data parallelism."
        )


def compiler_name(cluster: Cluster) -> str:
    """The topology's name for the compiler, such as v5p:4x4x8. Raises UserError for a chip that it has no target of."""
    name = COMPILER_NAMES.get(cluster.chip.name)
    if name is None:
        raise UserError(
            f"no compiler here makes programs for {cluster.chip.name}; choose one of {', '.join(COMPILER_NAMES)}."
        )
    return f"{name}:{'x'.join(map(str, cluster.slice.topology))}"


def cache_directory() -> Path:
    """Where compiled programs are kept: $XDG_CACHE_HOME/slicewise/programs, by default under ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "slicewise" / "programs"


@functools.cache
def _source_digest() -> str:
    """Of what compiles here."""
    return identity.digest_of([Path(__file__).with_name(name) for name in COMPILING])


def start(request: Request, work: Path, log: Path, flags: str = "") -> subprocess.Popen:
    """The process that knows the absent devices, at work on ``request``; what it prints goes to ``log``."""
    said = {
        "config": request.config.model_dump(),
        "slice": request.slice_text,
        "num_slices": request.cluster.num_slices,
        "program": request.program,
        "serialize": request.serialize,
    }
    environment = os.environ | SETTINGS | {"XLA_FLAGS": f"{flags} {os.environ.get('XLA_FLAGS', '')}"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "slicewise.compile.child", str(work)],
            stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(said).encode())
    return process


class _Child:
    """One compiling process: started, watched, stopped."""

    def __init__(self, request: Request, work: Path):
        self.request, self.work, self.dump = request, work, work / "dump"
        self.log = work / "compiler.log"
        self.schedule: dict[str, bytes] = {}  # what is kept of a compiler that was stopped at it

    def run(self, timeout_s: float, memory_limit_bytes: float | None) -> dict[str, Any]:
        """Facts of the compile. Raises UserError."""
        start_s, stopped = time.monotonic(), None
        process = start(self.request, self.work, self.log, f"--xla_dump_to={self.dump} {DUMPS}")
        peak_bytes = 0.0
        try:
            while _running(process):
                if self.request.depth == "schedule" and self._schedule_is_there():
                    stopped = "schedule"
                    break
                peak_bytes = max(peak_bytes, _resident_bytes(process.pid))
                if time.monotonic() - start_s > timeout_s:
                    stopped = f"took longer than {timeout_s:g} s"
                    break
                if memory_limit_bytes and peak_bytes > memory_limit_bytes:
                    stopped = f"used more than {memory_limit_bytes / 1e9:.1f} GB"
                    break
                time.sleep(POLL_S)
        finally:
            usage = _end(process)
        if stopped not in (None, "schedule"):
            raise CompileFailed(
                f"the compiler was stopped: it {stopped}. Its log: {self.log}", code=ExitCode.INTERNAL
            )
        facts = self._facts(process, stopped == "schedule")
        return facts | {
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "wall_s": time.monotonic() - start_s,
            "peak_rss_bytes": max(peak_bytes, usage.ru_maxrss * 1024),
        }

    def _dumped(self, suffix: str) -> Path | None:
        facts = _read(self.work / "facts.json")
        if facts is None:
            return None
        module = facts["module"]
        return next(iter(sorted(self.dump.glob(f"module_*.{module}.*.{suffix}"))), None)

    def _schedule_is_there(self) -> bool:
        """All files of the schedule are there, and the one that is written last is whole.

        The one after it, of the same instructions, has to wait for the machine code of the SparseCores, which on TPU7x
        takes longer than all that came before. They are read at once: the compiler may begin to write them anew, for
        what it offloads, and then they are empty when it is stopped.
        """
        names = {
            "live_ranges.txt": "-live-range.txt",
            "buffers.txt": "-buffer-assignment.txt",
            "scheduled.hlo": ".txt",
        }
        found = {name: self._dumped(f"after_optimizations{suffix}") for name, suffix in names.items()}
        texts = {name: path.read_bytes() for name, path in found.items() if path}
        if len(texts) < len(names) or not all(texts.values()):
            return False
        text = texts["scheduled.hlo"]
        if not text.rstrip().endswith(b"}") or b"\nENTRY " not in text:  # the entry computation comes last
            return False
        self.schedule = texts
        return True

    def _facts(self, process: subprocess.Popen, has_schedule: bool) -> dict[str, Any]:
        outcome = {"error": None, "kind": ""}
        if not has_schedule:
            if not (self.work / "outcome.json").exists():
                how = (
                    f"signal {-process.returncode}"
                    if process.returncode < 0
                    else f"code {process.returncode}"
                )
                raise CompileFailed(
                    f"the compiler crashed ({how}). Its log: {self.log}", code=ExitCode.INTERNAL
                )
            outcome = _whole(self.work / "outcome.json")
        message = outcome["error"]
        if message and outcome["kind"] == "user":
            raise UserError(message)
        if message and "CompileTimeHbmOom" not in message and "memory space hbm" not in message:
            raise CompileFailed(
                f"the compiler refuses this program: {message.splitlines()[0]} Its log: {self.log}"
            )
        facts = _whole(self.work / "facts.json")
        return facts | {"out_of_memory": message}


def _whole(path: Path) -> dict[str, Any]:
    """What the child left in ``path``. Raises OSError where it could not write all of it."""
    found = _read(path)
    if found is None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return found


def _running(process: subprocess.Popen) -> bool:
    """Whether it runs, without reaping it: its use of the processor is read when it is."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _end(process: subprocess.Popen) -> Any:
    """Kills what is left of the process and its children, and returns what it used."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage


def _resident_bytes(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0.0


def _keep(work: Path, facts: dict[str, Any], depth: Depth, schedule: dict[str, bytes]) -> None:
    """Leaves the few files that are read again, compressed; facts.json last, which makes it whole."""
    module = facts["module"]
    (work / "facts.json").unlink()
    for name, suffixes in _kept(depth):
        if name in schedule:
            (work / f"{name}.gz").write_bytes(gzip.compress(schedule[name], 6))
            continue
        for suffix in suffixes:
            if path := next(iter(sorted((work / "dump").glob(f"module_*.{module}.*{suffix}"))), None):
                (work / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes(), 6))
                break
    kept = [*work.glob("*.gz"), *work.glob(EXECUTABLE)]
    facts["sizes"] = {path.name: path.stat().st_size for path in kept}
    shutil.rmtree(work / "dump")
    (work / "outcome.json").unlink(missing_ok=True)
    (work / "facts.json.tmp").write_text(json.dumps(facts))
    (work / "facts.json.tmp").replace(work / "facts.json")


def _kept(depth: Depth) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name here, and the dumps it may come from, the best first."""
    final = (
        (".after_codegen.txt",) if depth == "full" else ()
    )  # a small program may be done before it is stopped
    yield "scheduled.hlo", (*final, ".after_optimizations.txt", ".oom_intermediate_module.txt")
    yield "buffers.txt", (".after_optimizations-buffer-assignment.txt", "buffer-assignment.txt")
    yield "live_ranges.txt", (".after_optimizations-live-range.txt", "live-range.txt")
