"""A save under way, in the background: complete everywhere, or failed everywhere with the reason."""

import contextlib
import json
import os
import threading
from typing import Any

from etils import epath

from slicewise.checkpoint import backend, together
from slicewise.checkpoint import manifest as layout
from slicewise.errors import ExitCode, UserError

POLL_S = 0.25  # between two looks for a failure elsewhere


class Writing:
    """Of one step. Every process makes one for each save, in the same order."""

    def __init__(self, directory: str, step: int):
        self._directory, self.step = directory, step
        self._outcomes = together.Outcomes("save")

    def finish(self, response: Any, failure: Exception | None) -> None:
        """Returns when the step is durable. ``response``: of Orbax; None after a ``failure`` to start.

        Raises UserError when the storage failed, for any process.
        """
        if response is not None:
            failure = self._own_failure(response)
        told: dict[str, Any] = {}
        if failure is not None:
            told = {"message": str(failure), "is_environment": isinstance(failure, UserError)}
        self._outcomes.post(json.dumps(told))
        failures = [found for outcome in self._outcomes.all() if (found := json.loads(outcome))]
        if failure is not None:
            raise failure
        if failures:
            raise _failure(failures[0]["message"], failures[0]["is_environment"])

    def _own_failure(self, response: Any) -> Exception | None:
        """What this process met; None also when another one failed before this was done."""
        met: list[Exception] = []
        is_done = threading.Event()

        def wait() -> None:
            try:
                response.result()
                _sync(epath.Path(self._directory) / str(self.step))
            except Exception as error:
                met.append(save_error(self._directory, self.step, error))
            is_done.set()

        # Where another process failed Orbax waits for it for many minutes: nobody waits for that.
        threading.Thread(target=wait, name="save", daemon=True).start()
        while not is_done.wait(POLL_S):
            if any(json.loads(outcome) for outcome in self._outcomes.posted()):
                return None
        return met[0] if met else None


def _sync(path: epath.Path) -> None:
    """Makes names and marks on a disk survive a loss of power; the arrays do already."""
    if "://" in str(path):
        return
    files = [path / layout.MANIFEST / "data.json", path / layout.WRITTEN_MARK, path / layout.COMMIT_MARK]
    for part in (*files, path / layout.MANIFEST, path, path.parent):
        with contextlib.suppress(FileNotFoundError):  # another process may have moved on and deleted it
            descriptor = os.open(part, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def save_error(directory: str, step: int, error: Exception) -> Exception:
    """What to raise for a save of ``step`` that failed with ``error``."""
    if isinstance(error, UserError):
        return error
    message = f"the checkpoint of step {step} could not be written to {directory}: {backend.reason(error)}."
    found = _failure(message, backend.is_environment(error))
    found.__cause__ = error
    return found


def _failure(message: str, is_environment: bool) -> Exception:
    return UserError(message, code=ExitCode.INTERNAL) if is_environment else RuntimeError(message)
