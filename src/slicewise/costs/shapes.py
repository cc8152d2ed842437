"""What a step costs depends on shapes only: a model as groups of equal layers made of matmuls and
attention."""

import functools
from dataclasses import dataclass, replace
from typing import Any, Literal

from slicewise.catalog.model import ModelSpec

Number = Any  # int, float or an array of many layouts
Sharding = Literal[
    "column", "row", "replicated"
]  # by the tensor axis: the output dim, the input dim, neither


@dataclass(frozen=True)
class Matmul:
    """One weight matrix. ``name`` is the checkpoint name of its output (MaxText's names of saved tensors)."""

    name: str
    d_in: int
    d_out: int
    sharding: Sharding = "column"
    experts: int = 1  # copies of the weight, of which a token uses ``active``
    active: int = 1
    bias: bool = False
    frozen: bool = False  # it has no gradient and no optimiser state
    rank: int = 0  # of the adapter that is trained beside it, 0 = none

    @property
    def parameters(self) -> int:
        """Of the matrix itself, without its adapter."""
        return (self.d_in + self.bias) * self.d_out * self.experts

    @property
    def adapter(self) -> tuple["Matmul", ...]:
        """The two narrow products of its adapter. What is between is whole, so only one side of each is divided."""
        if not self.rank:
            return ()
        into: Sharding = "row" if self.sharding == "row" else "replicated"
        out: Sharding = "column" if self.sharding == "column" else "replicated"
        return (
            Matmul(self.name, self.d_in, self.rank, into),
            Matmul(self.name, self.rank, self.d_out, out),
        )

    @property
    def routed(self) -> bool:
        return self.experts > 1


@dataclass(frozen=True)
class Attention:
    """Softmax attention of one layer: head counts and sizes; ``window`` = tokens a query sees, None = all."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int | None = None

    @property
    def context_width(self) -> int:
        """Elements of the output per token."""
        return self.heads * self.v_dim

    @property
    def kv_width(self) -> int:
        """Elements of keys and values per token."""
        return self.kv_heads * (self.qk_dim + self.v_dim)


@dataclass(frozen=True)
class Layer:
    """``count`` equal layers. Attention projections come first in ``matmuls``, in order of computation."""

    count: int
    matmuls: tuple[Matmul, ...]
    attention: Attention
    d_model: int
    norm_parameters: int
    post_norms: bool = False
    frozen: bool = False  # only its adapters are trained

    @functools.cached_property
    def parameters(self) -> int:
        """Without adapters."""
        return sum(m.parameters for m in self.matmuls) + self.norm_parameters

    @functools.cached_property
    def routed_parameters(self) -> int:
        return sum(m.parameters for m in self.matmuls if m.routed)

    def adapter_parameters(self, fsdp: Number, tensor: Number) -> Number:
        """Of one device: of an adapter's two matrices, fsdp divides the one with the embedding's side, tensor the one
        with the other side."""
        count: Number = 0
        for m in self.matmuls:
            width, other = (m.d_out, m.d_in) if m.sharding == "row" else (m.d_in, m.d_out)
            count = count + m.rank * (width / fsdp + other / (1 if m.sharding == "replicated" else tensor))
        return count

    @functools.cached_property
    def active(self) -> int:
        """Experts a token uses, 0 for a dense layer."""
        return max((m.active for m in self.matmuls if m.routed), default=0)

    @functools.cached_property
    def experts(self) -> int:
        return max(m.experts for m in self.matmuls)

    @functools.cached_property
    def mlp_width(self) -> int:
        """Hidden elements per token of all MLPs it passes: the width of the activation function's output."""
        return sum(
            m.d_in * m.active for m in self.matmuls if m.name in ("mlpwo", "moe_mlpwo", "shared_mlpwo")
        )


@dataclass(frozen=True)
class ModelShape:
    """A decoder as the cost model sees it; ``layers`` in order of the first of each kind."""

    name: str
    layers: tuple[Layer, ...]
    d_model: int
    vocab: int
    tied_embeddings: bool
    other_parameters: int = 0  # final norm, position table, per-layer embedding tables
    prediction_heads: int = 0  # extra passes through the output matrix (multi-token prediction)
    frozen_bytes: float | None = None  # of a weight where only adapters are trained
    staged_groups: int = 1  # equal layers, or groups of them, that a pipeline divides
    learned_positions: int | None = None  # the most tokens of a sequence, where they are learned

    @functools.cached_property
    def layer_count(self) -> int:
        return sum(layer.count for layer in self.layers)

    @functools.cached_property
    def embedding_parameters(self) -> int:
        return self.vocab * self.d_model * (1 if self.tied_embeddings else 2)

    @functools.cached_property
    def parameters(self) -> int:
        layers = sum(layer.count * layer.parameters for layer in self.layers)
        return layers + self.embedding_parameters + self.other_parameters

    @functools.cached_property
    def routed_parameters(self) -> int:
        return sum(layer.count * layer.routed_parameters for layer in self.layers)

    @functools.cached_property
    def active_parameters(self) -> int:
        """Parameters one token is multiplied with (experts it does not use left out)."""
        idle = sum(
            layer.count * m.parameters // m.experts * (m.experts - m.active)
            for layer in self.layers
            for m in layer.matmuls
        )
        return self.parameters - idle


