"""The clock as judge: settings are run on the devices of this job."""

import math
import os
import platform
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from slicewise.compile.compiler import IRRELEVANT
from slicewise.config import RunConfig
from slicewise.errors import UserError
from slicewise.interop.huggingface import load_spec
from slicewise.kernels import tuned
from slicewise.kernels.attention.api import chip_of
from slicewise.kernels.tuned import Judge, Key
from slicewise.measure import timing
from slicewise.parallel.cluster import SliceDevices
from slicewise.train import identity
from slicewise.tune.kept import Kept, Known
from slicewise.tune.problems import Problem
from slicewise.tune.search import DOES_NOT_FIT, Accident

FAILED = (
    jax.errors.JaxRuntimeError,
    NotImplementedError,
    ValueError,
)  # what compilers and kernels say no with
# Codes by which a runtime says what is not the program's fault: https://github.com/abseil/abseil-cpp, status.h.
ACCIDENTS = ("CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "UNAVAILABLE", "DATA_LOSS", "UNKNOWN")
SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that decide what a program becomes


class Measured:
    """Every process of the job makes the same calls; the first one's clock counts, and what it remembers.

    What was timed before is not timed again.
    """

    name: Judge = "measured"

    def __init__(self, devices: SliceDevices, kept: Kept):
        self.devices, self.kept = devices, kept
        self.forward_s: dict[str, float] = {}  # by key

    def kernel(self, problem: Problem, values: Mapping[str, int], until_s: float) -> tuple[float | None, str]:
        known = _remembered(self.kept.get(problem, values))
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
            _check_refusal(e)
            return None, _sentence(e)
        return _agreed(seconds), ""

    def _forward(self, key: Key, values: Mapping[str, int]) -> float:
        """With the settings that stay the same while those of the backward pass vary."""
        if key.text not in self.forward_s:
            self.forward_s[key.text] = timing.kernel_seconds(key, values, "forward")
        return self.forward_s[key.text]

    def step(self, config: RunConfig, until_s: float) -> tuple[float | None, str, str]:
        parts = _parts(config, self.devices)
        known = _remembered(self.kept.get_step(parts))
        if known is None:
            try:
                seconds = _agreed(timing.step_seconds(config, self.devices))
            except UserError as e:  # which takes no time to find out again
                return None, str(e).splitlines()[0], ""
            except jax.errors.JaxRuntimeError as e:
                if "RESOURCE_EXHAUSTED" not in str(e):
                    raise Accident(_sentence(e)) from e
                known = self.kept.put_step(parts, None, DOES_NOT_FIT)
            else:
                known = self.kept.put_step(parts, seconds, "")
        return *known, ""

    def is_over(self, is_over: bool) -> bool:
        """What the first process says, so that all stop at one place."""
        return bool(_agreed(float(is_over)))


def _agreed(value: float) -> float:
    if jax.process_count() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float32(value)))


def _remembered(known: Known | None) -> Known | None:
    """What the first process knows: all try the same, also where their files differ."""
    said = math.nan if known is None else -1.0 if known[0] is None else known[0]
    first = _agreed(said)
    if math.isnan(first):
        return None
    if first < 0:
        return known if known and known[0] is None else (None, DOES_NOT_FIT)
    return first, ""


def _parts(config: RunConfig, devices: SliceDevices) -> list[Any]:
    """What decides how long a step takes."""
    first = devices.array.flat[0]
    # A CPU has no other name than 'cpu'.
    machine = [platform.node(), os.cpu_count()] if first.platform == "cpu" else []
    settings = {name: os.environ.get(name, "") for name in SETTINGS}
    spec = load_spec(config.model.model).model_dump()  # what its file says now
    return [
        {name: part for name, part in config.model_dump().items() if name not in IRRELEVANT},
        spec,
        [first.device_kind, *machine, *devices.array.shape, jax.process_count()],
        [identity.versions(), identity.source_digest(), tuned.digest(chip_of(first)), settings],
    ]


def _check_refusal(error: Exception) -> None:
    """Raises Accident for what says nothing of a setting."""
    if _sentence(error).startswith(ACCIDENTS):
        raise Accident(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    said = str(error).strip().splitlines() or [type(error).__name__]
    return said[0][:300]
