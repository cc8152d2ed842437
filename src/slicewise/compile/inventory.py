"""Which collectives a compiled program does, one by one, and the same in terms of those that the planner prices."""

from collections.abc import Iterable, Iterator
from typing import Literal, cast

from slicewise.compile.collectives import OPS
from slicewise.compile.hlo import Computation, Instruction, Module, trip_count
from slicewise.compile.schedule import Describe, is_done
from slicewise.costs.communication import Sent
from slicewise.costs.network import Op

# What is smaller is no part of a price: scalars, sums of norms' gradients and of the loss, numbers of segments.
SMALL_BYTES = 2**17
Kind = tuple[
    str, Literal["ici", "dcn"], frozenset[str]
]  # gather, scatter, exchange or permute; network; axes


def by_kind(collectives: Iterable[Sent]) -> dict[Kind, float]:
    """Bytes that a device sends by kind.

    An all-reduce counts as a scatter and a gather, each of half its bytes. That is how it runs on a torus, and
    compilers take one for the other: a reduce-scatter along a dim that does not fall into tiles becomes an all-reduce
    of which each device keeps its part, which then shows as a gather too many.
    """
    sums: dict[Kind, float] = {}
    for c in collectives:
        for name, share in _KINDS[c.op]:
            kind = (name, c.network, c.axes)
            sums[kind] = sums.get(kind, 0.0) + share * c.sent_bytes
    return sums


_KINDS = {
    "all-gather": (("gather", 1.0),),
    "reduce-scatter": (("scatter", 1.0),),
    "all-reduce": (("scatter", 0.5), ("gather", 0.5)),
    "all-to-all": (("exchange", 1.0),),
    "collective-permute": (("permute", 1.0),),
}


def found_collectives(module: Module, describe: Describe) -> Iterator[tuple[int, Sent]]:
    """Those of all loops and branches, in the order of the schedule, each with how often a step does it."""
    yield from _within(module, module.entry, 1, describe)


def _within(
    module: Module, computation: Computation, times: int, describe: Describe
) -> Iterator[tuple[int, Sent]]:
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
                yield times, Sent(cast(Op, work.op), network, axes, work.bytes_)


def _may_move(i: Instruction) -> bool:
    """Whether ``i`` is of a kind that a collective may be part of."""
    is_plain = i.opcode.startswith((*OPS, "async-")) or i.opcode == "send"
    return is_plain or (i.opcode == "fusion" and "kCustom" in i.attributes)
