"""Is a trainer making progress? Heartbeats cannot tell: a process that is stuck in a loop still has a heart."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from slicewise.launch.policy import Watch

PROGRESS = ("phase", "step", "progress", "text")


class Watchdog:
    """Watches the events of one trainer, or of each trainer of a gang, told apart by ``worker``.

    The gang is as late as its latest worker: in a collective all wait for the one that does not come.
    """

    def __init__(self, watch: Watch, workers: int = 1, *, clock: Callable[[], float] = time.monotonic):
        self._watch, self._clock = watch, clock
        self._last_s = [clock()] * workers
        self._step: list[int | None] = [None] * workers

    def saw(self, event: Mapping[str, Any], worker: int = 0) -> None:
        """An event that is no progress, such as an error, changes nothing."""
        kind = event.get("event")
        if kind in PROGRESS:
            self._last_s[worker] = self._clock()
        if kind in ("step", "progress") and isinstance(step := event.get("step"), int):
            self._step[worker] = step

    def finished(self, worker: int = 0) -> None:
        """Its process has ended: nothing more is expected of it."""
        self._last_s[worker] = float("inf")

    def latest(self) -> tuple[int, float]:
        """The worker whose time runs out first, and the seconds that it has left (0 or less: none)."""
        left = [self._left_s(worker) for worker in range(len(self._last_s))]
        worker = min(range(len(left)), key=left.__getitem__)
        return worker, left[worker]

    def reason(self, worker: int = 0) -> str:
        """Why ``worker`` counts as stuck."""
        step = self._step[worker]
        where = "before its first step" if step is None else f"since step {step}"
        return f"made no progress for {self._timeout_s(worker):g} s, {where}"

    def _left_s(self, worker: int) -> float:
        return self._last_s[worker] + self._timeout_s(worker) - self._clock()

    def _timeout_s(self, worker: int) -> float:
        started = self._step[worker] is not None
        return self._watch.stall_timeout_s if started else self._watch.start_timeout_s
