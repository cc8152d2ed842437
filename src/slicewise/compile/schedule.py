"""Replays a scheduled program on the resources of a device: when each instruction runs, what waits for what.

One clock for the core, which takes instructions in the order of the schedule, and one for each resource that works
beside it: the directions of the ICI axes, the data-centre network, the link to the host, the SparseCores, the copies
between memories. An asynchronous start reserves its resources from now on; its done waits for the end, and what the
core waits is exposed.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field

from slicewise.compile.hlo import Computation, Instruction, Module, trip_count

CORE, COPY, DCN, SPARSECORE = "core", "copies", "dcn", "sparsecore"
HOST = "host"  # label of its copies; each direction of the link is a resource
TO_HOST, FROM_HOST = "to host", "from host"
SHARED = frozenset({TO_HOST, FROM_HOST})  # links whose transfers run at once, each at its share of the rate
STEADY = 1e-12  # s: a round of a loop that starts like the one before it takes as long
SHOWN_ROUNDS = 2  # of a loop that are recorded one by one


@dataclass(frozen=True)
class Work:
    """What an instruction occupies: a synchronous one the core, and its resources too; a start only its resources."""

    kind: str  # of OpCost, 'collective', 'copy', 'host copy', 'offloaded', 'wait'
    seconds: float
    resources: tuple[str, ...] = ()
    label: str = ""  # of a collective: its axes
    bytes_: float = 0.0
    flops: float = 0.0
    is_start: bool = False
    estimated: bool = False
    op: str = ""  # of a collective, as in collectives.OPS


@dataclass(frozen=True)
class Span:
    """Something that occupies a track from ``start_s``."""

    track: str
    start_s: float
    seconds: float
    instruction: Instruction
    work: Work
    depth: int = 0


@dataclass
class Totals:
    """Sums over the whole program, by (kind, instruction) and by what was waited for."""

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)  # of the core: (kind, instruction)
    busy: dict[str, float] = field(default_factory=dict)  # of each resource
    communication: dict[str, float] = field(default_factory=dict)  # label -> seconds, hidden or not
    communication_bytes: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)  # label -> seconds that the core waited
    # Of that, by (instruction, whether it is synchronous).
    waited: dict[tuple[str, bool], float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)  # instruction -> FLOPs
    host_bytes: float = 0.0

    def add(self, other: "Totals", times: int) -> None:
        _add(self.seconds, other.seconds, times)
        _add(self.busy, other.busy, times)
        _add(self.communication, other.communication, times)
        _add(self.communication_bytes, other.communication_bytes, times)
        _add(self.exposed, other.exposed, times)
        _add(self.waited, other.waited, times)
        _add(self.flops, other.flops, times)
        self.host_bytes += times * other.host_bytes


def _add[K](mine: dict[K, float], theirs: Mapping[K, float], times: int) -> None:
    for key, value in theirs.items():
        mine[key] = mine.get(key, 0.0) + times * value


@dataclass(frozen=True)
class Replay:
    """The end of a program, the sums, and the spans of its first rounds."""

    seconds: float
    totals: Totals
    spans: tuple[Span, ...]


Describe = Callable[[Module, Computation, Instruction], Work | None]
"""What an instruction occupies; None for one that takes no time and that a done may look through."""


def replay(module: Module, describe: Describe) -> Replay:
    """The whole program, from an idle device."""
    player = _Player(module, describe)
    totals = player.run(module.entry, depth=0, record=True)
    return Replay(player.now_s, totals, tuple(player.spans))


@dataclass
class _Link:
    """Transfers that share a link evenly: seconds that each would still take alone, as of ``at_s``."""

    at_s: float = 0.0
    left_s: dict[str, float] = field(default_factory=dict)

    def advance(self, now_s: float) -> None:
        """To ``now_s``: every transfer goes on, those that end leave their share to the others."""
        while self.left_s and self.at_s < now_s:
            first_s = min(self.left_s.values())
            span_s = min(now_s - self.at_s, first_s * len(self.left_s))
            share_s = span_s / len(self.left_s)
            self.left_s = {n: left - share_s for n, left in self.left_s.items() if left - share_s > STEADY}
            self.at_s += span_s
        self.at_s = max(self.at_s, now_s)

    def start(self, name: str, seconds: float, now_s: float) -> None:
        self.advance(now_s)
        self.left_s[name] = self.left_s.get(name, 0.0) + seconds

    def end_s(self, name: str, now_s: float) -> float:
        """When ``name`` ends if nothing more is started."""
        self.advance(now_s)
        mine = self.left_s.get(name, 0.0)
        return now_s + sum(min(left, mine) for left in self.left_s.values())


class _Player:
    """``now_s`` is the core's clock; ``free`` when each resource is free; ``pending`` the ends of what was started."""

    def __init__(self, module: Module, describe: Describe):
        self.module, self.describe = module, describe
        self.now_s = 0.0
        self.free: dict[str, float] = {}
        self.links = {name: _Link() for name in SHARED}
        self.pending: dict[str, tuple[float, Work]] = {}
        self.spans: list[Span] = []
        self._works: dict[str, Work | None] = {}
        self._trips: dict[str, int] = {}

    def run(self, computation: Computation, *, depth: int, record: bool) -> Totals:
        totals = Totals()
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                self._loop(computation, instruction, totals, depth, record)
            elif instruction.opcode == "conditional":
                branch = max(
                    (self.module.computations[c] for c in instruction.called),
                    key=lambda c: len(c.instructions),
                )
                totals.add(self.run(branch, depth=depth, record=record), 1)
            elif instruction.opcode == "call":
                inner = self.module.computations[instruction.called[0]]
                totals.add(self.run(inner, depth=depth, record=record), 1)
            else:
                self._step(computation, instruction, totals, depth, record)
        return totals

    def _loop(self, caller: Computation, loop: Instruction, totals: Totals, depth: int, record: bool) -> None:
        if loop.name not in self._trips:
            self._trips[loop.name] = trip_count(self.module, caller, loop)
        rounds = self._trips[loop.name]
        body = self.module.computations[loop.attribute("body").lstrip("%")]
        begin_s, before = self.now_s, None
        for number in range(rounds):
            start_s, relative = self.now_s, self._relative()
            once = self.run(body, depth=depth + 1, record=record and number < SHOWN_ROUNDS)
            totals.add(once, 1)
            if before is not None and relative == before and number + 1 < rounds:
                left = rounds - number - 1  # all like this one
                totals.add(once, left)
                self._skip(left * (self.now_s - start_s))
                break
            before = relative
        if record:
            work = Work("loop", self.now_s - begin_s, label=f"{rounds} rounds")
            self.spans.append(Span("loops", begin_s, self.now_s - begin_s, loop, work, depth))

    def _relative(self) -> tuple:
        """The state that decides how the next round goes, as seen from now."""
        ahead = sorted((r, round((t - self.now_s) / STEADY)) for r, t in self.free.items() if t > self.now_s)
        for resource, link in self.links.items():
            link.advance(self.now_s)
            ahead += sorted((f"{resource} {n}", round(left / STEADY)) for n, left in link.left_s.items())
        return tuple(ahead), tuple(
            sorted(
                (name, round((end - self.now_s) / STEADY))
                for name, (end, _) in self.pending.items()
                if end > self.now_s
            )
        )

    def _skip(self, seconds: float) -> None:
        was_s = self.now_s
        self.now_s += seconds
        for link in self.links.values():
            link.at_s += seconds
        for resource, end_s in self.free.items():
            if end_s > was_s:
                self.free[resource] = end_s + seconds
        self.pending = {n: (e + seconds if e > was_s else e, w) for n, (e, w) in self.pending.items()}

    def _step(
        self, computation: Computation, i: Instruction, totals: Totals, depth: int, record: bool
    ) -> None:
        started = self._done_of(computation, i)
        if started is not None:
            self._wait(i, started, totals, depth, record)
            return
        if i.name not in self._works:
            self._works[i.name] = self.describe(self.module, computation, i)
        work = self._works[i.name]
        if work is None:
            return
        shared = [r for r in work.resources if r in SHARED]
        begin_s = max([self.now_s, *(self.free.get(r, 0.0) for r in work.resources)])
        end_s = begin_s + work.seconds
        for resource in shared:
            self.links[resource].start(i.name, work.seconds, self.now_s)
            end_s = self.links[resource].end_s(i.name, self.now_s)
        for resource in work.resources:
            if resource not in SHARED:
                self.free[resource] = end_s
            totals.busy[resource] = totals.busy.get(resource, 0.0) + work.seconds
            if record:
                self.spans.append(Span(resource, begin_s, end_s - begin_s, i, work, depth))
        if work.kind in ("collective", "host copy"):
            totals.communication[work.label] = totals.communication.get(work.label, 0.0) + work.seconds
            totals.communication_bytes[work.label] = (
                totals.communication_bytes.get(work.label, 0.0) + work.bytes_
            )
        if work.kind == "host copy":
            totals.host_bytes += work.bytes_
        if work.is_start:
            self.pending[i.name] = (end_s, work)
            return
        taken_s = end_s - self.now_s
        if work.kind == "collective" or work.resources:
            _expose(totals, work.label, taken_s, (i.name, True))
        else:
            key = (work.kind, i.name)
            totals.seconds[key] = totals.seconds.get(key, 0.0) + taken_s
            totals.busy[CORE] = totals.busy.get(CORE, 0.0) + taken_s
            totals.flops[i.name] = totals.flops.get(i.name, 0.0) + work.flops
        if record and taken_s > 0:
            self.spans.append(Span(CORE, self.now_s, taken_s, i, work, depth))
        self.now_s = end_s

    def _wait(self, i: Instruction, name: str, totals: Totals, depth: int, record: bool) -> None:
        end_s, work = self.pending.pop(name, (0.0, None))
        for resource in work.resources if work else ():
            if resource in SHARED:  # what was started since then has slowed it down
                end_s = self.links[resource].end_s(name, self.now_s)
        waited_s = end_s - self.now_s
        if work is None or waited_s <= 0:
            return
        label = work.label or work.kind
        _expose(totals, label, waited_s, (name, False))
        if record:
            wait = Work("wait", waited_s, label=label)
            self.spans.append(Span(CORE, self.now_s, waited_s, i, wait, depth))
        self.now_s = end_s

    def _done_of(self, computation: Computation, i: Instruction) -> str | None:
        """The pending start that ``i`` completes; None where it completes nothing."""
        return start_of(computation, i, self.pending) if is_done(self.module, i) else None


