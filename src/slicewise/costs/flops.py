"""Floating-point operations of a training step: what the model needs, and what the execution really
computes."""

from dataclasses import dataclass

import numpy as np

from slicewise.costs.layout import AttentionKernel, Number, Recipe
from slicewise.costs.remat import recomputed
from slicewise.costs.shapes import Attention, Layer, Matmul, ModelShape


@dataclass(frozen=True)
class PartFlops:
    """FLOPs of one part over a whole step and all devices. ``extra`` = computed but not needed by the model:
    recomputation, masked tiles of attention, padding of expert buffers, one-hot products."""

    useful: float
    extra: float


def padded(dim: Number, tile: int) -> Number:
    """``dim`` rounded up to whole tiles of the matrix unit."""
    return np.ceil(dim / tile) * tile


def causal_logits(attention: Attention, seq: int) -> float:
    """Query-key pairs per head and sequence that the causal mask (and the window) keeps."""
    window = min(attention.window or seq, seq)
    return window * (window + 1) / 2 + (seq - window) * window


def computed_logits(attention: Attention, seq: int, kernel: AttentionKernel) -> float:
    """Query-key pairs per head and sequence that the kernel computes: whole blocks that the mask touches."""
    if kernel.kind == "dot":
        return float(seq) * seq
    block_q, block_kv = min(kernel.block_q, seq), min(kernel.block_kv, seq)
    causal = seq * (seq + max(block_q, block_kv)) / 2
    if attention.window is None:
        return causal
    return min(causal, seq * (attention.window + block_q / 2 + block_kv / 2))


def matmul_flops(m: Matmul) -> float:
    """FLOPs per token of the forward pass."""
    return 2.0 * m.d_in * m.d_out * m.active


def backward_flops(m: Matmul) -> float:
    """FLOPs per token of the backward pass: of its input's gradient, and of the weight's unless it is frozen."""
    return (1 if m.frozen else 2) * matmul_flops(m)


def attention_flops(attention: Attention, logits: float) -> float:
    """FLOPs of the forward pass for ``logits`` query-key pairs of each head: 2 (qk + v) each."""
    return 2.0 * attention.heads * (attention.qk_dim + attention.v_dim) * logits


def dispatch_flops(layer: Layer, seq: int, recipe: Recipe) -> float:
    """FLOPs per token of the one-hot products that move tokens to and from fixed expert buffers, forward."""
    if recipe.expert_capacity_factor is None or not layer.active:
        return 0.0
    slots = seq * layer.active * recipe.expert_capacity_factor  # of all experts, per sequence
    return 2 * 2.0 * slots * layer.d_model


def step_flops(shape: ModelShape, tokens: int, seq: int, recipe: Recipe) -> dict[str, PartFlops]:
    """FLOPs of one step by part. Backward is twice forward, but for frozen matrices, which have no gradient;
    recomputation follows ``recipe.remat``."""
    useful = dict.fromkeys(("attention projections", "attention", "mlp", "experts", "output"), 0.0)
    total = dict(useful)
    for layer in shape.layers:
        again = recomputed(layer, recipe.remat)
        n = layer.count * tokens
        for m in layer.matmuls:
            part = part_of(m)
            slots = (recipe.expert_capacity_factor or 1.0) if m.routed else 1.0
            for one in (m, *m.adapter):
                needed = matmul_flops(one) + backward_flops(one)
                repeated = matmul_flops(one) if m.name in again else 0.0
                useful[part] += n * needed
                total[part] += n * slots * (needed + repeated)
        a = layer.attention
        useful["attention"] += n * 3 * attention_flops(a, causal_logits(a, seq) / seq)
        # The backward kernel computes the logits again: five products of which forward has two.
        logits = computed_logits(a, seq, recipe.attention) / seq
        total["attention"] += n * (3.5 + ("context" in again)) * attention_flops(a, logits)
        total["experts"] += n * 4 * dispatch_flops(layer, seq, recipe)
    output = 2.0 * shape.d_model * shape.vocab * (1 + shape.prediction_heads) * tokens
    products = 3 if shape.frozen_bytes is None else 2
    useful["output"] = products * output
    total["output"] = output * (products + (recipe.vocab_tiles > 1) + 2 * recipe.one_hot_embedding)
    return {part: PartFlops(useful[part], total[part] - useful[part]) for part in useful if total[part]}


def part_of(m: Matmul) -> str:
    if m.routed or m.name == "router":
        return "experts"
    return "mlp" if "mlp" in m.name else "attention projections"


def model_flops(shape: ModelShape, tokens: int, seq: int) -> float:
    """FLOPs the model needs for one step: the numerator of MFU (matmuls, causal attention, output matrix)."""
    return sum(part.useful for part in step_flops(shape, tokens, seq, Recipe()).values())
