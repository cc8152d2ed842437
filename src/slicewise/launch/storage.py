"""A folder of small documents on a shared disk or in a bucket: created once, or replaced whole.

A reader sees a document as it was written or not at all, and of several that create one, a single one succeeds.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from slicewise.errors import ExitCode, UserError

TEMPORARY = ".tmp-"


class StorageError(UserError):
    """The storage did not do what was asked. It may do so later: who can wait tries again."""

    def __init__(self, message: str):
        super().__init__(message, code=ExitCode.INTERNAL)


class Folder(Protocol):
    """Names are relative to ``root``, with "/" between parts. Failures of the storage are StorageErrors."""

    root: str

    def read(self, name: str, start: int = 0) -> bytes | None:
        """From byte ``start`` on. None when there is no such file."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Replaces what was there, whole."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """False, and nothing is written, when the file is there already."""
        ...

    def exists(self, name: str) -> bool: ...

    def names(self, name: str) -> list[str]:
        """What lies directly below the folder ``name``, sorted; empty when it does not exist."""
        ...

    def remove(self, name: str) -> None:
        """Removes one file; none being there is fine."""
        ...


def open_folder(root: str) -> Folder:
    """``root``: a local path, or a URL that fsspec knows (gs://bucket/run). Nothing is read or written yet.

    Raises UserError for a URL whose filesystem is not installed.
    """
    return _Bucket(root.rstrip("/")) if "://" in root else _Disk(root)


def read_json(folder: Folder, name: str) -> dict[str, Any] | None:
    """None when absent. Raises StorageError for what is no JSON object: nobody but us writes there."""
    data = folder.read(name)
    if data is None:
        return None
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise StorageError(f"{folder.root}/{name} is damaged: expected a JSON object.")
    return document


def write_json(folder: Folder, name: str, document: dict[str, Any]) -> None:
    folder.write(name, _encoded(document))


def create_json(folder: Folder, name: str, document: dict[str, Any]) -> bool:
    return folder.create(name, _encoded(document))


def _encoded(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    assert not path.is_absolute(), name
    assert ".." not in path.parts, name
    return str(path)


class _Disk:
    """Files of mode 0600, as they may hold environments and logs."""

    def __init__(self, root: str):
        self.root = str(Path(root).expanduser().absolute())

    def read(self, name: str, start: int = 0) -> bytes | None:
        def read(path: Path) -> bytes:
            with path.open("rb") as file:
                file.seek(start)
                return file.read()

        return self._try("read", name, read, None)

    def write(self, name: str, data: bytes) -> None:
        def replace(path: Path) -> None:
            with _temporary(path, data) as temporary:
                temporary.replace(path)

        self._try("write", name, replace, None)

    def create(self, name: str, data: bytes) -> bool:
        def link(path: Path) -> bool:
            with _temporary(path, data) as temporary:
                try:
                    os.link(temporary, path)  # atomic, also on NFS, and the content is there at once
                except FileExistsError:
                    return False
            return True

        return self._try("write", name, link, False)

    def exists(self, name: str) -> bool:
        return self._try("read", name, lambda path: path.exists(), False)

    def names(self, name: str) -> list[str]:
        absent: list[str] = []
        found = self._try("list", name, lambda path: os.listdir(path), absent)
        return sorted(n for n in found if not n.startswith(TEMPORARY))

    def remove(self, name: str) -> None:
        self._try("remove", name, lambda path: path.unlink(), None)

    def _try[T](self, verb: str, name: str, action: Callable[[Path], T], absent: T) -> T:
        path = Path(self.root) / _checked(name)
        try:
            return action(path)
        except FileNotFoundError:
            return absent
        except OSError as error:
            raise StorageError(f"cannot {verb} {self.root}/{name}: {error.strerror}.") from error


@contextlib.contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    """A file beside ``path`` with ``data`` (mkstemp makes it 0600), gone at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


class _Bucket:
    """Through fsspec. ``create`` is atomic where its filesystem has a conditional write, as gs:// and s3:// have."""

    def __init__(self, root: str):
        self.root = root
        try:
            import fsspec

            self._fs, self._base = fsspec.core.url_to_fs(root, use_listings_cache=False)
        except ImportError as error:
            raise UserError(
                f"{root}: a package for such URLs is absent ({error}); pip install 'slicewise[job]'."
            ) from error
        except Exception as error:  # each filesystem has errors of its own
            raise UserError(f"{root} cannot be opened: {_line(error)}.") from error

    def read(self, name: str, start: int = 0) -> bytes | None:
        return self._try("read", name, lambda path: self._fs.cat_file(path, start=start or None), None)

    def write(self, name: str, data: bytes) -> None:
        self._try("write", name, lambda path: self._fs.pipe_file(path, data), None)

    def create(self, name: str, data: bytes) -> bool:
        def pipe(path: str) -> bool:
            try:
                self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            return True

        return self._try("write", name, pipe, False)

    def exists(self, name: str) -> bool:
        return self._try("read", name, self._fs.exists, False)

    def names(self, name: str) -> list[str]:
        absent: list[str] = []
        found = self._try("list", name, lambda path: self._fs.ls(path, detail=False, refresh=True), absent)
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def remove(self, name: str) -> None:
        self._try("remove", name, self._fs.rm_file, None)

    def _try[T](self, verb: str, name: str, action: Callable[[str], T], absent: T) -> T:
        path = f"{self._base}/{_checked(name)}".rstrip("/.")
        try:
            return action(path)
        except FileNotFoundError:
            return absent
        except Exception as error:  # each filesystem has errors of its own
            raise StorageError(f"cannot {verb} {self.root}/{name}: {_line(error)}.") from error


def _line(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__).rstrip(".")
