"""When a way of splitting the training of a transformer keeps its chips computing: thresholds and best
splits.

Symbols: B tokens in the global batch, F d_ff, D d_model, X data or FSDP ways, Y tensor ways, Z expert ways, n
chips, M_X and M_Y the physical torus axes that X and Y span, alpha = C / W2 (FLOP per byte of one axis).
Times are of one layer with a two-matrix MLP in bf16. Source: How to Scale Your Model, chapter "training";
MaxText's guide to custom models for experts and pipelines; Google Cloud's Multislice overview for slices.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from slicewise.costs.roofline import Roofline

Scheme = Literal["data", "fsdp", "tensor", "fsdp+tensor"]


def alpha(flops_per_s: float, axis_bytes_per_s: float) -> float:
    """FLOP per byte of one torus axis, both directions: C / W2 (v5p 2550)."""
    return flops_per_s / axis_bytes_per_s


def tokens_per_chip(sequences: float, sequence_length: float, chips: float) -> float:
    """Tokens of the global batch that each chip gets."""
    return sequences * sequence_length / chips


def min_tokens_per_chip(
    alpha: float, axes: float = 1, *, experts: int = 1, experts_per_token: int = 1, model_parallel: float = 1
) -> float:
    """B / X from which data parallelism or FSDP is compute bound: alpha / M_X, times E / k for experts.

    ``model_parallel`` = TP x EP x PP ways per data shard, which divide the tokens that a *chip* needs.
    """
    return alpha / axes * experts / experts_per_token / model_parallel


def max_chips(tokens: float, min_tokens: float) -> float:
    """Chips that a global batch of ``tokens`` keeps busy when each needs ``min_tokens``."""
    return tokens / min_tokens


def max_tensor_ways(d_ff: float, alpha: float, axes: float = 1) -> float:
    """Y up to which tensor parallelism is compute bound: M_Y F / alpha."""
    return axes * d_ff / alpha


def min_d_ff(ways: float, alpha: float, axes: float = 1) -> float:
    """F from which ``ways`` tensor ways are compute bound: alpha Y / M_Y."""
    return alpha * ways / axes


def min_tokens_per_chip_mixed(
    alpha: float, d_ff: float, axes_product: float = 1, *, experts: int = 1, experts_per_token: int = 1
) -> float:
    """B / n from which FSDP with tensor parallelism is compute bound: alpha^2 / (M_X M_Y F), times E / k.

    For experts ``d_ff`` is k times the width of one.
    """
    return alpha**2 / (axes_product * d_ff) * experts / experts_per_token


def max_chips_mixed(tokens: float, alpha: float, d_ff: float, axes_product: float = 1) -> float:
    """n up to which a batch of ``tokens`` stays compute bound: B M_X M_Y F / alpha^2."""
    return tokens / min_tokens_per_chip_mixed(alpha, d_ff, axes_product)


def optimal_fsdp_ways(
    tokens: float, d_ff: float, chips: float, fsdp_axes: float = 1, tensor_axes: float = 1
) -> float:
    """X that balances weight against activation traffic on n chips: sqrt(B / F * M_X / M_Y * n)."""
    return math.sqrt(tokens / d_ff * fsdp_axes / tensor_axes * chips)


def math_over_comms_at_optimum(
    tokens: float, d_ff: float, chips: float, alpha: float, fsdp_axes: float = 1, tensor_axes: float = 1
) -> float:
    """Math over communication time at the best split: sqrt(B F M_X M_Y) / (alpha sqrt(n)); bound above
    one."""
    return math.sqrt(tokens * d_ff * fsdp_axes * tensor_axes / chips) / alpha


def divisors(number: int) -> list[int]:
    """In rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def nearest(value: float, allowed: Iterable[int]) -> int:
    """The allowed number with the smallest ratio to ``value``; the larger of a tie."""
    return min(allowed, key=lambda a: (abs(math.log(a / value)), -a))


@dataclass(frozen=True)
class Split:
    """FSDP ways x tensor ways of a number of chips."""

    exact_fsdp_ways: float
    fsdp_ways: int
    tensor_ways: int


