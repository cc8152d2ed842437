"""How many parameters a ModelSpec has, by the part of the model they sit in."""

from dataclasses import dataclass, fields

from slicewise.catalog.model import Experts, LatentAttention, ModelSpec


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of one model, in elements, summed over layers; a bias counts with its matrix."""

    embedding: int  # token table, and the position table when positions are learned
    attention: int  # projections and sinks
    mlp: int  # of the dense layers
    experts: int  # routed, all of them
    active_experts: int  # the part of ``experts`` that one token uses
    shared: int  # experts that every token uses
    router: int  # with its biases
    norms: int
    head: int  # 0 when tied to the embedding
    prediction: int  # layers of multi-token prediction, with everything in them

    @property
    def total(self) -> int:
        """The whole model without its prediction layers, which is what publishers state."""
        counted = {f.name for f in fields(self)} - {"active_experts", "prediction"}
        return sum(getattr(self, name) for name in counted)

    @property
    def active(self) -> int:
        """``total`` without the routed experts that a token does not use; the embedding counts."""
        return self.total - self.experts + self.active_experts

    @property
    def non_embedding(self) -> int:
        """``total`` without the embedding and the head."""
        return self.total - self.embedding - self.head


def parameter_count(spec: ModelSpec) -> ParameterCount:
    """The exact parameter count of ``spec``.

    With L layers, width D, N query and K key-value heads of H dims, MLP width F and vocabulary V, a plain
    decoder has L * (2 D (N + K) H + 3 D F + 2 D) + D + 2 V D: attention, gated MLP (2 D F without a gate),
    two RMS norms a layer and the last one, embedding and head (V D when tied). A layer norm has a bias beside
    its scale. A sparse layer has 3 D F_e for each of its E experts (and for what is shared) and D E for the
    router. A prediction layer (DeepSeek-V3, 2024, section 2.2) is one layer of the model plus a 2 D x D
    projection and three norms; its embedding and head are those of the model.
    """
    D = spec.d_model
    norm = D * (2 if spec.norm == "layer" else 1)
    attention, attention_norms = _attention(spec)
    layer_norms = norm * (4 if spec.post_norms else 2) + attention_norms
    sparse_layers = sum(spec.layer_is_sparse(layer) for layer in range(spec.layers))
    dense = _mlp(spec, spec.d_ff)
    e = spec.experts
    expert, shared, router = _sparse_parts(spec, e) if e else (0, 0, 0)
    mlp_of_last_layer = e.experts * expert + shared + router if e else dense
    prediction_layer = attention + layer_norms + mlp_of_last_layer + 2 * D * D + 3 * norm
    positions = spec.max_context * D if spec.position == "learned" else 0
    return ParameterCount(
        embedding=spec.vocab * D + positions,
        attention=spec.layers * attention,
        mlp=(spec.layers - sparse_layers) * dense,
        experts=sparse_layers * e.experts * expert if e else 0,
        active_experts=sparse_layers * e.per_token * expert if e else 0,
        shared=sparse_layers * shared,
        router=sparse_layers * router,
        norms=spec.layers * layer_norms + norm,
        head=0 if spec.tied_embeddings else spec.vocab * D,
        prediction=spec.prediction_layers * prediction_layer,
    )


def _attention(spec: ModelSpec) -> tuple[int, int]:
    """Parameters of one attention without its norms, and of the norms inside it."""
    D, N, K, H = spec.d_model, spec.heads, spec.kv_heads, spec.head_dim
    sinks = N if spec.attention_sinks else 0
    if spec.latent_attention:
        matrices, norms = _latent_attention(spec.latent_attention, D, N)
        return matrices + sinks, norms
    biases = (N + 2 * K) * H * spec.qkv_bias + D * spec.attention_output_bias
    return 2 * D * (N + K) * H + biases + sinks, 2 * H if spec.qk_norm else 0


def _latent_attention(a: LatentAttention, D: int, N: int) -> tuple[int, int]:
    """As _attention, for multi-head latent attention (DeepSeek-V2, 2024, section 2.1)."""
    query_width = N * (a.nope_head_dim + a.rope_head_dim)
    query = D * a.q_lora_rank + a.q_lora_rank * query_width if a.q_lora_rank else D * query_width
    key_value = D * (a.kv_lora_rank + a.rope_head_dim) + a.kv_lora_rank * N * (a.nope_head_dim + a.v_head_dim)
    return query + key_value + N * a.v_head_dim * D, a.kv_lora_rank + (a.q_lora_rank or 0)


def _mlp(spec: ModelSpec, d_ff: int) -> int:
    """Parameters of one MLP, or of one expert, of width ``d_ff``."""
    wide = 2 if spec.gated_mlp else 1
    biases = wide * d_ff + spec.d_model if spec.mlp_bias and d_ff else 0
    return (wide + 1) * spec.d_model * d_ff + biases


def _sparse_parts(spec: ModelSpec, e: Experts) -> tuple[int, int, int]:
    """Parameters of one routed expert, of what is shared and of the router, in one sparse layer."""
    router = e.experts * (spec.d_model + e.router_bias + e.balancing_bias)
    return _mlp(spec, e.d_ff), _mlp(spec, e.shared_d_ff), router
