"""Next-token cross-entropy straight from hidden states, in chunks of tokens: the full logits are never held.

The forward pass computes the gradients too, while a chunk's logits are there; the backward pass only scales them. So
nothing is computed twice, and the output matrix is gathered once. Of a block of chunks the gradients of the logits are
held in the type of products, so that the output matrix has one product for its own. Collectives are spelled out, for a
block's share of that must not cross the mesh before all blocks are summed.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from slicewise.costs.memory import LOSS_PARTS, loss_blocks, loss_chunk_tokens
from slicewise.parallel.rules import partition


@dataclass(frozen=True)
class Loss:
    """What is computed besides the arrays."""

    vocab: int  # columns of the output matrix from here on are padding
    tied: bool = False  # the matrix is the embedding table, [V, D] instead of [D, V]
    softcap: float | None = None
    z_loss_weight: float = 0.0  # of the squared log-normaliser (PaLM, section 5)
    chunk_tokens: int | None = None  # of one device; None derives it
    is_frozen: bool = False  # the matrix: it has no gradient


@dataclass(frozen=True)
class _Axes:
    """Mesh axes over which each is divided."""

    tokens: tuple[str, ...]
    embed: tuple[str, ...]
    vocab: tuple[str, ...]


def summed_loss(x_BTD: jax.Array, weight: jax.Array, targets_BT: jax.Array, loss: Loss) -> jax.Array:
    """Sum over tokens of the cross-entropy in nats, float32; a token with a negative target (none) counts 0.

    ``weight`` is the output matrix as stored, [D, V] or [V, D]; products run in the type of ``x_BTD``.
    """
    x_BTD = jax.sharding.reshard(x_BTD, partition("batch", "sequence", "activation"))
    weight = jax.sharding.reshard(weight, _matrix(loss))
    targets_BT = jax.sharding.reshard(targets_BT, partition("batch", "sequence"))
    return _summed(x_BTD, weight, targets_BT, loss)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(x_BTD: jax.Array, weight: jax.Array, targets_BT: jax.Array, loss: Loss) -> jax.Array:
    return _on_shards(loss, with_gradients=False)(x_BTD, weight, targets_BT)[0]


def _forward(x_BTD: jax.Array, weight: jax.Array, targets_BT: jax.Array, loss: Loss) -> tuple:
    total, *gradients = _on_shards(loss, with_gradients=True)(x_BTD, weight, targets_BT)
    return total, gradients


def _backward(loss: Loss, gradients: list[jax.Array], scale: jax.Array) -> tuple:
    scaled = [(scale * gradient.astype(jnp.float32)).astype(gradient.dtype) for gradient in gradients]
    return (*scaled, None, None) if loss.is_frozen else (*scaled, None)


_summed.defvjp(_forward, _backward)


def _matrix(loss: Loss) -> PartitionSpec:
    return partition("vocab", "embed") if loss.tied else partition("embed", "vocab")


def _on_shards(loss: Loss, *, with_gradients: bool) -> Callable[..., tuple[jax.Array, ...]]:
    """The function of local shards, mapped over the mesh in force. Returns (total, gradients of x and weight)."""
    tokens, matrix = partition("batch", "sequence"), _matrix(loss)
    x_spec = partition("batch", "sequence", "activation")
    gradients = (x_spec, matrix)[: 2 - loss.is_frozen] if with_gradients else ()
    return jax.shard_map(
        functools.partial(_local, loss=loss, with_gradients=with_gradients),
        in_specs=(x_spec, matrix, tokens),
        out_specs=(PartitionSpec(), *gradients),
        check_vma=False,
    )


def _local(
    x_BTD: jax.Array, weight: jax.Array, targets_BT: jax.Array, *, loss: Loss, with_gradients: bool
) -> tuple[jax.Array, ...]:
    """What one device does with its tokens and its part of the output matrix."""
    axes = _Axes(*(_axes(partition(*dims)) for dims in (("batch", "sequence"), ("embed",), ("vocab",))))
    assert set(axes.embed) <= set(axes.tokens)
    whole = jax.lax.all_gather(weight.astype(x_BTD.dtype), axes.embed, axis=int(loss.tied), tiled=True)
    block = functools.partial(_block, whole=whole, axes=axes, loss=loss, with_gradients=with_gradients)
    x_NKCD, targets_NKC = _cut(x_BTD, targets_BT, loss)
    of_matrix = with_gradients and not loss.is_frozen

    def summed_block(carry: tuple, tokens: tuple) -> tuple[tuple, jax.Array | None]:
        total, x_gradient_SD, gradient_SV, x_SD = block(carry[0], tokens)
        return (total, carry[1] + _product(gradient_SV, x_SD, (0, 0)) if of_matrix else None), x_gradient_SD

    total = jnp.zeros((), jnp.float32)
    if len(x_NKCD) == 1:
        total, x_gradient, gradient_SV, x_SD = block(total, (x_NKCD[0], targets_NKC[0]))
        gradient_VD = _summed_in_parts(gradient_SV, x_SD, axes) if of_matrix else None
    else:
        start = jnp.zeros(whole.shape if loss.tied else whole.shape[::-1], jnp.float32) if of_matrix else None
        (total, gradient_VD), x_gradient = jax.lax.scan(summed_block, (total, start), (x_NKCD, targets_NKC))
        if gradient_VD is not None:
            gradient_VD = _over_devices(gradient_VD.astype(x_BTD.dtype), axes)
    total = jax.lax.psum(total, axes.tokens)
    if not with_gradients:
        return (total,)
    assert x_gradient is not None
    x_gradient = x_gradient.reshape(-1, x_BTD.shape[-1])[: targets_BT.size].reshape(x_BTD.shape)
    if gradient_VD is None:
        return total, x_gradient
    gradient = gradient_VD if loss.tied else gradient_VD.T
    # The layers' backward pass waits for all of it: else what it is computed from is held until the end of the step. A
    # barrier would not do, for the compiler schedules without them. (One slice with a stride would be an operation on
    # all of it, for which the compiler may lack VMEM.)
    rows = range(len(gradient_VD) - 1, -1, -max(1, len(gradient_VD) // LOSS_PARTS))
    of_every_part = jnp.concatenate([jax.lax.slice(gradient_VD, (row, 0), (row + 1, 1)) for row in rows])
    x_gradient = x_gradient + 0 * of_every_part.sum().astype(x_gradient.dtype)
    return total, x_gradient, gradient.astype(weight.dtype)


def _block(
    total: jax.Array, tokens: tuple, *, whole: jax.Array, axes: _Axes, loss: Loss, with_gradients: bool
) -> tuple:
    """(``total`` with the loss of one block of tokens, its gradients by x [S, D] and by the logits [S, V], and x)."""
    vocab_dim = 0 if loss.tied else 1
    first = jax.lax.axis_index(axes.vocab) * whole.shape[vocab_dim]

    def chunk(total: jax.Array, tokens: tuple) -> tuple[jax.Array, jax.Array | None]:
        x_CD, targets_C = tokens
        logits_CV = _product(x_CD, whole, (1, 1 - vocab_dim))
        total_chunk, gradient_CV = _cross_entropy(logits_CV, targets_C, first, axes.vocab, loss)
        return total + total_chunk, gradient_CV.astype(x_CD.dtype) if with_gradients else None

    total, gradient_KCV = jax.lax.scan(chunk, total, tokens)
    if gradient_KCV is None:
        return total, None, None, None
    gradient_SV, x_SD = (a.reshape(-1, a.shape[-1]) for a in (gradient_KCV, tokens[0]))
    x_gradient_SD = _product(gradient_SV, whole, (1, vocab_dim), x_SD.dtype)
    # In this order, for the gradients of the logits can be freed before the matrix's is summed over devices.
    x_gradient_SD, gradient_SV = jax.lax.optimization_barrier((x_gradient_SD, gradient_SV))
    return total, jax.lax.psum(x_gradient_SD, axes.vocab), gradient_SV, x_SD


def _summed_in_parts(gradient_SV: jax.Array, x_SD: jax.Array, axes: _Axes) -> jax.Array:
    """The output matrix's gradient [V, D]: one part of it crosses the mesh while the next is computed."""
    V = gradient_SV.shape[1]
    width = -(-V // LOSS_PARTS // 128) * 128 if math.prod(map(jax.lax.axis_size, axes.tokens)) > 1 else V
    parts = [
        _over_devices(_product(gradient_SV[:, start : start + width], x_SD, (0, 0), x_SD.dtype), axes)
        for start in range(0, V, width)
    ]
    return jnp.concatenate(parts)


def _over_devices(gradient_VD: jax.Array, axes: _Axes) -> jax.Array:
    """Summed over the devices that have other tokens; each keeps its columns. (Scattered along a whole vocabulary, the
    compiler would sum all of it and only then cut it.)"""
    others = tuple(axis for axis in axes.tokens if axis not in axes.embed)
    scattered = jax.lax.psum_scatter(gradient_VD, axes.embed, scatter_dimension=1, tiled=True)
    return jax.lax.psum(scattered, others)


def _cut(x_BTD: jax.Array, targets_BT: jax.Array, loss: Loss) -> tuple[jax.Array, jax.Array]:
    """Equal blocks of equal chunks of tokens, [N, K, C, D] and [N, K, C]; the last may end in tokens without a
    target."""
    tokens, D = targets_BT.size, x_BTD.shape[-1]
    N = int(loss_blocks(tokens, D))
    K = -(-tokens // (N * (loss.chunk_tokens or loss_chunk_tokens(D))))
    C = -(-tokens // (N * K))
    rest = N * K * C - tokens
    x_SD, targets_S = x_BTD.reshape(tokens, D), targets_BT.reshape(tokens)
    if rest:
        x_SD, targets_S = (
            jnp.pad(x_SD, ((0, rest), (0, 0))),
            jnp.pad(targets_S, (0, rest), constant_values=-1),
        )
    return x_SD.reshape(N, K, C, D), targets_S.reshape(N, K, C)


def _cross_entropy(
    logits_CV: jax.Array, targets_C: jax.Array, first: jax.Array, vocab_axes: tuple[str, ...], loss: Loss
) -> tuple[jax.Array, jax.Array]:
    """(summed loss of the chunk, its gradient by the logits before the soft cap); ``first`` is the id of column 0."""
    ids_CV = first + jax.lax.broadcasted_iota(jnp.int32, logits_CV.shape, 1)
    slope_CV = None
    if loss.softcap is not None:
        bounded_CV = jnp.tanh(logits_CV / loss.softcap)
        logits_CV, slope_CV = loss.softcap * bounded_CV, 1 - bounded_CV**2
    logits_CV = jnp.where(ids_CV < loss.vocab, logits_CV, -1e30)
    top_C = jax.lax.pmax(logits_CV.max(-1), vocab_axes)
    shares_CV = jnp.exp(logits_CV - top_C[:, None])
    sum_C = jax.lax.psum(shares_CV.sum(-1), vocab_axes)
    normaliser_C = top_C + jnp.log(sum_C)
    # A mask over an iota, not a gather: a gather from a sharded vocabulary would need the whole of it.
    chosen_CV = ids_CV == targets_C[:, None]
    target_C = jax.lax.psum(jnp.where(chosen_CV, logits_CV, 0.0).sum(-1), vocab_axes)
    losses_C = normaliser_C - target_C + loss.z_loss_weight * normaliser_C**2
    counts_C = targets_C >= 0
    by_share_C = jnp.where(counts_C, (1 + 2 * loss.z_loss_weight * normaliser_C) / sum_C, 0.0)
    gradient_CV = by_share_C[:, None] * shares_CV - chosen_CV  # no column is chosen where there is no target
    return (
        jnp.where(counts_C, losses_C, 0.0).sum(),
        gradient_CV if slope_CV is None else gradient_CV * slope_CV,
    )


def _product(
    a: jax.Array, b: jax.Array, contract: tuple[int, int], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Product of two matrices over one dim of each, as ``dtype``."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=dtype)


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that ``spec`` uses."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None)
    return tuple(axis for entry in entries for axis in entry)
