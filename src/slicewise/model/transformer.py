"""A decoder-only transformer as frozen dataclass pytrees and functions.

Dims in names: B batch, T query tokens, S key tokens, D d_model, N heads, K kv heads, H head_dim, F d_ff, V vocabulary,
L layers, P positions. Weights carry a leading L: the layers run as one scan.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slicewise.catalog.model import ModelSpec
from slicewise.costs.remat import POLICIES, RematPolicy
from slicewise.errors import UserError
from slicewise.kernels.attention.api import REFERENCE, Kernel, Tokens, attention
from slicewise.model import rope
from slicewise.model.linear import linear
from slicewise.model.remat import GATHERED, checkpoint_policy, named
from slicewise.parallel.rules import gathered, partition


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm:
    scale: Any
    bias: Any  # of a layer norm; None for RMS norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers:
    """Weights of all layers, each with a leading L; None where the model has no such weight."""

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
    post_attn_norm: Any  # Norm, LD
    mlp_norm: Norm  # LD
    w_gate: Any  # LDF
    w_up: Any  # LDF
    w_down: Any  # LFD
    b_up: Any  # LF
    b_down: Any  # LD
    post_mlp_norm: Any  # Norm, LD


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Params:
    embed: Any  # VD
    position: Any  # PD, None with rotary positions
    layers: Layers
    final_norm: Norm  # D
    head: Any  # DV, None when tied to embed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far; a token stands at the slot of its position."""

    k_LBSKH: Any
    v_LBSKH: Any


