"""Attention by blocks of rows and columns in plain JAX: no array of T x S is ever there, on any backend.

The online softmax and its backward pass follow FlashAttention-2 (arXiv 2307.08691, algorithms 1 and 2); masked blocks
are computed all the same, since positions are data. Dims in names: t rows and s columns of a block, i and j their
blocks, G query heads of a kv head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slicewise.errors import UserError
from slicewise.kernels import tuned
from slicewise.kernels.tuned import Key

MASKED = -1e30
KERNEL = "xla_chunked"
BLOCK = 512  # tokens; a block of logits is then 1 MiB a head

Where = tuple[jax.Array, jax.Array]  # positions and segments, each [B, T]


@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def attention(
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_KG: jax.Array,
    queries: Where,
    keys: Where,
    window: jax.Array,
    softcap: float | None,
    residual_name: str,
    most: int = BLOCK,
) -> jax.Array:
    """Softmax over the visible keys and the sinks (-inf = none); ``q`` is scaled already. Returns [B, T, K, G, V].

    Blocks are of up to ``most`` tokens.
    """
    return _forward(q_BTKGH, k_BSKH, v_BSKV, sinks_KG, queries, keys, window, softcap, residual_name, most)[0]


def _forward(
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_KG: jax.Array,
    queries: Where,
    keys: Where,
    window: jax.Array,
    softcap: float | None,
    residual_name: str,
    most: int,
) -> tuple[jax.Array, tuple]:
    operands = (q_BTKGH, k_BSKH, v_BSKV, sinks_KG, queries, keys, window)
    found = forward(*operands, softcap, v_BSKV.dtype, most)
    context_BTKGV, normaliser_BTKG = (checkpoint_name(x, residual_name) for x in found)
    return context_BTKGV, (*operands, context_BTKGV, normaliser_BTKG)


def forward(
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    sinks_KG: jax.Array,
    queries: Where,
    keys: Where,
    window: jax.Array,
    softcap: float | None,
    dtype: jnp.dtype,
    most: int = BLOCK,
) -> tuple[jax.Array, jax.Array]:
    """The context [B, T, K, G, V] in ``dtype``, and the logarithm of what the softmax divides by, [B, T, K, G]."""
    blocks = partial(_blocks, most=most)
    columns = (blocks(k_BSKH), blocks(v_BSKV), *map(blocks, keys))
    B, T, K, G, _ = q_BTKGH.shape
    sinks_BKGt = jnp.broadcast_to(sinks_KG[None, :, :, None].astype(jnp.float32), (B, K, G, _block(T, most)))

    def rows(block: tuple) -> tuple[jax.Array, jax.Array]:
        q, *where = block

        def column(carry: tuple, block: tuple) -> tuple[tuple, None]:
            top, total, acc = carry
            k, v, *seen = block
            logits = _logits(q, k, where, seen, window, softcap)[0]
            higher = jnp.maximum(top, logits.max(-1))
            shrink = jnp.exp(top - higher)
            weights = jnp.exp(logits - higher[..., None])
            more = jnp.einsum(
                "BKGts,BsKV->BKGtV", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
            )
            return (higher, total * shrink + weights.sum(-1), acc * shrink[..., None] + more), None

        top = jnp.maximum(sinks_BKGt, MASKED)
        start = (top, jnp.exp(sinks_BKGt - top), jnp.zeros((*top.shape, v_BSKV.shape[-1]), jnp.float32))
        (top, total, acc), _ = jax.lax.scan(column, start, columns)
        context = (acc / total[..., None]).astype(dtype)
        return context.transpose(0, 3, 1, 2, 4), (top + jnp.log(total)).transpose(0, 3, 1, 2)

    context, normaliser = jax.lax.map(rows, (blocks(q_BTKGH), *map(blocks, queries)))
    return _joined(context), _joined(normaliser)


def _backward(
    softcap: float | None, residual_name: str, most: int, saved: tuple, grad_BTKGV: jax.Array
) -> tuple:
    q_BTKGH, k_BSKH, v_BSKV, sinks_KG, queries, keys, window, context_BTKGV, normaliser_BTKG = saved
    delta_BTKG = (context_BTKGV.astype(jnp.float32) * grad_BTKGV.astype(jnp.float32)).sum(-1)
    operands = (q_BTKGH, k_BSKH, v_BSKV)
    given = (*operands, grad_BTKGV, normaliser_BTKG, delta_BTKG, queries, keys, window)
    found = backward(*given, softcap, most)
    share_BTKG = jnp.exp(sinks_KG.astype(jnp.float32) - normaliser_BTKG)
    dsinks_KG = -(share_BTKG * delta_BTKG).sum((0, 1))
    return (
        *(d.astype(x.dtype) for d, x in zip(found, operands, strict=True)),
        dsinks_KG.astype(sinks_KG.dtype),
        None,
        None,
        None,
    )


def backward(
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKV: jax.Array,
    grad_BTKGV: jax.Array,
    normaliser_BTKG: jax.Array,
    delta_BTKG: jax.Array,
    queries: Where,
    keys: Where,
    window: jax.Array,
    softcap: float | None,
    most: int = BLOCK,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What these keys give to the gradients of q, k and v, float32. The normaliser and ``delta``, the sum over V of the
    context times its gradient, are those of all keys."""
    f32 = partial(jnp.einsum, preferred_element_type=jnp.float32)
    blocks = partial(_blocks, most=most)
    rows = tuple(map(blocks, (q_BTKGH, grad_BTKGV, normaliser_BTKG, delta_BTKG, *queries)))

    def column(dq_iBtKGH: jax.Array, block: tuple) -> tuple[jax.Array, tuple]:
        k, v, *seen = block

        def row(carry: tuple, block: tuple) -> tuple[tuple, jax.Array]:
            q, grad, normaliser, delta, *where = block
            logits, slope = _logits(q, k, where, seen, window, softcap)
            weights = jnp.exp(logits - normaliser.transpose(0, 2, 3, 1)[..., None])
            dweights = f32("BtKGV,BsKV->BKGts", grad, v)
            dlogits = (weights * (dweights - delta.transpose(0, 2, 3, 1)[..., None]) * slope).astype(q.dtype)
            dk, dv = carry
            dk = dk + f32("BKGts,BtKGH->BsKH", dlogits, q)
            dv = dv + f32("BKGts,BtKGV->BsKV", weights.astype(grad.dtype), grad)
            return (dk, dv), f32("BKGts,BsKH->BtKGH", dlogits, k)

        grads, dq = jax.lax.scan(row, (_zeros_of(k), _zeros_of(v)), rows)
        return dq_iBtKGH + dq, grads

    columns = (blocks(k_BSKH), blocks(v_BSKV), *map(blocks, keys))
    dq, (dk, dv) = jax.lax.scan(column, _zeros_of(blocks(q_BTKGH)), columns)
    return _joined(dq), _joined(dk), _joined(dv)