def start_of(computation: Computation, done: Instruction, pending: Container[str]) -> str:
    """Which of the ``pending`` starts ``done`` completes; empty where it is none of them."""
    for operand in done.operands:
        name: str | None = operand
        while name is not None:
            if name in pending:
                return name
            source = computation.instructions.get(name)
            through = source and source.opcode in ("get-tuple-element", "bitcast", "async-update", "fusion")
            name = source.operands[0] if source and through and source.operands else None
    return ""


def _expose(totals: Totals, label: str, seconds: float, by: tuple[str, bool]) -> None:
    totals.exposed[label] = totals.exposed.get(label, 0.0) + seconds
    totals.waited[by] = totals.waited.get(by, 0.0) + seconds


def is_done(module: Module, i: Instruction) -> bool:
    """Whether ``i`` is the end of something started before."""
    if i.opcode.endswith("-done"):
        return True
    if i.opcode != "fusion" or "kCustom" not in i.attributes:
        return False
    return any(j.attribute("custom_call_target") == '"AsyncCollectiveDone"' for j in _calls(module, i))


def is_start(module: Module, i: Instruction) -> bool:
    """Whether ``i`` only begins something."""
    if i.opcode.endswith("-start") or i.opcode in ("send", "recv"):
        return True
    if i.opcode != "fusion" or "kCustom" not in i.attributes:
        return False
    return any(j.attribute("custom_call_target") == '"AsyncCollectiveStart"' for j in _calls(module, i))


def _calls(module: Module, i: Instruction) -> Iterator[Instruction]:
    for name in i.called:
        for j in module.computations[name].instructions.values():
            if j.opcode == "custom-call":
                yield j
