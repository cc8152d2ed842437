"""Counts of a transformer: FLOPs, KV cache, activations and training state.

Symbols: B tokens, T query and S key length, D d_model, F d_ff, L layers, N heads, K kv_heads, H head_dim,
V vocab, E experts of which a token uses k. Source: How to Scale Your Model, chapter "transformers".
"""

from dataclasses import dataclass

from slicewise.catalog.model import ModelSpec
from slicewise.costs.params import parameter_count


@dataclass(frozen=True)
class Flops:
    """FLOPs of a pass over some tokens, by part."""

    projections: float  # query, key, value and output matrices
    attention: float  # the products with the keys and the values
    mlp: float  # dense MLPs, active experts and router
    unembedding: float

    @property
    def total(self) -> float:
        return self.projections + self.attention + self.mlp + self.unembedding

    def times(self, factor: float) -> "Flops":
        return Flops(
            *(factor * part for part in (self.projections, self.attention, self.mlp, self.unembedding))
        )


def forward_flops(spec: ModelSpec, tokens: float, context: float, *, causal: bool = True) -> Flops:
    """Matrix FLOPs of the forward pass of ``tokens`` in sequences of ``context`` tokens.

    MLP 6BDF (gated), projections 4BD(N+K)H, attention 4BSNH (half of it for ``causal``, which counts useful
    work only), unembedding 2BDV. Local layers see min(context, window).
    """
    p = parameter_count(spec)
    N, H = spec.heads, spec.head_dim
    per_pair = 4 * N * H
    if spec.latent_attention is not None:
        m = spec.latent_attention
        per_pair = 2 * N * (m.nope_head_dim + m.rope_head_dim + m.v_head_dim)
    pairs = sum(_seen(spec, layer, context, causal) for layer in range(spec.layers))
    return Flops(
        projections=2 * tokens * p.attention,
        attention=tokens * per_pair * pairs,
        mlp=2 * tokens * (p.mlp + p.shared + p.active_experts + p.router),
        unembedding=2 * tokens * spec.d_model * spec.vocab,
    )


def _seen(spec: ModelSpec, layer: int, context: float, causal: bool) -> float:
    """Mean number of keys one query of ``layer`` uses."""
    if not causal:
        return context if spec.layer_is_global(layer) else min(context, spec.sliding_window or context)
    window = context if spec.layer_is_global(layer) else min(context, spec.sliding_window or context)
    return window - window * window / (2 * context)  # the first `window` queries see half of it


def train_flops(spec: ModelSpec, tokens: float, context: float, *, causal: bool = True) -> Flops:
    """Forward and backward: three times the forward pass (MLP 18BDF, projections 12BD(N+K)H, ...)."""
    return forward_flops(spec, tokens, context, causal=causal).times(3)


def rule_of_thumb_flops(active_params: float, tokens: float, *, training: bool = True) -> float:
    """6P per token for training, 2P forward; attention products not counted."""
    return (6 if training else 2) * active_params * tokens


def training_s(
    active_params: float, tokens: float, flops_per_s: float, *, chips: float = 1, utilization: float = 1.0
) -> float:
    """Seconds to train on ``tokens``: 6P tokens / (n C MFU)."""
    return rule_of_thumb_flops(active_params, tokens) / (chips * flops_per_s * utilization)


def model_flops_utilization(
    active_params: float, tokens: float, seconds: float, flops_per_s: float, *, chips: float = 1
) -> float:
    """MFU: 6P tokens over what ``chips`` could have done in ``seconds``."""
    return rule_of_thumb_flops(active_params, tokens) / (chips * flops_per_s * seconds)


def attention_equals_projections_context(d_model: int, heads: int = 1, kv_heads: int = 1) -> float:
    """Context at which attention products (not halved) cost as much as the projections: D (N + K) / N, 2D for
    MHA."""
    return d_model * (heads + kv_heads) / heads


def attention_share_of_mlp(context: float, d_model: float) -> float:
    """FLOPs of the attention products over those of all matrices, for F = 4D, NH = D, K = N: T / 8D."""
    return context / (8 * d_model)


def attention_remat_flops(batch: float, context: float, heads: float, head_dim: float) -> float:
    """To recompute the products with keys and values of one layer: 4 B T^2 N H, B in sequences."""
    return 4 * batch * context**2 * heads * head_dim


def kv_cache_bytes_per_token(layers: float, kv_heads: float, head_dim: float, *, bits: float = 16) -> float:
    """Keys and values of one token: 2 L K H."""
    return 2 * layers * kv_heads * head_dim * bits / 8


def kv_cache_bytes(spec: ModelSpec, context: int, *, bits: float = 16) -> float:
    """Cache of one sequence of ``context`` tokens; local layers keep their window, latent attention its
    latent."""
    kept = sum(
        context if spec.layer_is_global(layer) else min(context, spec.sliding_window or context)
        for layer in range(spec.layers)
    )
    if spec.latent_attention is not None:
        width = spec.latent_attention.kv_lora_rank + spec.latent_attention.rope_head_dim
    else:
        width = 2 * spec.kv_heads * spec.head_dim
    return kept * width * bits / 8


def activation_bytes(
    tokens: float, d_model: float, layers: float, *, saved_per_layer: float = 20, bits: float = 16
) -> float:
    """Saved activations of width D: about 20 a layer without remat, 7 to keep matmul outputs, 1 with full
    remat."""
    return bits / 8 * saved_per_layer * tokens * d_model * layers


def saved_widths_bytes(tokens: float, widths: float, layers: float, *, bits: float = 16) -> float:
    """Saved activations whose widths add up to ``widths`` a layer, such as D + 2F for three MLP outputs."""
    return bits / 8 * tokens * widths * layers


def training_state_bytes(
    total_params: float,
    *,
    param_bits: float = 16,
    optimizer_bits: float = 64,
    gradient_bits: float = 0,
    master_bits: float = 0,
) -> float:
    """Weights and Adam state: 10 bytes a parameter as the book counts (bf16 weights, two fp32 moments).

    Gradients and fp32 master weights are options, since a program may hold neither at its peak.
    """
    return total_params * (param_bits + optimizer_bits + gradient_bits + master_bits) / 8


def min_chips(total_bytes: float, hbm_bytes: float) -> float:
    """Chips whose memory holds ``total_bytes``, not rounded."""
    return total_bytes / hbm_bytes


def max_data_parallel_params(hbm_bytes: float, bytes_per_param: float = 10) -> float:
    """Largest model that pure data parallelism can hold, a whole copy on each chip."""
    return hbm_bytes / bytes_per_param
