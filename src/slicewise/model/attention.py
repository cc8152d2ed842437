"""Attention of one layer, plain or latent, with its projections and its cache.

Dims in names: B batch, T query tokens, S key tokens, D d_model, N heads, K kv heads, H head_dim, R rank of the latent
keys and values, C its rotary part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slicewise.catalog.model import ModelSpec
from slicewise.kernels.attention.api import Kernel, Tokens, attention
from slicewise.model import mla, order, rope
from slicewise.model.layers import apart, biased, normed
from slicewise.model.linear import linear
from slicewise.model.params import Layers, Norm
from slicewise.model.remat import named
from slicewise.parallel.rules import partition, residual


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What attention needs of the tokens so far; a token stands at the slot of its position.

    ``keys`` [L, B, S, K, H] and ``values`` as they; with latent attention the latents [L, B, S, R] and the rotary keys
    [L, B, S, C].
    """

    keys: Any
    values: Any


def empty_cache(spec: ModelSpec, layers: int, rows: int, slots: int, dtype: jnp.dtype) -> Cache:
    """A cache of ``layers`` layers for ``rows`` sequences of up to ``slots`` tokens under the mesh in force."""
    if a := spec.latent_attention:
        sharding = partition("layers", "batch", "slots", "activation")
        last: list[tuple[int, ...]] = [(a.kv_lora_rank,), (a.rope_head_dim,)]
    else:
        sharding = partition("layers", "batch", "slots", "kv_heads", "head_dim")
        last = [(spec.kv_heads, spec.head_dim)] * 2
    return Cache(*(jnp.zeros((layers, rows, slots, *dims), dtype, out_sharding=sharding) for dims in last))


def attend(
    w: Layers,
    spec: ModelSpec,
    x_BTD: jax.Array,
    where: Tokens,
    tables: list | None,
    is_global: jax.Array,
    cached: Cache | None,
    weight: Callable,
    kernel: Kernel,
) -> tuple[jax.Array, Cache | None, Layers]:
    """What the layer's attention adds to the residual stream ``x``, its cache with these tokens appended, and
    the weights for the rest of the layer, whose gradients come first (model/order.py)."""
    h_BTD = jax.sharding.reshard(
        normed(x_BTD, w.attn_norm, spec), partition("batch", "sequence", "activation")
    )
    table = None
    if tables is not None:
        table = jax.tree.map(lambda local, whole: jnp.where(is_global, whole, local), *tables)
    keys = where
    if spec.latent_attention:
        assert table is not None
        q_BTNH, latent_BTR, rotary_BTC = mla.down(w, spec, h_BTD, table, weight)
        if cached is not None:
            cached, keys = _append(cached, latent_BTR, rotary_BTC, where)
            latent_BTR, rotary_BTC = cached.keys, cached.values
        k_BSKH, v_BSKH = mla.up(w, latent_BTR, rotary_BTC, weight)
    else:
        q_BTNH, k_BSKH, v_BSKH = _project(w, spec, h_BTD, table, weight)
        if cached is not None:
            cached, keys = _append(cached, k_BSKH, v_BSKH, where)
            k_BSKH, v_BSKH = cached.keys, cached.values
    (q_BTNH, k_BSKH, v_BSKH), w = order.behind_mlp((q_BTNH, k_BSKH, v_BSKH), w)
    context_BTNH = attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        where,
        keys,
        window=spec.sliding_window,
        is_global=is_global if spec.global_every else None,
        scale=spec.query_scale or spec.head_dim**-0.5,
        softcap=spec.attention_softcap,
        sinks_N=w.sinks,
        kernel=kernel,
    )
    scattered = residual(x_BTD.shape[1])
    out_BTD = linear(apart(context_BTNH), weight(w.wo, "heads", "head_dim", "embed"), scattered, contract=2)
    out_BTD = named(biased(out_BTD, w.bo), "out_proj")
    if w.post_attn_norm is not None:
        out_BTD = normed(out_BTD, w.post_attn_norm, spec)
    return out_BTD, cached, w


def _project(
    w: Layers, spec: ModelSpec, h_BTD: jax.Array, table: tuple | None, weight: Callable
) -> tuple[jax.Array, jax.Array, jax.Array]:
    by_head = partition("batch", "sequence", "heads", "head_dim")
    by_kv_head = partition("batch", "sequence", "kv_heads", "head_dim")
    q_BTNH = biased(linear(h_BTD, weight(w.wq, "embed", "heads", "head_dim"), by_head), w.bq)
    k_BTKH = biased(linear(h_BTD, weight(w.wk, "embed", "kv_heads", "head_dim"), by_kv_head), w.bk)
    v_BTKH = biased(linear(h_BTD, weight(w.wv, "embed", "kv_heads", "head_dim"), by_kv_head), w.bv)
    v_BTKH = named(v_BTKH, "value_proj")
    if w.q_norm is not None:  # its backward pass reads the products, that of attention what comes out last
        q_BTNH, k_BTKH = named(q_BTNH, "query_proj"), named(k_BTKH, "key_proj")
        q_BTNH = normed(q_BTNH, Norm(w.q_norm, None), spec)
        k_BTKH = normed(k_BTKH, Norm(w.k_norm, None), spec)
    if table is not None:
        q_BTNH, k_BTKH = rope.rotate(q_BTNH, table), rope.rotate(k_BTKH, table)
    if w.q_norm is None:
        q_BTNH, k_BTKH = named(q_BTNH, "query_proj"), named(k_BTKH, "key_proj")
    return q_BTNH, k_BTKH, v_BTKH


def _append(cached: Cache, new_keys: jax.Array, new_values: jax.Array, where: Tokens) -> tuple[Cache, Tokens]:
    """Writes what is new at its positions. A row is one document: every slot may be seen, causally."""
    write = jax.vmap(lambda slots, at_T, new: slots.at[at_T].set(new))
    positions_BT = jax.sharding.reshard(where.positions_BT, partition("batch", "slots"))

    def written(slots: jax.Array, new: jax.Array) -> jax.Array:
        return write(slots, positions_BT, jax.sharding.reshard(new, jax.typeof(slots).sharding.spec))

    cached = Cache(written(cached.keys, new_keys), written(cached.values, new_values))
    B, S = cached.keys.shape[:2]
    slots_BS = jnp.broadcast_to(jnp.arange(S), (B, S), out_sharding=partition("batch", "slots"))
    return cached, Tokens(slots_BS, jnp.ones_like(slots_BS))
