"""The calculator of models: what a model costs, and how far a chip lets training and serving it be split."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slicewise.catalog.chips import Chip
from slicewise.catalog.model import ModelSpec
from slicewise.costs import parallelism, roofline, transformer
from slicewise.costs.params import ParameterCount, parameter_count
from slicewise.costs.units import count, quantity
from slicewise.plan.roofline import require_positive


@dataclass(frozen=True)
class ModelReport:
    """What a model costs and how far a chip lets it be split."""

    model: str
    chip: str
    context: int
    params: ParameterCount
    flops_per_token: transformer.Flops  # training
    attention_share: float  # of the training FLOPs
    kv_bytes_per_sequence: float
    state_bytes: float
    min_chips: int  # to hold the training state alone
    alpha: float  # FLOP per byte of one axis; inf without a torus
    min_tokens_per_chip: tuple[float, ...]  # data parallelism or FSDP on 1, 2, ... axes
    max_tensor_ways: tuple[float, ...]
    min_tokens_per_chip_mixed: float | None  # of FSDP with tensor parallelism; None without a torus
    min_tokens_per_slice: float
    decode_critical_batch: float
    lines: tuple[str, ...]

    def explain(self) -> list[str]:
        return list(self.lines)


def model(
    spec: ModelSpec, chip: Chip, *, context: int | None = None, state_bytes_per_param: float = 10
) -> ModelReport:
    """Counts of ``spec`` at ``context`` tokens and the thresholds of training and serving it in bf16 on
    ``chip``."""
    context = min(spec.max_context, 8192) if context is None else context
    require_positive(context=context, state_bytes_per_param=state_bytes_per_param)
    p = parameter_count(spec)
    flops = transformer.train_flops(spec, 1, context)
    peak = chip.peak_flops_per_s("bf16")
    sparsity = {"experts": 1, "experts_per_token": 1}
    d_ff = spec.d_ff
    if spec.experts:
        sparsity = {"experts": spec.experts.experts, "experts_per_token": spec.experts.per_token}
        d_ff = spec.experts.d_ff * spec.experts.per_token + spec.experts.shared_d_ff
    axis = chip.ici_axis_bytes_per_s or chip.levels[0].egress_bytes_per_s
    axes = range(1, max(chip.ici_dims, 1) + 1)
    alpha = parallelism.alpha(peak, axis)
    tokens = tuple(parallelism.min_tokens_per_chip(alpha, m, **sparsity) for m in axes)
    ways = tuple(parallelism.max_tensor_ways(d_ff, alpha, m) for m in axes)
    outer = chip.ici_dims - 1  # FSDP on all axes but one, which is for the tensor ways
    mixed = parallelism.min_tokens_per_chip_mixed(alpha, d_ff, outer, **sparsity) if outer > 0 else None
    slices_ = parallelism.min_tokens_per_slice(peak, chip.dcn_bytes_per_s, **sparsity)
    state = p.total * state_bytes_per_param
    cache = transformer.kv_cache_bytes(spec, context)
    decode = roofline.critical_batch(peak, chip.hbm_bytes_per_s, **sparsity)
    share = flops.attention / flops.total
    least = math.ceil(transformer.min_chips(state, chip.usable_hbm_bytes))
    dense = "" if not spec.experts else f" x E/k ({sparsity['experts']}/{sparsity['experts_per_token']})"
    mixed_line = [] if mixed is None else [_mixed_line(outer, dense, mixed)]
    lines = (
        f"{spec.name} on {chip.name}, {count(context)} tokens of context",
        f"parameters {quantity(p.total)} ({count(p.total)}), active {quantity(p.active)}: attention"
        f" {quantity(p.attention)}, MLP {quantity(p.mlp + p.shared + p.experts)}, embeddings"
        f" {quantity(p.embedding + p.head)}",
        f"training {quantity(flops.total, 'FLOP')} a token (6P = {quantity(6 * p.active, 'FLOP')}),"
        f" {100 * share:.3g}% in attention products",
        f"training state {state_bytes_per_param:g} B a parameter = {quantity(state, 'B')}:"
        f" {'one chip' if least == 1 else f'at least {count(least)} chips'}"
        f" of {quantity(chip.usable_hbm_bytes, 'B')}",
        f"alpha = C/W = {quantity(peak, 'FLOP/s')} / {quantity(axis, 'B/s')} = {count(alpha)} FLOP/B",
        f"data parallel or FSDP: tokens a chip > alpha / axes{dense} = " + _per_axes(tokens),
        "tensor parallel: ways < axes F / alpha = " + _per_axes(ways),
        *mixed_line,
        f"across slices: tokens a slice > C / W_dcn{dense} = {count(slices_)} (bf16 gradients, many slices)",
        f"KV cache {quantity(cache, 'B')} a sequence; decode is compute bound from {count(decode)} sequences",
    )
    return ModelReport(
        model=spec.name,
        chip=chip.name,
        context=context,
        params=p,
        flops_per_token=flops,
        attention_share=share,
        kv_bytes_per_sequence=cache,
        state_bytes=state,
        min_chips=least,
        alpha=alpha,
        min_tokens_per_chip=tokens,
        max_tensor_ways=ways,
        min_tokens_per_chip_mixed=mixed,
        min_tokens_per_slice=slices_,
        decode_critical_batch=decode,
        lines=lines,
    )


def _mixed_line(axes: int, sparsity: str, tokens: float) -> str:
    return f"FSDP with tensor: tokens a chip > alpha^2 / ({axes} F){sparsity} = {count(tokens)}"


def _per_axes(values: Sequence[float]) -> str:
    return ", ".join(f"{count(v)} ({m} {'axis' if m == 1 else 'axes'})" for m, v in enumerate(values, 1))
