"""The sharding experiment as text and as JSON."""

from collections.abc import Sequence
from typing import Any

from slicewise.config import AXES, AxisDegrees
from slicewise.costs.units import duration, quantity
from slicewise.plan.stack import Measured, Predicted, Stack


def title(stack: Stack, where: str, devices: int) -> list[str]:
    """What runs, and how large it is."""
    activations = stack.activation_bytes(devices)
    return [
        f"{stack.layers} layer{'s' * (stack.layers > 1)} of {stack.d_model:,} x {stack.d_ff:,} and back, {stack.dtype},"
        f" {stack.rows:,} rows a device, on {where}",
        f"parameters {quantity(stack.parameter_bytes, 'B')}, activations {quantity(activations, 'B')} over all devices",
    ]


def run(stack: Stack, one: Measured, peak: tuple[str, float]) -> list[str]:
    """One layout, beside what the plan predicts. ``peak``: what a rate is compared with, and its FLOP/s."""
    what, most = peak
    rate = stack.flops / one.step_s
    rows = [
        ("time a step", duration(one.step_s), one.plan and duration(one.plan.step_s)),
        ("TFLOP/s a device", f"{rate / 1e12:.4g}", one.plan and _tflops(stack, one.plan)),
        (
            f"share of {what}",
            f"{rate / most:.1%}",
            one.plan and f"{stack.flops / one.plan.step_s / most:.1%}",
        ),
    ]
    spread = f"{duration(min(one.times_s))} to {duration(max(one.times_s))} in {len(one.times_s)} steps"
    shown = [f"layout: {layout(one.degrees)}", f"{'':24}{'measured':>14}{'plan':>14}"]
    shown += [f"{name:24}{measured:>14}{plan or '-':>14}" for name, measured, plan in rows]
    return [*shown, f"spread: {spread}", f"{what}: {most / 1e12:.4g} TFLOP/s a device"]


def ranked(stack: Stack, found: Sequence[Measured], peak: tuple[str, float]) -> list[str]:
    """Every layout of a sweep, the fastest first; those that do not fit have no time."""
    what, most = peak
    shown = [f"{'#':3}{'time':>10}{'spread':>22}{'TFLOP/s':>10}{'share':>8}{'plan':>10}  layout"]
    for number, one in enumerate(found, 1):
        if one.lack:
            shown.append(
                f"{'-':<3}{'-':>10}{'does not fit':>22}{'-':>10}{'-':>8}{'-':>10}  {layout(one.degrees)}"
            )
            continue
        spread = f"{duration(min(one.times_s))}-{duration(max(one.times_s))}"
        rate = stack.flops / one.step_s
        plan = duration(one.plan.step_s) if one.plan else "-"
        shown.append(
            f"{number:<3}{duration(one.step_s):>10}{spread:>22}{rate / 1e12:>10.4g}{rate / most:>8.1%}{plan:>10}"
            f"  {layout(one.degrees)}"
        )
    lacks = [f"does not fit: {one.lack} for {layout(one.degrees)}" for one in found if one.lack][:1]
    return [*shown, f"share: of {what}, {most / 1e12:.4g} TFLOP/s a device", *lacks]


def prediction(stack: Stack, degrees: AxisDegrees, plan: Predicted, peak: float) -> list[str]:
    """What the plan says of devices that are not here."""
    exposed = ", ".join(f"{axis} {duration(s)}" for axis, s in plan.exposed_s.items()) or "none"
    return [
        f"layout: {layout(degrees)}",
        f"predicted: {duration(plan.step_s)} a step, {_tflops(stack, plan)} TFLOP/s a device,"
        f" {stack.flops / plan.step_s / peak:.1%} of peak",
        f"communication that compute does not hide: {exposed}",
    ]


def document(stack: Stack, found: Sequence[Measured], peak: tuple[str, float]) -> dict[str, Any]:
    return {
        "kind": "bench shardings",
        "rows": stack.rows,
        "embedding_dimension": stack.d_model,
        "layers": stack.layers,
        "dtype": stack.dtype,
        "compared_with": peak[0],
        "compared_flops_per_s": peak[1],
        "layouts": [
            {
                "ici": dict(one.degrees.ici),
                "dcn": dict(one.degrees.dcn),
                "step_s": None if one.lack else one.step_s,
                "times_s": list(one.times_s),
                "flops_per_s_per_device": None if one.lack else stack.flops / one.step_s,
                "lack": one.lack or None,
                "plan_step_s": one.plan.step_s if one.plan else None,
            }
            for one in found
        ],
    }


def layout(degrees: AxisDegrees) -> str:
    parts = [
        f"{network} {axis} {of[axis]}"
        for network, of in (("dcn", degrees.dcn), ("ici", degrees.ici))
        for axis in AXES
        if of[axis] > 1
    ]
    return " x ".join(parts) or "one device"


def _tflops(stack: Stack, plan: Predicted) -> str:
    return f"{stack.flops / plan.step_s / 1e12:.4g}"
