"""The calculator of sharded matmuls: which collectives a layout needs, their bytes and time, the cheaper
strategy."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slicewise.catalog.slices import Slice
from slicewise.costs import sharding
from slicewise.costs.collectives import Axis
from slicewise.costs.units import duration, quantity
from slicewise.errors import UserError
from slicewise.plan.roofline import axes_text, bits_of, require_positive, torus_chip


def parse_layout(text: str) -> sharding.Layout:
    """Reads 'B_X,D * D_Y,F -> B_X,F': which mesh axes (one letter each) split the dims of x, w and y.

    Leaving out '-> ...' keeps y as x and w have it. Raises UserError for anything else.
    """
    left, arrow, right = text.replace(" ", "").partition("->")
    operands = re.split(r"[*.]", left)
    if len(operands) != 2:
        raise UserError(
            f"'{text}' is not a sharded matmul: expected something like 'B_X,D * D_Y,F -> B_X,F'."
        )
    x, w = _dims(operands[0], "BD", text), _dims(operands[1], "DF", text)
    y = _dims(right, "BF", text) if arrow else {"B": None, "F": None}
    return sharding.Layout(
        x_B=x["B"] or (), x_D=x["D"] or (), w_D=w["D"] or (), w_F=w["F"] or (), y_B=y["B"], y_F=y["F"]
    )


def _dims(text: str, expected: str, whole: str) -> dict[str, tuple[str, ...] | None]:
    found: dict[str, tuple[str, ...] | None] = {}
    for dim in text.split(","):
        name, _, axes = dim.partition("_")
        if name not in tuple(expected) or (axes and not axes.isalpha()):
            raise UserError(
                f"'{dim}' in '{whole}': expected {expected[0]} or {expected[1]},"
                f" then optionally _ and mesh axes, as {expected[0]}_XY."
            )
        found[name] = tuple(axes)
    if len(found) != 2 or len(text.split(",")) != 2:
        raise UserError(f"'{text}' in '{whole}': expected the two dims {expected[0]},{expected[1]}.")
    return found


def parse_mesh(text: str, slice_: Slice) -> dict[str, tuple[Axis, ...]]:
    """Reads 'X=16,Y=8': logical axes, each laid on whole physical axes of ``slice_``, or on part of one as a
    line.

    Axes are laid in the order given. Raises UserError for a malformed text or an axis that fits nowhere.
    """
    free = [Axis(size, wrap) for size, wrap in zip(slice_.topology, slice_.wrap, strict=True) if size > 1]
    mesh: dict[str, tuple[Axis, ...]] = {}
    for part in text.replace(" ", "").split(","):
        name, _, ways = part.partition("=")
        counted = ways.isdecimal() and len(ways) <= 9 and int(ways) > 0
        if not (len(name) == 1 and name.isalpha() and counted) or name in mesh:
            raise UserError(
                f"'{part}' in mesh '{text}': expected one letter and its ways, each once, as X=16,Y=4."
            )
        taken, free = _lay(int(ways), free, f"mesh axis {part} does not fit {slice_.name}")
        mesh[name] = taken
    return mesh


def _lay(ways: int, free: list[Axis], problem: str) -> tuple[tuple[Axis, ...], list[Axis]]:
    """(physical axes of ``ways`` chips, what is left): whole axes, else neighbours along one axis."""
    for length in range(len(free) + 1):
        for chosen in itertools.combinations(free, length):
            if math.prod(a.size for a in chosen) == ways:
                left = list(free)
                for axis in chosen:
                    left.remove(axis)
                return chosen, left
    whole = min((a for a in free if a.size % ways == 0), key=lambda a: a.size, default=None)
    if whole is None:
        axes = " x ".join(str(a.size) for a in free) or "none"
        raise UserError(
            f"{problem}: the free physical axes are {axes}; use products of them or a part of one."
        )
    left = list(free)
    left.remove(whole)
    return (Axis(ways, wrap=False),), left


@dataclass(frozen=True)
class ShardedMatmul:
    """x[B, D] . w[D, F] over a mesh: the ways to do it, the fastest first."""

    slice: str
    mesh: Mapping[str, tuple[Axis, ...]]
    B: int
    D: int
    F: int
    flops_per_s: float
    link_bytes_per_s: float
    strategies: tuple[sharding.Strategy, ...]

    @property
    def best(self) -> sharding.Strategy:
        return self.strategies[0]

    def explain(self, shown: int = 3) -> list[str]:
        axes = ", ".join(f"{name}={axes_text(physical)}" for name, physical in self.mesh.items())
        lines = [f"[{self.B}, {self.D}] x [{self.D}, {self.F}] on {self.slice} with {axes}"]
        for rank, s in enumerate(self.strategies[:shown], 1):
            time = s.time
            lines.append(
                f"{rank}. {s.name}: {duration(time.lower_s)} overlapped, {duration(time.upper_s)} not"
            )
            work, peak = quantity(s.flops_per_device, "FLOP"), quantity(self.flops_per_s, "FLOP/s")
            lines.append(f"   math  {work} a chip / {peak} = {duration(time.math_s)}")
            for step in s.steps:
                lines.append(
                    f"   comms {step.op.replace('_', '-')} of {step.array} over {''.join(step.axes)},"
                    f" {quantity(step.bytes_, 'B')} = {duration(step.time_s)} ({step.bound})"
                )
        if len(self.strategies) > 1:
            other = self.strategies[1]
            gain = other.time.lower_s / self.best.time.lower_s
            lines.append(f"'{self.best.name}' is {gain:.3g}x as fast as '{other.name}'")
        sign = ">=" if self.best.time.bound == "compute" else "<"
        math_s, comms_s = duration(self.best.time.math_s), duration(self.best.time.comms_s)
        lines.append(f"{self.best.time.bound} bound: math {math_s} {sign} communication {comms_s}")
        return lines


def sharded_matmul(
    B: int,
    D: int,
    F: int,
    layout: sharding.Layout,
    mesh: Mapping[str, tuple[Axis, ...]],
    slice_: Slice,
    *,
    precision: str = "bf16",
    weights: str | None = None,
    all_to_all: bool = False,
) -> ShardedMatmul:
    """Strategies for x[B, D] . w[D, F] in ``layout`` on ``mesh`` of ``slice_`` (a TPU slice).

    ``all_to_all`` also tries to move a mesh axis from one dim of an array to another.

    Raises UserError for sizes below one, a chip without a torus, or a dim that its axes do not divide.
    """
    require_positive(B=B, D=D, F=F)
    chip = torus_chip(slice_)
    for dim, size, axes in (
        ("B", B, layout.x_B),
        ("D", D, layout.x_D),
        ("D", D, layout.w_D),
        ("F", F, layout.w_F),
    ):
        ways = math.prod(p.size for a in axes if a in mesh for p in mesh[a])
        if size % ways:
            raise UserError(f"{dim} = {size} does not split into {ways} parts over {''.join(axes)}.")
    peak = chip.peak_flops_per_s(precision)
    found = sharding.matmul_strategies(
        B,
        D,
        F,
        layout,
        mesh,
        flops_per_s=peak,
        link_bytes_per_s=chip.ici_link_bytes_per_s,
        hop_s=chip.hop_s,
        weight_bits=bits_of(weights or precision),
        activation_bits=bits_of(precision),
        all_to_all=all_to_all,
    )
    name = f"{chip.name} {slice_.name}"
    return ShardedMatmul(name, mesh, B, D, F, peak, chip.ici_link_bytes_per_s, found)
