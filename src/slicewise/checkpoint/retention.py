"""Which checkpoints may go: the newest stay, and for good one in every so many steps, and the best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True)
class Retention:
    newest: int
    """How many of the newest stay."""
    every: int = 0
    """The first at or after each multiple of so many steps stays for good; 0 = none."""
    best: int = 0
    """How many of those with the lowest loss stay; one without a loss is none of them."""

    def __post_init__(self) -> None:
        assert self.newest >= 1
        assert self.every >= 0
        assert self.best >= 0

    def to_delete(self, steps: Sequence[int], losses: Mapping[int, float]) -> list[int]:
        """Of the complete ``steps``; losses are of some of them."""
        ordered = sorted(steps)
        kept = set(ordered[-self.newest :])
        if self.every:
            first_of: dict[int, int] = {}
            for step in ordered:
                first_of.setdefault(step // self.every, step)
            kept |= {step for block, step in first_of.items() if block > 0}
        if self.best:
            known = sorted(
                (loss, step) for step, loss in losses.items() if step in ordered and isfinite(loss)
            )
            kept |= {step for _, step in known[: self.best]}
        return [step for step in ordered if step not in kept]
