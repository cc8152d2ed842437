"""Between a run's config and a layout: pricing what a config asks for, and writing what a plan chose."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slicewise.catalog.chips import Chip
from slicewise.catalog.slices import Cluster
from slicewise.config import AXES, SECTION_OF, RunConfig, check_effects, resolve_degrees, toml
from slicewise.costs import remat, scales
from slicewise.costs.adapters import check as check_lora
from slicewise.costs.adapters import with_adapters
from slicewise.costs.batch import check_blocks, check_positions, check_tokens
from slicewise.costs.layout import AXES as ALL_AXES
from slicewise.costs.layout import Degrees, Layout, Precision, Recipe
from slicewise.costs.pipeline import settled
from slicewise.costs.shapes import ModelShape
from slicewise.costs.step import estimate
from slicewise.errors import UserError
from slicewise.plan.check import check_layout, check_recipe
from slicewise.plan.search import DEFAULT_RECIPE, Candidate, Workload

Value = str | int | float | list[str] | Mapping[str, str]
MOMENTS = {
    "adamw": 2,
    "lion": 1,
    "muon": 1,
    "adafactor": 0,
}  # as large as the weights that each optimiser keeps
# quantization of a config -> precision of a recipe
PRECISIONS: Mapping[str, Precision] = {"none": "bf16", "fp8": "fp8", "fp8_e4m3": "fp8", "int8": "int8"}
# axis -> what it divides; only the planner's arithmetic lacks it between slices
UNPRICED = {"tensor": "heads and hidden widths", "expert": "experts", "context": "sequences"}
MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0}


def workload_of(config: RunConfig, shape: ModelShape) -> Workload:
    """The work of ``config``, whose model has ``shape``: with LoRA the shape is frozen and has adapters."""
    return Workload(
        with_adapters(shape, config.adapters), config.data.sequence_length, config.data.global_batch_size
    )


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
    check_effects(config, shape, degrees, cluster.num_slices)
    for axis, what in UNPRICED.items():
        if degrees.dcn[axis] > 1:
            raise UserError(
                f"dcn_{axis}_parallelism = {degrees.dcn[axis]}: {what} that are divided between slices can be trained"
                f" but not priced; ask slicewise compile, or use ici_{axis}_parallelism."
            )
    check_tokens(config.data.global_batch_size, config.data.sequence_length)
    check_positions(shape.name, config.data.sequence_length, shape.learned_positions)
    work = workload_of(config, shape)
    steps = config.optimizer.gradient_accumulation_steps
    layout = Layout(Degrees(**degrees.ici), Degrees(**degrees.dcn), work.global_batch, steps)
    check_lora(config.adapters, config.optimizer.optimizer_type, config.quantization)
    layout = _with_pipeline(config, shape, layout)
    check_layout(shape, cluster, layout, work.seq)
    if config.quantization != "none":
        scales.check_staged(int(layout.total("pipeline")), config.model.quantization_calibrate_every)
    recipe = recipe_of(config)
    check_recipe(work.shape, layout, recipe, work.seq)
    if cluster.chip.ici_dims and config.model.attention in ("auto", "splash"):  # on TPUs
        check_blocks(work.seq, int(layout.total("context")), recipe.context_exchange)
    return Candidate(cluster, layout, recipe, estimate(work.shape, cluster, layout, recipe, work.seq))


def _with_pipeline(config: RunConfig, shape: ModelShape, layout: Layout) -> Layout:
    keys = config.parallelism
    microbatches = settled(
        shape.name,
        shape.staged_groups,
        stages=layout.total("pipeline"),
        shards=layout.data_shards // layout.ici.context,
        batch=layout.global_batch,
        steps=layout.accumulation_steps,
        asked=keys.pipeline_microbatches,
        repeats=keys.pipeline_repeats,
    )
    return replace(
        layout,
        pipeline_microbatches=microbatches,
        pipeline_repeats=keys.pipeline_repeats,
        pipeline_gathers_once=keys.pipeline_gather == "step",
    )


def precision_on(chip: Chip, config: RunConfig) -> Precision:
    """What products of ``config`` are computed in: bf16 where the chip has no unit for its 8 bits."""
    asked = PRECISIONS[config.quantization]
    rates = {"int8": chip.int8_flops_per_s, "fp8": chip.fp8_flops_per_s}
    return asked if rates.get(asked) else "bf16"


def _arithmetic(config: RunConfig) -> dict[str, Any]:
    """Fields of the recipe. Raises UserError for products in 8 bits that no rate is known of."""
    model = config.model
    if config.quantization == "none":
        return {}
    scales.check(
        fixed_range=model.quantization_fixed_range,
        calibrate_every=model.quantization_calibrate_every,
        scaling=model.quantization_scaling,
    )
    if model.quantization_layers != ".*":
        raise UserError(
            f"quantization_layers = '{model.quantization_layers}': only steps with all their matrices in 8 bits can be"
            " priced; leave it out."
        )
    if model.quantization_scaling == "tile":
        raise UserError(
            "quantization_scaling = tile: only steps whose products are in 8 bits can be priced; set it to tensor or"
            " axis."
        )
    is_static = model.quantization_calibrate_every > 0 or model.quantization_fixed_range > 0
    return {"precision": PRECISIONS[config.quantization], "static_scales": is_static}


def recipe_of(config: RunConfig) -> Recipe:
    """How ``train`` executes the step of ``config``. Raises UserError for products that no rate is known of."""
    o = config.optimizer
    return replace(
        DEFAULT_RECIPE,
        remat=config.remat,
        **_arithmetic(config),
        moment_bytes=MOMENTS[o.optimizer_type] * MOMENT_BYTES[o.optimizer_state_dtype],
        moments_over_data=o.shard_optimizer_over_data,
        moments_on_host=o.optimizer_state_memory == "host",
        context_exchange=config.parallelism.context_strategy,
        expert_capacity_factor=config.model.capacity_factor
        if config.model.moe_dispatch == "capacity"
        else None,
    )


def config_values(
    work: Workload,
    candidate: Candidate,
    *,
    model: str,
    run_tokens: float | None = None,
    quantization: str = "none",
) -> dict[str, Value]:
    """The config keys that make ``train`` run ``candidate``; ``model`` is what the user called the model.

    ``quantization`` is that of the config, which stays where it is of the candidate's precision.
    """
    layout, precision = candidate.layout, candidate.recipe.precision
    policy, places = remat.keys(candidate.recipe.remat)
    values: dict[str, Value] = {
        "model": model,
        "compute_dtype": "bfloat16",
        "quantization": quantization if PRECISIONS[quantization] == precision else _quantization(precision),
        "remat_policy": policy,
        "remat_tensors": places,
        "sequence_length": work.seq,
        "global_batch_size": work.global_batch,
    }
    for network, degrees in (("ici", layout.ici), ("dcn", layout.dcn)):
        for axis in AXES:
            values[f"{network}_{axis}_parallelism"] = int(getattr(degrees, axis))
    is_divided = layout.ici.context > 1
    values["context_strategy"] = candidate.recipe.context_exchange if is_divided else "all_gather"
    values["gradient_accumulation_steps"] = int(layout.accumulation_steps)
    staged = layout.total("pipeline") > 1
    values["pipeline_microbatches"] = int(layout.pipeline_microbatches) if staged else 0
    values["pipeline_repeats"] = int(layout.pipeline_repeats)
    values["pipeline_gather"] = "step" if layout.pipeline_gathers_once or not staged else "microbatch"
    if work.shape.routed_parameters:
        factor = candidate.recipe.expert_capacity_factor
        values |= (
            {"moe_dispatch": "capacity", "capacity_factor": factor}
            if factor
            else {"moe_dispatch": "dropless"}
        )
    if run_tokens:
        values["steps"] = math.ceil(run_tokens / work.tokens)
    assert set(values) <= set(SECTION_OF), values
    return values


@dataclass(frozen=True)
class Change:
    """One thing that the plan does otherwise than the config."""

    what: str
    key: str
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
    key = "gradient_accumulation_steps"
    found.append(("accumulation steps", key, a.accumulation_steps, b.accumulation_steps))
    for what in ("microbatches", "repeats"):
        key = f"pipeline_{what}"
        found.append((key.replace("_", " "), key, getattr(a, key), getattr(b, key)))
    gathers = ["step" if x.pipeline_gathers_once else "microbatch" for x in (a, b)]
    found.append(("pipeline gathers once a", "pipeline_gather", gathers[0], gathers[1]))
    found.append(("remat policy", "remat_policy", _shown(now), _shown(then)))
    if then.layout.ici.context > 1:
        exchanges = (now.recipe.context_exchange, then.recipe.context_exchange)
        found.append(("context strategy", "context_strategy", *exchanges))
    named = [_quantization(x.recipe.precision) for x in (now, then)]
    found.append(("precision", "quantization", named[0], named[1]))
    assert {key for _, key, *_ in found} <= set(SECTION_OF)
    return tuple(Change(what, key, str(old), str(new)) for what, key, old, new in found if old != new)


def _quantization(precision: str) -> str:
    """The plainest value of the key ``quantization`` for a recipe's precision."""
    return {"bf16": "none"}.get(precision, precision)


def _shown(candidate: Candidate) -> str:
    """The policy as a config names it, a custom one by its places."""
    name, places = remat.keys(candidate.recipe.remat)
    return toml(places) if places else name


def as_overrides(values: Mapping[str, Value]) -> list[str]:
    """``key=value`` texts that ``config.with_overrides`` takes."""
    return [f"{key}={value if isinstance(value, str) else toml(value)}" for key, value in values.items()]
