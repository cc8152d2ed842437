"""The TPU compiler as judge: kernels by their bundles, steps by their schedules; no TPU is needed."""

import math
import re
import time
from collections.abc import Mapping

from slicewise.catalog.slices import Cluster
from slicewise.compile.analysis import analyse
from slicewise.compile.compiler import CompileFailed, Request, compile_request
from slicewise.compile.kernels import EXCEEDS, KernelCompiler, call_seconds, least_seconds
from slicewise.config import RunConfig
from slicewise.errors import ExitCode, UserError
from slicewise.kernels.grouped_matmul import tiles as matmul_tiles
from slicewise.kernels.tuned import Judge
from slicewise.tune.kept import Kept
from slicewise.tune.problems import Problem
from slicewise.tune.search import DOES_NOT_FIT, Accident, OutOfTime

LONGEST_S = 600.0  # that one kernel may compile
LIMIT = re.compile(r"limit ([\d.]+)M")  # of VMEM, in the compiler's refusal


def _of(problem: Problem) -> tuple[str, str, int]:
    return problem.key.kernel, problem.key.dtype, problem.key.vmem_limit_kib


def _vmem_bytes(problem: Problem, values: Mapping[str, int]) -> int:
    """Of a tile of a grouped product; 0 for kernels whose use of VMEM has no such formula."""
    if not set(matmul_tiles.NAMES) <= set(values):
        return 0
    itemsize = 1 if "8" in problem.key.dtype else 4 if problem.key.dtype == "float32" else 2
    rows, summed, columns = (values[name] for name in matmul_tiles.NAMES)
    return matmul_tiles.vmem_bytes(problem.key.kernel, (rows, summed, columns), itemsize)


def _left_s(until_s: float) -> float:
    return max(until_s - time.monotonic(), 0.0)


def _check_refusal(until_s: float, why: UserError) -> None:
    """Raises what says nothing of the setting: OutOfTime where a compile was most likely stopped for the time, and
    Accident where the compiler crashed, was killed or took too long."""
    if isinstance(why, CompileFailed) and time.monotonic() >= until_s:
        why.forget()
        raise OutOfTime from why
    if why.code != ExitCode.USER:
        raise Accident(str(why).splitlines()[0]) from why


class Compiled:
    """For one cluster. What was compiled before is not compiled again."""

    name: Judge = "compiled"

    def __init__(self, cluster: Cluster, compiler: KernelCompiler, kept: Kept):
        self.cluster, self.compiler, self.kept = cluster, compiler, kept
        self.refused_bytes: dict[tuple[str, str, int], int] = {}  # the least VMEM that was too much

    def kernel(self, problem: Problem, values: Mapping[str, int], until_s: float) -> tuple[float | None, str]:
        known = self.kept.get(problem, values)
        found = known or self.kept.put(problem, values, *self._judge(problem, values, until_s))
        if found[0] is None and EXCEEDS in found[1]:
            size, of = _vmem_bytes(problem, values), _of(problem)
            if limit := LIMIT.search(found[1]):
                size = min(size, math.ceil(float(limit[1]) * 2**20))
            self.refused_bytes[of] = min(size, self.refused_bytes.get(of, size))
        return found

    def least_s(self, problem: Problem, values: Mapping[str, int]) -> float:
        return least_seconds(problem.key, values, problem.part)

    def _judge(self, problem: Problem, values: Mapping[str, int], until_s: float) -> tuple[float | None, str]:
        if 0 < self.refused_bytes.get(_of(problem), 0) <= _vmem_bytes(problem, values):
            return None, f"{EXCEEDS}: so does a smaller tile"
        try:
            found = self.compiler.compile(
                problem.key, values, problem.part, timeout_s=min(LONGEST_S, _left_s(until_s))
            )
        except CompileFailed as e:
            _check_refusal(until_s, e)
            return None, str(e)
        if found.regions is None:
            return None, found.problem
        return call_seconds(problem.key, values, problem.part, found.regions), ""

    def step(self, config: RunConfig, until_s: float) -> tuple[float | None, str, str]:
        try:
            step = analyse(compile_request(Request(config, self.cluster), timeout_s=_left_s(until_s)))
        except UserError as e:
            if e.code != ExitCode.USER and not isinstance(e, CompileFailed):
                raise  # this machine's fault, and so every setting's
            _check_refusal(until_s, e)
            return None, str(e).splitlines()[0], ""
        memory = f"{step.memory.total_bytes / 2**30:.1f} of {step.memory.limit_bytes / 2**30:.1f} GiB"
        if not step.fits:
            return None, DOES_NOT_FIT, memory
        return step.estimate.step_time_s, "", memory

    def is_over(self, is_over: bool) -> bool:
        return is_over
