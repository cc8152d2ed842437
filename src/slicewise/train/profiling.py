"""The window of steps that the profiler records."""

from typing import Any

import jax

from slicewise.config import RunConfig


class Profiler:
    """Records the ``profile_steps`` steps from ``profile_from`` on; of a resumed run, those after ``start``."""

    def __init__(self, config: RunConfig, start: int):
        asked = max(config.metrics.profile_from, 1)
        self._first = max(asked, start + 1)
        self._end = min(asked + config.metrics.profile_steps, config.run.steps + 1)
        self._directory = str(config.local_directory / "profile")
        self._is_recording = False

    def before(self, number: int, state: Any) -> None:
        """Opens the window before step ``number``, or closes it; the last step is followed by one more call."""
        if self._first >= self._end or number not in (self._first, self._end):
            return
        jax.block_until_ready(state)  # no step is half inside the window
        if number == self._first:
            self._is_recording = True
            jax.profiler.start_trace(self._directory)
        else:
            self.close()

    def close(self) -> None:
        if self._is_recording:
            self._is_recording = False
            jax.profiler.stop_trace()
