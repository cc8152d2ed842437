"""Attention in plain JAX: the definition that every kernel is tested against."""

import jax
import jax.numpy as jnp

from slicewise.parallel.rules import partition

MASKED = -1e30  # finite, so that a fully masked row stays finite


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    *,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """Softmax attention, logits and softmax in float32. N query heads share K key-value heads in groups.

    Returns the context [B, T, N, H] in the dtype of ``v``.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    heads = partition("batch", "sequence", "kv_heads", "activation", "head_dim")
    q_BTKGH = jnp.reshape(q_BTNH * scale, (B, T, K, N // K, H), out_sharding=heads)
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits_BKGTS = softcap * jnp.tanh(logits_BKGTS / softcap)
    logits_BKGTS = jnp.where(mask_BTS[:, None, None], logits_BKGTS, MASKED)
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(v_BSKH.dtype)
    context_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS, v_BSKH)
    return jnp.reshape(
        context_BTKGH, (B, T, N, H), out_sharding=partition("batch", "sequence", "heads", "head_dim")
    )
