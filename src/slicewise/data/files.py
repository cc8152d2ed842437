"""Finds and reads the files of a dataset, with errors that name the file and the place in it."""

import contextlib
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from slicewise.errors import ExitCode, UserError

COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".zip")
PATTERNS = {  # what a directory is searched for
    "text": ("*",),
    "jsonl": ("*.jsonl", "*.ndjson"),
    "parquet": ("*.parquet",),
    "arrayrecord": ("*.array_record*", "*.arrayrecord*"),
}

# Files: (name that does not depend on where the corpus lies, path).
Files = Sequence[tuple[str, str]]


def find_files(dataset: str, path: str) -> Files:
    """The files of ``path`` (a file, a directory searched recursively, or a glob), sorted by name.

    Raises UserError when there is none, for a compressed one, or a directory that may not be read.
    """
    if "://" in path:
        raise UserError(f"dataset_path = '{path}': only local paths are read; mount the bucket first.")
    given = os.path.expanduser(path)
    with reading(given):
        if os.path.isfile(given):
            files = [(os.path.basename(given), given)]
        elif os.path.isdir(given):
            files = walk(given, PATTERNS[dataset])
            if not files:
                wanted = " or ".join(PATTERNS[dataset])
                raise UserError(f"dataset_path = '{path}': that directory has no file {wanted}.")
        elif glob.has_magic(given):
            files = _glob(given)
            if not files:
                raise UserError(f"dataset_path = '{path}': the glob matches no file.")
        else:
            os.stat(given)  # raises, with the reason, in all likelihood
            raise UserError(f"dataset_path = '{path}' is neither a file nor a directory.")
    if dataset in ("text", "jsonl") and (packed := [p for _, p in files if p.endswith(COMPRESSED)]):
        raise UserError(f"{packed[0]} is compressed, which allows no random access; decompress it first.")
    return sorted(files)


def walk(root: str, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Files under ``root`` whose names match a pattern, without hidden ones, unsorted; raises OSError."""

    def refuse(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if not f.startswith(".")]
        for name in names:
            if not name.startswith(".") and any(fnmatch(name, pattern) for pattern in patterns):
                path = os.path.join(folder, name)
                found.append((Path(path).relative_to(root).as_posix(), path))
    return found


def _glob(pattern: str) -> list[tuple[str, str]]:
    root = Path(pattern)
    while glob.has_magic(str(root)):
        root = root.parent
    paths = [p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
    return [(Path(p).relative_to(root).as_posix(), p) for p in paths]


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turns an OSError into a UserError that names the file; only a missing file is the user's fault."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as e:
        raise UserError(f"{e.filename or path}: {_reason(e)}.") from e
    except OSError as e:
        raise UserError(f"{e.filename or path}: {_reason(e)}.", code=ExitCode.INTERNAL) from e


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def read_bytes(path: str, start: int, length: int) -> bytes:
    """Bytes [start, start + length) of a file; UserError when they are no longer there."""
    with reading(path), open(path, "rb", buffering=0) as file:
        content = os.pread(file.fileno(), length, start)
    if len(content) < length:
        raise UserError(f"{path} became shorter while it was read; leave the files of a dataset as they are.")
    return content


def decode_utf8(content: bytes, where: Callable[[int], str]) -> str:
    """``content`` as text; a UserError says ``where(i)`` for the first byte i that is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as e:
        raise UserError(f"{where(e.start)} is not UTF-8 text ({e.reason}); convert the file.") from e
