"""What a worker has on its own disk during an attempt: code, config, and logs that are copied to the job's folder."""

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from slicewise.errors import ExitCode, UserError
from slicewise.launch.job_folder import PIECE_BYTES, JobFolder, JobSpec
from slicewise.launch.storage import StorageError
from slicewise.temporary import temporary_folder

COPY_INTERVAL_S = 5.0  # so much of a log is lost at most with its machine
MAX_CODE_BYTES = 256 * 1024**2  # packed
OWN = ".slicewise"  # in the home of a worker: code and working directories
IGNORED = {".git", ".hg", ".venv", "venv", "node_modules", "__pycache__", "runs"}


class WorkerFiles:
    """As a context manager. On entering, code and config are there; on leaving, all of the logs is copied."""

    def __init__(self, job: JobFolder, spec: JobSpec, attempt: int):
        self._job, self._spec, self._attempt = job, spec, attempt
        self._stack = contextlib.ExitStack()
        self._logs: dict[str, Path] = {}
        self._copied: dict[str, int] = {}
        self._done = threading.Event()

    def __enter__(self) -> Self:
        """Raises UserError when the code or the disk is not as it must be."""
        with contextlib.ExitStack() as undo, _environment():
            own = undo.enter_context(temporary_folder("slicewise-job-"))
            (own / "config.toml").write_text(self._spec.config, encoding="utf-8")
            self._on_disk = "://" not in self._job.root
            root = Path(self._job.folder.root) if self._on_disk else own
            self._log_folder = root / self._job.log_name(self._attempt, "").rstrip("/")
            self._log_folder.mkdir(parents=True, exist_ok=True)
            self._code = (
                unpack_code(self._job, self._spec.code, Path.home() / OWN / "code")
                if self._spec.code
                else None
            )
            self._own = own
            self._directory = self._start_directory()
            if not self._on_disk:
                copier = threading.Thread(target=self._keep_copying, daemon=True)
                copier.start()
                undo.callback(self._finish_copying, copier)
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def command(self) -> Sequence[str]:
        """Arguments of Python."""
        config = str(self._own / "config.toml")
        return [config if word == "{config}" else word for word in self._spec.command]

    @property
    def directory(self) -> Path:
        """Where the trainer starts: it stays from attempt to attempt."""
        return self._directory

    def _start_directory(self) -> Path:
        if self._spec.working_directory:
            return Path(self._spec.working_directory)
        if self._code:
            return self._code
        own = Path.home() / OWN / "jobs" / self._spec.name
        own.mkdir(parents=True, exist_ok=True, mode=0o700)
        return own

    def python_path(self, before: str = "") -> dict[str, str]:
        """Environment that makes the shipped code importable: its root, and its src where it has one."""
        if self._code is None:
            return {}
        roots = [str(self._code / "src")] if (self._code / "src").is_dir() else []
        return {"PYTHONPATH": os.pathsep.join([*roots, str(self._code), *filter(None, [before])])}

    def log(self, place: str) -> Path:
        """Where the trainer at ``place`` writes its log."""
        self._logs[place] = path = self._log_folder / f"{place}.log"
        return path

    def _keep_copying(self) -> None:
        while not self._done.wait(COPY_INTERVAL_S):
            for place in list(self._logs):
                with contextlib.suppress(StorageError):  # the next time, or at the end
                    self._copy(place)

    def _finish_copying(self, copier: threading.Thread) -> None:
        self._done.set()
        copier.join()
        for place in self._logs:
            for _ in range(3):
                try:
                    self._copy(place)
                    break
                except StorageError:
                    continue

    def _copy(self, place: str) -> None:
        """Writes what was added since the last copy."""
        path, name = self._logs[place], self._job.log_name(self._attempt, place)
        if not path.exists():
            return
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            while (copied := self._copied.get(place, 0)) < size:
                piece = copied // PIECE_BYTES
                file.seek(piece * PIECE_BYTES)
                data = file.read(PIECE_BYTES)
                self._job.folder.write(f"{name}.{piece:04d}.log", data)
                self._copied[place] = piece * PIECE_BYTES + len(data)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or 'disk'}: {error.strerror}: a worker needs it for code, config and logs.",
            code=ExitCode.INTERNAL,
        ) from error


def pack_code(job: JobFolder, directory: Path) -> str:
    """Puts the files below ``directory`` into the job's folder; the name of the archive.

    Links, hidden version control, environments and runs are left out. The same files give the same archive.
    Raises UserError for no directory, or too much in it.
    """
    if not directory.is_dir():
        raise UserError(f"--code {directory}: no such directory.")
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for path in _code_files(directory):
            archive.add(path, arcname=str(path.relative_to(directory)), recursive=False, filter=_plain)
            if buffer.tell() > MAX_CODE_BYTES:
                raise UserError(
                    f"--code {directory} packs to more than {MAX_CODE_BYTES // 1024**2} MiB; name a directory"
                    " with the code only, and keep data and checkpoints elsewhere."
                )
    data = buffer.getvalue()
    name = f"code-{hashlib.sha256(data).hexdigest()[:16]}.tar.gz"
    job.folder.create(name, data)
    return name


def _code_files(directory: Path) -> Iterator[Path]:
    for folder, folders, names in directory.walk():
        folders[:] = sorted(name for name in folders if name not in IGNORED)
        yield from (
            path for name in sorted(names) if (path := folder / name).is_file() and not path.is_symlink()
        )


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def unpack_code(job: JobFolder, name: str, below: Path) -> Path:
    """The directory with the code of the archive ``name``: once for all attempts and workers of a machine.

    Raises UserError when the archive is absent, damaged, or would write outside of its directory.
    """
    digest = name.removeprefix("code-").partition(".")[0]
    target = below / digest
    if target.is_dir():
        return target
    data = job.folder.read(name)
    if data is None or hashlib.sha256(data).hexdigest()[:16] != digest:
        what = "is absent" if data is None else "is damaged"
        raise UserError(f"{job.root}/{name} {what}: submit the job again.", code=ExitCode.INTERNAL)
    below.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=below) as half:
        whole = Path(half) / digest
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
                archive.extractall(whole, filter="data")
        except tarfile.TarError as error:
            raise UserError(f"{job.root}/{name}: {error}.", code=ExitCode.INTERNAL) from error
        whole.mkdir(exist_ok=True)
        try:
            whole.rename(target)
        except OSError:
            if not target.is_dir():  # else another worker of this machine was faster
                raise
    return target
