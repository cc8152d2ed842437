"""The weights of a model as frozen dataclass pytrees: their shapes, logical dims and first values.

Dims in names: D d_model, N heads, K kv heads, H head_dim, F d_ff, V vocabulary, P positions, E experts, Q and R ranks
of the latent queries and keys, C its rotary part. Weights of layers carry a leading L: equal layers run as one scan.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slicewise.catalog.model import Experts, LatentAttention, ModelSpec
from slicewise.parallel.rules import partition


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    scale: Any
    bias: Any  # of a layer norm; None for RMS norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention beside wq and wo of the layer: down to the latents and up to heads."""

    wq_a: Any  # LDQ, None where queries are not compressed, as the next two
    q_norm: Any  # LQ
    wq_b: Any  # LQNH
    wkv_a: Any  # LD(R + C)
    kv_norm: Any  # LR
    wk_b: Any  # LRN(H - C)
    wv_b: Any  # LRNV, V here the width of a value


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mlp:
    w_gate: Any  # LDF
    w_up: Any  # LDF
    w_down: Any  # LFD
    b_gate: Any  # LF
    b_up: Any  # LF
    b_down: Any  # LD


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Moe:
    """A mixture of experts; F is the width of one expert."""

    router: Any  # LDE
    b_router: Any  # LE
    balance_bias: Any  # LE, changed by counting and not by gradients
    w_gate: Any  # LEDF
    w_up: Any  # LEDF
    w_down: Any  # LEFD
    b_gate: Any  # LEF
    b_up: Any  # LEF
    b_down: Any  # LED
    shared: Any  # Mlp of the experts that every token uses


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers:
    """Weights of equal layers, each with a leading L; None where the model has no such weight."""

    attn_norm: Norm  # LD
    wq: Any  # LDNH
    wk: Any  # LDKH
    wv: Any  # LDKH
    wo: Any  # LNHD
    bq: Any  # LNH
    bk: Any  # LKH
    bv: Any  # LKH
    bo: Any  # LD
    q_norm: Any  # LH
    k_norm: Any  # LH
    latent: Any  # Latent
    sinks: Any  # LN
    post_attn_norm: Any  # Norm, LD
    mlp_norm: Norm  # LD
    w_gate: Any  # LDF
    w_up: Any  # LDF
    w_down: Any  # LFD
    b_gate: Any  # LF
    b_up: Any  # LF
    b_down: Any  # LD
    moe: Any  # Moe, instead of the dense MLP above
    post_mlp_norm: Any  # Norm, LD


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Prediction:
    """Layers of multi-token prediction (DeepSeek-V3, 2024, section 2.2)."""

    embed_norm: Norm  # LD
    hidden_norm: Norm  # LD
    projection: Any  # L(2D)D, embedding first
    layers: Layers
    final_norm: Norm  # LD


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    embed: Any  # VD
    position: Any  # PD, None with rotary positions
    layers: Layers  # of a model with experts, those that have them
    final_norm: Norm  # D
    head: Any  # DV, None when tied to embed
    dense_layers: Any = None  # Layers of a model with experts that have none, in their order
    prediction: Any = None  # Prediction


