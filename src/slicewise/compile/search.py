"""Layouts judged by the compiler: the planner proposes, each proposal is compiled to its schedule, time decides."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slicewise.catalog.slices import Cluster
from slicewise.compile.analysis import CompiledStep, analyse
from slicewise.compile.compiler import CompileFailed, Request, compile_request
from slicewise.config import RunConfig, with_overrides
from slicewise.costs.shapes import model_shape
from slicewise.errors import ExitCode, UserError
from slicewise.interop.huggingface import load_spec
from slicewise.plan.run_config import (
    Value,
    as_overrides,
    config_values,
    precision_on,
    priced,
    recipe_of,
    workload_of,
)
from slicewise.plan.search import DEFAULT_RECIPE, Candidate, Workload, remat_candidates, search


@dataclass(frozen=True)
class Trial:
    """One layout: what the planner expected, and what became of it."""

    config: RunConfig
    name: str
    planned_s: float | None  # None for the config as it was given, where it cannot be priced
    step: CompiledStep | None  # None where it was not compiled
    problem: str = ""  # why it does not count
    changed: Mapping[str, Value] = field(default_factory=dict)  # keys of the config that was given

    @property
    def counts(self) -> bool:
        return self.step is not None and self.step.fits


@dataclass(frozen=True)
class Found:
    """``trials`` with those that count first, the fastest before. ``skipped`` were left when time was up."""

    trials: tuple[Trial, ...]
    skipped: int

    @property
    def best(self) -> Trial | None:
        return self.trials[0] if self.trials and self.trials[0].counts else None


Progress = Callable[[int, int, Trial], None]
"""Called after each trial with how many are done, of how many, and the trial."""


def search_compiled(
    config: RunConfig,
    cluster: Cluster,
    *,
    top: int,
    seconds: float,
    progress: Progress = lambda done, of, trial: None,
    timeout_s: float = 3600.0,
    memory_limit_bytes: float | None = None,
) -> Found:
    """Compiles ``config`` and ``top`` proposals of the planner for the same work on ``cluster`` to their schedules.

    Two thirds are its best meshes, each with the remat policy it thinks best; the others are further remat policies on
    the mesh that the compiler found fastest, for what moving and recomputing cost is where the two differ most.
    What an earlier search compiled is taken from the cache, so that one that was interrupted goes on where it was. Once
    ``seconds`` have passed no further layout is begun, and the one at work is stopped.
    ``timeout_s`` and ``memory_limit_bytes`` limit each compile.
    Raises UserError when the planner knows no layout.
    """
    until_s = time.monotonic() + seconds
    trials: list[Trial] = []
    proposed = 0

    def compile_all(proposals: list[Trial], of: int) -> None:
        nonlocal proposed
        for proposal in proposals:
            proposed += 1
            request = Request(proposal.config, cluster)
            left_s = until_s - time.monotonic()
            if left_s <= 0 and not request.is_cached:
                continue
            limit_s = min(timeout_s, max(left_s, 1.0))
            if trial := _tried(request, proposal, limit_s, memory_limit_bytes, until_s):
                trials.append(trial)
                progress(proposed, of, trial)

    meshes = _meshes(config, cluster, top - top // 3)
    given = Trial(config, "as given", _priced_s(config, cluster), None)
    compile_all([given, *meshes], 1 + len(meshes) + top // 3)
    policies = _policies(config, cluster, trials, top // 3)
    compile_all(policies, proposed + len(policies))
    if not trials:
        proposed += top // 3  # which are unknown before there is a fastest mesh
    return Found(tuple(sorted(trials, key=_rank)), proposed - len(trials))


def _rank(trial: Trial) -> tuple[bool, float]:
    return not trial.counts, trial.step.estimate.step_time_s if trial.step else float("inf")


def _tried(
    request: Request, proposal: Trial, timeout_s: float, limit_bytes: float | None, until_s: float
) -> Trial | None:
    """None for one that was most likely stopped for the time, and so is no worse than those that were not begun."""
    try:
        step = analyse(compile_request(request, timeout_s=timeout_s, memory_limit_bytes=limit_bytes))
    except UserError as e:
        if e.code != ExitCode.USER and not isinstance(e, CompileFailed):
            raise  # this machine's fault, and so every layout's
        if time.monotonic() >= until_s:
            if isinstance(e, CompileFailed):
                e.forget()
            return None
        return replace(proposal, problem=str(e).splitlines()[0])
    return replace(proposal, step=step, problem="" if step.fits else "does not fit")


def _priced_s(config: RunConfig, cluster: Cluster) -> float | None:
    try:
        return priced(config, model_shape(load_spec(config.model.model)), cluster).estimate.step_time_s
    except UserError:  # the planner need not know every step that can be compiled
        return None


def _meshes(config: RunConfig, cluster: Cluster, most: int) -> list[Trial]:
    """The planner's best layouts, the fastest first."""
    work = workload_of(config, model_shape(load_spec(config.model.model)))
    try:
        recipe = recipe_of(config)
    except UserError:  # as in _priced_s
        recipe = DEFAULT_RECIPE
    precisions = (precision_on(cluster.chip, config),)
    ranked = search(work, cluster, recipe=recipe, precisions=precisions, top=10 * most, families=False).ranked
    return list(itertools.islice(_proposals(config, work, ranked, [config]), most))


def _policies(config: RunConfig, cluster: Cluster, trials: Sequence[Trial], most: int) -> list[Trial]:
    """Further remat policies on the mesh of the fastest of ``trials``, the planner's best first."""
    shape = model_shape(load_spec(config.model.model))
    best = min(trials, key=_rank, default=None)
    if best is None or not best.counts:
        return []
    try:
        base = priced(best.config, shape, cluster)
    except UserError:  # as in _priced_s
        return []
    work, tried = workload_of(config, shape), [t.config for t in trials]
    return list(itertools.islice(_proposals(config, work, remat_candidates(work, base), tried), most))


def _proposals(
    config: RunConfig, work: Workload, candidates: Iterable[Candidate], tried: Sequence[RunConfig]
) -> Iterator[Trial]:
    """Those of ``candidates`` that are not among ``tried``."""
    for candidate in candidates:
        values = config_values(work, candidate, model=config.model.model)
        del values["quantization"]  # which stays what it is
        proposal = with_overrides(config, as_overrides(values))
        if proposal not in tried:
            planned_s = candidate.estimate.step_time_s
            yield Trial(proposal, layout_name(candidate), planned_s, None, changed=values)


def layout_name(candidate: Candidate) -> str:
    """Such as 'fsdp 16, tensor 4, dcn data 2, full'."""
    parts = []
    for prefix, degrees in (("", candidate.layout.ici), ("dcn ", candidate.layout.dcn)):
        parts += [f"{prefix}{axis} {int(n)}" for axis, n in vars(degrees).items() if n > 1]
    if candidate.layout.accumulation_steps > 1:
        parts.append(f"{candidate.layout.accumulation_steps} accumulation steps")
    return ", ".join([*parts, candidate.recipe.remat.name])
