"""Gradient accumulation: one optimiser step over several microbatches, with the result of the whole batch at once."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slicewise.errors import UserError
from slicewise.parallel.rules import partition

Arrays = dict[str, jax.Array]


def check(global_batch_size: int, steps: int, degrees: Mapping[str, int]) -> None:
    """Raises UserError when a device would get no whole sequence of a microbatch."""
    entry = partition("batch")[0]
    shards = 1
    for axis in entry if isinstance(entry, tuple) else (entry,):
        shards *= degrees[axis]
    if global_batch_size % (shards * steps):
        most = max(global_batch_size // shards, 1)
        fitting = [n for n in range(1, most + 1) if global_batch_size % (shards * n) == 0]
        raise UserError(
            f"gradient_accumulation_steps = {steps} does not divide the {global_batch_size // shards} sequences a step"
            f" of each of {shards} data shards; choose one of {', '.join(map(str, fitting))}."
        )


def accumulated(
    value_and_grad: Callable[[Any, Arrays], tuple[Any, Any]], params: Any, batch: Arrays, steps: int
) -> tuple[Any, Any]:
    """Sums over ``steps`` microbatches of ``batch`` of what ``value_and_grad(params, microbatch)`` returns.

    Each device cuts its own sequences, so nothing moves. Gradients are summed in their own type, laid out as
    ``params``; only one microbatch's activations are held at a time.
    """
    if steps == 1:
        return value_and_grad(params, batch)
    parts = {name: _cut(x_BT, steps) for name, x_BT in batch.items()}
    first = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding.spec), first)

    def add(sums: Any, part: Arrays) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, value_and_grad(params, part)), None

    return jax.lax.scan(add, zeros, parts)[0]


def _cut(x_BT: jax.Array, steps: int) -> jax.Array:
    """[steps, B / steps, T], each device's rows cut where they are."""
    spec = partition("batch", "sequence")
    cut = jax.shard_map(
        lambda local: local.reshape(steps, local.shape[0] // steps, *local.shape[1:]),
        in_specs=spec,
        out_specs=PartitionSpec(None, *spec),
        check_vma=False,
    )
    return cut(jax.sharding.reshard(x_BT, spec))