attention.defvjp(_forward, _backward)


def count_above(
    q_BTKGH: jax.Array,
    k_BSKH: jax.Array,
    queries: Where,
    keys: Where,
    window: jax.Array,
    softcap: float | None,
    limit: float,
) -> jax.Array:
    """How many visible logits exceed ``limit``, float32."""
    columns = (_blocks(k_BSKH), *map(_blocks, keys))

    def rows(block: tuple) -> jax.Array:
        q, *where = block

        def column(block: tuple) -> jax.Array:
            k, *seen = block
            return (_logits(q, k, where, seen, window, softcap)[0] > limit).sum(dtype=jnp.float32)

        return jax.lax.map(column, columns).sum()

    return jax.lax.map(rows, (_blocks(q_BTKGH), *map(_blocks, queries))).sum()


def _logits(
    q: jax.Array, k: jax.Array, where: Any, seen: Any, window: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array | float]:
    """Logits [B, K, G, t, s] of one block, -1e30 where masked, and their slope over the product of q and k."""
    logits = jnp.einsum("BtKGH,BsKH->BKGts", q, k, preferred_element_type=jnp.float32)
    slope: jax.Array | float = 1.0
    if softcap is not None:
        bent = jnp.tanh(logits / softcap)
        logits, slope = softcap * bent, 1 - bent**2
    distance = where[0][:, :, None] - seen[0][:, None, :]
    visible = (where[1][:, :, None] == seen[1][:, None, :]) & (distance >= 0) & (distance < window)
    return jnp.where(visible[:, None, None], logits, MASKED), slope


def key(platform: str, sequence_length: int, qk_dim: int, v_dim: int, window: int | None, dtype: str) -> Key:
    """What a tuned block is for."""
    shape = {"tokens": sequence_length, "qk": qk_dim, "v": v_dim, "window": window or 0}
    return Key(kernel=KERNEL, chip=platform, shape=shape, dtype=dtype)


def chosen(k: Key) -> int:
    """Tokens of a block: tuned, or by the rule."""
    values = tuned.find(k, ("block",))
    return values["block"] if values else BLOCK


def candidates(k: Key) -> list[int]:
    """Blocks to try for ``k``, that of the rule first."""
    length = k.shape["tokens"]
    found = [_block(length)] + [_block(length, most) for most in (128, 256, 1024, 2048)]
    return list(dict.fromkeys(found))


def check(sequence_length: int) -> None:
    """Raises UserError for a length that only falls into tiny blocks."""
    if _block(sequence_length) < min(64, sequence_length):
        above = sequence_length + -sequence_length % 128
        raise UserError(
            f"sequence_length = {sequence_length} has no divisor from 64 to {BLOCK} for the blocks of xla_chunked"
            f" attention; use {above}."
        )


def _zeros_of(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape, jnp.float32)


def _block(tokens: int, most: int = BLOCK) -> int:
    """The largest divisor of ``tokens`` up to ``most``."""
    return max(size for size in range(1, min(most, tokens) + 1) if tokens % size == 0)


def _blocks(x: jax.Array, most: int = BLOCK) -> jax.Array:
    """[B, T, ...] as [blocks, B, t, ...]."""
    B, T, *rest = x.shape
    t = _block(T, most)
    return x.reshape(B, T // t, t, *rest).swapaxes(0, 1)


def _joined(x: jax.Array) -> jax.Array:
    """The inverse of _blocks."""
    n, B, t, *rest = x.shape
    return x.swapaxes(0, 1).reshape(B, n * t, *rest)
