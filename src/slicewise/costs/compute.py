"""Seconds that one device computes for one layer and one microbatch: matmuls, attention kernel, memory
traffic."""

from dataclasses import dataclass

import numpy as np

from slicewise.costs.device import Device
from slicewise.costs.flops import computed_logits, dispatch_flops, padded
from slicewise.costs.layout import Number, Recipe
from slicewise.costs.remat import recomputed
from slicewise.costs.shapes import Attention, Layer, Matmul

ACT = 2  # bytes of an activation (bf16)

# Vector cycles of one core per logit, from the bundles of compiled attention kernels (blocks of 1024, 2048).
SOFTMAX_FORWARD = 3.31e-3
SOFTMAX_BACKWARD = 5.27e-3
SOFTMAX_SPLIT_BACKWARD = 1.5 * SOFTMAX_BACKWARD  # dq and dkv apart; not measured


@dataclass(frozen=True)
class Shard:
    """What one device holds of the work of a layer."""

    tokens: Number  # of one microbatch, replicated over the tensor axis
    seq: int
    tensor: Number
    context: Number
    expert: Number


@dataclass(frozen=True)
class Compute:
    """Seconds of one pass over one layer."""

    matmul: Number
    attention: Number
    memory: Number
    routing: Number

    @property
    def total(self) -> Number:
        return self.matmul + self.attention + self.memory + self.routing


def matmul_s(m: Matmul, work: Shard, device: Device, recipe: Recipe) -> Number:
    """One product of the local shard: the slower of the matrix unit on whole tiles and of memory."""
    c = device.calibration
    t = work.tensor
    d_in = m.d_in / t if m.sharding == "row" else m.d_in
    d_out = m.d_out / t if m.sharding == "column" else m.d_out
    tokens = work.tokens * m.active
    weights = d_in * d_out
    eight_bit = recipe.precision != "bf16" and m.name != "router"
    efficiency = c.matmul_efficiency
    if m.routed:
        weights = weights * m.experts / work.expert
        if recipe.expert_capacity_factor is None:
            efficiency = efficiency * device.kernels.grouped_efficiency
        else:
            tokens = tokens * recipe.expert_capacity_factor
    peak = device.peak_flops_per_s(recipe.precision if eight_bit else "bf16")
    flops = 2.0 * tokens * padded(d_in, device.mxu) * padded(d_out, device.mxu)
    size = 1 if eight_bit else ACT
    moved = size * (tokens * d_in + weights) + ACT * tokens * d_out
    return np.maximum(flops / (peak * efficiency), moved / (device.hbm_bytes_per_s * c.hbm_efficiency))


def quantise_s(m: Matmul, work: Shard, device: Device, recipe: Recipe) -> tuple[Number, Number]:
    """Turning operands into 8 bits, forward and backward: activations and weights are read (once more for the
    largest value unless scales are static) and written; the backward pass also does its incoming gradient."""
    if recipe.precision == "bf16" or m.name == "router":
        return 0.0, 0.0
    per_element = (ACT if recipe.static_scales else 2 * ACT) + 1
    t = work.tensor
    d_in = m.d_in / t if m.sharding == "row" else m.d_in
    d_out = m.d_out / t if m.sharding == "column" else m.d_out
    weights = d_in * d_out * (m.experts / work.expert if m.routed else 1)
    activations = work.tokens * m.active * d_in
    gradients = work.tokens * m.active * d_out
    rate = device.hbm_bytes_per_s * device.calibration.hbm_efficiency
    return (
        per_element * (activations + weights) / rate,
        per_element * (activations + weights + gradients) / rate,
    )


def attention_s(a: Attention, work: Shard, device: Device, recipe: Recipe) -> tuple[Number, Number]:
    """The attention kernel, forward and backward, from cycles per logit and grid steps.

    Matmuls run at the full width of the matrix unit per head; the softmax on the vector unit beside them.
    Where the context axis is not balanced the last shard, which sees every key, decides.
    """
    kernel = recipe.attention
    sequences = work.tokens / work.seq  # of queries, in whole sequences
    ring = work.context / np.minimum(recipe.context_ulysses, work.context)
    logits = computed_logits(a, work.seq, kernel)
    if recipe.context_exchange != "ulysses" and not recipe.context_balanced:
        logits = np.minimum(logits * 2 * ring / (ring + 1), 1.0 * work.seq * work.seq)
    logits = sequences * a.heads / work.tensor * logits
    if kernel.kind == "dot":
        return _dense_attention_s(a, logits, device)
    blocks = logits / (min(kernel.block_q, work.seq) * min(kernel.block_kv, work.seq))
    qk, v = padded(a.qk_dim, 128), padded(a.v_dim, 128)
    forward = _kernel_s(logits, blocks, 2 * (qk + v), SOFTMAX_FORWARD, device)
    if kernel.fused_backward:
        return forward, _kernel_s(logits, blocks, 2 * (3 * qk + 2 * v), SOFTMAX_BACKWARD, device)
    # Separate kernels for dq and dkv compute the logits and the softmax's gradient twice.
    split = _kernel_s(logits, 2 * blocks, 2 * (4 * qk + 3 * v), SOFTMAX_SPLIT_BACKWARD, device)
    return forward, split


