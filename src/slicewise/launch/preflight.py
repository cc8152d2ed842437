"""Before a run: what every worker says of itself, what it should have said, and how fast the networks are."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import resources
from typing import Any

from slicewise.catalog import chips
from slicewise.errors import UserError
from slicewise.launch.output import LineReader
from slicewise.launch.runner.fleet import Fleet, Start
from slicewise.launch.runner.members import Member, State, names
from slicewise.launch.workers import Worker

MARK = "slicewise-preflight "
LIMIT_S = 240.0  # for all of it; joining a cluster that is not complete takes JAX a minute
MEET_S = 30.0
MAX_SKEW_S = 1.0  # more makes logs and file times of different workers misleading
_EXCHANGES, _EXCHANGE_S = 4, 0.1


@dataclass(frozen=True)
class Expectations:
    """What every worker should have; None where most of them decide. ``chip`` is a name of the catalog."""

    chip: str | None = None
    devices: int | None = None
    checkpoint: str | None = None
    min_free_bytes: float = 5e9
    python: str = "python3"

    def check(self) -> None:
        """Raises UserError for an unknown chip, or numbers that no worker can have."""
        if self.chip is not None and not chips.load(self.chip).jax_device_kinds:
            raise UserError(f"--chip {self.chip}: it is not known what JAX calls it. Leave --chip out.")
        if self.devices is not None and self.devices < 1:
            raise UserError(f"--devices {self.devices}: expected 1 or more.")
        if not self.min_free_bytes >= 0:
            raise UserError(f"--min-free {self.min_free_bytes / 1e9:g}: expected 0 GB or more.")


@dataclass(frozen=True)
class Answer:
    """Of one worker. ``ahead_s`` is its clock's lead over ours, right to half of ``round_trip_s``."""

    worker: Worker
    ahead_s: float
    round_trip_s: float
    host: Mapping[str, Any] = field(default_factory=dict)
    network: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, Any] = field(default_factory=dict)
    ending: str = ""  # how its preflight ended, when not well
    tail: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    answers: Sequence[Answer]
    problems: Sequence[str]  # each names a worker and what it should have been

    def as_json(self) -> str:
        return json.dumps({"problems": self.problems, "workers": [asdict(a) for a in self.answers]}, indent=1)

    def table(self) -> list[str]:
        """What holds for the workers together, a line each."""
        return list(_summary(self.answers))


class _Ears:
    """Collects what the preflight of each worker prints."""

    def __init__(self, members: Sequence[Member]):
        self.heard: dict[int, dict[str, Any]] = {member.index: {} for member in members}
        self._readers = {member.index: LineReader() for member in members}
        self.changed = asyncio.Event()

    def on_output(self, member: Member, there_s: float, data: bytes) -> None:
        for line in self._readers[member.index].feed(data):
            if line.startswith(MARK):
                self.heard[member.index].update(json.loads(line[len(MARK) :]))

    def on_event(self, member: Member, there_s: float, data: bytes) -> None:
        pass

    def on_change(self, member: Member) -> None:
        self.changed.set()

    def tail(self, member: Member) -> list[str]:
        return [line for line in self._readers[member.index].tail if not line.startswith(MARK)]


async def check(
    fleet: Fleet, expected: Expectations, environment: Callable[[Member], Mapping[str, str]], directory: str
) -> Report:
    """Runs slicewise.train.preflight on every worker, and judges."""
    for _ in range(_EXCHANGES):
        for member in fleet.members:
            if member.link:
                member.link.send(b"P", time.time())
        await asyncio.sleep(_EXCHANGE_S)
    order = {"checkpoint": expected.checkpoint, "run": fleet.run_id, "wait_s": MEET_S}
    source = resources.files("slicewise.train").joinpath("preflight.py").read_text()
    program = "{slicewise:RUN}/{slicewise:PLACE}-preflight.py"
    ears = _Ears(fleet.members)
    start = Start(
        "preflight",
        [expected.python, program, json.dumps(order)],
        directory,
        environment,
        {"preflight.py": source},
    )
    fleet.start(start, ears)
    late = await _until_ended(fleet, ears)
    answers = [_answer(member, ears, member in late) for member in fleet.members]
    return Report(answers, problems(answers, expected))


async def _until_ended(fleet: Fleet, ears: _Ears) -> list[Member]:
    """Waits for all; after LIMIT_S kills, and returns those that had to be."""
    late: list[Member] = []
    for limit_s in (LIMIT_S, 15.0):
        try:
            async with asyncio.timeout(limit_s):
                while not all(member.ended for member in fleet.members):
                    await ears.changed.wait()
                    ears.changed.clear()
            break
        except TimeoutError:
            late = late or [member for member in fleet.members if not member.ended]
            fleet.signal(0)
    return late


def _answer(member: Member, ears: _Ears, late: bool) -> Answer:
    said = ears.heard[member.index]
    ending = f"gave no answer within {LIMIT_S:g} s" if late else ""
    if not late and member.state != State.DONE:
        ending = member.ending
    return Answer(
        member.worker,
        member.clock.ahead_s,
        member.clock.round_trip_s,
        said.get("host", {}),
        said.get("network", {}),
        said.get("devices", {}),
        ending,
        ears.tail(member)[-5:] if ending else [],
    )


