"""Tries settings one after the other until time is up, and keeps the best: the search that both judges share."""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slicewise.config import RunConfig, with_overrides
from slicewise.kernels import tuned
from slicewise.kernels.tuned import Entry, Judge
from slicewise.tune.problems import Problem

GAIN = 0.005  # by which a step must be shorter for a change of flags or remat to stay: less is noise
DOES_NOT_FIT = "does not fit"
AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Trial:
    """One setting: how long a call or a step takes with it, or why it does not count."""

    of: str  # the kernel and its shape, 'compiler flags' or 'remat policy'
    setting: str
    seconds: float | None
    problem: str = ""
    note: str = ""  # such as the memory that a step takes
    is_accident: bool = False  # the problem says nothing of the setting: the next time it may go well

    @property
    def is_of_step(self) -> bool:
        return self.of in (AS_IT_IS, "remat policy", "compiler flags")

    @property
    def does_not_fit(self) -> bool:
        return self.problem == DOES_NOT_FIT

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.of, self.setting)))


@dataclass(frozen=True)
class Outcome:
    """``entries`` are what was put into your table, ``overrides`` what a config should change, ``skipped`` what was
    left when time was up. ``step_s`` is that of the config as it is, None where it does not fit, and with the
    overrides."""

    trials: tuple[Trial, ...]
    entries: tuple[Entry, ...]
    overrides: tuple[str, ...]
    step_s: tuple[float | None, float] | None
    skipped: int

    @property
    def failure(self) -> tuple[str, bool] | None:
        """Why the search says nothing, and whether by an accident: the step as it is was not judged, or nothing was."""
        first = next((t for t in self.trials if t.of == AS_IT_IS), None)
        if first is not None and first.seconds is None and not first.does_not_fit:
            said = f"the step as it is was not judged, so no other is compared with it: {first.problem}"
            return said, first.is_accident
        if not self.trials or any(t.seconds is not None for t in self.trials):
            return None
        shown = next((t for t in self.trials if t.is_accident), self.trials[0])
        said = f"no setting can be had of {len(self.trials)} that were tried"
        return f"{said}; {shown.name}: {shown.problem}", shown.is_accident


class Judged(Protocol):
    """Says how long things take; what is under way at ``until_s`` (of time.monotonic) may be cut short: OutOfTime."""

    @property
    def name(self) -> Judge: ...

    def kernel(self, problem: Problem, values: Mapping[str, int], until_s: float) -> tuple[float | None, str]:
        """(seconds, '') of one call, or (None, why it cannot be). Raises Accident."""

    def least_s(self, problem: Problem, values: Mapping[str, int]) -> float:
        """What ``kernel`` cannot be below, known without trying; 0 where nothing is known."""

    def step(self, config: RunConfig, until_s: float) -> tuple[float | None, str, str]:
        """(seconds, '', note) of a training step, or (None, why it cannot be, note): DOES_NOT_FIT where it is the
        memory. Raises Accident."""

    def is_over(self, is_over: bool) -> bool:
        """Whether the search ends, which all processes of a job must agree on."""


class OutOfTime(Exception):
    """The time that a search was given is over."""


class Accident(Exception):
    """A setting was not judged, for a reason that is not its own: a compiler that was killed, say."""


Progress = Callable[[int, int, str], None]
"""Called before each trial with how many are done, of how many, and what comes."""


