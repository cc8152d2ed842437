"""Attention behind one signature; positions and segments are data, so any order of tokens may be passed."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from slicewise.kernels.attention import reference


@dataclass(frozen=True)
class Tokens:
    """Where tokens stand: position within their document, and the document's number in the row (0 = padding)."""

    positions_BT: jax.Array
    segments_BT: jax.Array


jax.tree_util.register_dataclass(Tokens, data_fields=["positions_BT", "segments_BT"], meta_fields=[])


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    queries: Tokens,
    keys: Tokens,
    *,
    window: jax.Array | int | None,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Causal attention within documents; a token sees ``window`` tokens, itself included (None = all).

    Returns the context [B, T, N, H].
    """
    mask_BTS = visible(queries, keys, window)
    return reference.attention(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale=scale, softcap=softcap)


def visible(queries: Tokens, keys: Tokens, window: jax.Array | int | None) -> jax.Array:
    """Which keys each query may see: bool [B, T, S]."""
    distance_BTS = queries.positions_BT[:, :, None] - keys.positions_BT[:, None, :]
    mask_BTS = (queries.segments_BT[:, :, None] == keys.segments_BT[:, None, :]) & (distance_BTS >= 0)
    return mask_BTS if window is None else mask_BTS & (distance_BTS < window)
