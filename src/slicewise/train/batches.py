"""Global batches, of which each process reads the rows that its devices hold, and the loss on held-out ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from slicewise.config import RunConfig
from slicewise.data.loader import BatchLoader
from slicewise.errors import UserError
from slicewise.parallel.compiling import compile_in_turn, lower
from slicewise.train.step import TrainStep


def local_rows(step: TrainStep) -> list[int]:
    """The batch rows on this process's devices, ascending."""
    tokens = step.abstract_batch["tokens"]
    rows = tokens.shape[0]
    return sorted(
        {
            row
            for index in tokens.sharding.addressable_devices_indices_map(tokens.shape).values()
            for row in range(*index[0].indices(rows))
        }
    )


def to_global(step: TrainStep, rows: Sequence[int], local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Global arrays [B, T] from this process's ``rows`` of each, [len(rows), T]; tokens in the order of the step."""
    place = {row: i for i, row in enumerate(rows)}

    def build(name: str) -> jax.Array:
        abstract, values = step.abstract_batch[name], local[name]
        values = values if step.order is None else values[:, step.order]

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            wanted = range(*index[0].indices(abstract.shape[0]))
            return values[[place[row] for row in wanted], index[1]]

        return jax.make_array_from_callback(abstract.shape, abstract.sharding, shard)

    return {name: build(name) for name in step.abstract_batch}


def held_out_loss(config: RunConfig, step: TrainStep, params: Any) -> float:
    """Mean cross-entropy in nats a token over the held-out batches of ``config``. Raises UserError without a token."""
    lowered = lower(step.evaluate, params, step.abstract_batch)
    evaluate = compile_in_turn("evaluate", lowered, step.mesh.devices.flat)
    sums = [evaluate(params, batch) for batch in _held_out(config, step)]
    total, count = (sum(float(s[i]) for s in sums) for i in range(2))
    if not count:
        raise UserError(
            "the held-out text has no token to predict; give longer documents, or set eval_batches=0."
        )
    return total / count


def _held_out(config: RunConfig, step: TrainStep) -> Iterator[dict[str, jax.Array]]:
    """The first ``eval_batches`` global batches of held-out text; the same ones at every call."""
    rows = local_rows(step)
    loader = BatchLoader(config, rows, split="held_out", vocab_size=step.spec.vocab)
    try:
        for _ in range(config.evaluation.eval_batches):
            yield to_global(step, rows, next(loader))
    finally:
        loader.close()
