"""Arithmetic of serving: decode and prefill times, memory limits, sharding limits, capacity and cost.

Symbols: B sequences decoded together, S context, P weights, n chips, W_hbm memory bytes/s and C FLOP/s of one
chip, W2 bytes/s of one torus axis both ways, D d_model, F d_ff, Y tensor ways on M_Y axes. Source: How to
Scale Your Model, chapters "inference" and "applied inference".
"""

import math

from slicewise.costs.roofline import Roofline


def attention_intensity(query_length: float, key_length: float, group: float = 1) -> float:
    """FLOP per byte (bf16) of attention with G query heads a KV head: T S G / (T G + S); G in decode at
    most."""
    return query_length * key_length * group / (query_length * group + key_length)


def decode_step_s(
    batch: float,
    cache_bytes: float,
    param_bytes: float,
    *,
    chips: float = 1,
    hbm_bytes_per_s: float,
    active_params: float = 0.0,
    flops_per_s: float = math.inf,
) -> float:
    """Least time of one decode step: B KV / (n W) + max(2 B P_active / (n C), P_bytes / (n W)).

    ``cache_bytes`` is one sequence's, ``param_bytes`` all weights that the batch touches. Without FLOPs this
    is the bandwidth bound (B KV + P_bytes) / (n W).
    """
    return (
        batch * cache_bytes / (chips * hbm_bytes_per_s)
        + linear_s(
            batch,
            param_bytes,
            chips=chips,
            hbm_bytes_per_s=hbm_bytes_per_s,
            active_params=active_params,
            flops_per_s=flops_per_s,
        ).lower_s
    )


def linear_s(
    batch: float,
    param_bytes: float,
    *,
    chips: float = 1,
    hbm_bytes_per_s: float,
    active_params: float,
    flops_per_s: float,
) -> Roofline:
    """Math and memory time of all matrices of one decode step."""
    math_s = 2 * batch * active_params / (chips * flops_per_s)
    return Roofline(math_s, param_bytes / (chips * hbm_bytes_per_s))


def tokens_per_s(batch: float, step_s: float) -> float:
    """Decode throughput."""
    return batch / step_s


def prefill_s(
    active_params: float, tokens: float, flops_per_s: float, *, chips: float = 1, utilization: float = 1.0
) -> float:
    """Time to read a prompt: 2 P tokens / (n C MFU)."""
    return 2 * active_params * tokens / (chips * flops_per_s * utilization)


def free_bytes(chips: float, hbm_bytes: float, param_bytes: float) -> float:
    """What the weights leave for caches."""
    return chips * hbm_bytes - param_bytes


def max_batch(chips: float, hbm_bytes: float, param_bytes: float, cache_bytes: float) -> int:
    """Sequences whose caches fit beside the weights; 0 when the weights alone do not."""
    return max(0, math.floor(free_bytes(chips, hbm_bytes, param_bytes) / cache_bytes))


def full_memory_step_s(hbm_bytes: float, hbm_bytes_per_s: float) -> float:
    """A decode step that reads all of a chip's memory once."""
    return hbm_bytes / hbm_bytes_per_s


def max_decode_tensor_ways(batch: float, d_ff: float, beta: float, axes: float = 1) -> float:
    """Y up to which a decode matmul waits for memory and not for ICI: M_Y F / (B beta), beta = W_hbm / W2."""
    return axes * d_ff / (batch * beta)


def decode_matmul(
    batch: float,
    d_model: float,
    d_ff: float,
    ways: int,
    *,
    flops_per_s: float,
    hbm_bytes_per_s: float,
    axis_bytes_per_s: float,
    axes: float = 1,
    bits: float = 16,
) -> tuple[float, float, float]:
    """(math, HBM, ICI) seconds of one [B, D] x [D, F] over Y ways: 2BDF / (Y C), w DF / (Y W_hbm), a BD /
    (M_Y W2)."""
    return (
        2 * batch * d_model * d_ff / (ways * flops_per_s),
        bits / 8 * d_model * d_ff / (ways * hbm_bytes_per_s),
        bits / 8 * batch * d_model / (axes * axis_bytes_per_s),
    )


def weight_stationary_ways(chips: float, d_model: float, d_ff: float) -> tuple[float, float]:
    """(X on D, YZ on F) of 2D weight-stationary sharding that moves least: X = sqrt(n D / (2F)), YZ = n /
    X."""
    x = math.sqrt(chips * d_model / (2 * d_ff))
    return x, chips / x


def weight_stationary_s(
    batch: float, d_model: float, d_ff: float, x_ways: float, yz_ways: float, axis_bytes_per_s: float
) -> float:
    """ICI time of a two-matrix MLP with weights [D_X, F_YZ] (bf16): 2BD / (X W2) + 4BF / (YZ W2).

    Activations [B, D_X] are gathered and scattered over the two axes YZ, hidden ones [B, F_YZ] over the axis
    X.
    """
    return (2 * batch * d_model / x_ways + 4 * batch * d_ff / yz_ways) / axis_bytes_per_s


def weight_stationary_coefficient(d_ff_over_d_model: float) -> float:
    """c of T = c B D / (sqrt(n) W2) at the best split: 2 sqrt(8 F / D), which is sqrt(128) at F = 4D."""
    return 2 * math.sqrt(8 * d_ff_over_d_model)


def tensor_parallel_s(batch: float, d_model: float, axis_bytes_per_s: float, axes: float = 1) -> float:
    """ICI time of a two-matrix MLP under 1D tensor parallelism: 4BD / (M W2)."""
    return 4 * batch * d_model / (axes * axis_bytes_per_s)


def min_chips_weight_stationary(d_ff_over_d_model: float, axes: float = 3) -> float:
    """n above which 2D weight-stationary sharding beats tensor parallelism on ``axes``: 32 (F / D) (axes /
    4)^2."""
    return (weight_stationary_coefficient(d_ff_over_d_model) * axes / 4) ** 2


def queries_per_s_per_chip(batch: float, step_s: float, steps: float, chips: float) -> float:
    """Requests finished each second for one chip: B / (T_step steps n)."""
    return batch / (step_s * steps * chips)


def sequences_finished_per_step(batch: float, output_tokens: float) -> float:
    """Requests that end in one decode step: B / G."""
    return batch / output_tokens


def tokens_evicted_per_step(batch: float, prompt_tokens: float, output_tokens: float) -> float:
    """Cache entries freed in one decode step: B (P + G) / G."""
    return batch * (prompt_tokens + output_tokens) / output_tokens


def prefill_to_decode_ratio(batch: float, prefill_s: float, step_s: float, output_tokens: float) -> float:
    """Prefill servers for each decode server of batch B: B T_prefill / (T_step G)."""
    return batch * prefill_s / (step_s * output_tokens)


def flops_per_currency(flops_per_s: float, price_per_chip_hour: float) -> float:
    """FLOPs that one unit of money buys at peak."""
    return flops_per_s * 3600 / price_per_chip_hour


def price_per_million_tokens(chips: float, price_per_chip_hour: float, tokens_per_s: float) -> float:
    """n price / (3600 throughput) 1e6."""
    return chips * price_per_chip_hour / (3600 * tokens_per_s) * 1e6


def free_speculative_tokens(batch: float, critical_batch: float) -> int:
    """Draft tokens a sequence that cost no time while B (draft + 1) stays below the critical batch."""
    return max(0, math.ceil(critical_batch / batch) - 2)
