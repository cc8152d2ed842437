"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values of all heads from one latent a token.

Dims in names: B batch, T query tokens, S key tokens, D d_model, N heads, H head_dim with its rotary part C last, Q and
R ranks of the latent queries and keys.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from slicewise.catalog.model import ModelSpec
from slicewise.model import rope
from slicewise.model.layers import normed
from slicewise.model.linear import linear
from slicewise.model.params import Layers, Norm
from slicewise.model.remat import named
from slicewise.parallel.rules import partition


def down(
    w: Layers, spec: ModelSpec, h_BTD: jax.Array, table: tuple[jax.Array, jax.Array], weight: Callable
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [B, T, N, H], latents [B, T, R] and rotary keys [B, T, C], which all heads share."""
    a, latent = spec.latent_attention, w.latent
    assert a is not None
    whole = partition("batch", "sequence", "activation")
    by_head = partition("batch", "sequence", "heads", "head_dim")
    if latent.wq_a is None:
        q_BTNH = linear(h_BTD, weight(w.wq, "embed", "heads", "head_dim"), by_head)
    else:
        q_BTQ = named(linear(h_BTD, weight(latent.wq_a, "embed", "activation"), whole), "query_wa_proj")
        q_BTQ = normed(q_BTQ, Norm(latent.q_norm, None), spec)
        q_BTNH = linear(q_BTQ, weight(latent.wq_b, "latent", "heads", "head_dim"), by_head)
    plain, turning = jnp.split(q_BTNH, [a.nope_head_dim], axis=-1)
    q_BTNH = named(jnp.concatenate([plain, rope.rotate(turning, table)], axis=-1), "query_proj")
    kv_BTX = named(linear(h_BTD, weight(latent.wkv_a, "embed", "activation"), whole), "kv_wa_proj")
    latent_BTR, rotary_BTC = jnp.split(kv_BTX, [a.kv_lora_rank], axis=-1)
    latent_BTR = normed(latent_BTR, Norm(latent.kv_norm, None), spec)
    return q_BTNH, latent_BTR, rope.rotate(rotary_BTC[:, :, None], table)[:, :, 0]


def up(
    w: Layers, latent_BSR: jax.Array, rotary_BSC: jax.Array, weight: Callable
) -> tuple[jax.Array, jax.Array]:
    """Keys [B, S, N, H] and values of every head."""
    by_head = partition("batch", "sequence", "heads", "head_dim")
    plain_BSNH = linear(latent_BSR, weight(w.latent.wk_b, "latent", "heads", "head_dim"), by_head)
    v_BSNH = linear(latent_BSR, weight(w.latent.wv_b, "latent", "heads", "head_dim"), by_head)
    shape = (*plain_BSNH.shape[:3], rotary_BSC.shape[-1])
    rotary_BSNC = jnp.broadcast_to(rotary_BSC[:, :, None], shape, out_sharding=by_head)
    k_BSNH = jnp.concatenate([plain_BSNH, rotary_BSNC], axis=-1)
    return named(k_BSNH, "key_proj"), named(v_BSNH, "value_proj")
