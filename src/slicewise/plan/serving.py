"""Serving a workload: the cheapest slice, batch and quantization within a latency, and the trade-off around
it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slicewise.catalog.chips import BITS, Chip
from slicewise.catalog.model import ModelSpec
from slicewise.catalog.slices import Slice, default_shape, legal_shapes
from slicewise.costs import collectives, inference, parallelism, roofline, transformer
from slicewise.costs.units import count, duration, quantity
from slicewise.errors import UserError
from slicewise.plan.serving_point import MEMORY_SHARE, Point, Quantization, Workload, point, weight_bytes

COMMON = (Quantization(), Quantization("int8", "int8"), Quantization("int4", "int8"))
EQUAL = 0.99  # throughputs this near are equal: the lower latency wins


def batches(largest: int) -> list[int]:
    """Powers of two up to ``largest``, and ``largest``."""
    return sorted(
        {*(1 << i for i in range(largest.bit_length()) if 1 << i <= largest), *([largest] if largest else [])}
    )


def replica_sizes(chip: Chip, max_chips: int) -> list[Slice]:
    """The most cube-like slice of each size that can be had, up to ``max_chips``."""
    sizes = sorted({math.prod(s) for s in legal_shapes(chip) if math.prod(s) <= max_chips})
    shapes = [default_shape(chip, n) for n in sizes]
    return [Slice(chip, shape) for shape in shapes if shape is not None]


def frontier(points: Iterable[Point]) -> tuple[Point, ...]:
    """The points that no other beats both in latency and in tokens per chip, by rising latency."""
    best: list[Point] = []
    for candidate in sorted(points, key=lambda p: (p.step_s, -p.tokens_per_s_per_chip)):
        if not best or candidate.tokens_per_s_per_chip > best[-1].tokens_per_s_per_chip:
            best.append(candidate)
    return tuple(best)


@dataclass(frozen=True)
class Plan:
    """How to serve a workload: the best point, and the frontier it was taken from."""

    model: ModelSpec
    chip: Chip
    workload: Workload
    best: Point  # most tokens per chip within the latency; of near equals the one with the least latency
    fastest: Point  # least time between tokens
    frontier: tuple[Point, ...]
    rejected: tuple[str, ...] = ()  # why some quantizations have no point

    @property
    def disaggregated(self) -> tuple[int, int]:
        """Small whole numbers of (prefill, decode) slices nearest to the ratio that keeps both busy."""
        return whole_ratio(self.best.prefill_per_decode)

    @property
    def cache_transfer_s(self) -> float:
        """To send one prompt's cache from a prefill to a decode slice through all its DCN egress."""
        bits = BITS[self.best.quantization.cache]
        bytes_ = transformer.kv_cache_bytes(self.model, self.workload.prompt, bits=bits)
        return bytes_ / (self.best.slice.chips * self.chip.dcn_bytes_per_s)

    def reasons(self) -> list[str]:
        """Why the best point is the best, and what limits it."""
        return _reasons(self)

    def explain(self) -> list[str]:
        """The reasons, and the frontier."""
        points = (
            f"  {_say(p)}, {p.quantization.name}: {duration(p.step_s)} a token,"
            f" {count(p.tokens_per_s_per_chip)} tokens/s a chip"
            for p in self.frontier
        )
        return [*self.reasons(), "by rising latency, points that no other beats:", *points]


def whole_ratio(ratio: float, largest: int = 8) -> tuple[int, int]:
    """(a, b) with a / b nearest to ``ratio`` and neither below one nor, if that can be, above ``largest``."""
    if ratio >= largest:
        return math.ceil(ratio), 1
    if ratio <= 1 / largest:
        return 1, max(1, math.floor(1 / ratio)) if ratio > 0 else largest
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(1, largest + 1)]
    return min(pairs, key=lambda p: (round(abs(math.log(p[0] / p[1] / ratio)), 9), sum(p)))


def serve(
    spec: ModelSpec,
    chip: Chip,
    workload: Workload,
    *,
    quantizations: Sequence[Quantization] = COMMON,
    max_chips: int = 256,
    replicas: Sequence[Slice] | None = None,
    prefill_utilization: float = 0.4,
) -> Plan:
    """The cheapest way to serve ``workload``, over replica sizes up to ``max_chips`` (or only ``replicas``),
    batches and quantizations.

    Raises UserError when the model fits no slice, or when no slice meets the latency (with the least that can
    be).
    """
    if not 0 < prefill_utilization <= 1:
        raise UserError(
            f"prefill utilization = {prefill_utilization}: expected a share above 0 and at most 1."
        )
    if workload.full_context > spec.max_context:
        raise UserError(
            f"prompt + output = {workload.full_context} tokens, but {spec.name} has a context of"
            f" {spec.max_context}."
        )
    options = {"prefill_utilization": prefill_utilization}
    sizes = replica_sizes(chip, max_chips) if replicas is None else replicas
    if not sizes:
        smallest = min(math.prod(s) for s in legal_shapes(chip))
        raise UserError(f"{chip.name} has no slice of up to {max_chips} chips; the smallest has {smallest}.")
    allowed = f"of up to {max_chips} chips" if replicas is None else f"of {', '.join(s.name for s in sizes)}"
    points, rejected = [], []
    for quantization in quantizations:
        found = []
        for slice_ in sizes:
            largest = point(spec, slice_, 1, workload, quantization, **options).max_batch
            found += [point(spec, slice_, b, workload, quantization, **options) for b in batches(largest)]
        if not found:
            rejected.append(
                f"{quantization.name} need {_least_chips(spec, chip, workload, quantization)} chips"
            )
        points += found
    if not points:
        raise UserError(f"{spec.name} does not fit {chip.name} slices {allowed}: {'; '.join(rejected)}.")
    within = [p for p in points if p.meets_latency]
    fastest = min(points, key=lambda p: (p.step_s, -p.tokens_per_s_per_chip))
    if not within:
        raise UserError(
            f"no {chip.name} slice {allowed} gives a token of {spec.name} every"
            f" {duration(workload.latency_s or 0)}; the least is {duration(fastest.step_s)}"
            f" on {fastest.slice.name}"
            f" with {fastest.quantization.name}."
        )
    most = max(p.tokens_per_s_per_chip for p in within)
    best = min((p for p in within if p.tokens_per_s_per_chip >= EQUAL * most), key=lambda p: p.step_s)
    return Plan(spec, chip, workload, best, fastest, frontier(points), tuple(rejected))


