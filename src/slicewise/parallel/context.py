"""Sequences divided by their tokens over the context axis: who holds which tokens, and what neighbours tell each other.

A causal mask gives late tokens more to do than early ones. So a row is cut into two chunks for each of the n devices,
and device i holds chunks i and 2n - 1 - i: every device then sees as many keys as any other. Where heads are exchanged
each device attends to whole rows, and tokens stay in their order.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slicewise.catalog.model import ModelSpec
from slicewise.config import ContextStrategy
from slicewise.costs.batch import check_divided, check_heads, is_balanced
from slicewise.costs.experts import check_capacity
from slicewise.parallel.rules import in_stage, partition

AXIS = "context"


def ways() -> int:
    """Devices that share each row, under the mesh in force."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def row_tokens(tokens: int) -> int:
    """Tokens of a whole row, of which the code in force sees ``tokens``: all, or within a stage a device's own part."""
    return tokens * ways() if in_stage() else tokens


def order(tokens: int, ways: int, strategy: ContextStrategy) -> np.ndarray | None:
    """Which token of a row stands at each place, [T]; None where each stands in its own."""
    if ways == 1 or not is_balanced(strategy):
        return None
    chunks_CX = np.arange(tokens).reshape(2 * ways, -1)
    return np.stack([chunks_CX[:ways], chunks_CX[: ways - 1 : -1]], axis=1).reshape(-1)


def in_order(x_BT: jax.Array) -> jax.Array:
    """Rows [B, T, ...] that were gathered over the context axis, with their tokens in order."""
    B, T, *rest = x_BT.shape
    n = jax.lax.axis_size(AXIS)
    pairs = x_BT.reshape(B, n, 2, T // (2 * n), *rest)
    chunks = jnp.concatenate([pairs[:, :, 0], pairs[:, ::-1, 1]], axis=1)
    return chunks.reshape(x_BT.shape)


def ahead(x_BT: jax.Array, by: int, fill: float, strategy: ContextStrategy) -> jax.Array:
    """``x`` [B, T, ...] with what stands ``by`` tokens later in the row in each place, ``fill`` at its end."""
    n = ways()
    if n == 1:
        return _joined(x_BT, by, jnp.full_like(x_BT[:, :by], fill))

    def on_device(x_BT: jax.Array) -> jax.Array:
        here = jax.lax.axis_index(AXIS)

        def from_neighbour(x_BT: jax.Array, step: int, at_edge: jax.Array | float) -> jax.Array:
            """The first tokens of a chunk of the device ``step`` further; of one beyond the last, ``at_edge``."""
            pairs = [(i + step, i) for i in range(n) if 0 <= i + step < n]
            first = jax.lax.ppermute(x_BT[:, :by], AXIS, pairs)
            edge = n - 1 if step > 0 else 0
            return jnp.where(here == edge, jnp.asarray(at_edge, first.dtype), first)

        if not is_balanced(strategy):
            return _joined(x_BT, by, from_neighbour(x_BT, 1, fill))
        early, late = jnp.split(x_BT, 2, axis=1)
        after_early = from_neighbour(early, 1, late[:, :by])
        after_late = from_neighbour(late, -1, fill)
        return jnp.concatenate([_joined(early, by, after_early), _joined(late, by, after_late)], axis=1)

    spec = partition("batch", "sequence", *["activation"] * (x_BT.ndim - 2))
    return jax.shard_map(on_device, in_specs=spec, out_specs=spec)(jax.sharding.reshard(x_BT, spec))


def _joined(x_BT: jax.Array, by: int, after: jax.Array) -> jax.Array:
    return jnp.concatenate([x_BT[:, by:], after], axis=1)


def whole_rows(sums_B: jax.Array) -> jax.Array:
    """Sums over the tokens of each row, of all of them also where the code in force sees a device's own part."""
    return jax.lax.psum(sums_B, AXIS) if in_stage() else sums_B


def check(
    spec: ModelSpec,
    sequence_length: int,
    strategy: ContextStrategy,
    dispatch: str,
    degrees: Mapping[str, int],
) -> None:
    """Raises UserError where rows, heads or what the model does with whole rows forbid the context axis of ``degrees``.

    ``dispatch``: how tokens get to their experts.
    """
    n = degrees[AXIS]
    check_divided(sequence_length, n, strategy, spec.prediction_layers)
    check_heads(spec.name, spec.kv_heads, n, degrees["tensor"], strategy)
    check_capacity(n, is_capacity=spec.experts is not None and dispatch == "capacity")


def gathered(tree: Any) -> Any:
    """Arrays [B, T / n, ...] of each device as [B, T, ...], in the order of the devices; of one inside a shard_map."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True), tree)