@dataclass(frozen=True)
class Weight:
    """How one weight is laid out and starts: normal with standard deviation ``std``, or constant when std is 0."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    std: float = 0.0
    constant: float = 0.0


Dim = tuple[int, str]  # size and logical name


def padded_vocab(spec: ModelSpec) -> int:
    """Rows of the embedding table: the vocabulary rounded up to 128, whatever the mesh, so that it shards evenly."""
    return math.ceil(spec.vocab / 128) * 128


def weights(spec: ModelSpec) -> Params:
    """The tree of Weight of ``spec``: the one place that knows every shape, its logical dims and its start.

    Projections start at 1/sqrt(fan in); those that write to the residual stream also shrink by sqrt(2 L) (GPT-2).
    """
    D, embed, feature = spec.d_model, (spec.d_model, "embed"), (spec.d_model, "activation")
    vocab = (padded_vocab(spec), "vocab")
    sparse = sum(spec.layer_is_sparse(layer) for layer in range(spec.layers))
    dense = spec.layers - sparse
    return Params(
        embed=_normal(0.02, vocab, embed),
        position=_normal(0.02, (spec.max_context, "position"), embed) if spec.position == "learned" else None,
        layers=_layers(spec, sparse or dense, sparse=bool(sparse)),
        final_norm=_norm(spec, feature),
        head=None if spec.tied_embeddings else _matrix(D, embed, vocab),
        dense_layers=_layers(spec, dense, sparse=False) if sparse and dense else None,
        prediction=_prediction(spec) if spec.prediction_layers else None,
    )


def _normal(std: float, *dims: Dim) -> Weight:
    return Weight(tuple(n for n, _ in dims), tuple(d for _, d in dims), std=std)


def _matrix(fan_in: int, *dims: Dim, scale: float = 1.0) -> Weight:
    return _normal(scale / math.sqrt(fan_in), *dims)


def _vector(present: bool, *dims: Dim, constant: float = 0.0) -> Weight | None:
    if not present:
        return None
    return Weight(tuple(n for n, _ in dims), tuple(d for _, d in dims), constant=constant)


def _norm(spec: ModelSpec, *dims: Dim) -> Norm:
    one = 0.0 if spec.zero_centered_norm else 1.0
    return Norm(_vector(True, *dims, constant=one), _vector(spec.norm == "layer", *dims))


def _residual(spec: ModelSpec) -> float:
    return 1 / math.sqrt(2 * spec.layers)


def _layers(spec: ModelSpec, count: int, *, sparse: bool) -> Layers:
    D, N, H, latent = spec.d_model, spec.heads, spec.head_dim, spec.latent_attention
    layer, embed, feature = (count, "layers"), (D, "embed"), (D, "activation")
    heads, kv_heads, head_dim = (N, "heads"), (spec.kv_heads, "kv_heads"), (H, "head_dim")
    value_dim = (latent.v_head_dim, "head_dim") if latent else head_dim
    one = 0.0 if spec.zero_centered_norm else 1.0
    bias, qk_norm = spec.qkv_bias and not latent, spec.qk_norm and not latent
    dense = None if sparse else _mlp(spec, spec.d_ff, layer)
    return Layers(
        attn_norm=_norm(spec, layer, feature),
        wq=None if latent and latent.q_lora_rank else _matrix(D, layer, embed, heads, head_dim),
        wk=None if latent else _matrix(D, layer, embed, kv_heads, head_dim),
        wv=None if latent else _matrix(D, layer, embed, kv_heads, head_dim),
        wo=_matrix(N * value_dim[0], layer, heads, value_dim, embed, scale=_residual(spec)),
        bq=_vector(bias, layer, heads, head_dim),
        bk=_vector(bias, layer, kv_heads, head_dim),
        bv=_vector(bias, layer, kv_heads, head_dim),
        bo=_vector(spec.attention_output_bias and not latent, layer, feature),
        q_norm=_vector(qk_norm, layer, head_dim, constant=one),
        k_norm=_vector(qk_norm, layer, head_dim, constant=one),
        latent=_latent(spec, latent, layer) if latent else None,
        sinks=_vector(spec.attention_sinks, layer, heads),
        post_attn_norm=_norm(spec, layer, feature) if spec.post_norms else None,
        mlp_norm=_norm(spec, layer, feature),
        w_gate=dense and dense.w_gate,
        w_up=dense and dense.w_up,
        w_down=dense and dense.w_down,
        b_gate=dense and dense.b_gate,
        b_up=dense and dense.b_up,
        b_down=dense and dense.b_down,
        moe=_moe(spec, spec.experts, layer) if sparse and spec.experts else None,
        post_mlp_norm=_norm(spec, layer, feature) if spec.post_norms else None,
    )


def _latent(spec: ModelSpec, a: LatentAttention, layer: Dim) -> Latent:
    D, Q, R = spec.d_model, a.q_lora_rank, a.kv_lora_rank
    embed, heads = (D, "embed"), (spec.heads, "heads")
    one = 0.0 if spec.zero_centered_norm else 1.0
    return Latent(
        wq_a=_matrix(D, layer, embed, (Q, "activation")) if Q else None,
        q_norm=_vector(True, layer, (Q, "activation"), constant=one) if Q else None,
        wq_b=_matrix(Q, layer, (Q, "latent"), heads, (spec.head_dim, "head_dim")) if Q else None,
        wkv_a=_matrix(D, layer, embed, (R + a.rope_head_dim, "activation")),
        kv_norm=_vector(True, layer, (R, "activation"), constant=one),
        wk_b=_matrix(R, layer, (R, "latent"), heads, (a.nope_head_dim, "head_dim")),
        wv_b=_matrix(R, layer, (R, "latent"), heads, (a.v_head_dim, "head_dim")),
    )


def _mlp(spec: ModelSpec, width: int, layer: Dim) -> Mlp:
    embed, feature, mlp = (spec.d_model, "embed"), (spec.d_model, "activation"), (width, "mlp")
    return Mlp(
        w_gate=_matrix(spec.d_model, layer, embed, mlp) if spec.gated_mlp else None,
        w_up=_matrix(spec.d_model, layer, embed, mlp),
        w_down=_matrix(width, layer, mlp, embed, scale=_residual(spec)),
        b_gate=_vector(spec.mlp_bias and spec.gated_mlp, layer, mlp),
        b_up=_vector(spec.mlp_bias, layer, mlp),
        b_down=_vector(spec.mlp_bias, layer, feature),
    )


def _moe(spec: ModelSpec, e: Experts, layer: Dim) -> Moe:
    D, embed, feature = spec.d_model, (spec.d_model, "expert_embed"), (spec.d_model, "activation")
    experts, mlp, each = (e.experts, "experts"), (e.d_ff, "mlp"), (e.experts, "activation")
    return Moe(
        router=_matrix(D, layer, (D, "embed"), each),
        b_router=_vector(e.router_bias, layer, each),
        balance_bias=_vector(e.balancing_bias, layer, each),
        w_gate=_matrix(D, layer, experts, embed, mlp) if spec.gated_mlp else None,
        w_up=_matrix(D, layer, experts, embed, mlp),
        w_down=_matrix(e.d_ff, layer, experts, mlp, embed, scale=_residual(spec)),
        b_gate=_vector(spec.mlp_bias and spec.gated_mlp, layer, experts, mlp),
        b_up=_vector(spec.mlp_bias, layer, experts, mlp),
        b_down=_vector(spec.mlp_bias, layer, experts, feature),
        shared=_mlp(spec, e.shared_d_ff, layer) if e.shared_d_ff else None,
    )


def _prediction(spec: ModelSpec) -> Prediction:
    layer, feature = (spec.prediction_layers, "layers"), (spec.d_model, "activation")
    return Prediction(
        embed_norm=_norm(spec, layer, feature),
        hidden_norm=_norm(spec, layer, feature),
        projection=_matrix(2 * spec.d_model, layer, (2 * spec.d_model, "embed"), feature),
        layers=_layers(spec, spec.prediction_layers, sparse=spec.layer_is_sparse(spec.layers - 1)),
        final_norm=_norm(spec, layer, feature),
    )


def init(spec: ModelSpec, key: jax.Array) -> Params:
    """Float32 weights under the mesh in force; the same numbers on every mesh."""
    return start(weights(spec), key)


def start(tree: Any, key: jax.Array) -> Any:
    """Arrays for a tree of Weight, as init."""
    layout, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(layout))

    def one(weight: Weight, key: jax.Array) -> jax.Array:
        sharding = partition(*weight.dims)
        if weight.std:
            return weight.std * jax.random.normal(key, weight.shape, jnp.float32, out_sharding=sharding)
        return jnp.full(weight.shape, weight.constant, jnp.float32, out_sharding=sharding)

    return jax.tree.unflatten(treedef, [one(w, k) for w, k in zip(layout, keys, strict=True)])


NODES = (Params, Layers, Prediction, Moe, Mlp, Latent, Norm)


def leaves(params: Params) -> dict[str, Any]:
    """The weights by dotted name, such as layers.attn_norm.scale; absent weights are left out."""
    found: dict[str, Any] = {}
    mapped(lambda name, leaf: found.setdefault(name, leaf), params)
    return found


def mapped(change: Callable[[str, Any], Any], params: Params) -> Params:
    """``params`` with ``change(dotted name, weight)`` in the place of each weight; absent ones stay absent."""

    def walk(node: Any, name: str) -> Any:
        if node is None:
            return None
        if not isinstance(node, NODES):
            return change(name, node)
        parts = ((f.name, getattr(node, f.name)) for f in dataclasses.fields(node))
        return dataclasses.replace(node, **{n: walk(x, f"{name}.{n}" if name else n) for n, x in parts})

    return walk(params, "")