# ---------------------------------------------------------------- judging


def problems(answers: Sequence[Answer], expected: Expectations) -> list[str]:
    """One line for each thing that is wrong, with its workers: what it is, and what it should have been."""
    found: dict[str, list[Answer]] = {}
    for answer in answers:
        for text in _own_problems(answer, expected):
            found.setdefault(text, []).append(answer)
    compared: list[tuple[str, Callable[[Answer], Any], Any]] = [
        ("devices", lambda a: a.devices.get("count"), expected.devices)
    ]
    if expected.chip is None:
        compared.append(("chip", lambda a: a.devices.get("kind"), None))
    for package in sorted({p for a in answers for p in a.host.get("versions", {})}):
        compared.append((f"version of {package}", partial(_version, package), None))
    for what, get, should in compared:
        for answer, text in _odd(answers, what, get, should):
            found.setdefault(text, []).append(answer)
    return [f"{names(group)} ({group[0].worker.host}): {text}" for text, group in found.items()]


def _version(package: str, answer: Answer) -> str | None:
    return answer.host["versions"].get(package, "absent") if answer.host else None


def _own_problems(answer: Answer, expected: Expectations) -> Iterator[str]:
    if answer.ending:
        yield f"preflight {answer.ending}" + "".join(f"\n  {line}" for line in answer.tail)
    kinds = chips.load(expected.chip).jax_device_kinds if expected.chip else ()
    if expected.chip and "kind" in answer.devices and answer.devices["kind"] not in kinds:
        yield f"chip is {answer.devices['kind']!r}, should be {expected.chip} ({' or '.join(kinds)})"
    skew_s = abs(answer.ahead_s) - answer.round_trip_s / 2
    if skew_s > MAX_SKEW_S:
        way = "ahead of" if answer.ahead_s > 0 else "behind"
        yield f"its clock is {abs(answer.ahead_s):.1f} s {way} ours, should be within {MAX_SKEW_S:g} s"
    for path, free in answer.host.get("free_bytes", {}).items():
        if free < expected.min_free_bytes:
            yield f"{path} has {free / 1e9:.1f} GB free, should have {expected.min_free_bytes / 1e9:g} GB"
    if holders := answer.host.get("holders"):
        yield f"its accelerators are held by pid {', '.join(map(str, holders))}, should be free; end that process"
    if problem := answer.network.get("coordinator"):
        yield f"coordinator: {problem}"
    if problem := answer.network.get("checkpoint"):
        yield f"checkpoint path {expected.checkpoint}: {problem}; should be one folder that all workers share"
    if problem := answer.devices.get("problem"):
        yield f"devices: {problem}"
        return
    slices, own = answer.devices.get("slices", []), answer.worker.slice_index
    if slices not in ([], [own]) and answer.devices.get("platform") != "cpu":  # which does not know its slice
        yield f"its devices are of slice {', '.join(map(str, slices))}, should be of slice {own}"


def _odd(
    answers: Sequence[Answer], what: str, get: Callable[[Answer], Any], should: Any
) -> Iterator[tuple[Answer, str]]:
    """Workers whose value is not ``should``, or where that is None, not that of most workers."""
    values = [(answer, get(answer)) for answer in answers if get(answer) is not None]
    if not values:
        return
    because = ""
    if should is None:  # of two equally frequent ones that of the earlier worker
        should, count = Counter(value for _, value in values).most_common(1)[0]
        because = f", as on {count} of {len(values)} workers"
    for answer, value in values:
        if value != should:
            yield answer, f"{what} is {value}, should be {should}{because}"


def _summary(answers: Sequence[Answer]) -> Iterator[str]:
    counted = Counter((a.devices["count"], a.devices["kind"]) for a in answers if a.devices.get("count"))
    if counted:
        shown = "; ".join(f"{n} workers: {count} x {kind}" for (count, kind), n in counted.most_common())
        yield f"devices    {shown}"
    versions = Counter(
        ", ".join(f"{k} {v}" for k, v in a.host["versions"].items())
        for a in answers
        if a.host.get("versions")
    )
    yield from (f"versions   {n} workers: {text}" for text, n in versions.most_common())
    ahead = [a.ahead_s for a in answers]
    error_s = max(a.round_trip_s for a in answers) / 2
    yield f"clocks     {1e3 * min(ahead):+.1f} to {1e3 * max(ahead):+.1f} ms from ours, +-{1e3 * error_s:.1f} ms"
    free = [size for a in answers for size in a.host.get("free_bytes", {}).values()]
    if free:
        yield f"free disk  {min(free) / 1e9:,.1f} GB at least"
    reached = sum(1 for a in answers if a.network and not a.network["coordinator"])
    yield f"network    {reached} of {len(answers)} workers met at the coordinator"
    for timed in next((a.devices["all_reduce"] for a in answers if a.devices.get("all_reduce")), []):
        n, size = timed["members"], timed["bytes"]
        rate = 2 * (n - 1) / n * size / timed["seconds"]  # what a ring moves through each link
        yield (
            f"all-reduce {timed['network']}, {n} devices, {size >> 20} MiB each: {1e3 * timed['seconds']:.2f} ms, "
            f"{rate / 1e9:.2f} GB/s a device"
        )