def optimal_split(
    tokens: float, d_ff: float, chips: int, fsdp_axes: float = 1, tensor_axes: float = 1
) -> Split:
    """`optimal_fsdp_ways` rounded to the nearest divisor of ``chips``, the rest tensor ways."""
    exact = optimal_fsdp_ways(tokens, d_ff, chips, fsdp_axes, tensor_axes)
    fsdp = nearest(exact, divisors(chips))
    return Split(exact, fsdp, chips // fsdp)


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward of one layer; communication of the two axes can overlap, so the larger counts."""

    forward: Roofline
    backward: Roofline
    fsdp_forward_s: float
    tensor_forward_s: float

    @property
    def lower_s(self) -> float:
        return self.forward.lower_s + self.backward.lower_s

    @property
    def upper_s(self) -> float:
        return self.forward.upper_s + self.backward.upper_s


def layer_time(
    scheme: Scheme,
    tokens: float,
    d_model: float,
    d_ff: float,
    *,
    flops_per_s: float,
    axis_bytes_per_s: float,
    data_ways: int = 1,
    tensor_ways: int = 1,
    data_axes: float = 1,
    tensor_axes: float = 1,
    tensor_backward_factor: float = 1.0,
) -> LayerTime:
    """Times of one two-matrix MLP layer (bf16) under ``scheme``.

    Forward: math 4BDF / (X Y C); FSDP gathers 4DF / (Y M_X W2), tensor moves 4BD / (X M_Y W2). Backward: math
    twice; gradients 8DF / (Y M_X W2) (data: the all-reduce; FSDP: gather and scatter); tensor traffic times
    ``tensor_backward_factor``, 1 when the gathered input is kept, 1.5 when it is gathered again.
    """
    ways = data_ways * tensor_ways
    math_s = 4 * tokens * d_model * d_ff / (ways * flops_per_s)
    weights_s = 4 * d_model * d_ff / (tensor_ways * data_axes * axis_bytes_per_s)
    activations_s = 4 * tokens * d_model / (data_ways * tensor_axes * axis_bytes_per_s)
    fsdp_forward_s = weights_s if "fsdp" in scheme else 0.0
    gradients_s = 0.0 if scheme == "tensor" else 2 * weights_s
    tensor_s = activations_s if "tensor" in scheme else 0.0
    return LayerTime(
        forward=Roofline(math_s, max(fsdp_forward_s, tensor_s)),
        backward=Roofline(2 * math_s, max(gradients_s, tensor_backward_factor * tensor_s)),
        fsdp_forward_s=fsdp_forward_s,
        tensor_forward_s=tensor_s,
    )


def tensor_latency_bound_ways(
    batch: float, d_model: float, latency_bound_shard_bytes: float, *, bits: float = 8
) -> float:
    """Y above which the shard [B, D] / Y of a tensor collective is below one hop's worth of bytes."""
    return batch * d_model * bits / 8 / latency_bound_shard_bytes


def context_attention_intensity(
    sequence_length: float, heads: float, kv_heads: float, ways: int, *, bits: float = 16
) -> float:
    """FLOP per byte of causal attention that gathers keys and values: 4 s^2 N H / ways over 4 s K H
    (bf16)."""
    return sequence_length * heads / (kv_heads * ways) * 16 / bits


def max_expert_ways(d_ff: float, alpha: float) -> float:
    """Z up to which experts over one ring are compute bound (two all-to-alls of B k D): 4F / alpha."""
    return 4 * d_ff / alpha


def min_expert_d_ff(ways: float, alpha: float) -> float:
    """Expert width from which ``ways`` expert ways over one ring are compute bound: alpha Z / 4."""
    return alpha * ways / 4


def expert_layer(
    tokens: float,
    d_model: float,
    d_ff: float,
    experts_per_token: int,
    ways: int,
    *,
    flops_per_s: float,
    axis_bytes_per_s: float,
) -> Roofline:
    """Forward of a two-matrix MoE layer over a ring of ``ways``: math 4BkDF / (Z C), two all-to-alls BkD /
    W2."""
    math_s = 4 * tokens * experts_per_token * d_model * d_ff / (ways * flops_per_s)
    return Roofline(math_s, tokens * experts_per_token * d_model / axis_bytes_per_s)


def pipeline_bubble(stages: int, microbatches: int, repeats: int = 1) -> float:
    """Idle share of a pipeline: (P - 1) / (r m + P - 1), where each stage holds ``repeats`` pieces of the
    model."""
    return (stages - 1) / (repeats * microbatches + stages - 1)


def pipeline_hops_s(
    tokens: float, d_model: float, stages: int, microbatches: int, bytes_per_s: float, *, bits: float = 16
) -> float:
    """Time of the hops between stages on the critical path: (m + P - 2) hops of a microbatch's
    activations."""
    hop = bits / 8 * tokens * d_model / (microbatches * bytes_per_s)
    return (microbatches + stages - 2) * hop


def pipeline_intensity(layers_per_stage: float, d_ff: float, experts_per_token: int = 1) -> float:
    """FLOP per byte of a circular pipeline, two permutes: 1.5 layers F k (MaxText, gated MLP)."""
    return 1.5 * layers_per_stage * d_ff * experts_per_token


def dcn_flops_per_bit(flops_per_s: float, chips_per_host: int, host_bits_per_s: float) -> float:
    """FLOPs that a host does while its network card sends one bit (v4: 22,000)."""
    return chips_per_host * flops_per_s / host_bits_per_s


def min_tokens_per_slice(
    flops_per_s: float,
    dcn_bytes_per_s: float,
    *,
    num_slices: float = math.inf,
    gradient_bits: float = 16,
    experts: int = 1,
    experts_per_token: int = 1,
    margin: float = 1.0,
) -> float:
    """Tokens per slice from which data parallelism across slices is compute bound; both rates per chip.

    Backward does 4 FLOPs per parameter and token; the all-reduce moves 2 (s - 1) / s times the gradient. So B
    > C / W (gradient_bits / 16) (s - 1) / s, times E / k for experts. ``margin`` 2 is what Google Cloud
    advises.
    """
    sent = 1.0 if math.isinf(num_slices) else (num_slices - 1) / num_slices
    sparsity = experts / experts_per_token
    return margin * flops_per_s / dcn_bytes_per_s * gradient_bits / 16 * sent * sparsity


def min_tokens_per_slice_by_bit(
    flops_per_bit: float, *, num_slices: float = math.inf, gradient_bits: float = 32, margin: float = 1.0
) -> float:
    """`min_tokens_per_slice` from FLOPs per bit: gradient_bits * 2 (s - 1) / s bits per 4B FLOPs of a
    parameter.

    In fp32 that is 32 bits for two slices and nearly 64 for many.
    """
    sent = 1.0 if math.isinf(num_slices) else (num_slices - 1) / num_slices
    return margin * flops_per_bit * 2 * gradient_bits * sent / 4


def max_sequences(tokens: float, sequence_length: float) -> float:
    """Data-parallel ways without splitting a sequence."""
    return tokens / sequence_length
