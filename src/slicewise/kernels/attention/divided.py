"""Attention over rows that the context axis divides: by gathered keys and values, by a ring, or by exchanged heads.

Every function below is of one device, with its part of each row: T tokens of T n. What another device holds comes by
the collective that its strategy is named after (parallel/context.py says who holds which tokens).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from slicewise.kernels.attention import chunked, reference, ring
from slicewise.kernels.attention.device import by_device, chunks
from slicewise.parallel import context
from slicewise.parallel.rules import partition

if TYPE_CHECKING:
    from slicewise.kernels.attention.api import Kernel

AXIS = context.AXIS


@dataclass(frozen=True)
class How:
    kernel: "Kernel"
    window: Any  # tokens; splash needs a number that is known when it is traced, or None
    softcap: float | None
    residual_name: str
    block: int  # tokens of a block of xla_chunked, at most


def attention(
    operands: tuple,
    where: tuple[jax.Array, jax.Array],
    window: Any,
    scale: float,
    softcap: float | None,
    kernel: "Kernel",
    residual_name: str,
    block: int = chunked.BLOCK,
) -> jax.Array:
    """As api.attention, of rows with these positions and segments: the context [B, T, N, V].

    ``block`` is that of xla_chunked, and of a ring without splash.
    """
    is_splash = kernel.name == "splash"
    strategy = {"all_gather": _all_gather, "ring": ring.attention, "ulysses": _ulysses}[kernel.strategy]
    row = partition("batch", "sequence")
    others: list[Any] = [where]
    specs: list[Any] = [(row, row)]
    if not is_splash:
        others, specs = [*others, window], [*specs, PartitionSpec()]
    elif kernel.strategy == "all_gather":
        from slicewise.kernels.attention import splash

        schedule, spec = splash.divided_schedule(operands, window, softcap, kernel, residual_name)
        others, specs = [*others, schedule], [*specs, spec]

    def on_device(q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, where: Any, *more: Any) -> jax.Array:
        how = How(kernel, window if is_splash else more[0], softcap, residual_name, block)
        schedule = more[0] if is_splash and more else None
        return strategy(q * scale, k, v, sinks, where, how, schedule)

    return by_device(on_device, operands, tuple(others), tuple(specs))


def _all_gather(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, rows: Any, how: How, schedule: Any
) -> jax.Array:
    """Every device gets all keys and values of its rows; their gradients are summed and scattered."""
    k, v, columns = context.gathered((k, v, rows))
    if how.kernel.name != "splash":
        return _plain(q, k, v, sinks, rows, columns, how)
    from slicewise.kernels.attention import splash

    k, v, columns = jax.tree.map(context.in_order, (k, v, columns))
    return splash.over_rows(schedule, q, k, v, sinks, rows[1], columns[1])


def _ulysses(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, rows: Any, how: How, schedule: Any
) -> jax.Array:
    """Every device gets whole rows of its share of the heads, and gives back their contexts (Jacobs et al., 2023)."""
    q, k, v = (jax.lax.all_to_all(x, AXIS, split_axis=2, concat_axis=1, tiled=True) for x in (q, k, v))
    rows = context.gathered(rows)
    if sinks is not None:
        heads = q.shape[2]
        sinks = jax.lax.dynamic_slice_in_dim(sinks, jax.lax.axis_index(AXIS) * heads, heads)
    if how.kernel.name == "splash":
        from slicewise.kernels.attention import splash

        found = splash.attention(
            q,
            k,
            v,
            sinks,
            rows[1],
            window=how.window,
            softcap=how.softcap,
            kernel=how.kernel,
            residual_name=how.residual_name,
        )
    else:
        found = _plain(q, k, v, sinks, rows, rows, how)
    return jax.lax.all_to_all(found, AXIS, split_axis=1, concat_axis=2, tiled=True)


def _plain(
    q: jax.Array, k: jax.Array, v: jax.Array, sinks: Any, rows: Any, columns: Any, how: How
) -> jax.Array:
    if how.kernel.name == "xla_chunked":
        return chunks(q, k, v, sinks, rows, columns, how.window, how.softcap, how.residual_name, how.block)
    mask = reference.visible(rows, columns, how.window)
    found = reference.attention(q, k, v, mask, scale=1.0, softcap=how.softcap, sinks_N=sinks)
    return checkpoint_name(found, how.residual_name)
