"""The one table of exit codes, and the one exception that speaks to the user."""

import difflib
import errno
import os
import tempfile
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """How a slicewise process ends. A supervisor decides by these and never by an error's text."""

    DONE = 0
    INTERNAL = 1  # a defect or a broken environment: neither the config nor the user's input is at fault
    USER = 2  # a config, argument or input file must change before another try can succeed
    NOT_FOUND = 66  # what was named does not exist
    UNAVAILABLE = 69  # a service failed or does not answer: try again later
    CONFLICT = 73  # it exists already, or is being changed by somebody else
    RESTART = 75  # nothing is wrong with the job: start the whole gang again
    PREEMPTED = 76  # asked to stop, and no step is lost: they were saved first, or none was taken
    DENIED = 77  # not logged in, or not allowed
    RATE_LIMITED = 78  # too many requests
    QUOTA = 79  # a quota is used up
    NO_SLICES = 80  # the queued resource failed, or lost its slices
    CORRUPTION = 85  # a device computed or kept something wrongly: replace it
    TIMEOUT = 124  # still waiting when the time was over


class UserError(ValueError):
    """What is wrong (with its value), what was expected, what to do; one or two lines, shown without traceback.

    A broken environment (full disk, no permission) is raised with ``code=ExitCode.INTERNAL``.
    """

    def __init__(self, message: str, *, code: ExitCode = ExitCode.USER):
        super().__init__(message)
        self.code = code


# of paths that no mended environment makes right
_WRONG_PATH = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL}
_WRONG_PATH |= {errno.ELOOP}


def cannot_write(what: str, error: OSError) -> UserError:
    """What a file that a person named ends with: USER where the path is wrong, INTERNAL for a full disk or the like.

    ``what`` is the option and its path, such as ``"--html page.html"``.
    """
    code = ExitCode.USER if error.errno in _WRONG_PATH else ExitCode.INTERNAL
    return UserError(f"{what} cannot be written: {error.strerror or error}.", code=code)


def write_whole(path: str | Path, data: bytes, what: str) -> None:
    """Writes all of a file that a person named, or leaves it as it was; what is no file, such as a pipe, as it comes.

    Raises UserError, see cannot_write.
    """
    path, temporary = Path(path), None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o644
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary:
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise cannot_write(what, error) from error
        raise


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for the nearest known word, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""
