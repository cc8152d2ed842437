"""Next-token cross-entropy straight from hidden states, in chunks of tokens: the full logits are never held.

The forward pass computes the gradients too, chunk by chunk, while its logits are there; the backward pass only scales
them. So nothing is computed twice, and the output matrix is gathered once. Collectives are spelled out, for a chunk's
share of the gradient must not cross the mesh before all chunks are summed.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slicewise.costs.memory import loss_chunks
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
    token_axes, embed_axes, vocab_axes = (
        _axes(partition(*dims)) for dims in (("batch", "sequence"), ("embed",), ("vocab",))
    )
    assert set(embed_axes) <= set(token_axes)
    vocab_dim = 0 if loss.tied else 1
    whole = jax.lax.all_gather(weight.astype(x_BTD.dtype), embed_axes, axis=1 - vocab_dim, tiled=True)
    first = jax.lax.axis_index(vocab_axes) * whole.shape[vocab_dim]
    chunks = _chunks(x_BTD, targets_BT, loss)
    of_matrix = with_gradients and not loss.is_frozen
    # Scattered along its rows of a whole vocabulary, the compiler would sum the matrix and only then cut it.
    by_row = loss.tied or math.prod(jax.lax.axis_size(axis) for axis in embed_axes) > 1

    def chunk(carry: tuple, tokens: tuple) -> tuple[tuple, jax.Array | None]:
        total, gradient = carry
        x_CD, targets_C = tokens
        logits_CV = _product(x_CD, whole, (1, 1 - vocab_dim))
        total_chunk, gradient_CV = _cross_entropy(logits_CV, targets_C, first, vocab_axes, loss)
        if not with_gradients:
            return (total + total_chunk, None), None
        gradient_CV = gradient_CV.astype(x_CD.dtype)
        x_gradient_CD = _product(gradient_CV, whole, (1, vocab_dim)).astype(x_CD.dtype)
        if of_matrix:
            left, right = (gradient_CV, x_CD) if by_row else (x_CD, gradient_CV)
            gradient = gradient + _product(left, right, (0, 0))
        return (total + total_chunk, gradient), jax.lax.psum(x_gradient_CD, vocab_axes)

    shape = whole.shape if by_row == loss.tied else whole.shape[::-1]
    start = jnp.zeros(shape, jnp.float32) if of_matrix else None
    (total, gradient), x_gradient = jax.lax.scan(chunk, (jnp.zeros((), jnp.float32), start), chunks)
    total = jax.lax.psum(total, token_axes)
    if not with_gradients:
        return (total,)
    assert x_gradient is not None
    x_gradient = x_gradient.reshape(-1, x_BTD.shape[-1])[: math.prod(targets_BT.shape)].reshape(x_BTD.shape)
    if gradient is None:
        return total, x_gradient
    others = tuple(axis for axis in token_axes if axis not in embed_axes)
    summed = jax.lax.psum_scatter(
        gradient.astype(x_BTD.dtype), embed_axes, scatter_dimension=int(by_row), tiled=True
    )
    # The layers' backward pass waits for it: else the whole matrix in float32 is held until the end of the step.
    x_gradient, summed = jax.lax.optimization_barrier((x_gradient, summed))
    summed = summed if by_row == loss.tied else summed.T
    return total, x_gradient, jax.lax.psum(summed, others).astype(weight.dtype)


def _chunks(x_BTD: jax.Array, targets_BT: jax.Array, loss: Loss) -> tuple[jax.Array, jax.Array]:
    """Equal chunks of tokens, [n, C, D] and [n, C]; the last may end in tokens without a target."""
    tokens, D = targets_BT.size, x_BTD.shape[-1]
    n = -(-tokens // loss.chunk_tokens) if loss.chunk_tokens else int(loss_chunks(tokens, D))
    C = -(-tokens // n)
    rest = n * C - tokens
    x_SD, targets_S = x_BTD.reshape(tokens, D), targets_BT.reshape(tokens)
    if rest:
        x_SD, targets_S = (
            jnp.pad(x_SD, ((0, rest), (0, 0))),
            jnp.pad(targets_S, (0, rest), constant_values=-1),
        )
    return x_SD.reshape(n, C, D), targets_S.reshape(n, C)


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


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product of two matrices over one dim of each, in float32."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that ``spec`` uses."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None)
    return tuple(axis for entry in entries for axis in entry)