@dataclass(frozen=True)
class Weight:
    """How one weight is laid out and starts: normal with standard deviation ``std``, or constant when std is 0."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    std: float = 0.0
    constant: float = 0.0


def padded_vocab(spec: ModelSpec) -> int:
    """Rows of the embedding table: the vocabulary rounded up to 128, whatever the mesh, so that it shards evenly."""
    return math.ceil(spec.vocab / 128) * 128


def weights(spec: ModelSpec) -> Params:
    """The tree of Weight of ``spec``: the one place that knows every shape, its logical dims and its start.

    Projections start at 1/sqrt(fan in); those that write to the residual stream also shrink by sqrt(2 L) (GPT-2).
    """
    _check_trainable(spec)
    L, D, N, K, H, F = spec.layers, spec.d_model, spec.heads, spec.kv_heads, spec.head_dim, spec.d_ff
    residual = 1 / math.sqrt(2 * L)

    def matrix(fan_in: int, *dims: tuple[int, str], scale: float = 1.0) -> Weight:
        return Weight(tuple(n for n, _ in dims), tuple(d for _, d in dims), std=scale / math.sqrt(fan_in))

    def vector(present: bool, *dims: tuple[int, str], constant: float = 0.0) -> Weight | None:
        if not present:
            return None
        return Weight(tuple(n for n, _ in dims), tuple(d for _, d in dims), constant=constant)

    one = 0.0 if spec.zero_centered_norm else 1.0
    layer, embed, feature = (L, "layers"), (D, "embed"), (D, "activation")
    heads, kv_heads, head_dim, mlp = (N, "heads"), (K, "kv_heads"), (H, "head_dim"), (F, "mlp")

    def norm(*dims: tuple[int, str]) -> Norm:
        return Norm(vector(True, *dims, constant=one), vector(spec.norm == "layer", *dims))

    table = ((padded_vocab(spec), "vocab"), embed)
    learned = spec.position == "learned"
    return Params(
        embed=Weight(*_split(table), std=0.02),
        position=Weight(*_split(((spec.max_context, "sequence"), embed)), std=0.02) if learned else None,
        layers=Layers(
            attn_norm=norm(layer, feature),
            wq=matrix(D, layer, embed, heads, head_dim),
            wk=matrix(D, layer, embed, kv_heads, head_dim),
            wv=matrix(D, layer, embed, kv_heads, head_dim),
            wo=matrix(N * H, layer, heads, head_dim, embed, scale=residual),
            bq=vector(spec.qkv_bias, layer, heads, head_dim),
            bk=vector(spec.qkv_bias, layer, kv_heads, head_dim),
            bv=vector(spec.qkv_bias, layer, kv_heads, head_dim),
            bo=vector(spec.attention_output_bias, layer, feature),
            q_norm=vector(spec.qk_norm, layer, head_dim, constant=one),
            k_norm=vector(spec.qk_norm, layer, head_dim, constant=one),
            post_attn_norm=norm(layer, feature) if spec.post_norms else None,
            mlp_norm=norm(layer, feature),
            w_gate=matrix(D, layer, embed, mlp) if spec.gated_mlp else None,
            w_up=matrix(D, layer, embed, mlp),
            w_down=matrix(F, layer, mlp, embed, scale=residual),
            b_up=vector(spec.mlp_bias, layer, mlp),
            b_down=vector(spec.mlp_bias, layer, feature),
            post_mlp_norm=norm(layer, feature) if spec.post_norms else None,
        ),
        final_norm=norm(feature),
        head=None if spec.tied_embeddings else matrix(D, embed, (padded_vocab(spec), "vocab")),
    )


def _split(dims: tuple[tuple[int, str], ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    return tuple(n for n, _ in dims), tuple(d for _, d in dims)


def _check_trainable(spec: ModelSpec) -> None:
    parts = {
        "mixture-of-experts layers": spec.experts,
        "multi-head latent attention": spec.latent_attention,
        "attention sinks": spec.attention_sinks,
        "multi-token prediction": spec.prediction_layers,
        "clamped SwiGLU": spec.activation == "clamped_swiglu",
    }
    if missing := [name for name, present in parts.items() if present]:
        raise UserError(
            f"{spec.name} has {missing[0]}, which can be planned but not trained; use a dense model."
        )


def init(spec: ModelSpec, key: jax.Array) -> Params:
    """Float32 weights under the mesh in force; the same numbers on every mesh."""
    layout, treedef = jax.tree.flatten(weights(spec))
    keys = jax.random.split(key, len(layout))

    def start(weight: Weight, key: jax.Array) -> jax.Array:
        sharding = partition(*weight.dims)
        if weight.std:
            return weight.std * jax.random.normal(key, weight.shape, jnp.float32, out_sharding=sharding)
        return jnp.full(weight.shape, weight.constant, jnp.float32, out_sharding=sharding)

    return jax.tree.unflatten(treedef, [start(w, k) for w, k in zip(layout, keys, strict=True)])


def forward(
    params: Params, spec: ModelSpec, tokens_BT: jax.Array, where: Tokens, *, dtype: jnp.dtype, **how: Any
) -> tuple[jax.Array, Cache | None]:
    """Logits [B, T, V padded] of the next token in ``dtype``; entries at or above spec.vocab are -1e30.

    Arguments and cache as those of hidden_states. Training does without: see model/loss.py.
    """
    x_BTD, cache = hidden_states(params, spec, tokens_BT, where, dtype=dtype, **how)
    return _logits(params, spec, x_BTD, _weights_in(dtype)), cache


def hidden_states(
    params: Params,
    spec: ModelSpec,
    tokens_BT: jax.Array,
    where: Tokens,
    *,
    dtype: jnp.dtype,
    remat: RematPolicy = POLICIES["minimal"],
    cache: Cache | None = None,
    kernel: Kernel = REFERENCE,
) -> tuple[jax.Array, Cache | None]:
    """What the output matrix multiplies: [B, T, D] in ``dtype``, behind the final norm.

    With ``cache`` the tokens are appended to it at slots ``where.positions_BT`` and attend to all that it holds; the
    new cache is returned.
    """
    weight = _weights_in(dtype)
    x_BTD = _embed(params, spec, tokens_BT, where, weight)
    tables = rope.tables(spec, where.positions_BT) if spec.position == "rope" else None
    is_global_L = jnp.array([spec.layer_is_global(layer) for layer in range(spec.layers)])

    def body(x_BTD: jax.Array, layer: tuple) -> tuple[jax.Array, Any]:
        w, is_global, cached = layer
        x_BTD = named(x_BTD, "decoder_layer_input")
        attended_BTD, cached = _attention(
            w, spec, x_BTD, where, tables, is_global, cached, weight, kernel
        )
        x_BTD = x_BTD + attended_BTD
        return x_BTD + _mlp(w, spec, x_BTD, weight), cached

    body = jax.checkpoint(body, policy=checkpoint_policy(remat), prevent_cse=False)  # a scan prevents it
    x_BTD, cache = jax.lax.scan(body, x_BTD, (params.layers, is_global_L, cache))
    return _norm(x_BTD, params.final_norm, spec), cache


def output_matrix(params: Params) -> jax.Array:
    """[D, V padded], or the embedding table [V padded, D] where that is tied."""
    return params.embed if params.head is None else params.head


def _weights_in(dtype: jnp.dtype) -> Callable[..., jax.Array]:
    """How a stored weight is used: cast first, so that the all-gather moves the smaller type."""
    return lambda w, *dims: checkpoint_name(gathered(w.astype(dtype), *dims), GATHERED)


def _embed(
    params: Params, spec: ModelSpec, tokens_BT: jax.Array, where: Tokens, weight: Callable
) -> jax.Array:
    activation = partition("batch", "sequence", "activation")
    # A vocabulary-sharded table is gathered whole once a step: a lookup by one-hot product would cost more FLOPs.
    table_VD = jax.sharding.reshard(
        weight(params.embed, "vocab", "embed"), partition("activation", "activation")
    )
    x_BTD = table_VD.at[tokens_BT].get(out_sharding=activation)
    if spec.embedding_scale:
        x_BTD = x_BTD * jnp.asarray(math.sqrt(spec.d_model), x_BTD.dtype)
    if params.position is not None:
        position_PD = weight(params.position, "sequence", "embed")
        x_BTD = x_BTD + position_PD.at[where.positions_BT].get(out_sharding=activation)
    return x_BTD


def _attention(
    w: Layers,
    spec: ModelSpec,
    x_BTD: jax.Array,
    where: Tokens,
    tables: list | None,
    is_global: jax.Array,
    cached: Cache | None,
    weight: Callable,
    kernel: Kernel,
) -> tuple[jax.Array, Cache | None]:
    h_BTD = _norm(x_BTD, w.attn_norm, spec)
    by_head = partition("batch", "sequence", "heads", "head_dim")
    by_kv_head = partition("batch", "sequence", "kv_heads", "head_dim")
    q_BTNH = linear(h_BTD, weight(w.wq, "embed", "heads", "head_dim"), by_head)
    k_BTKH = linear(h_BTD, weight(w.wk, "embed", "kv_heads", "head_dim"), by_kv_head)
    v_BTKH = linear(h_BTD, weight(w.wv, "embed", "kv_heads", "head_dim"), by_kv_head)
    if w.bq is not None:
        q_BTNH, k_BTKH, v_BTKH = (
            x + b.astype(x.dtype) for x, b in ((q_BTNH, w.bq), (k_BTKH, w.bk), (v_BTKH, w.bv))
        )
    v_BTKH = named(v_BTKH, "value_proj")
    if w.q_norm is not None:  # its backward pass reads the products, that of attention what comes out last
        q_BTNH, k_BTKH = named(q_BTNH, "query_proj"), named(k_BTKH, "key_proj")
        q_BTNH = _norm(q_BTNH, Norm(w.q_norm, None), spec)
        k_BTKH = _norm(k_BTKH, Norm(w.k_norm, None), spec)
    if tables is not None:
        table = jax.tree.map(lambda local, whole: jnp.where(is_global, whole, local), *tables)
        q_BTNH, k_BTKH = rope.rotate(q_BTNH, table), rope.rotate(k_BTKH, table)
    if w.q_norm is None:
        q_BTNH, k_BTKH = named(q_BTNH, "query_proj"), named(k_BTKH, "key_proj")
    keys = where
    if cached is not None:
        cached, keys = _append(cached, k_BTKH, v_BTKH, where)
        k_BTKH, v_BTKH = cached.k_LBSKH, cached.v_LBSKH
    scale = spec.query_scale or spec.head_dim**-0.5
    context_BTNH = attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        where,
        keys,
        window=spec.sliding_window,
        is_global=is_global if spec.global_every else None,
        scale=scale,
        softcap=spec.attention_softcap,
        kernel=kernel,
    )
    whole = partition("batch", "sequence", "activation")
    out_BTD = linear(context_BTNH, weight(w.wo, "heads", "head_dim", "embed"), whole, contract=2)
    if w.bo is not None:
        out_BTD = out_BTD + w.bo.astype(out_BTD.dtype)
    out_BTD = named(out_BTD, "out_proj")
    return (out_BTD if w.post_attn_norm is None else _norm(out_BTD, w.post_attn_norm, spec)), cached


def _append(cached: Cache, k_BTKH: jax.Array, v_BTKH: jax.Array, where: Tokens) -> tuple[Cache, Tokens]:
    """Writes keys and values at their positions. A row is one document: every slot may be seen, causally."""
    write = jax.vmap(lambda slots_SKH, at_T, new_TKH: slots_SKH.at[at_T].set(new_TKH))
    cached = Cache(
        write(cached.k_LBSKH, where.positions_BT, k_BTKH), write(cached.v_LBSKH, where.positions_BT, v_BTKH)
    )
    B, S = cached.k_LBSKH.shape[:2]
    slots_BS = jnp.broadcast_to(jnp.arange(S), (B, S), out_sharding=partition("batch", "sequence"))
    return cached, Tokens(slots_BS, jnp.ones_like(slots_BS))


def _mlp(w: Layers, spec: ModelSpec, x_BTD: jax.Array, weight: Callable) -> jax.Array:
    activation = {
        "silu": jax.nn.silu,
        "gelu": lambda x: jax.nn.gelu(x, approximate=False),
        "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
        "relu": jax.nn.relu,
    }[spec.activation]
    h_BTD = _norm(x_BTD, w.mlp_norm, spec)
    by_mlp = partition("batch", "sequence", "mlp")
    up_BTF = linear(h_BTD, weight(w.w_up, "embed", "mlp"), by_mlp)
    if w.b_up is not None:
        up_BTF = up_BTF + w.b_up.astype(up_BTF.dtype)
    if w.w_gate is not None:
        gate_BTF = named(linear(h_BTD, weight(w.w_gate, "embed", "mlp"), by_mlp), "mlpwi_0")
        hidden_BTF = activation(gate_BTF) * named(up_BTF, "mlpwi_1")
    else:
        hidden_BTF = activation(named(up_BTF, "mlpwi_0"))
    whole = partition("batch", "sequence", "activation")
    out_BTD = linear(hidden_BTF, weight(w.w_down, "mlp", "embed"), whole)
    if w.b_down is not None:
        out_BTD = out_BTD + w.b_down.astype(out_BTD.dtype)
    out_BTD = named(out_BTD, "mlpwo")
    return out_BTD if w.post_mlp_norm is None else _norm(out_BTD, w.post_mlp_norm, spec)


def _norm(x: jax.Array, norm: Norm, spec: ModelSpec) -> jax.Array:
    """RMS or layer norm over the last dim, in float32."""
    x32 = x.astype(jnp.float32)
    if norm.bias is not None:
        x32 = x32 - x32.mean(-1, keepdims=True)
    normal = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + spec.norm_eps)
    scaled = normal * (1 + norm.scale if spec.zero_centered_norm else norm.scale)
    return (scaled if norm.bias is None else scaled + norm.bias).astype(x.dtype)


def _logits(params: Params, spec: ModelSpec, x_BTD: jax.Array, weight: Callable) -> jax.Array:
    head_DV = weight(params.embed, "vocab", "embed").T if params.head is None else None
    if head_DV is None:
        head_DV = weight(params.head, "embed", "vocab")
    logits_BTV = linear(x_BTD, head_DV, partition("batch", "sequence", "vocab"))
    if spec.logits_softcap is not None:
        logits_BTV = spec.logits_softcap * jnp.tanh(logits_BTV / spec.logits_softcap)
    if padded_vocab(spec) == spec.vocab:
        return logits_BTV
    ids_V = jax.lax.broadcasted_iota(
        jnp.int32, (1, 1, padded_vocab(spec)), 2, out_sharding=partition("activation", "activation", "vocab")
    )
    return jnp.where(ids_V < spec.vocab, logits_BTV, jnp.asarray(-1e30, logits_BTV.dtype))


def empty_cache(spec: ModelSpec, rows: int, slots: int, dtype: jnp.dtype) -> Cache:
    """A cache for ``rows`` sequences of up to ``slots`` tokens under the mesh in force."""
    shape = (spec.layers, rows, slots, spec.kv_heads, spec.head_dim)
    sharding = partition("layers", "batch", "sequence", "kv_heads", "head_dim")
    return Cache(*(jnp.zeros(shape, dtype, out_sharding=sharding) for _ in range(2)))


def leaves(params: Params) -> dict[str, Any]:
    """The weights by dotted name, such as layers.attn_norm.scale; absent weights are left out."""

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        if node is None:
            return {}
        if not dataclasses.is_dataclass(node) or isinstance(node, Weight):
            return {prefix.removesuffix("."): node}
        fields = dataclasses.fields(node)
        return {k: v for f in fields for k, v in walk(getattr(node, f.name), f"{prefix}{f.name}.").items()}

    return walk(params, "")
