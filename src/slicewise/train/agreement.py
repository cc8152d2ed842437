"""A step that all processes have in common, for what only one of them knows of: a signal, a clock, a failed save.

It needs no collective and nothing in the compiled step. A process asks in the key-value store of the coordination
service, where a thread of every process looks now and then. When all have seen it, each freezes for a moment how
many steps it has begun, and the highest of these numbers is the common step. Whoever has begun fewer still takes the
steps up to it, so nobody is waited for in a collective; a main thread stands still for one barrier at most, some
milliseconds, and only if it is between two steps just then.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.errors import JaxRuntimeError

STOP, SAVE = "stop", "save"
POLL_S = 0.25  # between two looks for requests of others, each a few bytes from the coordinator's memory
LEAD_S = 0.5  # of the others, when all leave at once: the service they listen to ends with process 0
BARRIER_TIMEOUT_S = 60  # a process that is alive gets there within POLL_S
_PREFIX = "slicewise/agreement"


@dataclass(frozen=True)
class Point:
    """Between two steps: where all processes stop, or save."""

    what: str
    why: str
    begun: int  # calls of ``begin`` before it


class Agreement:
    """Of ``processes``, by ``client`` of the coordination service; a lone process agrees with itself at once.

    ``begin`` is called before every step, the same number of times by all processes.
    """

    def __init__(
        self,
        client: Any = None,
        process: int = 0,
        processes: int = 1,
        heard: Callable[[Point], None] = lambda point: None,
    ):
        """``heard`` is called, in any thread, as soon as a point is known."""
        self._client, self._process, self._heard = client, process, heard
        self._is_alone = processes == 1
        self._lock = threading.Lock()
        self._begun = 0
        self._points: list[Point] = []
        self._wanted: dict[str, str] = {}
        self._wake = threading.Event()
        self._is_over = False
        self._thread: threading.Thread | None = None
        if not self._is_alone:
            self._thread = threading.Thread(target=self._watch, name="agreement", daemon=True)
            self._thread.start()

    def request(self, what: str, why: str) -> None:
        """Asks for a point as soon as there can be one. From any thread, and by any process."""
        if not self._is_alone:
            self._wanted.setdefault(what, why)
            self._wake.set()
            return
        with self._lock:
            point = Point(what, why, self._begun)
            self._points.append(point)
        self._heard(point)

    def begin(self) -> list[Point]:
        """Before a step: what is due first. When a stop is among it, the step is not to be taken."""
        with self._lock:
            due = [point for point in self._points if point.begun <= self._begun]
            self._points = [point for point in self._points if point.begun > self._begun]
            if all(point.what != STOP for point in due):
                self._begun += 1
        return due

    @property
    def begun(self) -> int:
        """Steps that this process has begun, or is about to."""
        return self._begun

    def close(self) -> None:
        self._is_over = True
        self._wake.set()
        if self._thread:
            self._thread.join(2 * POLL_S)  # longer only in a barrier, for a process that will not come

    def _watch(self) -> None:
        serial = 0
        while not self._is_over:
            self._wake.wait(POLL_S)
            self._wake.clear()
            while not self._is_over and (asked := self._next(serial)):
                self._wanted.pop(asked[0], None)
                try:
                    self._settle(serial, *asked)
                except (
                    JaxRuntimeError
                ):  # a process is gone: the heartbeats, or the launcher, end the others too
                    return
                serial += 1

    def _next(self, serial: int) -> tuple[str, str] | None:
        """What the request with this number is: of another process, or our own."""
        key = f"{_PREFIX}/{serial}/request"
        found = self._get(key)
        if found is None and self._wanted:
            with contextlib.suppress(JaxRuntimeError):  # another one was first
                self._client.key_value_set(key, json.dumps(next(iter(self._wanted.items()))))
            found = self._get(key)
        if found is None:
            return None
        what, why = json.loads(found)
        return what, why

    def _get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except JaxRuntimeError:  # there is none, or nobody to ask
            return None

    def _settle(self, serial: int, what: str, why: str) -> None:
        place = f"{_PREFIX}/{serial}"
        self._client.wait_at_barrier(f"{place}/heard", 1000 * BARRIER_TIMEOUT_S)
        with self._lock:
            self._client.key_value_set(f"{place}/begun/{self._process}", str(self._begun))
            self._client.wait_at_barrier(f"{place}/frozen", 1000 * BARRIER_TIMEOUT_S)
            begun = [int(number) for _, number in self._client.key_value_dir_get(f"{place}/begun/")]
            point = Point(what, why, max(begun))
            self._points.append(point)
        if point.begun == 0 and self._process == 0:
            time.sleep(LEAD_S)
        self._heard(point)
