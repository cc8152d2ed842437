"""How much of a program's communication its schedule could hide: a bound by the program's own dependencies.

A schedule puts a collective beside work that it neither waits for nor feeds. Within one computation (a round of a loop
over layers, or what stands outside of loops) that work is given by the graph of operands. Collectives that share a link
take turns, so no second of work hides two of them. What the best distribution of work over collectives covers is a
maximum flow. No schedule hides more; whether memory and the order allow as much, the bound does not ask.

Loops are borders: no program that the compiler made here has a collective of one computation beside a loop in it, or
across its rounds. To let a layer's weights travel beside the layer before is another program (layers_per_round).
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from slicewise.compile.hlo import Computation, Instruction, Module, trip_count
from slicewise.compile.schedule import Describe, Work, is_done, start_of


@dataclass(frozen=True)
class Hiding:
    """The transfers of one computation, over all its rounds of a step."""

    computation: str
    seconds: Mapping[str, float]  # of each, by the instruction that issues it
    most_s: Mapping[str, float]  # of these, what the best distribution of independent work covers
    ops: Mapping[str, str]
    waited_s: float  # by the core, in all

    @property
    def could_s(self) -> float:
        """What no schedule exceeds."""
        return sum(self.most_s.values())

    @property
    def hidden_s(self) -> float:
        """What this schedule hides of that."""
        return min(self.could_s, max(0.0, sum(self.seconds.values()) - self.waited_s))


def hiding(
    module: Module, describe: Describe, waited: Mapping[tuple[str, bool], float], kind: str = "collective"
) -> tuple[Hiding, ...]:
    """For each computation that has transfers of ``kind``; ``waited`` as the replay's totals have it."""
    rounds: dict[str, int] = {}
    for computation, times in _run(module, module.entry, 1):
        rounds[computation.name] = rounds.get(computation.name, 0) + times
    waits_s: dict[str, float] = {}
    for (name, _), seconds in waited.items():
        waits_s[name] = waits_s.get(name, 0.0) + seconds
    found = []
    for name, times in rounds.items():
        graph = _graph(module, describe, module.computations[name])
        moving = {n: w for n, w in graph.works.items() if w.kind == kind and w.seconds > 0}
        if moving:
            most_s = {n: times * seconds for n, seconds in _most(graph, moving).items()}
            seconds_of = {n: times * w.seconds for n, w in moving.items()}
            ops = {n: w.op for n, w in moving.items()}
            found.append(Hiding(name, seconds_of, most_s, ops, sum(waits_s.get(n, 0.0) for n in moving)))
    return tuple(found)


def _run(module: Module, computation: Computation, rounds: int) -> Iterator[tuple[Computation, int]]:
    """(computation, how often a step runs it), once for each place that runs it."""
    yield computation, rounds
    for i in computation.instructions.values():
        if i.opcode == "while":
            body = module.computations[i.attribute("body").lstrip("%")]
            yield from _run(module, body, rounds * trip_count(module, computation, i))
        elif i.opcode == "conditional":  # the longest, as the replay takes it
            branches = (module.computations[name] for name in i.called)
            yield from _run(module, max(branches, key=lambda c: len(c.instructions)), rounds)
        elif i.opcode == "call":
            yield from _run(module, module.computations[i.called[0]], rounds)


@dataclass
class _Graph:
    """Of a computation: what each instruction depends on, as bits, and what it occupies."""

    bits: dict[str, int] = field(default_factory=dict)  # of each instruction
    before: dict[str, int] = field(default_factory=dict)  # all that it depends on
    works: dict[str, Work] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)  # start -> its done


def _most(graph: _Graph, moving: Mapping[str, Work]) -> dict[str, float]:
    """Of each transfer the seconds that work of the core covers, where it covers the most in all."""
    work = {n: w.seconds for n, w in graph.works.items() if not w.resources}
    most_s: dict[str, float] = {}
    for names in _taking_turns(moving):
        # Work that the same transfers could be put beside is one node of the flow.
        pools: dict[tuple[str, ...], float] = {}
        for name, seconds in work.items():
            beside = tuple(n for n in names if _independent(graph, n, name))
            if beside:
                pools[beside] = pools.get(beside, 0.0) + seconds
        most_s |= covered({n: moving[n].seconds for n in names}, pools)
    return most_s


