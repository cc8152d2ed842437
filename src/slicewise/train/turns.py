"""The rows of the asked batch in turn, over and over: all of them in each step, or the next few.

So the order of the data is the same however many rows a step takes: what elastic = batch changes is only where one
step ends and the next begins.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from slicewise.data.loader import Batch, BatchLoader
from slicewise.train.elastic import Fitted


class Turns:
    """Iterates over what this process reads for each step: {field: int32 [len(places), T]}.

    places: the rows of a step's batch that are on this process's devices, ascending. ``rows`` are the rows of the asked
    batch that it reads in all, and ``state`` int64 [len(rows), 2] is theirs; ``row`` is the next in turn.
    """

    def __init__(
        self,
        fitted: Fitted,
        places: Sequence[int],
        data_state: np.ndarray | None,
        row: int = 0,
        *,
        vocab_size: int | None = None,
    ):
        """data_state: int64 [rows asked for, 2], None at the start."""
        self.rows: list[int] = []
        self.row = row
        self._total, self._taken = fitted.asked.data.global_batch_size, fitted.config.data.global_batch_size
        self._loaders: list[
            tuple[BatchLoader, np.ndarray]
        ] = []  # and the order in which a step wants their rows
        self._turn = 0
        for turn in range(fitted.turns):
            rows = (row + turn * self._taken + np.array(places)) % self._total
            ascending = sorted(rows.tolist())
            state = None if data_state is None else data_state[ascending]
            loader = BatchLoader(fitted.asked, ascending, state=state, vocab_size=vocab_size)
            self._loaders.append((loader, np.searchsorted(ascending, rows)))
            self.rows += ascending

    @property
    def fingerprint(self) -> dict[str, str]:
        return self._loaders[0][0].fingerprint

    @property
    def chat_template(self) -> str | None:
        return self._loaders[0][0].chat_template

    def conversations_skipped(self) -> int:
        """Those that had no answer, of all processes, since this was made."""
        if not self.chat_template:
            return 0
        found = np.zeros(self._total, np.int64)
        found[self.rows] = np.concatenate([loader.skipped for loader, _ in self._loaders])
        if jax.process_count() > 1:  # rows held by several processes have equal numbers, absent ones are zero
            found = multihost_utils.process_allgather(found).max(axis=0)
        return int(found.sum())

    def __next__(self) -> Batch:
        loader, order = self._loaders[self._turn]
        self._turn = (self._turn + 1) % len(self._loaders)
        self.row = (self.row + self._taken) % self._total
        batch = next(loader)
        if (order[1:] > order[:-1]).all():
            return batch
        return {field: rows[order] for field, rows in batch.items()}

    @property
    def state(self) -> np.ndarray:
        return np.concatenate([loader.state for loader, _ in self._loaders])

    def close(self) -> None:
        for loader, _ in self._loaders:
            loader.close()
