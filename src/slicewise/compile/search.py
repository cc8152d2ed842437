"""Layouts judged by the compiler: the planner proposes, each proposal is compiled to its schedule, time decides."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from slicewise.catalog.slices import Cluster
from slicewise.compile.analysis import CompiledStep, analyse
from slicewise.compile.compiler import CompileFailed, Request, compile_request
from slicewise.config import RunConfig, with_overrides
from slicewise.costs.shapes import model_shape
from slicewise.errors import ExitCode, UserError
from slicewise.interop.huggingface import load_spec
from slicewise.plan.run_config import Value, as_overrides, beyond_config, config_values, priced, workload_of
from slicewise.plan.search import Candidate, search


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
) -> Found:
    """Compiles ``config`` and the planner's ``top`` best layouts of the same work on ``cluster`` to their schedules.

    What an earlier search compiled is taken from the cache, so that one that was interrupted goes on where it was. Once
    ``seconds`` have passed no further layout is begun. Raises UserError when the planner knows no layout.
    """
    until_s = time.monotonic() + seconds
    proposals = [
        Trial(config, "as given", _priced_s(config, cluster), None),
        *_proposals(config, cluster, top),
    ]
    trials: list[Trial] = []
    for number, proposal in enumerate(proposals):
        request = Request(proposal.config, cluster)
        left_s = until_s - time.monotonic()
        if left_s <= 0 and not request.is_cached:
            continue
        trials.append(_tried(request, proposal, max(left_s, 1.0)))
        progress(number + 1, len(proposals), trials[-1])
    ranked = sorted(
        trials, key=lambda t: (not t.counts, t.step.estimate.step_time_s if t.step else float("inf"))
    )
    return Found(tuple(ranked), len(proposals) - len(trials))


def _tried(request: Request, proposal: Trial, timeout_s: float) -> Trial:
    try:
        step = analyse(compile_request(request, timeout_s=timeout_s))
    except UserError as e:
        if e.code != ExitCode.USER and not isinstance(e, CompileFailed):
            raise  # this machine's fault, and so every layout's
        return replace(proposal, problem=str(e).splitlines()[0])
    return replace(proposal, step=step, problem="" if step.fits else "does not fit")


def _priced_s(config: RunConfig, cluster: Cluster) -> float | None:
    try:
        return priced(config, model_shape(load_spec(config.model.model)), cluster).estimate.step_time_s
    except UserError:  # the planner need not know every step that can be compiled
        return None


def _proposals(config: RunConfig, cluster: Cluster, top: int) -> list[Trial]:
    """The planner's best layouts that a config can ask for, the fastest first."""
    shape = model_shape(load_spec(config.model.model))
    work = workload_of(config, shape)
    found: list[Trial] = []
    for candidate in search(work, cluster, top=10 * top, families=False).ranked:
        if beyond_config(candidate):
            continue
        values = config_values(work, candidate, model=config.model.model)
        proposal = with_overrides(config, as_overrides(values))
        if proposal != config:
            planned_s = candidate.estimate.step_time_s
            found.append(Trial(proposal, layout_name(candidate), planned_s, None, changed=values))
        if len(found) == top:
            break
    return found


def layout_name(candidate: Candidate) -> str:
    """Such as 'fsdp 16, tensor 4, dcn data 2, full'."""
    parts = []
    for prefix, degrees in (("", candidate.layout.ici), ("dcn ", candidate.layout.dcn)):
        parts += [f"{prefix}{axis} {int(n)}" for axis, n in vars(degrees).items() if n > 1]
    if candidate.layout.accumulation_steps > 1:
        parts.append(f"{candidate.layout.accumulation_steps} accumulation steps")
    return ", ".join([*parts, candidate.recipe.remat.name])
