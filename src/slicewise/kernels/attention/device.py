"""Attention as one device computes it, on its own rows and heads."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from slicewise.kernels.attention import chunked
from slicewise.parallel.rules import partition, unmapped


def by_device(on_device: Callable[..., jax.Array], operands: tuple, others: tuple, specs: tuple) -> jax.Array:
    """``on_device`` over the mesh: (q, k, v, sinks, *others) as a device holds them, to its context [B, T, N, V].

    Neither rows nor heads see each other; where the context axis divides rows, ``on_device`` gets what it lacks.
    """
    by_head = partition("batch", "sequence", "heads", "head_dim")
    by_kv_head = partition("batch", "sequence", "kv_heads", "head_dim")
    return jax.shard_map(
        on_device,
        in_specs=(by_head, by_kv_head, by_kv_head, partition("heads"), *specs),
        out_specs=by_head,
        axis_names={*unmapped()},
        check_vma=False,  # a kernel call does not say over which axes its result varies
    )(*operands, *others)


def chunks(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_N: jax.Array | None,
    rows: Any,
    columns: Any,
    window: jax.Array,
    softcap: float | None,
    residual_name: str,
    block: int,
) -> jax.Array:
    """xla_chunked with one dim for all heads, in blocks of up to ``block`` tokens; ``q`` is scaled already.

    Returns [B, T, N, V].
    """
    context_BTKGV = chunked.attention(
        grouped(q_BTNH, k_BSKH.shape[2]),
        k_BSKH,
        v_BSKV,
        grouped_sinks(sinks_N, q_BTNH.shape[2], k_BSKH.shape[2]),
        rows,
        columns,
        window,
        softcap,
        residual_name,
        block,
    )
    return context_BTKGV.reshape(*q_BTNH.shape[:3], v_BSKV.shape[3])


def grouped(q_BTNH: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, K, G, H]: query heads by the key-value head that they share."""
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, kv_heads, N // kv_heads, H)


def grouped_sinks(sinks_N: jax.Array | None, heads: int, kv_heads: int) -> jax.Array:
    """[K, G]; -inf where there are none."""
    sinks_N = jnp.full(heads, -jnp.inf) if sinks_N is None else sinks_N
    return sinks_N.reshape(kv_heads, heads // kv_heads)