def _graph(module: Module, describe: Describe, computation: Computation) -> _Graph:
    graph = _Graph()
    recipients: dict[str, str] = {}  # rendezvous -> recv
    open_: dict[str, Instruction] = {}
    for number, i in enumerate(computation.instructions.values()):
        graph.bits[i.name] = 1 << number
        start = start_of(computation, i, open_) if is_done(module, i) else None
        if start:
            graph.ends[start] = i.name
            graph.before[i.name] = graph.before[start] | graph.bits[start]
            continue
        # What carries a transfer on while it computes reads its state, but waits for nothing.
        needed = [o for o in i.operands if o in graph.bits and _source(computation, o) not in open_]
        graph.before[i.name] = 0
        for o in needed:
            graph.before[i.name] |= graph.before[o] | graph.bits[o]
        if i.opcode in ("while", "conditional", "call"):
            continue
        work = describe(module, computation, i)
        if work is None:
            continue
        graph.works[i.name] = work
        if work.is_start:
            open_[i.name] = i
        if i.opcode == "recv":
            recipients[_rendezvous(i)] = i.name
    for i in open_.values():
        if i.opcode == "send" and (recv := recipients.get(_rendezvous(i))) in graph.ends:
            graph.ends[i.name] = graph.ends[recv]  # what it moves is there when that is done
    return graph


def _rendezvous(i: Instruction) -> str:
    """What a send and its recv have in common."""
    return i.attributes.partition("_xla_host_transfer_rendezvous=")[2].partition(",")[0]


def _source(computation: Computation, name: str) -> str:
    """Where the value comes from, through elements of tuples."""
    while (i := computation.instructions[name]).opcode in ("get-tuple-element", "bitcast") and i.operands:
        if i.operands[0] not in computation.instructions:
            break
        name = i.operands[0]
    return name


def _independent(graph: _Graph, transfer: str, name: str) -> bool:
    end = graph.ends.get(transfer, transfer)
    return not graph.before[transfer] & graph.bits[name] and not graph.before[name] & graph.bits[end]


def _taking_turns(moving: Mapping[str, Work]) -> list[tuple[str, ...]]:
    """Groups of collectives that share links, directly or by way of others."""
    groups: list[tuple[set[str], tuple[str, ...]]] = []
    for name, work in moving.items():
        links = set(work.resources)
        names: tuple[str, ...] = (name,)
        for group in [g for g in groups if g[0] & links]:
            groups.remove(group)
            links |= group[0]
            names = (*group[1], *names)
        groups.append((links, names))
    return [names for _, names in groups]


def covered(seconds: Mapping[str, float], pools: Mapping[tuple[str, ...], float]) -> dict[str, float]:
    """Of each transfer the seconds that work covers where it covers the most in all.

    ``pools`` are seconds of work by the transfers that it may cover. A maximum flow from pools to transfers: augmenting
    paths, the shortest first (Edmonds and Karp 1972).
    """
    left = dict(seconds)
    spare = dict(pools)
    flow: dict[tuple[tuple[str, ...], str], float] = {}
    least = 1e-9 * max(seconds.values(), default=0.0)
    while path := _path(left, spare, flow, least):
        pool, transfer = path[0][0], path[-1][1]
        # A step back takes from a pool what the step before it gives instead.
        amount = min(spare[pool], left[transfer], *(flow[p, t] for p, t in _taken(path)))
        spare[pool] -= amount
        left[transfer] -= amount
        for p, t in path:
            flow[p, t] = flow.get((p, t), 0.0) + amount
        for p, t in _taken(path):
            flow[p, t] -= amount
    return {name: s - left[name] for name, s in seconds.items()}


Path = list[tuple[tuple[str, ...], str]]


def _taken(path: Path) -> Path:
    """(pool, transfer) of which a path takes away: the next pool no longer covers the transfer before it."""
    return [(path[k + 1][0], path[k][1]) for k in range(len(path) - 1)]


def _path(
    left: Mapping[str, float],
    spare: Mapping[tuple[str, ...], float],
    flow: Mapping[tuple[tuple[str, ...], str], float],
    least: float,
) -> Path | None:
    """From a pool with spare work to a transfer that is not covered yet, as (pool, transfer) that it adds to."""
    queue: deque[Path] = deque()
    seen = {pool for pool, s in spare.items() if s > least}
    begin = list(seen)
    for pool in begin:
        for transfer in pool:
            queue.append([(pool, transfer)])
    visited: set[str] = set()
    while queue:
        path = queue.popleft()
        transfer = path[-1][1]
        if transfer in visited:
            continue
        visited.add(transfer)
        if left[transfer] > least:
            return path
        for pool in spare:
            if pool not in seen and flow.get((pool, transfer), 0.0) > least:
                seen.add(pool)
                queue.extend([*path, (pool, t)] for t in pool)
    return None
