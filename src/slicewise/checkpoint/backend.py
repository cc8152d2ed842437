"""The few calls of Orbax that the store makes, without its chatter and with its real errors."""

import errno
import gc
import importlib
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from etils import epath

from slicewise.checkpoint.manifest import MANIFEST, STATE

OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # in TensorStore's messages
BARRIER_TIMEOUT_S = (
    60  # of Orbax's own barriers around short actions, for which it has no option; its default is 300
)
SHARED_WRITE_BYTES = 1 << 20  # least that a replica writes of an array: each shape cut is a program
SAVE_TIMEOUT_S = 1200  # from the start of a save until the slowest process has written its part
# What the storage says when it cannot serve now, in the words of TensorStore and its drivers.
_OUT_OF_REACH = (
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "RESOURCE_EXHAUSTED",
)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
Arrays = Mapping[str, jax.Array]


class ReadError(Exception):
    """Orbax could not load; the text is the innermost cause. ``is_damage``: of the content, not of the storage."""

    def __init__(self, cause: str, *, is_damage: bool):
        super().__init__(cause)
        self.is_damage = is_damage


class Orbax:
    """Saves and loads one step directory; importing Orbax (1 to 3 s) passes in the background meanwhile."""

    def __init__(self) -> None:
        self._import = threading.Thread(target=importlib.import_module, args=("orbax.checkpoint",))
        self._import.start()

    def start_save(self, path: epath.Path, arrays: Arrays, manifest: Mapping[str, Any]) -> Any:
        """Returns after the copy off the devices; ``.result()`` of what it returns waits for the rest."""
        ocp = self._module()
        with _context(ocp):
            return ocp.save_checkpointables_async(path, {STATE: arrays, MANIFEST: manifest}, overwrite=True)

    def load(self, path: epath.Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Loads the named arrays, without waiting for other processes. Raises ReadError."""
        ocp = self._module()
        make_noisy = _hide_noise(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            try:
                with _context(ocp, alone=True):
                    loaded = ocp.load_checkpointables(path, {STATE: arrays})[STATE]
                make_noisy()  # not after a failure, which other threads and abandoned tasks will yet report
                return loaded
            except Exception as e:
                cause, is_damage = reason(e), _is_damage(e)
            gc.collect()  # frees the failed tasks, which complain of it: here, where it is hidden
        raise ReadError(cause, is_damage=is_damage)

    def close(self) -> None:
        self._import.join()

    def _module(self) -> Any:
        self._import.join()
        logger = logging.getLogger("absl")
        if _drop_chatter not in logger.filters:
            logger.addFilter(_drop_chatter)
        ocp = importlib.import_module("orbax.checkpoint").v1
        package = ocp.Context.__module__.partition(".context.")[0]
        barriers = importlib.import_module(f"{package}.synchronization.multihost")
        vars(barriers)["_DEFAULT_BARRIER_TIMEOUT"] = BARRIER_TIMEOUT_S
        return ocp


def _context(ocp: Any, *, alone: bool = False) -> Any:
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name=MANIFEST)
    context = ocp.Context()
    context.checkpointables.registry = registry
    context.pytree.loading.partial_load = True  # the store has compared the trees by then
    context.array.saving.use_compression = False
    context.array.saving.min_slice_bytes_for_replica_parallel = SHARED_WRITE_BYTES
    context.asynchronous.timeout_secs = SAVE_TIMEOUT_S
    if alone:  # else the processes that can load wait minutes at a barrier for one that cannot
        context.multiprocessing.active_processes = {jax.process_index()}
        context.multiprocessing.primary_host = jax.process_index()
    context.asynchronous.create_directories_asynchronously = False  # a failure would leave threads waiting
    return context


def _drop_chatter(record: logging.LogRecord) -> bool:
    """Drops progress notes, and the stack traces of errors that reach the caller anyway."""
    if "/orbax/" not in record.pathname:
        return True
    return record.levelno >= logging.WARNING and "run() raised an exception" not in record.getMessage()


def _hide_noise(path: epath.Path) -> Callable[[], None]:
    """Hides hundreds of lines that follow a failed load: from abandoned tasks, and from TensorStore's threads
    whose event loop is gone. Returns what undoes it.
    """
    shown = sys.unraisablehook
    logger = logging.getLogger("asyncio")

    def unraisable(report: Any) -> None:
        code = getattr(report.object, "cr_code", None)
        abandoned = code is not None and "/orbax/" in code.co_filename
        if not abandoned and str(report.exc_value) != "Event loop is closed":
            shown(report)

    def about_others(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "/orbax/" not in message and str(path) not in message

    def undo() -> None:
        sys.unraisablehook = shown
        logger.removeFilter(about_others)

    sys.unraisablehook = unraisable
    logger.addFilter(about_others)
    return undo


def _is_damage(error: BaseException) -> bool:
    """Whether what was read is at fault, or absent; else the storage could not be reached, or refused."""
    while (inner := error.__cause__) is not None and str(inner):
        error = inner
    if isinstance(error, OSError) and error.errno:
        return error.errno in _ABSENT
    if match := OS_ERROR.search(str(error)):
        return int(match[1]) in _ABSENT
    return not any(word in str(error) for word in _OUT_OF_REACH)


def reason(error: BaseException) -> str:
    """The innermost cause in one line, as the operating system words it where it has a say."""
    while (inner := error.__cause__) is not None and str(inner):
        error = inner
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    if match := OS_ERROR.search(str(error)):
        return os.strerror(int(match[1]))
    text = re.sub(r'Error opening "\w+" driver: ', "", (str(error).splitlines() or [""])[0])
    text = re.split(r" \[(?:tensorstore_spec|source locations)", text)[0].rstrip(".")
    return f"{type(error).__name__}: {text if len(text) < 400 else text[:400] + '...'}"


def is_environment(error: BaseException) -> bool:
    """Whether the storage failed, rather than the program."""
    return isinstance(error, OSError) or OS_ERROR.search(str(error)) is not None
