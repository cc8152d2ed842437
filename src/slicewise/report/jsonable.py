"""Every record as plain JSON. Keys are an interface: names carry units, and none is dropped or renamed."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from slicewise.catalog.chips import Chip
from slicewise.catalog.model import ModelSpec
from slicewise.catalog.slices import Cluster, Slice
from slicewise.costs.layout import AXES, Degrees, Layout, Recipe
from slicewise.costs.shapes import ModelShape

SCHEMA = 1  # raised when a key changes its meaning

# Properties shown beside a record's fields, by module and class: the record itself stays the one definition.
PROPERTIES: Mapping[str, tuple[str, ...]] = {
    "costs.roofline.Roofline": ("lower_s", "upper_s", "bound"),
    "costs.sharding.Strategy": ("name", "comms_bytes"),
    "costs.params.ParameterCount": ("total", "active"),
    "costs.transformer.Flops": ("total",),
    "costs.step.StepEstimate": ("tokens_per_s", "mfu", "hbm_total_bytes", "decided_by"),
    "plan.roofline.Matmul": ("time", "intensity"),
    "plan.serving_point.Point": (
        "step_s", "bound", "tokens_per_s", "tokens_per_s_per_chip", "prefill_per_decode",
        "price_per_million_tokens", "used_bytes", "meets_latency",
    ),
    "plan.serving.Plan": ("disaggregated", "cache_transfer_s"),
    "plan.goodput.Goodput": ("failures_per_day",),
    "plan.goodput_plan.GoodputPlan": ("checkpoint_every",),
    "plan.operations.Operation": ("intensity", "flops_per_s"),
    "plan.rules.Inequality": ("holds",),
}  # fmt: skip


def document(kind: str, record: Any) -> dict[str, Any]:
    """The whole output of a verb: what it is, the version of its keys, the record and its explanation."""
    explain = getattr(record, "explain", None)
    return {
        "kind": kind,
        "schema": SCHEMA,
        **jsonable(record),
        **({"explanation": list(explain())} if explain else {}),
    }


def text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, allow_nan=False)


def jsonable(value: Any) -> Any:
    """``value`` in terms of dict, list, str, numbers and None; what is infinite (never, no limit) is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Chip | ModelSpec | ModelShape):
        return value.name
    if isinstance(value, Slice):
        return {
            "chip": value.chip.name,
            "topology": value.name,
            "accelerator_type": value.accelerator_type,
            "chips": value.chips,
        }
    if isinstance(value, Cluster):
        return {**jsonable(value.slice), "slices": value.num_slices, "total_chips": value.chips}
    if isinstance(value, Degrees):
        return {axis: int(getattr(value, axis)) for axis in AXES}
    if isinstance(value, Layout):
        return layout(value)
    if isinstance(value, Recipe):
        return recipe(value)
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(jsonable, value))
    if isinstance(value, tuple | list):
        return [jsonable(item) for item in value]
    if dataclasses.is_dataclass(value):
        return _record(value)
    raise TypeError(f"no JSON for {type(value)}")


def layout(value: Layout) -> dict[str, Any]:
    """Degrees and batch; ``batch_per_device`` counts sequences of one microbatch (a share of one where the
    context axis splits it)."""
    micro = int(value.accumulation_steps * value.pipeline_microbatches)
    return {
        "ici": jsonable(value.ici),
        "dcn": jsonable(value.dcn),
        "global_batch": int(value.global_batch),
        "batch_per_device": float(value.global_batch / (value.data_shards * micro)),
        "accumulation_steps": int(value.accumulation_steps),
        "pipeline_microbatches": int(value.pipeline_microbatches),
        "pipeline_repeats": int(value.pipeline_repeats),
        "pipeline_gather": "step" if value.pipeline_gathers_once else "microbatch",
    }


def recipe(r: Recipe) -> dict[str, Any]:
    """How a step is executed; the constants of the search are left out."""
    return {
        "remat_policy": r.remat.name,
        "saved": sorted(r.remat.saved),
        "offloaded": sorted(r.remat.offloaded),
        "precision": r.precision,
        "context_strategy": r.context_exchange,
    }


def _record(value: Any) -> dict[str, Any]:
    cls = type(value)
    name = f"{cls.__module__.removeprefix('slicewise.')}.{cls.__qualname__}"
    names = [f.name for f in dataclasses.fields(value)] + list(PROPERTIES.get(name, ()))
    return {key.rstrip("_"): jsonable(getattr(value, key)) for key in names if key != "lines"}
