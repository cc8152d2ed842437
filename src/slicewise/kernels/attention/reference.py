"""Attention in plain JAX: the definition that every kernel is tested against."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from slicewise.parallel.rules import partition

MASKED = -1e30  # finite, so that a fully masked row stays finite

Where = tuple[jax.Array, jax.Array]  # positions and segments, each [B, T]


def visible(queries: Where, keys: Where, window: jax.Array | int | None) -> jax.Array:
    """Which keys each query may see: bool [B, T, S]."""
    distance_BTS = queries[0][:, :, None] - keys[0][:, None, :]
    mask_BTS = (queries[1][:, :, None] == keys[1][:, None, :]) & (distance_BTS >= 0)
    return mask_BTS if window is None else mask_BTS & (distance_BTS < window)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    mask_BTS: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention, logits and softmax in float32. N query heads share K key-value heads in groups.

    ``sinks`` are one more logit of each head, which takes its share of the softmax and has no value (gpt-oss).
    Returns the context [B, T, N, V], of the head dim and the dtype of ``v`` [B, S, K, V].
    """
    B, T, N, H = q_BTNH.shape
    K = k_BSKH.shape[2]
    heads = _sharding("batch", "sequence", "kv_heads", "activation", "head_dim")
    q_BTKGH = jnp.reshape(q_BTNH * scale, (B, T, K, N // K, H), out_sharding=heads)
    logits_BKGTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    if softcap is not None:
        logits_BKGTS = softcap * jnp.tanh(logits_BKGTS / softcap)
    logits_BKGTS = jnp.where(mask_BTS[:, None, None], logits_BKGTS, MASKED)
    if sinks_N is None:
        weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1).astype(v_BSKV.dtype)
    else:
        by_group = _sharding("kv_heads", "activation")
        sinks_KG11 = jnp.reshape(sinks_N, (K, N // K), out_sharding=by_group)[:, :, None, None].astype(
            jnp.float32
        )
        top_BKGT1 = jax.lax.stop_gradient(jnp.maximum(logits_BKGTS.max(-1, keepdims=True), sinks_KG11))
        scores_BKGTS = jnp.exp(logits_BKGTS - top_BKGT1)
        total_BKGT1 = scores_BKGTS.sum(-1, keepdims=True) + jnp.exp(sinks_KG11 - top_BKGT1)
        weights_BKGTS = (scores_BKGTS / total_BKGT1).astype(v_BSKV.dtype)
    context_BTKGV = jnp.einsum("BKGTS,BSKV->BTKGV", weights_BKGTS, v_BSKV)
    return jnp.reshape(
        context_BTKGV,
        (B, T, N, v_BSKV.shape[3]),
        out_sharding=_sharding("batch", "sequence", "heads", "head_dim"),
    )


def _sharding(*dims: str) -> PartitionSpec | None:
    """Of arrays of the whole mesh; None inside a shard_map, where they are a device's own."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return None if AxisType.Manual in types else partition(*dims)
