"""One run at a time in a folder: two would tear each other's checkpoints and metrics."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from slicewise.errors import ExitCode, UserError

FILE = "lock"
HELD = "SLICEWISE_RUN_HELD"  # in the environment: whoever started this process holds the folder
WAIT_S = 5.0  # the processes of a run that was just killed may take a moment to end
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def sole(
    directory: Path, environment: Mapping[str, str] = os.environ, *, wait_s: float = WAIT_S
) -> Iterator[dict[str, str]]:
    """``directory``, which is made, belongs to this process until it ends, whatever ends it.

    Yields what to add to the environment of processes of the same run. In a job its supervisor sees to it that
    there is one attempt at a time, and nothing is held here; nor is it where the file system has no locks.
    Raises UserError: CONFLICT when another process holds it, INTERNAL when nothing can be written there.
    """
    if HELD in environment or "SLICEWISE_ATTEMPT" in environment:
        yield {}
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"{error.filename or directory} cannot be written: {error.strerror}. Once that is mended, the same"
            " command starts the run, or continues it.",
            code=ExitCode.INTERNAL,
        ) from error
    try:
        _take(lock, directory, wait_s)
        yield {HELD: "1"}
    finally:
        os.close(lock)


def _take(lock: int, directory: Path, wait_s: float) -> None:
    import fcntl

    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                break
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return
        else:
            return
    raise UserError(
        f"another process is training in {directory}: wait until it has ended, or choose another run_name.",
        code=ExitCode.CONFLICT,
    )
