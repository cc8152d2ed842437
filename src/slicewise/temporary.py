"""Temporary folders that go with their process, however it ends."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCKED = ".locked"  # the end of a name that a folder has only while, and after, a process holds its lock


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A new folder for this user alone, removed at the end of the block. Raises OSError.

    A process that is killed leaves it behind; the next that makes one of the same ``prefix`` removes it. A lock tells
    it from one in use: the kernel frees it with the process, and containers that share a disk see it too.
    """
    _remove_left(prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix))
    lock = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # without locks here its name keeps others away
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = path.rename(path.with_name(path.name + LOCKED))
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_left(prefix: str) -> None:
    """Removes this user's folders whose processes have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*{LOCKED}"):
        with contextlib.suppress(OSError):  # another user's, in use, or removed by another process
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
