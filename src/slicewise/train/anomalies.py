"""Steps that went wrong: a loss or gradient that is no number, or a loss that jumped.

    stop       ends the run; checkpoints of earlier steps are good
    skip       leaves the update out, in the compiled step itself; data and the step number go on
    rollback   goes back to an older checkpoint and on with the data behind the bad step

All processes read the same numbers at the same moment, one step late, so they decide alike without talking.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from slicewise.config import Faults, RunConfig
from slicewise.errors import UserError

RECENT = 16  # losses whose median a spike is measured against; a spike is none before there are so many
MAX_SKIPPED = 10  # in a row
MAX_ROLLBACKS = 3  # without getting beyond the step that was bad
WATCHED = ("loss", "gradient_norm")  # an infinite gradient spoils weights before the loss shows it


def check(config: RunConfig) -> None:
    """Raises UserError for keys that do not go together."""
    faults = config.faults
    if faults.loss_spike_ratio and faults.loss_spike_ratio <= 1:
        raise UserError(f"loss_spike_ratio = {faults.loss_spike_ratio}: expected more than 1, or 0 for none.")
    if faults.on_bad_step == "skip" and faults.loss_spike_ratio:
        raise UserError(
            "on_bad_step = skip leaves out updates that are no number; a spike shows when the next step has begun:"
            " use on_bad_step = rollback, or loss_spike_ratio = 0."
        )
    if faults.on_bad_step == "skip" and config.optimizer.optimizer_state_memory == "host":
        raise UserError(
            "on_bad_step = skip needs the optimiser's state beside the new one: use optimizer_state_memory ="
            " device, or on_bad_step = rollback."
        )
    if faults.on_bad_step == "rollback" and not config.checkpoint.checkpoint_every:
        raise UserError("on_bad_step = rollback needs checkpoints: set checkpoint_every above 0.")


def unless_bad(metrics: Mapping[str, jax.Array], new: Any, old: Any) -> Any:
    """``new``, or ``old`` when the metrics of the step are no numbers: pytrees of equal structure, inside jit."""
    is_good = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
    return jax.tree.map(lambda a, b: jnp.where(is_good, a, b), new, old)


@dataclass(frozen=True)
class Bad:
    step: int
    what: str  # such as "loss is nan"


class Judge:
    """Looks at the results of all steps in turn. ``recent``: losses before them, the newest last."""

    def __init__(self, faults: Faults, recent: Iterable[float] = ()):
        self._faults = faults
        self._recent = deque(recent, RECENT)
        self._unseen: list[tuple[int, Mapping[str, Any]]] = []
        self._skipped = self._rollbacks = self._farthest = 0

    @property
    def recent(self) -> list[float]:
        """What a checkpoint keeps, so that a resumed run judges alike."""
        return list(self._recent)

    @property
    def _is_idle(self) -> bool:
        """Whether it is enough that the numbers are read for the records, and the run stopped then."""
        return self._faults.on_bad_step == "stop" and not self._faults.loss_spike_ratio

    def add(self, number: int, metrics: Mapping[str, Any]) -> None:
        """The results of a step that is under way."""
        if not self._is_idle:
            self._unseen.append((number, metrics))

    def bad(self, *, now: bool) -> Bad | None:
        """The next bad step. Waits for the results of all but the newest step, with ``now`` for that too."""
        while len(self._unseen) > (0 if now else 1):
            step, results = self._unseen.pop(0)
            values = {name: float(results[name]) for name in WATCHED}
            if what := self._what_is_bad(values):
                return Bad(step, what)
            self._recent.append(values["loss"])
            self._skipped = 0
        return None

    def _what_is_bad(self, values: Mapping[str, float]) -> str:
        if what := not_finite(values):
            return what
        ratio = self._faults.loss_spike_ratio
        if ratio and len(self._recent) == RECENT:
            usual = statistics.median(self._recent)
            if values["loss"] > ratio * usual:
                return (
                    f"loss is {values['loss']:.4g}, {values['loss'] / usual:.3g} times the median of before"
                )
        return ""

    def skips(self, bad: Bad) -> None:
        """Notes a step that was left out. Raises UserError when there are too many in a row."""
        self._skipped += 1
        if self._skipped >= MAX_SKIPPED:
            raise stopped(bad, f" It is the last of {MAX_SKIPPED} in a row.")

    def rolls_back(self, bad: Bad, recent: Iterable[float]) -> None:
        """Starts anew behind a checkpoint. Raises UserError when that has not helped several times."""
        if bad.step > self._farthest:
            self._farthest, self._rollbacks = bad.step, 0
        self._rollbacks += 1
        if self._rollbacks > MAX_ROLLBACKS:
            raise stopped(bad, f" Going back {MAX_ROLLBACKS} times did not help.")
        self._recent = deque(recent, RECENT)
        self._unseen.clear()


def not_finite(values: Mapping[str, float]) -> str:
    """Which of the watched numbers is none; empty when all are."""
    return next((f"{n} is {values[n]}" for n in WATCHED if not math.isfinite(values[n])), "")


def stopped(bad: Bad, more: str = "") -> UserError:
    return UserError(
        f"{bad.what} at step {bad.step}; lower learning_rate or lengthen warmup_steps."
        f" Checkpoints of earlier steps are good.{more}"
    )
