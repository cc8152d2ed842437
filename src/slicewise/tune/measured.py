"""The clock as judge: settings are run on the devices of this job."""

from collections.abc import Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils

from slicewise.config import RunConfig
from slicewise.errors import UserError
from slicewise.kernels.tuned import Judge, Key
from slicewise.measure import timing
from slicewise.parallel.cluster import SliceDevices
from slicewise.tune.kept import Kept
from slicewise.tune.problems import Problem

FAILED = (
    jax.errors.JaxRuntimeError,
    NotImplementedError,
    ValueError,
)  # what compilers and kernels say no with


class Measured:
    """Every process of the job makes the same calls; the first one's clock counts."""

    name: Judge = "measured"

    def __init__(self, devices: SliceDevices, kept: Kept):
        self.devices, self.kept = devices, kept
        self.forward_s: dict[str, float] = {}  # by key

    def kernel(self, problem: Problem, values: Mapping[str, int], until_s: float) -> tuple[float | None, str]:
        known = self.kept.get(problem, values)
        if known is None:
            known = self.kept.put(problem, values, *self._time(problem, values))
        return known

    def least_s(self, problem: Problem, values: Mapping[str, int]) -> float:
        return 0.0

    def _time(self, problem: Problem, values: Mapping[str, int]) -> tuple[float | None, str]:
        try:
            seconds = timing.kernel_seconds(problem.key, values, problem.part)
            if problem.part == "backward":  # which is timed with its forward pass
                seconds = max(seconds - self._forward(problem.key, values), 1e-9)
        except FAILED as e:
            return None, _sentence(e)
        return _agreed(seconds), ""

    def _forward(self, key: Key, values: Mapping[str, int]) -> float:
        """With the settings that stay the same while those of the backward pass vary."""
        if key.text not in self.forward_s:
            self.forward_s[key.text] = timing.kernel_seconds(key, values, "forward")
        return self.forward_s[key.text]

    def step(self, config: RunConfig, until_s: float) -> tuple[float | None, str, str]:
        try:
            return _agreed(timing.step_seconds(config, self.devices)), "", ""
        except UserError as e:
            return None, str(e).splitlines()[0], ""
        except jax.errors.JaxRuntimeError as e:
            return None, _sentence(e), ""

    def is_over(self, is_over: bool) -> bool:
        """What the first process says, so that all stop at one place."""
        return bool(_agreed(float(is_over)))


def _agreed(value: float) -> float:
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))


def _sentence(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