def _kernel_s(logits: Number, steps: Number, flops: Number, softmax: float, device: Device) -> Number:
    """Grid steps, and per logit the slower of matmuls (``flops``) and softmax (cycles) on each core."""
    k = device.kernels
    matmul = k.attention_mxu_overhead * flops * device.cores / device.flops_per_s
    busy = logits * np.maximum(matmul, softmax / device.clock_hz)
    return (busy + steps * k.grid_step_us * 1e-6) / device.cores


def _dense_attention_s(a: Attention, logits: Number, device: Device) -> tuple[Number, Number]:
    """Attention that writes its logits: matmuls at the plain rate, and passes over the logits in float32 (4
    forward: write, two reads of the softmax, write; 5 backward)."""
    c = device.calibration
    rate = device.flops_per_s * c.matmul_efficiency
    pass_s = logits * 4 / (device.hbm_bytes_per_s * c.hbm_efficiency)
    products = 2.0 * (a.qk_dim + a.v_dim) * logits / rate
    return products + 4 * pass_s, 2 * products + 5 * pass_s


def memory_s(layer: Layer, work: Shard, device: Device) -> Number:
    """Elementwise work of one forward pass, which matmuls do not hide: bytes over the memory bandwidth.

    Reads and writes counted: two norms and two residual sums on the stream (8), rotary and the kernel's
    layout of queries, keys and values (4) and of the context (2), the activation function (3).
    """
    a = layer.attention
    residual = 8 * layer.d_model
    heads = 4 * (a.heads * a.qk_dim + a.kv_width) + 2 * a.context_width
    hidden = 3 * layer.mlp_width
    elements = work.tokens * (residual + heads + hidden) / work.tensor
    return ACT * elements / (device.hbm_bytes_per_s * device.calibration.hbm_efficiency)


def routing_s(layer: Layer, work: Shard, device: Device, recipe: Recipe) -> Number:
    """Moving tokens to their experts and back, one forward pass: by index when dropless, by one-hot
    products when experts have a fixed capacity."""
    if not layer.active:
        return 0.0
    if recipe.expert_capacity_factor is not None:
        flops = dispatch_flops(layer, work.seq, recipe) * work.tokens
        return flops / (device.flops_per_s * device.calibration.matmul_efficiency)
    elements = 4 * work.tokens * layer.active * layer.d_model / work.tensor
    return ACT * elements / (device.hbm_bytes_per_s * device.kernels.gather_efficiency)


def layer_compute(
    layer: Layer, work: Shard, device: Device, recipe: Recipe
) -> tuple[Compute, Compute, Compute]:
    """Seconds of the forward pass, of the backward pass proper, and of what is recomputed for it."""
    again = recomputed(layer, recipe.remat)
    forward = backward = repeat = 0.0
    for m in layer.matmuls:
        product = matmul_s(m, work, device, recipe)
        q_forward, q_backward = quantise_s(m, work, device, recipe)
        beside = sum(matmul_s(narrow, work, device, recipe) for narrow in m.adapter)
        forward = forward + product + q_forward + beside
        backward = backward + (1 if m.frozen else 2) * product + q_backward + 2 * beside
        if m.name in again:
            repeat = repeat + product + q_forward + beside
    attend, attend_backward = attention_s(layer.attention, work, device, recipe)
    memory = memory_s(layer, work, device)
    routing = routing_s(layer, work, device, recipe)
    routed_again = any(m.routed and m.name in again for m in layer.matmuls)
    return (
        Compute(forward, attend, memory, routing),
        Compute(backward, attend_backward, 2 * memory, 2 * routing),
        Compute(
            repeat,
            attend if "context" in again else 0.0,
            memory if again else 0.0,
            routing if routed_again else 0.0,
        ),
    )