class Search:
    """One search; ``run`` once. A judge that remembers lets the same search go on where an earlier one stopped."""

    def __init__(self, judge: Judged, seconds: float, progress: Progress = lambda done, of, what: None):
        self.judge, self.progress = judge, progress
        self.until_s = time.monotonic() + seconds
        self.trials: list[Trial] = []
        self.entries: list[Entry] = []
        self.done = self.total = 0

    def run(
        self,
        config: RunConfig,
        found: Sequence[Problem],
        flags: Sequence[tuple[str, tuple[str, ...]]],
        remat: Sequence[Mapping[str, str]],
    ) -> Outcome:
        """Kernels first: what they take decides what flags and rematerialisation are worth."""
        steps = len(flags) + len(remat)
        self.total = sum(len(p.candidates) for p in found) + (steps + 1 if steps else 0)
        overrides: tuple[str, ...] = ()
        times: tuple[float | None, float] | None = None
        try:
            for problem in found:
                self._kernel(problem)
            if steps:
                overrides, times = self._steps(config, flags, remat)
        except OutOfTime:
            pass
        return Outcome(
            tuple(self.trials), tuple(self.entries), overrides, times, max(0, self.total - self.done)
        )

    def _next(self, what: str) -> None:
        self.progress(self.done, self.total, what)
        if self.judge.is_over(time.monotonic() > self.until_s):
            raise OutOfTime
        self.done += 1

    def _judged[T](self, judge: Callable[[], T]) -> T:
        """What ``judge`` says; what is cut short for the time is left, as what was not begun."""
        try:
            return judge()
        except OutOfTime:
            self.done -= 1
            raise

    def _kernel(self, problem: Problem) -> None:
        """The fastest candidate goes into the table, also when time is over before all were tried. The rule's comes
        first, then the most promising; what cannot be faster than one before it is not tried."""
        tried: list[tuple[Mapping[str, int], float | None]] = []
        first, *others = problem.candidates
        others.sort(key=lambda v: self.judge.least_s(problem, v))
        try:
            for k, values in enumerate((first, *others)):
                best_s = min((s for _, s in tried if s is not None), default=math.inf)
                if self.judge.least_s(problem, values) >= best_s:
                    self.done += 1
                    continue
                setting = problem.shown(values)
                self._next(" ".join(filter(None, (problem.key.kernel, problem.part, setting))))
                try:
                    seconds, why = self._judged(
                        functools.partial(self.judge.kernel, problem, values, self.until_s)
                    )
                except Accident as e:
                    self.trials.append(Trial(problem.text, setting, None, str(e), is_accident=True))
                    if k == 0:  # what the others gain over the rule is not known then
                        self.done += len(others)
                        return
                    continue
                tried.append((values, seconds))
                self.trials.append(Trial(problem.text, setting, seconds, why))
        finally:
            self._keep(problem, tried)

    def _keep(self, problem: Problem, tried: list[tuple[Mapping[str, int], float | None]]) -> None:
        counting = [(seconds, values) for values, seconds in tried if seconds is not None]
        if not counting:
            return
        best_s, best = min(counting, key=lambda pair: pair[0])
        untuned_s, values, count = tried[0][1], dict(best), len(tried)
        other = next((e for e in self.entries if e.key == problem.key), None)
        if other is not None:  # the other pass of the same kernel
            values |= {n: v for n, v in other.values.items() if n not in problem.varying}
            best_s, count = best_s + other.seconds, count + other.tried
            untuned_s = _sum(untuned_s, other.untuned_seconds)
        entry = Entry(
            key=problem.key,
            values=values,
            versions=dict(tuned.versions()),
            judge=self.judge.name,
            seconds=best_s,
            untuned_seconds=untuned_s,
            tried=count,
        )
        self.entries = [e for e in self.entries if e.key != entry.key] + [entry]
        tuned.keep(entry)

    def _steps(
        self,
        config: RunConfig,
        flags: Sequence[tuple[str, tuple[str, ...]]],
        remat: Sequence[Mapping[str, str]],
    ) -> tuple[tuple[str, ...], tuple[float | None, float] | None]:
        """Greedily: each change stays that makes the step shorter, and the next one starts from there.

        Where the step as it is is not judged there is nothing to be shorter than, unless it is that it does not fit.
        """
        self._next("the step as it is")
        first_s = best_s = self._step(config, AS_IT_IS, "")
        if first_s is None and not self.trials[-1].does_not_fit:
            self.done = self.total
            return (), None
        changed: dict[str, str] = {}
        asked = config.compiler.compiler_flags
        try:
            for keys in remat:
                policy = keys["remat_policy"]
                self._next(f"remat policy {policy}")
                seconds = self._step(_with(config, {**changed, **keys}), "remat policy", policy)
                if _shorter(seconds, best_s):
                    best_s = seconds
                    changed |= keys
            for what, listed in flags:
                self._next(what)
                # What was put on or off before stays so.
                now = _merged(asked, listed, changed.get("compiler_flags"))
                seconds = self._step(
                    _with(config, {**changed, "compiler_flags": now}), "compiler flags", what
                )
                if _shorter(seconds, best_s):
                    best_s, changed["compiler_flags"] = seconds, now
        except OutOfTime:
            pass
        overrides = tuple(f"{key}={value}" for key, value in changed.items())
        return overrides, (first_s, best_s) if best_s is not None else None

    def _step(self, config: RunConfig, of: str, setting: str) -> float | None:
        try:
            seconds, why, note = self._judged(functools.partial(self.judge.step, config, self.until_s))
        except Accident as e:
            self.trials.append(Trial(of, setting, None, str(e), is_accident=True))
            return None
        self.trials.append(Trial(of, setting, seconds, why, note))
        return seconds


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _shorter(seconds: float | None, best_s: float | None) -> bool:
    return seconds is not None and (best_s is None or seconds < (1 - GAIN) * best_s)


def _with(config: RunConfig, changed: Mapping[str, str]) -> RunConfig:
    return with_overrides(config, [f"{key}={value}" for key, value in changed.items()])


def _merged(asked: Sequence[str], listed: Sequence[str], kept: str | None) -> str:
    """The flags ``listed``, a change of ``asked``, on top of those that earlier changes left."""
    if kept is None:
        return ",".join(listed)
    before = [f for f in kept.split(",") if f]
    removed = [f for f in asked if f not in listed]
    added = [f for f in listed if f not in asked]
    return ",".join([*(f for f in before if f not in removed), *(f for f in added if f not in before)])
