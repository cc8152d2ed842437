"""The TPU compiler as judge: kernels by their bundles, steps by their schedules; no TPU is needed."""

import time
from collections.abc import Mapping

from slicewise.catalog.slices import Cluster
from slicewise.compile.analysis import analyse
from slicewise.compile.compiler import CompileFailed, Request, compile_request
from slicewise.compile.kernels import KernelCompiler, call_seconds
from slicewise.config import RunConfig
from slicewise.errors import ExitCode, UserError
from slicewise.kernels.tuned import Judge
from slicewise.tune.kept import Kept
from slicewise.tune.problems import Problem


class Compiled:
    """For one cluster. What was compiled before is not compiled again."""

    name: Judge = "compiled"

    def __init__(self, cluster: Cluster, compiler: KernelCompiler, kept: Kept):
        self.cluster, self.compiler, self.kept = cluster, compiler, kept

    def kernel(self, problem: Problem, values: Mapping[str, int], until_s: float) -> tuple[float | None, str]:
        known = self.kept.get(problem, values)
        return known or self.kept.put(problem, values, *self._judge(problem, values))

    def _judge(self, problem: Problem, values: Mapping[str, int]) -> tuple[float | None, str]:
        try:
            found = self.compiler.compile(problem.key, values, problem.part)
        except CompileFailed as e:
            return None, str(e)
        if found.regions is None:
            return None, found.problem
        return call_seconds(problem.key, values, problem.part, found.regions), ""

    def step(self, config: RunConfig, until_s: float) -> tuple[float | None, str, str]:
        left_s = max(until_s - time.monotonic(), 1.0)
        try:
            step = analyse(compile_request(Request(config, self.cluster), timeout_s=left_s))
        except UserError as e:
            if e.code != ExitCode.USER and not isinstance(e, CompileFailed):
                raise  # this machine's fault, and so every setting's
            return None, str(e).splitlines()[0], ""
        memory = f"{step.memory.total_bytes / 2**30:.1f} of {step.memory.limit_bytes / 2**30:.1f} GiB"
        if not step.fits:
            return None, "does not fit", memory
        return step.estimate.step_time_s, "", memory

    def is_over(self, is_over: bool) -> bool:
        return is_over
