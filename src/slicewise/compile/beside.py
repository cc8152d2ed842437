"""A compiled step beside the planner's price of the same config, line by line, the largest difference first."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from slicewise.compile.compiler import Request
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import StepEstimate
from slicewise.costs.units import duration
from slicewise.errors import UserError
from slicewise.interop.huggingface import load_spec
from slicewise.plan.run_config import priced

# Components of memory that mean the same: name here -> the planner's names, the compiler's names.
MEMORY = {
    "weights": (("weights",), ("weights",)),
    "optimizer": (("optimizer",), ("optimizer",)),
    "saved activations": (("activations",), ("saved activations",)),
    "temporaries": (
        ("copies of weights", "gradients", "working set", "logits"),
        (
            "gradients",
            "copies of weights",
            "temporaries",
            "fragmentation",
            "batch",
            "cache",
            "results",
            "other",
        ),
    ),
}

_WEIGHT_AXES = {"fsdp", "expert", "context"}  # over which the planner has one line for weights, that of fsdp


@dataclass(frozen=True)
class Line:
    """One part of a step as planned and as compiled. ``planned`` is None for what the planner has no price of."""

    name: str
    unit: Literal["s", "bytes"]
    planned: float | None
    compiled: float
    note: str = ""

    @property
    def difference(self) -> float:
        """Above 0 where the program takes more than planned."""
        return self.compiled - (self.planned or 0.0)


@dataclass(frozen=True)
class Comparison:
    """``planned`` is None, with a ``reason``, where the planner cannot price the program."""

    planned: StepEstimate | None
    reason: str
    lines: tuple[Line, ...]  # seconds, then bytes; the largest difference of each first


def beside_plan(request: Request, compiled: StepEstimate) -> Comparison:
    """``compiled`` is what the compiler's schedule of ``request`` gives."""
    if request.program != "update":
        return Comparison(None, f"The planner prices training steps, and no {request.program}.", ())
    shape = model_shape(load_spec(request.config.model.model))
    try:
        planned = priced(request.config, shape, request.cluster).estimate
    except UserError as error:
        return Comparison(None, f"The planner has no price for this config: {error}", ())
    return Comparison(planned, "", differences(planned, compiled))


def differences(planned: StepEstimate, compiled: StepEstimate) -> tuple[Line, ...]:
    """Lines of two estimates of one step that differ, seconds first, the largest difference of each unit first."""
    seconds = [
        Line(name, "s", planned.compute_s.get(name, 0.0), compiled.compute_s.get(name, 0.0))
        for name in {**planned.compute_s, **compiled.compute_s}
    ]
    compiled = replace(
        compiled,
        communication_s=_by_planned_axis(compiled.communication_s),
        exposed_s=_by_planned_axis(compiled.exposed_s),
    )
    for axis in {**planned.communication_s, **compiled.communication_s}:
        known = axis in planned.communication_s
        before = planned.exposed_s.get(axis, 0.0) if known else None
        note = (
            f"in all {duration(planned.communication_s.get(axis, 0.0))} planned,"
            f" {duration(compiled.communication_s.get(axis, 0.0))} compiled"
        )
        seconds.append(
            Line(f"{axis} exposed", "s", before, compiled.exposed_s.get(axis, 0.0), note if known else "")
        )
    for name in {**planned.other_s, **compiled.other_s}:
        priced_by_plan = name in ("pipeline bubble", "host copies", "slowest slice")
        before = planned.other_s.get(name, 0.0) if priced_by_plan else None
        seconds.append(Line(name, "s", before, compiled.other_s.get(name, 0.0)))
    held = [
        Line(
            name,
            "bytes",
            sum(planned.hbm_bytes.get(n, 0.0) for n in theirs),
            sum(compiled.hbm_bytes.get(n, 0.0) for n in ours),
        )
        for name, (theirs, ours) in MEMORY.items()
    ]
    held.append(Line("on the host", "bytes", planned.host_bytes, compiled.host_bytes))
    return tuple(_ordered(seconds) + _ordered(held))


def _by_planned_axis(seconds: Mapping[str, float]) -> dict[str, float]:
    """By the planner's names of axes: what is gathered over fsdp and other axes at once is weights."""
    found: dict[str, float] = {}
    for label, value in seconds.items():
        network, axes = ("dcn ", label[4:]) if label.startswith("dcn ") else ("", label)
        name = "fsdp" if "fsdp" in axes and set(axes.split(" x ")) <= _WEIGHT_AXES else axes
        found[network + name] = found.get(network + name, 0.0) + value
    return found


def _ordered(lines: list[Line]) -> list[Line]:
    return sorted((l for l in lines if l.difference), key=lambda l: -abs(l.difference))
