"""Which faults happen to whom and when: everything about a schedule follows from its seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from slicewise.errors import UserError, did_you_mean
from slicewise.launch.targets.local import ClusterShape
from slicewise.train.injection import Fault, Kind, Moment

KINDS: tuple[Kind, ...] = ("kill", "stop", "exception", "terminate", "corrupt", "disk-full")
MOMENTS: tuple[Moment, ...] = ("imports", "compile", "step", "save", "restore", "finish")
MOST_FAULTS = 2  # of a schedule, beside one that makes a restore possible
# Longest time from reaching a moment to the fault. Those that only a trainer can do to itself come at once.
DELAY_S: dict[Moment, float] = {
    "imports": 0.4,
    "compile": 0.4,
    "step": 0.01,
    "save": 0.06,
    "restore": 0.2,
    "finish": 0.2,
}
_OUTSIDE = ("kill", "stop", "terminate")  # what also happens to the process that started the trainers


@dataclass(frozen=True)
class Schedule:
    seed: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return ", then ".join(map(describe, self.faults))


def describe(fault: Fault) -> str:
    at = f"{WORDS[fault.moment]} {fault.step}" if fault.moment in ("step", "save") else WORDS[fault.moment]
    return f"{fault.kind} {who(fault)} {at}"


WORDS: dict[Moment, str] = {"imports": "at start-up", "compile": "compiling", "step": "in step",
                            "save": "saving step", "restore": "restoring", "finish": "at the end"}  # fmt: skip


def who(fault: Fault) -> str:
    if not fault.ranks:
        return "supervisor"
    if len(fault.ranks) == 1:
        return f"rank {fault.ranks[0]}"
    return f"ranks {fault.ranks[0]}-{fault.ranks[-1]}"


def parse_kinds(text: str) -> tuple[Kind, ...]:
    """``kill,stop``. Raises UserError for an unknown word."""
    found: list[Kind] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        kind = next((k for k in KINDS if k == word), None)
        if kind is None:
            raise UserError(
                f"--faults {word!r}: expected some of {', '.join(KINDS)}.{did_you_mean(word, KINDS)}"
            )
        found.append(kind)
    if not found:
        raise UserError(f"--faults names none: expected some of {', '.join(KINDS)}.")
    return tuple(dict.fromkeys(found))


def make(seed: int, kinds: Sequence[Kind], shape: ClusterShape, *, steps: int, every: int) -> Schedule:
    """One to three faults, each in an attempt of its own; ``every``: steps between checkpoints."""
    chosen = random.Random(seed)
    faults: list[Fault] = []
    for _ in range(chosen.randint(1, MOST_FAULTS)):
        kind = chosen.choice(kinds)
        needs_checkpoint = kind == "corrupt"
        moment = chosen.choice(("step", "finish", "restore") if needs_checkpoint else MOMENTS)
        if moment == "restore" and not faults:  # there is nothing to restore before a first fault
            after = chosen.randint(min(every + 2, steps), steps)
            faults.append(Fault(1, "kill", (chosen.randrange(shape.processes),), "step", after))
        lowest = min(every + 2, steps) if needs_checkpoint else 1
        faults.append(
            Fault(
                attempt=len(faults) + 1,
                kind=kind,
                ranks=_ranks(chosen, kind, shape),
                moment=moment,
                step=_step(chosen, moment, lowest, steps, every),
                delay_s=round(chosen.uniform(0, DELAY_S[moment]), 4) if kind in _OUTSIDE else 0.0,
                seed=chosen.randrange(2**31),
            )
        )
    return Schedule(seed, tuple(faults))


def matrix(shape: ClusterShape, *, steps: int, every: int, seed: int) -> list[Schedule]:
    """One schedule for each kind, victim and moment that go together, with seeds from ``seed`` on."""
    other = shape.processes - 1
    first = other - other % shape.hosts_per_slice
    victims = {(0,): None, (other,): None, tuple(range(first, other + 1)): None, (): None}
    made: list[Schedule] = []
    for kind in KINDS:
        for ranks in victims:
            for moment in MOMENTS:
                if not ranks and kind not in _OUTSIDE:
                    continue
                if kind == "corrupt" and (moment in ("imports", "compile") or len(ranks) > 1):
                    continue
                made.append(_cell(kind, ranks, moment, steps, every, seed + len(made)))
    return made


def _cell(kind: Kind, ranks: tuple[int, ...], moment: Moment, steps: int, every: int, seed: int) -> Schedule:
    chosen = random.Random(seed)
    # The third save waits for the second: so late, there are two whole checkpoints to restore or to damage.
    late = min(3 * every + 1, steps)
    before = [Fault(1, "kill", (0,), "step", late)] if moment == "restore" else []
    step = {"step": late if kind == "corrupt" else every + 2, "save": 3 * every}.get(moment, 0)
    delay_s = round(chosen.uniform(0, DELAY_S[moment]), 4) if kind in _OUTSIDE else 0.0
    fault = Fault(len(before) + 1, kind, ranks, moment, step, delay_s, chosen.randrange(2**31))
    return Schedule(seed, (*before, fault))


def _step(chosen: random.Random, moment: Moment, lowest: int, steps: int, every: int) -> int:
    if moment == "step":
        return chosen.randint(lowest, steps)
    saves = [*range(every, steps, every), steps]
    return chosen.choice(saves) if moment == "save" else 0


def _ranks(chosen: random.Random, kind: Kind, shape: ClusterShape) -> tuple[int, ...]:
    """Rank 0, another rank, a whole slice, or nobody: the supervisor."""
    options: list[tuple[int, ...]] = [(0,)]
    if shape.processes > 1:
        options.append((chosen.randrange(1, shape.processes),))
    if shape.hosts_per_slice > 1 and kind != "corrupt":
        first = chosen.randrange(shape.slices) * shape.hosts_per_slice
        options.append(tuple(range(first, first + shape.hosts_per_slice)))
    if kind in _OUTSIDE:
        options.append(())
    return chosen.choice(options)
