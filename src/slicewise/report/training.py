"""A training plan as JSON and as the words that tables and pages share."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slicewise.catalog.slices import Cluster
from slicewise.costs.layout import AXES, Degrees
from slicewise.costs.step import StepEstimate
from slicewise.plan.search import Candidate, fits
from slicewise.plan.training import ScalingPoint, TrainingPlan
from slicewise.report.jsonable import SCHEMA, jsonable

if TYPE_CHECKING:
    from slicewise.plan.run_config import Change

GIB = 2**30


def document(plan: TrainingPlan, *, scaling: Sequence[ScalingPoint] = ()) -> dict[str, Any]:
    """Every ranked layout with its estimate, the families with what decided, and the offers of a free
    search."""
    r = plan.result
    return {
        "kind": "training plan",
        "schema": SCHEMA,
        "model": r.workload.shape.name,
        "parameters": r.workload.shape.parameters,
        "sequence_length": r.workload.seq,
        "global_batch": r.workload.global_batch,
        "batch_tokens": r.workload.tokens,
        "run_tokens": plan.run_tokens,
        "cluster": jsonable(r.cluster),
        "layouts_considered": r.considered,
        "layouts_fitting": r.fitting,
        "memory_margin": r.margin,
        "ranked": [{"rank": k, **candidate(plan, c)} for k, c in enumerate(r.ranked, 1)],
        "reasons": jsonable(plan.reasons),
        "offers": [
            {
                **candidate(plan, o.candidate),
                "cluster": jsonable(o.candidate.cluster),
                "run_s": o.run_s,
                "cost": o.cost,
            }
            for o in plan.offers
        ],
        "scaling": [
            {"slices": p.num_slices, "chips": p.chips, **candidate(plan, p.candidate)} for p in scaling
        ],
    }


def candidate(plan: TrainingPlan, c: Candidate) -> dict[str, Any]:
    return {
        **jsonable(c.layout),
        **jsonable(c.recipe),
        "estimate": jsonable(c.estimate),
        "run_s": plan.run_s(c),
        "cost": plan.cost(c),
    }


def comparison(
    plan: TrainingPlan, now: Candidate, changes: "Sequence[Change]", *, scaling: Sequence[ScalingPoint] = ()
) -> dict[str, Any]:
    """What a config asks for beside the plan's first choice."""
    return {
        **document(plan, scaling=scaling),
        "kind": "config priced",
        "config": {**candidate(plan, now), "fits": fits(now)},
        "changes": jsonable(tuple(changes)),
    }


def place(cluster: Cluster) -> str:
    """Such as '4 x v5p 8x8x8'."""
    return f"{cluster.num_slices} x {cluster.chip.name} {cluster.slice.name}"


def axes(degrees: Degrees) -> str:
    """Such as 'fsdp 256 x context 2'; '-' when nothing is split."""
    used = [(axis, int(getattr(degrees, axis))) for axis in AXES]
    return " x ".join(f"{axis} {degree}" for axis, degree in used if degree > 1) or "-"


def batch(c: Candidate) -> str:
    """Sequences of one device in one microbatch, times the microbatches: '2 x 4'."""
    each = jsonable(c.layout)
    micro = each["accumulation_steps"] * each["pipeline_microbatches"]
    size = each["batch_per_device"]
    shown = f"{size:g}" if size >= 1 or size == 0 else f"1/{1 / size:g}"
    return shown if micro == 1 else f"{shown} x {micro}"


def exposed(e: StepEstimate) -> str:
    """Exposed communication per axis, the largest first."""
    parts = sorted(e.exposed_s.items(), key=lambda item: -item[1])
    return ", ".join(f"{axis} {seconds:.2g}" for axis, seconds in parts) or "-"


def step_parts(e: StepEstimate) -> dict[str, float]:
    """Seconds by part in the order of a stacked bar: compute, exposed communication, everything else.

    Host copies and collectives run partly beside compute, so parts may add up to a little more or less than
    the step.
    """
    return {**e.compute_s, **{f"{axis} exposed": s for axis, s in e.exposed_s.items()}, **e.other_s}


def recipe(c: Candidate) -> str:
    """The remat policy, whose name says what goes to the host; the precision where it is not bf16, and how a context
    axis is crossed where it is not by gathering."""
    r = c.recipe
    said = [r.remat.name, *([r.precision] if r.precision != "bf16" else [])]
    if c.layout.ici.context > 1 and r.context_exchange != "all_gather":
        said.append(r.context_exchange)
    return ", ".join(said)


def parts_table(estimates: Sequence[StepEstimate]) -> list[list[str]]:
    """Rows of where the seconds of a step and the bytes of a device go: a name, then a value an estimate."""
    scale, unit = time_unit(estimates)
    steps = [{name: value / scale for name, value in step_parts(e).items()} for e in estimates]
    rows = [[f"{name}, {unit}", *(_short(s.get(name), "{:.3g}") for s in steps)] for name in _union(steps)]
    held = [{name: value / GIB for name, value in e.hbm_bytes.items()} for e in estimates]
    rows += [[f"{name}, GiB", *(_short(h.get(name), "{:.2f}") for h in held)] for name in _union(held)]
    free = [(e.hbm_limit_bytes - e.hbm_total_bytes) / GIB for e in estimates]
    rows.append(["free, GiB", *(_short(f, "{:.2f}") for f in free)])
    if any(e.host_bytes for e in estimates):
        rows.append(["on the host, GiB", *(_short(e.host_bytes / GIB, "{:.2f}") for e in estimates)])
    return rows


def time_unit(estimates: Sequence[StepEstimate]) -> tuple[float, str]:
    """(seconds, name) of the unit that suits the longest step."""
    longest = max(e.step_time_s for e in estimates)
    return next(u for u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if longest >= u[0] or u[1] == "us")


def _union(parts: Sequence[Mapping[str, float]]) -> list[str]:
    """Names with a value somewhere, in the order of their first appearance."""
    return list(dict.fromkeys(name for part in parts for name, value in part.items() if value))


def _short(value: float | None, form: str) -> str:
    if not value:
        return "-"
    return form.format(value) if abs(value) >= 0.01 else f"{value:.2g}"