def mlp(
    d_model: int, d_ff: int, gated: bool, prefix: str = "", experts: int = 1, active: int = 1
) -> list[Matmul]:
    """The matrices of one MLP, named with ``prefix``: mlpwi_0, mlpwi_1 when gated, and mlpwo."""
    into = ["mlpwi_0", "mlpwi_1"] if gated else ["mlpwi_0"]
    wi = [Matmul(prefix + name, d_model, d_ff, "column", experts, active) for name in into]
    return [*wi, Matmul(f"{prefix}mlpwo", d_ff, d_model, "row", experts, active)]


def projections(d_model: int, attention: Attention, *, shared_kv: bool = False) -> list[Matmul]:
    """Query, key, value and output matrices; with ``shared_kv`` one matrix gives both keys and values."""
    a = attention
    matmuls = [
        Matmul("query_proj", d_model, a.heads * a.qk_dim),
        Matmul("key_proj", d_model, a.kv_heads * a.qk_dim),
    ]
    if not shared_kv:
        matmuls.append(Matmul("value_proj", d_model, a.kv_heads * a.v_dim))
    return [*matmuls, Matmul("out_proj", a.heads * a.v_dim, d_model, "row")]


def latent_projections(
    d_model: int, attention: Attention, *, q_rank: int | None, kv_rank: int, rope_dim: int
) -> list[Matmul]:
    """Matrices of multi-head latent attention: down to the latents (replicated over tensor) and up to
    heads."""
    a = attention
    query = [Matmul("query_proj", d_model, a.heads * a.qk_dim)]
    if q_rank:
        query = [
            Matmul("query_wa_proj", d_model, q_rank, "replicated"),
            Matmul("query_proj", q_rank, a.heads * a.qk_dim),
        ]
    return [
        *query,
        Matmul("kv_wa_proj", d_model, kv_rank + rope_dim, "replicated"),
        Matmul("key_proj", kv_rank, a.heads * (a.qk_dim - rope_dim)),
        Matmul("value_proj", kv_rank, a.heads * a.v_dim),
        Matmul("out_proj", a.heads * a.v_dim, d_model, "row"),
    ]


@functools.cache
def model_shape(spec: ModelSpec) -> ModelShape:
    """The shapes of ``spec``. Layers of a multi-token prediction module count as layers of the last kind."""
    kinds: dict[tuple[bool, bool], int] = {}
    for index in range(spec.layers + spec.prediction_layers):
        last = min(index, spec.layers - 1)  # prediction layers are like the last one
        kind = (spec.layer_is_sparse(last), spec.layer_is_global(last))
        kinds[kind] = kinds.get(kind, 0) + 1
    norm = spec.d_model * (2 if spec.norm == "layer" else 1)
    position = (spec.learned_positions or 0) * spec.d_model
    merge = 2 * spec.d_model * spec.d_model + 3 * norm  # of the embedding with the hidden state, per module
    return ModelShape(
        spec.name,
        tuple(_layer(spec, count, sparse, everything) for (sparse, everything), count in kinds.items()),
        spec.d_model,
        spec.vocab,
        spec.tied_embeddings,
        other_parameters=norm + position + spec.prediction_layers * merge,
        prediction_heads=spec.prediction_layers,
        staged_groups=spec.staged_groups,
        learned_positions=spec.learned_positions,
    )


def _layer(spec: ModelSpec, count: int, sparse: bool, everything: bool) -> Layer:
    window = None if everything else spec.sliding_window
    latent = spec.latent_attention
    if latent:
        attention = Attention(
            spec.heads, spec.heads, latent.nope_head_dim + latent.rope_head_dim, latent.v_head_dim, window
        )
        matmuls = latent_projections(
            spec.d_model,
            attention,
            q_rank=latent.q_lora_rank,
            kv_rank=latent.kv_lora_rank,
            rope_dim=latent.rope_head_dim,
        )
    else:
        attention = Attention(spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim, window)
        matmuls = projections(spec.d_model, attention)
    if sparse:
        assert spec.experts is not None
        e = spec.experts
        matmuls.append(Matmul("router", spec.d_model, e.experts, "replicated"))
        matmuls += mlp(spec.d_model, e.d_ff, spec.gated_mlp, "moe_", e.experts, e.per_token)
        if e.shared_d_ff:
            matmuls += mlp(spec.d_model, e.shared_d_ff, spec.gated_mlp, "shared_")
    else:
        matmuls += mlp(spec.d_model, spec.d_ff, spec.gated_mlp)
    matmuls = [replace(m, bias=_biased(spec, m)) for m in matmuls]
    return Layer(
        count, tuple(matmuls), attention, spec.d_model, _vector_parameters(spec, sparse), spec.post_norms
    )


def _biased(spec: ModelSpec, m: Matmul) -> bool:
    if m.name == "router":
        assert spec.experts is not None
        return spec.experts.router_bias
    if "mlp" in m.name:
        return spec.mlp_bias
    if spec.latent_attention:
        return False
    return spec.attention_output_bias if m.name == "out_proj" else spec.qkv_bias


def _vector_parameters(spec: ModelSpec, sparse: bool) -> int:
    """Norm scales, sinks and balancing biases of one layer."""
    norm = spec.d_model * (2 if spec.norm == "layer" else 1)
    count = norm * (4 if spec.post_norms else 2) + spec.heads * spec.attention_sinks
    if spec.latent_attention:
        count += (spec.latent_attention.q_lora_rank or 0) + spec.latent_attention.kv_lora_rank
    elif spec.qk_norm:
        count += 2 * spec.head_dim
    if sparse and spec.experts is not None and spec.experts.balancing_bias:
        count += spec.experts.experts
    return count
