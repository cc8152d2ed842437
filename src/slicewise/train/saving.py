"""When a run saves, what becomes of a save that fails, and what a resumed run must have in common with it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import slicewise
from slicewise.checkpoint.store import CheckpointStore, Restored
from slicewise.checkpoint.tiers import LocalTier
from slicewise.config import RunConfig
from slicewise.errors import ExitCode, UserError
from slicewise.plan.goodput import optimal_interval_s
from slicewise.train.agreement import SAVE, Agreement
from slicewise.train.tiers import start

FIRST_INTERVAL_S = 60.0  # to the first checkpoint, which shows what one costs
RETRY_S = 5.0  # after a save that failed; doubled with every further one, up to the next regular save
DECIDE_DATA = (
    ("run", "seed"),
    ("data", "dataset"),
    ("data", "text_field"),
    ("data", "held_out_fraction"),
)
FINAL_TRIES, FINAL_RETRY_S = 3, 1.0  # of the save that a run ends with; the pause is doubled as well


class Saver:
    """The checkpoints of one run in one process; all processes make the same calls between the same steps."""

    def __init__(
        self,
        config: RunConfig,
        agreement: Agreement,
        say: Callable[[str], None],
        tier: LocalTier | None = None,
    ):
        kept = config.checkpoint
        self._config, self._agreement, self._say, self._tier = config, agreement, say, tier
        self.store = CheckpointStore(
            f"{config.directory}/checkpoints",
            keep=kept.checkpoint_keep,
            keep_every=kept.checkpoint_keep_every,
            keep_best=kept.checkpoint_keep_best,
        )
        self._by_clock = kept.checkpoint_interval_s > 0 or kept.failures_per_day > 0
        self._interval_s = kept.checkpoint_interval_s or FIRST_INTERVAL_S
        self._next_s = time.monotonic() + self._interval_s
        self._last: tuple[int, np.ndarray, Mapping[str, Any]] | None = None  # what was saved beside the state
        self._failure: UserError | None = None  # of the newest save
        self._failures = 0  # since the last save that ended well
        self._retry_s: float | None = None

    # ---------------------------------------------------------------- when

    def is_due(self, number: int) -> bool:
        """Whether the step just taken is to be saved because of its number."""
        kept, last = self._config.checkpoint, self._config.run.steps
        by_number = not self._by_clock and number % max(kept.checkpoint_every, 1) == 0
        return bool(kept.checkpoint_every) and (number == last or by_number)

    def is_due_locally(self, number: int, *, stops: bool) -> bool:
        """Whether hosts are to keep the step just taken, also when the run stops after it."""
        every = self._config.checkpoint.local_checkpoint_every
        return self._tier is not None and (number % every == 0 or stops) and number < self._config.run.steps

    def tick(self) -> None:
        """Between two steps: hears of a save that has ended, and asks for one when the clock says so."""
        if not self._config.checkpoint.checkpoint_every or self.store.is_writing:
            return
        self._wait()
        now_s = time.monotonic()
        if jax.process_index() != 0:
            return  # one clock for all
        if self._retry_s is not None and now_s >= self._retry_s:
            self._retry_s = None
            self._agreement.request(SAVE, "the last checkpoint failed")
        elif self._by_clock and now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._agreement.request(SAVE, "the interval is over")

    # ---------------------------------------------------------------- saving

    def save(
        self,
        number: int,
        state: Any,
        *,
        data_state: np.ndarray,
        metadata: Mapping[str, Any],
        shared: bool = True,
        locally: bool = False,
    ) -> None:
        """Starts a save to either tier. One that fails is told, and made anew before long; training goes on meanwhile.

        ``data_state`` int64 [rows, 2]: of the rows of this process, zero in others.
        Raises what is no failure of the storage.
        """
        if jax.process_count() > 1:  # rows held by several processes have equal states
            data_state = multihost_utils.process_allgather(data_state).max(axis=0)
        about = {"config": self._config.model_dump(), "slicewise": slicewise.__version__, **metadata}
        if locally:
            assert self._tier is not None
            self._tier.save(number, state, data_state=data_state, metadata=about)
        if not shared:
            return
        self._wait()
        began_s = time.monotonic()
        self._last = (number, data_state, about)
        self._start(state)
        self._plan_next(time.monotonic() - began_s)

    def finish(self, state: Any) -> None:
        """Returns when the newest save is durable; one that fails is made anew a few times, of the same ``state``.

        Raises UserError when that fails too.
        """
        for attempt in range(FINAL_TRIES):
            self._wait()
            if self._failure is None:
                return
            if attempt + 1 < FINAL_TRIES:
                time.sleep(FINAL_RETRY_S * 2**attempt)
                self._start(state)
        assert self._failure is not None
        raise self._failure

    def finish_stopping(self, state: Any) -> str:
        """As ``finish``, but what the hosts hold will do: where that is, if it is all that there is."""
        try:
            self.finish(state)
        except UserError:
            if self._tier is None:
                raise
            return str(self._tier.directory)
        finally:
            if self._tier:
                self._tier.wait()
        return ""

    def clear_local(self) -> None:
        """What hosts hold of a run that is done, and saved."""
        if self._tier:
            self._tier.clear()

    def close(self) -> None:
        """Raises UserError when the last save failed."""
        if self._tier:
            self._tier.close()
        self.store.close()

    def _start(self, state: Any) -> None:
        assert self._last is not None
        number, data_state, about = self._last
        self._failure = self._retry_s = None
        try:
            self.store.save(number, state, data_state=data_state, metadata=about)
        except UserError as error:
            self._note(error)

    def _wait(self) -> None:
        """Until no save is under way: the last one has become durable, or failed."""
        try:
            durable = self.store.wait()
        except UserError as error:
            self._note(error)
            return
        if durable is not None and self._failures:
            self._failures = 0
            self._say(f"the checkpoint of step {durable} is saved.")

    def _note(self, error: UserError) -> None:
        if error.code != ExitCode.INTERNAL:
            raise error
        pause_s = RETRY_S * 2 ** min(self._failures, 10)
        self._failure, self._failures = error, self._failures + 1
        self._retry_s = time.monotonic() + pause_s
        self._say(f"{error} Training goes on; the next try is in {pause_s:g} s at most.")

    def _plan_next(self, stall_s: float) -> None:
        if per_day := self._config.checkpoint.failures_per_day:
            self._interval_s = optimal_interval_s(stall_s, 86400 / per_day)
        self._next_s = time.monotonic() + self._interval_s

    # ---------------------------------------------------------------- resuming

    def newest(self) -> int | None:
        """The newest step of either tier, from which ``restore`` takes the state."""
        return start(self.store, self._tier, self._say) or None

    def restore(self, abstract_state: Any, *, at_most: int | None = None) -> Restored | None:
        """The newest good checkpoint, not beyond step ``at_most``; None without any.

        Raises UserError when it was made with other data than the config names, or when none is good.
        """
        self._wait()
        if self._tier and self._tier.has_picked and at_most is None:
            restored: Restored | None = self._tier.restore(abstract_state)
        else:
            restored = self.store.restore_newest(abstract_state, self._say, at_most=at_most)
        if restored is None:
            return None
        saved, rows = len(restored.data_state), self._config.data.global_batch_size
        if saved != rows:
            raise UserError(
                f"checkpoint {self.store.directory}/{restored.step} was made with global_batch_size ="
                f" {saved}, the config says {rows}; keep it, or start another run_name."
            )
        same_data(restored, self._config)
        return restored

    def roll_back(self, abstract_state: Any, at_most: int) -> Restored:
        """As ``restore``; newer checkpoints are gone then. Raises UserError when there is none so old."""
        restored = self.restore(abstract_state, at_most=at_most)
        if restored is None:
            where = (
                f"of step {at_most} or before" if at_most > 0 else f"from {-at_most} steps before the first"
            )
            raise UserError(
                f"there is no checkpoint {where} to go back to; save more often, keep more"
                " (checkpoint_keep), or lower rollback_steps."
            )
        self.store.drop_after(restored.step)
        if self._tier:
            self._tier.drop_after(restored.step)
        self._last = self._failure = self._retry_s = None  # of steps that are no more
        return restored


def same_data(restored: Restored, config: RunConfig) -> None:
    """Raises UserError when the order of the data would be another one from here on."""
    saved = restored.metadata.get("config", {})
    now = config.model_dump()
    for section, key in DECIDE_DATA:
        before, after = saved.get(section, {}).get(key), now[section][key]
        if before is not None and before != after:
            raise UserError(
                f"{key} was {before!r} up to step {restored.step} and is {after!r} now: documents would be"
                " repeated and left out. Keep it, or start another run_name."
            )


def same_content(restored: Restored, config: RunConfig, now: Mapping[str, str]) -> list[str]:
    """Lines on a path that changed while its content did not. Raises UserError when the content did.

    ``now``: `BatchLoader.fingerprint`, which the checkpoint holds of its own data.
    """
    before: Mapping[str, str] = restored.metadata.get("data", {})
    for what, value in now.items():
        if before.get(what, value) != value:
            raise UserError(
                f"the {what} changed: {before[what]} up to step {restored.step}, {value} now; documents would be"
                " repeated and left out. Restore what it was, or start another run_name."
            )
    lines = []
    for key in ("dataset_path", "tokenizer"):
        was, now_is = restored.metadata.get("config", {}).get("data", {}).get(key), getattr(config.data, key)
        if was is not None and was != now_is:
            lines.append(
                f"{key} is {now_is!r} and was {was!r}: the same content as far as names and sizes tell."
            )
    return lines
