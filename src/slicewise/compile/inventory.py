"""Which collectives a compiled program does, one by one, and the same in terms of those that the planner prices."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from slicewise.compile.collectives import OPS
from slicewise.compile.hlo import Computation, Instruction, Module, trip_count
from slicewise.compile.schedule import Describe, is_done


@dataclass(frozen=True)
class Found:
    """One collective of a program. ``sent_bytes``: by each device, each of ``times`` a step."""

    op: str
    network: Literal["ici", "dcn"]
    axes: frozenset[str]
    sent_bytes: float
    times: int
    instruction: Instruction


# What is smaller is no part of a price: scalars, sums of norms' gradients and of the loss, numbers of segments.
SMALL_BYTES = 2**17
Kind = tuple[
    str, Literal["ici", "dcn"], frozenset[str]
]  # gather, scatter, exchange or permute; network; axes


def by_kind(sent: Iterable[tuple[str, Literal["ici", "dcn"], frozenset[str], float]]) -> dict[Kind, float]:
    """Bytes that a device sends by kind, of (collective, network, axes, bytes).

    An all-reduce counts as a scatter and a gather, each of half its bytes. That is how it runs on a torus, and
    compilers take one for the other: a reduce-scatter along a dim that does not fall into tiles becomes an all-reduce
    of which each device keeps its part, which then shows as a gather too many.
    """
    sums: dict[Kind, float] = {}
    for op, network, axes, bytes_ in sent:
        for name, share in _KINDS[op]:
            sums[name, network, axes] = sums.get((name, network, axes), 0.0) + share * bytes_
    return sums


_KINDS = {
    "all-gather": (("gather", 1.0),),
    "reduce-scatter": (("scatter", 1.0),),
    "all-reduce": (("scatter", 0.5), ("gather", 0.5)),
    "all-to-all": (("exchange", 1.0),),
    "collective-permute": (("permute", 1.0),),
}


def found_collectives(module: Module, describe: Describe) -> Iterator[Found]:
    """Those of all loops and branches, in the order of the schedule."""
    yield from _within(module, module.entry, 1, describe)


def _within(module: Module, computation: Computation, times: int, describe: Describe) -> Iterator[Found]:
    for i in computation.instructions.values():
        if i.opcode == "while":
            body = module.computations[i.attribute("body").lstrip("%")]
            yield from _within(module, body, times * trip_count(module, computation, i), describe)
        elif i.opcode in ("conditional", "call"):
            for name in i.called:
                yield from _within(module, module.computations[name], times, describe)
        elif _may_move(i) and not is_done(module, i):
            work = describe(module, computation, i)
            if work is not None and work.kind == "collective" and work.bytes_:
                network: Literal["ici", "dcn"] = "dcn" if work.label.startswith("dcn ") else "ici"
                axes = frozenset(work.label.removeprefix("dcn ").split(" x "))
                yield Found(work.op, network, axes, work.bytes_, times, i)


def _may_move(i: Instruction) -> bool:
    """Whether ``i`` is of a kind that a collective may be part of."""
    is_plain = i.opcode.startswith((*OPS, "async-")) or i.opcode == "send"
    return is_plain or (i.opcode == "fusion" and "kCustom" in i.attributes)
