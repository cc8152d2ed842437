"""Settings of kernels that `slicewise tune` found: a table with the package, and one of your own that comes first.

An entry counts only where kernel, chip, shape, dtype, VMEM limit and the versions of the libraries are its own: another
compiler may refuse what it took. What no entry is for keeps the rules beside each kernel.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, ValidationError

from slicewise.catalog.model import Record, first_problem
from slicewise.errors import ExitCode, UserError, write_whole

FORMAT = 1
PACKAGES = ("jax", "libtpu", "tokamax")  # that decide what a kernel becomes; those that are installed
ADVICE = "move it away and run 'slicewise tune' again"
Judge = Literal["measured", "compiled"]


class Key(Record):
    """What a setting is for. ``shape`` are the dims that matter to the kernel, by name, of one device."""

    kernel: str
    chip: str  # of the catalog, or the platform where it has no name for the device
    shape: Mapping[str, int]
    dtype: str
    vmem_limit_kib: int = 0

    @property
    def text(self) -> str:
        """Such as 'splash, v6e, tokens 8192 qk 128 v 128 window 0, bfloat16'."""
        dims = " ".join(f"{name} {size}" for name, size in self.shape.items())
        limit = f", {self.vmem_limit_kib} KiB of VMEM" if self.vmem_limit_kib else ""
        return f"{self.kernel}, {self.chip}, {dims}, {self.dtype}{limit}"


class Entry(Record):
    """The best values found for ``key``, beside what the rules give. ``seconds`` are of one call, as judged."""

    key: Key
    values: Mapping[str, PositiveInt]
    versions: Mapping[str, str]
    judge: Judge
    seconds: float = Field(gt=0, allow_inf_nan=False)
    untuned_seconds: float | None = Field(
        None, gt=0, allow_inf_nan=False
    )  # None where the rules' do not compile
    tried: int = Field(ge=1)


def find(key: Key, names: Collection[str]) -> Mapping[str, int] | None:
    """The values for ``key``: those of your own table before those of the package, measured before compiled.

    Raises UserError for a table of your own that cannot be read, or whose values are not those that ``names`` says.
    """
    for table in (own(), shipped()):
        fitting = [e for e in table if e.key == key and e.versions == versions()]
        if fitting:
            values = min(fitting, key=lambda e: e.judge != "measured").values
            if set(values) != set(names):
                raise wrong(key, values, f"{' and '.join(names)} are wanted")
            return values
    return None


def wrong(key: Key, values: Mapping[str, int], why: str) -> UserError:
    """What values of your own table for ``key`` end with that the kernel cannot have."""
    shown = ", ".join(f"{name} = {value}" for name, value in values.items())
    return UserError(f"{own_path()}: {shown} for {key.text}: {why}; {ADVICE}.")


@functools.cache
def versions() -> Mapping[str, str]:
    """Of the packages that decide, as installed here."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def shipped() -> tuple[Entry, ...]:
    """The table of the package."""
    text = (resources.files("slicewise.kernels") / "tuned.toml").read_text()
    return _parsed(text, "tuned.toml of the package")


def own_path() -> Path:
    """$XDG_CACHE_HOME/slicewise/tuned.toml, by default under ~/.cache."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "slicewise" / "tuned.toml"


def own() -> tuple[Entry, ...]:
    """Your table; empty where there is none."""
    path = own_path()
    try:
        stamp = path.stat()
    except OSError:
        return ()
    return _read(path, stamp.st_mtime_ns, stamp.st_size)


@functools.lru_cache(maxsize=4)
def _read(path: Path, changed_ns: int, size: int) -> tuple[Entry, ...]:
    try:
        return _parsed(path.read_text(encoding="utf-8-sig"), str(path))
    except OSError as e:
        raise UserError(
            f"{path} cannot be read: {e.strerror}; {ADVICE}.",
            code=ExitCode.INTERNAL,
        ) from e
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is no text: {e}; {ADVICE}.") from e


def _parsed(text: str, where: str) -> tuple[Entry, ...]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{where} is no TOML: {e}; {ADVICE}.") from e
    if table.get("format") != FORMAT:
        raise UserError(f"{where} has format {table.get('format')}, this version reads {FORMAT}; {ADVICE}.")
    try:
        return tuple(Entry(**entry) for entry in table.get("tuned", ()))
    except (ValidationError, TypeError) as e:
        problem = first_problem(e, Entry) if isinstance(e, ValidationError) else str(e)
        raise UserError(f"{where}: {problem.rstrip('.')}; {ADVICE}.") from e


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """No other process changes ``path`` within, which may be absent, as its folder may.

    Raises UserError where there can be no file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with path.with_name(f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as e:
        raise UserError(
            f"{path} cannot be written: {e.strerror}; set XDG_CACHE_HOME to a place that can be written.",
            code=ExitCode.INTERNAL,
        ) from e


def keep(entry: Entry) -> None:
    """Puts ``entry`` into your table, instead of one of the same key, versions and judge.

    Raises UserError where the file cannot be written.
    """

    def same(other: Entry) -> bool:
        return (other.key, other.versions, other.judge) == (entry.key, entry.versions, entry.judge)

    path = own_path()
    with alone(path):
        entries = [*(e for e in own() if not same(e)), entry]
        write_whole(path, text_of(entries).encode(), str(path))


def text_of(entries: Sequence[Entry]) -> str:
    """A table as TOML."""
    parts = [f"format = {FORMAT}\n"]
    for e in entries:
        key = e.key
        lines = [
            "[[tuned]]",
            f"key = {{kernel = {json.dumps(key.kernel)}, chip = {json.dumps(key.chip)}, shape = {_inline(key.shape)},"
            f" dtype = {json.dumps(key.dtype)}, vmem_limit_kib = {key.vmem_limit_kib}}}",
            f"values = {_inline(e.values)}",
            f"versions = {_inline(e.versions)}",
            f"judge = {json.dumps(e.judge)}",
            f"seconds = {e.seconds:.6g}",
            *([f"untuned_seconds = {e.untuned_seconds:.6g}"] if e.untuned_seconds else []),
            f"tried = {e.tried}",
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _inline(values: Mapping[str, int] | Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in values.items()) + "}"


def digest(chip: str | None = None) -> str:
    """Of your entries, or those for ``chip``, which decide programs as sources do; '' where there are none."""
    mine = [e.model_dump_json() for e in own() if chip in (None, e.key.chip)]
    return hashlib.sha256("\n".join(sorted(mine)).encode()).hexdigest()[:16] if mine else ""
