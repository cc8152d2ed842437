"""Small calculators, each a record that explains itself: matmuls, collectives and copies.

Every ``explain`` gives lines of text that name the inequality which decides and put the numbers in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slicewise.catalog.chips import BITS, Chip
from slicewise.catalog.slices import Cluster, Slice
from slicewise.costs import collectives, roofline, switched
from slicewise.costs.collectives import Axis, Op
from slicewise.costs.roofline import Roofline
from slicewise.costs.units import count, duration, quantity
from slicewise.errors import UserError, did_you_mean


def require_positive(**values: float) -> None:
    """Raises UserError for a value that is not a finite number above zero."""
    for name, value in values.items():
        if not value > 0 or not math.isfinite(value):
            raise UserError(f"{name} = {value}: expected a number above 0.")


def bits_of(precision: str) -> int:
    """Bits of a number of ``precision``. Raises UserError for an unknown one."""
    if precision not in BITS:
        raise UserError(
            f"unknown precision '{precision}'.{did_you_mean(precision, BITS)} Known: {', '.join(BITS)}."
        )
    return BITS[precision]


def torus_chip(slice_: Slice) -> Chip:
    """The chip of ``slice_``. Raises UserError when it has no torus."""
    if not slice_.chip.ici_dims:
        raise UserError(f"{slice_.chip.name} has no torus; this calculator is for TPU slices.")
    return slice_.chip


def axes_text(axes: Sequence[Axis]) -> str:
    """Such as '4 ring x 8 line'."""
    return " x ".join(f"{a.size}{' ring' if a.wrap else ' line'}" for a in axes) or "1"


@dataclass(frozen=True)
class Matmul:
    """[B, D] x [D, F] on one chip."""

    chip: str
    B: int
    D: int
    F: int
    precision: str
    weights: str
    flops: float
    bytes_: float
    flops_per_s: float
    hbm_bytes_per_s: float
    critical_batch: float  # for B much less than D and F
    critical_batch_exact: float
    padding: float  # stored elements per real one once D and F fill whole matrix units

    @property
    def time(self) -> Roofline:
        return Roofline(self.flops / self.flops_per_s, self.bytes_ / self.hbm_bytes_per_s)

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes_

    def explain(self) -> list[str]:
        peak = self.flops_per_s / self.hbm_bytes_per_s
        sign = ">" if self.time.bound == "compute" else "<"
        exact = self.critical_batch_exact
        lines = [
            f"[{self.B}, {self.D}] x [{self.D}, {self.F}] on {self.chip} in {self.precision},"
            f" {self.weights} weights",
            f"math   2BDF = {quantity(self.flops, 'FLOP')} / {quantity(self.flops_per_s, 'FLOP/s')}"
            f" = {duration(self.time.math_s)}",
            f"memory BD + DF + BF = {quantity(self.bytes_, 'B')} / {quantity(self.hbm_bytes_per_s, 'B/s')}"
            f" = {duration(self.time.comms_s)}",
            f"{self.time.bound} bound: intensity {self.intensity:.4g} {sign} C/W = {peak:.4g} FLOP/B",
            f"between {duration(self.time.lower_s)} (overlapped) and {duration(self.time.upper_s)}",
            f"compute bound from B = {count(self.critical_batch)} for B << D, F;"
            + (f" exactly {count(exact)} here" if math.isfinite(exact) else " with these D and F never"),
        ]
        if self.padding > 1:
            lines.append(
                f"D and F do not fill the matrix unit, which computes {100 * (self.padding - 1):.3g}% more"
            )
        return lines


def matmul(
    B: int, D: int, F: int, chip: Chip, *, precision: str = "bf16", weights: str | None = None
) -> Matmul:
    """x[B, D] . w[D, F] on one ``chip``, computed in ``precision`` with weights stored as ``weights``.

    Raises UserError for sizes below one or a precision that the chip does not have.
    """
    require_positive(B=B, D=D, F=F)
    weights = weights or precision
    peak = chip.peak_flops_per_s(precision)
    weight_bits, activation_bits = bits_of(weights), bits_of(precision)
    padded = roofline.padding_expansion((D, F), (chip.mxu_dim, chip.mxu_dim))
    critical = roofline.critical_batch(peak, chip.hbm_bytes_per_s, weight_bits=weight_bits)
    return Matmul(
        chip=chip.name,
        B=B,
        D=D,
        F=F,
        precision=precision,
        weights=weights,
        flops=roofline.matmul_flops(B, D, F),
        bytes_=roofline.matmul_bytes(B, D, F, weight_bits=weight_bits, activation_bits=activation_bits),
        flops_per_s=peak,
        hbm_bytes_per_s=chip.hbm_bytes_per_s,
        critical_batch=critical,
        critical_batch_exact=roofline.critical_batch_exact(
            D, F, peak, chip.hbm_bytes_per_s, weight_bits=weight_bits, activation_bits=activation_bits
        ),
        padding=padded,
    )


@dataclass(frozen=True)
class CollectiveReport:
    """One collective inside a slice, or across slices, or on a switched network."""

    op: Op
    where: str
    bytes_: float  # of the array as one group sees it
    group: int
    time_s: float
    lines: tuple[str, ...]

    def explain(self) -> list[str]:
        return [f"{self.op.replace('_', '-')} of {quantity(self.bytes_, 'B')} over {self.where}", *self.lines]


def collective(
    op: str,
    bytes_: float,
    cluster: Cluster,
    *,
    axes: Sequence[int] | None = None,
    sharded_ways: int = 1,
    across_slices: bool = False,
) -> CollectiveReport:
    """``op`` on an array of ``bytes_``, of which other mesh axes already split ``sharded_ways``.

    ``axes`` are the physical axes of the slice that take part (all by default); ``across_slices`` runs it
    over the slices instead. Raises UserError for an unknown operation or axis, or a size below one.
    """
    if op not in collectives.OPS:
        known = ", ".join(collectives.OPS)
        raise UserError(f"unknown collective '{op}'.{did_you_mean(op, collectives.OPS)} Known: {known}.")
    require_positive(bytes=bytes_, sharded_ways=sharded_ways)
    seen = bytes_ / sharded_ways
    here = cluster.slice
    if axes is not None and (across_slices or cluster.chip.levels):
        what = "a collective across slices" if across_slices else f"the switched network of {here.chip.name}"
        raise UserError(f"axes {', '.join(map(str, axes))}: {what} has no physical axes; leave them out.")
    if across_slices:
        if cluster.num_slices < 2:
            raise UserError("a collective across slices needs two slices or more; give their number.")
        return _across_slices(op, seen, cluster)
    if cluster.chip.levels:
        return _switched(op, seen, cluster)
    if axes is not None and (bad := [a for a in axes if not 0 <= a < len(here.topology)]):
        raise UserError(f"axis {bad[0]}: {here.name} has axes 0 to {len(here.topology) - 1}.")
    if axes is not None and len(set(axes)) < len(axes):
        raise UserError(f"axes {', '.join(map(str, axes))}: expected each axis once.")
    done = collectives.collective(
        op, seen, collectives.axes_of(here, axes), here.chip.ici_link_bytes_per_s, hop_s=here.chip.hop_s
    )
    where = f"{axes_text(done.axes)} of {here.chip.name} {here.name}"
    lines = (
        _bandwidth_line(done, here.chip.ici_link_bytes_per_s),
        f"latency   {count(sum(a.hops for a in done.axes))} hops of {duration(here.chip.hop_s)}"
        f"{', twice' if op == 'all_reduce' else ''} = {duration(done.latency_s)}",
        f"{done.bound} bound: {duration(done.time_s)}; a chip holds {quantity(done.shard_bytes, 'B')}",
    )
    return CollectiveReport(op, where, seen, done.group, done.time_s, lines)


def _bandwidth_line(done: collectives.Collective, link: float) -> str:
    directions = sum(a.directions for a in done.axes)
    speed = quantity(directions * link, "B/s")
    if done.op == "all_to_all":
        return (
            f"bandwidth a quarter of V crosses the middle of the longest axis = {duration(done.bandwidth_s)}"
        )
    twice = "2 " if done.op == "all_reduce" else ""
    share = "" if all(a.wrap for a in done.axes) else "(n-1)/n "
    links = f"{directions} links of {quantity(link, 'B/s')}"
    return f"bandwidth {twice}{share}V / {speed} ({links}) = {duration(done.bandwidth_s)}"


def _across_slices(op: Op, bytes_: float, cluster: Cluster) -> CollectiveReport:
    n, chips, egress = cluster.num_slices, cluster.slice.chips, cluster.chip.dcn_bytes_per_s
    time_s = collectives.dcn_s(op, bytes_, n, chips, egress)
    twice = "2 " if op == "all_reduce" else ""
    held = "V/n" if op == "all_to_all" else "V"
    line = (
        f"bandwidth {twice}(n-1)/n {held} / ({chips} chips x {quantity(egress, 'B/s')}), n = {n} slices"
        f" = {duration(time_s)}"
    )
    return CollectiveReport(op, f"{n} slices of {cluster.slice.accelerator_type}", bytes_, n, time_s, (line,))


def _switched(op: Op, bytes_: float, cluster: Cluster) -> CollectiveReport:
    gpus = cluster.chips
    levels = switched.levels_spanned(cluster.chip, gpus)
    if op == "all_to_all":
        time_s = switched.all_to_all_s(bytes_, levels)
    else:
        time_s = switched.all_gather_s(bytes_, levels) * (2 if op == "all_reduce" else 1)
    lines = tuple(
        f"level {i}: {v.units} units, egress {quantity(v.egress_bytes_per_s, 'B/s')} each,"
        f" effective D W / (D - 1) = {quantity(switched.effective_bytes_per_s(v), 'B/s')}"
        for i, v in enumerate(levels, 1)
    )
    return CollectiveReport(
        op,
        f"{gpus} {cluster.chip.name} GPUs",
        bytes_,
        gpus,
        time_s,
        (*lines, f"slowest level: {duration(time_s)}"),
    )


@dataclass(frozen=True)
class CopyReport:
    """A copy between two chips of a slice."""

    copy: collectives.Copy
    lines: tuple[str, ...]

    def explain(self) -> list[str]:
        return list(self.lines)


def copy(bytes_: float, source: Sequence[int], target: Sequence[int], slice_: Slice) -> CopyReport:
    """``bytes_`` from the chip at ``source`` to the one at ``target``. Raises UserError outside the slice."""
    chip = torus_chip(slice_)
    require_positive(bytes=bytes_)
    axes = [Axis(size, wrap) for size, wrap in zip(slice_.topology, slice_.wrap, strict=True)]
    for at in (source, target):
        if len(at) != len(axes) or not all(0 <= c < a.size for c, a in zip(at, axes, strict=True)):
            raise UserError(f"chip {tuple(at)} is not in a {slice_.name} slice.")
    done = collectives.point_to_point(
        bytes_, source, target, axes, chip.ici_link_bytes_per_s, hop_s=chip.hop_s
    )
    line = (
        f"{quantity(bytes_, 'B')} / ({done.ports} links x {quantity(chip.ici_link_bytes_per_s, 'B/s')})"
        f" + {done.hops} hops x {duration(chip.hop_s)} = {duration(done.time_s)}"
    )
    return CopyReport(done, (f"{tuple(source)} to {tuple(target)} of {chip.name} {slice_.name}", line))