def _least_chips(spec: ModelSpec, chip: Chip, workload: Workload, quantization: Quantization) -> int:
    """For the weights and one cache."""
    cache = transformer.kv_cache_bytes(spec, workload.full_context, bits=BITS[quantization.cache])
    needed = weight_bytes(spec, BITS[quantization.weights]) + cache
    return math.ceil(needed / (MEMORY_SHARE * chip.usable_hbm_bytes))


def _reasons(plan: Plan) -> list[str]:
    spec, chip, best, work = plan.model, plan.chip, plan.best, plan.workload
    n, hbm = best.slice.chips, quantity(chip.hbm_bytes_per_s, "B/s")
    free = MEMORY_SHARE * chip.usable_hbm_bytes * n - best.weight_bytes
    alone = point(spec, best.slice, 1, work, best.quantization)
    limit = "any latency" if work.latency_s is None else f"within {duration(work.latency_s)} a token"
    a, b = plan.disaggregated
    lines = [
        f"{spec.name}, prompts of {work.prompt} and answers of {work.output} tokens, {limit}:"
        f" {_say(best)}, {best.quantization.name}",
        f"memory: weights {quantity(best.weight_bytes, 'B')} leave {quantity(free, 'B')} for caches of"
        f" {quantity(best.cache_bytes, 'B')}: batch <= {best.max_batch}",
        f"decode floor, batch 1: cache {duration(alone.cache_s)} + max({_touched(alone)} / ({n} x {hbm}) ="
        f" {duration(alone.weights_s)}, math {duration(alone.math_s)}), network {duration(alone.network_s)}"
        f" -> {duration(alone.step_s)}",
        f"decode, batch {best.batch}: caches {duration(best.cache_s)} + max({_touched(best)} in"
        f" {duration(best.weights_s)}, math {duration(best.math_s)}), network {duration(best.network_s)}"
        f" -> {duration(best.step_s)}, {best.bound} bound",
        f"matrices are compute bound from batch {count(_critical_batch(plan))}",
        f"prefill: {duration(best.prefill_s)} a prompt",
        f"{count(best.tokens_per_s)} tokens/s while decoding,"
        f" {count(best.tokens_per_s_per_chip)} a chip once prefill is paid for",
        f"separate prefill: {best.prefill_per_decode:.3g} slices for each decoding slice (about {a}:{b});"
        f" sending a prompt's cache takes {duration(plan.cache_transfer_s)}",
        _price_line(best),
        *_limits(plan),
    ]
    return lines + [f"not possible: {reason}" for reason in plan.rejected]


def _touched(p: Point) -> str:
    """The weights that one step of a batch reads: of a mixture of experts, not all."""
    touched = p.weights_s * p.slice.chips * p.slice.chip.hbm_bytes_per_s
    part = f" of the {quantity(p.weight_bytes, 'B')}" if touched < 0.99 * p.weight_bytes else ""
    return f"weights {quantity(touched, 'B')}{part}"


def _say(p: Point) -> str:
    return f"{p.slice.accelerator_type} ({p.slice.name}) at batch {p.batch}"


def _price_line(best: Point) -> str:
    price = best.price_per_million_tokens
    if price is None:
        return f"no price for {best.slice.chip.name}: give a price file to see the cost"
    return f"{price:.3g} per million output tokens at {best.price_per_chip_hour:g} a chip-hour"


def _critical_batch(plan: Plan) -> float:
    experts, quantization = plan.model.experts, plan.best.quantization
    return roofline.critical_batch(
        plan.chip.peak_flops_per_s(quantization.compute),
        plan.chip.hbm_bytes_per_s,
        weight_bits=BITS[quantization.weights],
        experts=experts.experts if experts else 1,
        experts_per_token=experts.per_token if experts else 1,
    )


def _limits(plan: Plan) -> list[str]:
    """How far tensor parallelism goes before its network time overtakes memory or math."""
    chip, spec, best = plan.chip, plan.model, plan.best
    if not chip.ici_dims:
        return []
    axes = len(collectives.axes_of(best.slice)) or 1
    beta = roofline.critical_intensity(chip.hbm_bytes_per_s, chip.ici_axis_bytes_per_s)
    alpha = parallelism.alpha(chip.peak_flops_per_s(best.quantization.compute), chip.ici_axis_bytes_per_s)
    d_ff = spec.experts.d_ff * spec.experts.per_token if spec.experts else spec.d_ff
    hbm = inference.max_decode_tensor_ways(best.batch, d_ff, beta, axes)
    math_ways = parallelism.max_tensor_ways(d_ff, alpha, axes)
    lines = [
        f"tensor ways: < {axes} F / (B beta) = {count(hbm)} while memory bound,"
        f" < {axes} F / alpha = {count(math_ways)} while compute bound"
    ]
    crossover = inference.min_chips_weight_stationary(d_ff / spec.d_model)
    if chip.ici_dims == 3 and best.slice.chips > crossover:
        lines.append(
            f"above {count(crossover)} chips 2D weight-stationary sharding moves less than tensor parallelism"
        )
    return lines
