"""Where the seconds of a run went, from its stamps (goodput_log). Integers throughout, so parts add up exactly.

A state lasts until the next stamp. Three rules say what a state alone cannot:
- steps after the one that a later start restored were taken again: lost work;
- steps that nobody saw the end of, since their trainer died, are lost for as long as they can have run, which is the
  interval between two stamps of steps and one more step; the rest is the time until somebody noticed;
- what a start does before it trains is "init" for the first start and "restart" for all others.
Time after "done" is not the run's, until the next start.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slicewise.errors import ExitCode, UserError
from slicewise.train.goodput_log import BEGIN, FILE, FLUSH_US

CATEGORIES = {
    "step": "training",
    "data": "waiting for data",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "init": "initialisation",
    "compile": "compiling",
    "restore": "restoring",
    "lost": "lost work",
    "restart": "restarting",
    "waiting": "waiting for capacity",
    "end": "ending",
}
_CATEGORY_OF = {"save": "checkpoint", "evaluate": "evaluation", "compile": "compile", "restore": "restore",
                "finish": "end", "wait": "waiting"}  # fmt: skip
PHASES = ("detect", "stop", "delay", "wait", "start", "imports", "join", "restore", "compile", "prepare",
          "first step")  # fmt: skip
STATES = {"start", "stop", "delay", "wait", "done", "imports", "join", "restore", "compile", "prepare", "step",
          "save", "evaluate", "finish"}  # fmt: skip
_MOST = 1 << 53  # of microseconds that is 285 years: a larger number is a damaged one


@dataclass(frozen=True)
class Stamp:
    at_us: int
    by: str
    start: str
    state: str
    step: int | None = None
    data_us: int = 0
    from_step: int | None = None


@dataclass(frozen=True)
class Segment:
    """What the run did from ``begin_us`` to ``end_us``. ``start`` counts starts from 0."""

    begin_us: int
    end_us: int
    category: str
    phase: str  # the state, for the breakdown of restarts
    start: int
    steps: tuple[int, int] | None = None  # first and last step that were finished in it

    @property
    def duration_us(self) -> int:
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class Restart:
    """From the end of training in one start to the end of the first step in a later one."""

    start: int  # that trains again, counted from 0
    starts: int  # how many it took
    from_step: int | None  # that it resumed from; None: from the beginning
    phases_us: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_us(self) -> int:
        return sum(self.phases_us.values())


@dataclass(frozen=True)
class Account:
    """``parts_us`` has every category and adds up to ``wall_us``."""

    wall_us: int
    parts_us: Mapping[str, int]
    starts: int
    steps: int  # the last that was finished
    lost_steps: int
    restarts: tuple[Restart, ...]
    segments: tuple[Segment, ...]

    @property
    def goodput(self) -> float:
        """Share of the wall time that was training which was not lost, 0 to 1."""
        return self.parts_us["step"] / self.wall_us if self.wall_us else 0.0


def read(directory: Path) -> list[Stamp]:
    """The stamps of the run in ``directory``; what was cut off is passed over.

    Raises UserError when there are none.
    """
    path = directory / FILE
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{path} does not exist: expected the folder of a run that was started, such as runs/demo.",
            code=ExitCode.NOT_FOUND,
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.", code=ExitCode.INTERNAL) from error
    stamps = list(parse(data.decode("utf-8", "replace").splitlines()))
    if not stamps:
        raise UserError(f"{path} holds no stamp: expected lines that begin with {BEGIN}.")
    return stamps


def parse(lines: Iterable[str]) -> Iterator[Stamp]:
    for line in lines:
        begin = line.rfind(BEGIN)
        if begin < 0:
            continue
        try:
            found = _stamp(json.loads(line[begin:]))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue
        numbers = (abs(found.at_us), found.data_us, found.step or 0, found.from_step or 0)
        if found.state in STATES and all(0 <= number < _MOST for number in numbers):
            yield found


def _stamp(raw: Mapping[str, Any]) -> Stamp:
    step, from_step = raw.get("step"), raw.get("from")
    return Stamp(
        int(raw["at"]),
        str(raw["by"]),
        str(raw["start"]),
        str(raw["state"]),
        None if step is None else int(step),
        max(0, int(raw.get("data_us", 0))),
        None if from_step is None else int(from_step),
    )


def account(stamps: Iterable[Stamp]) -> Account:
    """Whatever the stamps, every microsecond from the first to the last is in one segment, or after a "done"."""
    valid = list(_in_order(stamps))
    numbers: dict[str, int] = {}
    for stamp in valid:
        numbers.setdefault(stamp.start, len(numbers))
    segments = [s for s in _segments(valid, numbers) if s.duration_us or s.steps]
    resumed = [(s.at_us, s.from_step) for s in valid if s.from_step is not None]
    firsts: dict[int, int] = {}
    for s in valid:
        if s.from_step is not None:
            firsts.setdefault(numbers[s.start], s.from_step)
    restarts = tuple(_restarts(segments, firsts))
    segments, lost_steps = _lost(segments, resumed)
    parts = dict.fromkeys(CATEGORIES, 0)
    for segment in segments:
        parts[segment.category] += segment.duration_us
    return Account(
        wall_us=sum(segment.duration_us for segment in segments),
        parts_us=parts,
        starts=len(numbers),
        steps=max((s.steps[1] for s in segments if s.steps), default=max(firsts.values(), default=0)),
        lost_steps=lost_steps,
        restarts=restarts,
        segments=tuple(segments),
    )


def _in_order(stamps: Iterable[Stamp]) -> Iterator[Stamp]:
    """Without trainers that go on after their start has ended, and with clocks that never go back."""
    over: set[str] = set()
    current, at_us = "", 0
    for stamp in stamps:
        if stamp.by == "trainer" and stamp.start in over:
            continue
        if stamp.start != current:
            over.add(current)
            current = stamp.start
        if stamp.by == "launcher" and stamp.state != "start":
            over.add(stamp.start)
        at_us = max(at_us, stamp.at_us)
        yield replace(stamp, at_us=at_us)


def _segments(stamps: list[Stamp], numbers: Mapping[str, int]) -> Iterator[Segment]:
    launched = {stamp.start for stamp in stamps if stamp.by == "launcher"}
    step_us: dict[str, int] = {}  # the longest so far, by start
    finished: dict[str, int] = {}
    for one, then in itertools.pairwise(stamps):
        start, begin, end = numbers[one.start], one.at_us, then.at_us
        if one.from_step is not None:
            finished[one.start] = one.from_step
        state = one.state
        if one.by == "trainer" and one.start in launched:  # its launcher has the last word
            state = {"wait": "stop", "done": "finish"}.get(state, state)
        if state == "done":
            continue
        if state != "step":
            yield Segment(begin, end, _category(state, start), state, start)
        elif then.start == one.start and then.by == "trainer" and then.state != "wait":
            last = finished.get(one.start, 0) if then.step is None else then.step
            first = finished.get(one.start, last - 1) + 1
            waited_us = min(then.data_us, end - begin)
            if last >= first:
                step_us[one.start] = max(step_us.get(one.start, 0), (end - begin) // (last - first + 1))
            phase = "step" if one.from_step is None else "first step"
            steps = (first, last) if last >= first else None
            yield Segment(begin, begin + waited_us, "data", phase, start)
            yield Segment(begin + waited_us, end, "step", phase, start, steps)
            finished[one.start] = last
        else:  # nobody saw these steps end
            ran_us = FLUSH_US + step_us[one.start] if one.start in step_us else end - begin
            cut = min(end, begin + ran_us)
            yield Segment(begin, cut, "lost", "step", start)
            if then.start == one.start:
                yield Segment(cut, end, "restart", "detect", start)
            else:
                yield Segment(cut, end, "waiting", "wait", start)


def _category(state: str, start: int) -> str:
    return _CATEGORY_OF.get(state, "restart" if start or state in ("stop", "delay") else "init")


def _lost(segments: list[Segment], resumed: list[tuple[int, int]]) -> tuple[list[Segment], int]:
    """Marks the work that was taken again; how many steps that is. ``resumed``: when, and from which step."""
    kept: list[Segment] = []
    lost = 0
    limits = _limits(segments, resumed)
    for k, (segment, limit) in enumerate(zip(segments, limits, strict=True)):
        waited = segment.category == "data" and k + 1 < len(segments)
        work = segments[k + 1] if waited else segment  # what it waited for
        if limit is None or work.steps is None or work.steps[1] <= limit:
            kept.append(segment)
            continue
        first, last = work.steps
        again = last - max(limit, first - 1)
        if segment is not work:
            kept.append(replace(segment, category="lost") if again == last - first + 1 else segment)
            continue
        lost += again
        cut = segment.end_us - segment.duration_us * again // (last - first + 1)
        if again <= last - first:
            kept.append(replace(segment, end_us=cut, steps=(first, limit)))
        kept.append(replace(segment, begin_us=cut, category="lost", steps=(last - again + 1, last)))
    return kept, lost


def _limits(segments: list[Segment], resumed: list[tuple[int, int]]) -> list[int | None]:
    """For each segment the lowest step that the run went on from after it."""
    later, lowest, limits = list(resumed), None, []
    for segment in reversed(segments):
        while later and later[-1][0] >= segment.end_us:
            step = later.pop()[1]
            lowest = step if lowest is None else min(lowest, step)
        limits.append(lowest)
    return limits[::-1]


def _restarts(segments: list[Segment], resumed: Mapping[int, int]) -> Iterator[Restart]:
    """Outages of training. One that no step has ended yet is none."""
    phases: dict[str, int] = {}
    broken: int | None = None  # the start whose end began the outage
    for segment, following in itertools.pairwise([*segments, None]):
        assert segment is not None
        ends = following is not None and following.start != segment.start
        if broken is None and (segment.phase in ("detect", "stop", "delay", "wait") or ends):
            broken = segment.start
            if segment.category in ("step", "lost", "data"):
                continue
        if broken is None:
            continue
        if segment.phase in PHASES:
            phases[segment.phase] = phases.get(segment.phase, 0) + segment.duration_us
        if segment.phase == "first step" and segment.category == "step" and segment.start > broken:
            ordered = {name: phases[name] for name in PHASES if name in phases}
            yield Restart(segment.start, segment.start - broken, resumed.get(segment.start) or None, ordered)
            phases, broken = {}, None
