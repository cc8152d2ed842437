"""Between a run's config and a layout: pricing what a config asks for, and writing what a plan chose."""

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from slicewise.catalog.slices import Cluster
from slicewise.config import AXES, SECTION_OF, Model, RunConfig, resolve_degrees
from slicewise.costs import remat
from slicewise.costs.layout import AXES as ALL_AXES
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.shapes import ModelShape
from slicewise.costs.step import estimate
from slicewise.errors import UserError
from slicewise.plan.check import check_layout
from slicewise.plan.search import Candidate, Workload

Value = str | int | float


def workload_of(config: RunConfig, shape: ModelShape) -> Workload:
    return Workload(shape, config.data.sequence_length, config.data.global_batch_size)


def priced(config: RunConfig, shape: ModelShape, cluster: Cluster) -> Candidate:
    """The step that ``config`` asks for on ``cluster``, whether it fits or not.

    Raises UserError where degrees do not match the cluster, an axis does not divide the model or the batch
    cannot be shared out, and for float32 arithmetic, for which no rate is known.
    """
    if config.model.compute_dtype != "bfloat16":
        raise UserError(
            f"compute_dtype = {config.model.compute_dtype}: only bfloat16 steps can be priced;"
            " set compute_dtype=bfloat16."
        )
    degrees = resolve_degrees(config, num_slices=cluster.num_slices, devices_per_slice=cluster.slice.devices)
    work = workload_of(config, shape)
    layout = Layout(Degrees(**degrees.ici), Degrees(**degrees.dcn), work.global_batch)
    check_layout(shape, cluster, layout, work.seq)
    recipe = Recipe(remat=remat.chosen(config.model.remat_policy, config.model.remat_tensors))
    return Candidate(cluster, layout, recipe, estimate(shape, cluster, layout, recipe, work.seq))


def beyond_config(candidate: Candidate) -> tuple[str, ...]:
    """What the layout uses that no key of a run's config can ask for; empty when it can be written."""
    found = []
    for network, degrees in (("ici", candidate.layout.ici), ("dcn", candidate.layout.dcn)):
        for axis in ALL_AXES:
            degree = int(getattr(degrees, axis))
            if degree > 1 and axis not in AXES:
                found.append(f"{network} {axis} {degree}")
    if candidate.layout.accumulation_steps > 1:
        found.append(f"{candidate.layout.accumulation_steps} accumulation steps")
    if candidate.recipe.remat.name not in typing.get_args(Model.model_fields["remat_policy"].annotation):
        found.append(f"remat {candidate.recipe.remat.name}")
    if candidate.recipe.precision != "bf16":
        found.append(f"precision {candidate.recipe.precision}")
    return tuple(found)


def config_values(
    work: Workload, candidate: Candidate, *, model: str, run_tokens: float | None = None
) -> dict[str, Value]:
    """The config keys that make ``train`` run ``candidate``; ``model`` is what the user called the model."""
    assert not beyond_config(candidate), candidate
    layout = candidate.layout
    values: dict[str, Value] = {
        "model": model,
        "compute_dtype": "bfloat16",
        "remat_policy": candidate.recipe.remat.name,
        "sequence_length": work.seq,
        "global_batch_size": work.global_batch,
    }
    for network, degrees in (("ici", layout.ici), ("dcn", layout.dcn)):
        for axis in AXES:
            values[f"{network}_{axis}_parallelism"] = int(getattr(degrees, axis))
    if run_tokens:
        values["steps"] = math.ceil(run_tokens / work.tokens)
    assert set(values) <= set(SECTION_OF), values
    return values


@dataclass(frozen=True)
class Change:
    """One thing that the plan does otherwise than the config. ``key`` is None where no key, or no value of it, can ask
    for it."""

    what: str
    key: str | None
    now: str
    then: str


def changes(now: Candidate, then: Candidate) -> tuple[Change, ...]:
    """What separates two layouts of one workload on one cluster."""
    found = []
    for network in ("ici", "dcn"):
        before, after = getattr(now.layout, network), getattr(then.layout, network)
        for axis in ALL_AXES:
            key = f"{network}_{axis}_parallelism"
            found.append((f"{axis} over {network.upper()}", key, getattr(before, axis), getattr(after, axis)))
    a, b = now.layout, then.layout
    found.append(("accumulation steps", "", a.accumulation_steps, b.accumulation_steps))
    found.append(("pipeline microbatches", "", a.pipeline_microbatches, b.pipeline_microbatches))
    policy = then.recipe.remat.name
    key = "remat_policy" if policy in typing.get_args(Model.model_fields["remat_policy"].annotation) else ""
    found.append(("remat policy", key, now.recipe.remat.name, policy))
    found.append(("precision", "", now.recipe.precision, then.recipe.precision))
    return tuple(
        Change(what, key if key in SECTION_OF else None, str(old), str(new))
        for what, key, old, new in found
        if old != new
    )


def as_overrides(values: Mapping[str, Value]) -> list[str]:
    """``key=value`` texts that ``config.with_overrides`` takes."""
    return [f"{key}={value}" for key, value in values.items()]
