"""All that a training step communicates, as it is priced: by kind of collective, network and mesh axes."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from slicewise.costs.compute import Shard
from slicewise.costs.layout import Layout, Recipe
from slicewise.costs.network import Move, Op
from slicewise.costs.shapes import ModelShape
from slicewise.costs.step import at_ends_of, stage_moves
from slicewise.costs.traffic import end_moves, layer_moves


@dataclass(frozen=True)
class Sent:
    """A kind of collective over a set of axes, and the bytes that each device sends."""

    op: Op
    network: Literal["ici", "dcn"]
    axes: frozenset[str]
    sent_bytes: float


def priced_collectives(shape: ModelShape, layout: Layout, recipe: Recipe, seq: int) -> tuple[Sent, ...]:
    """What a step of one ``layout`` (no arrays) communicates in all, the most bytes first."""
    sums: dict[tuple[Op, Literal["ici", "dcn"], frozenset[str]], float] = {}
    for move, times in step_moves(shape, layout, recipe, seq):
        axes = frozenset(axis for axis, degree in move.degrees.items() if degree > 1)
        sent = float(times * move.sent_bytes)
        if axes and sent:
            key = (move.op, move.network, axes)
            sums[key] = sums.get(key, 0.0) + sent
    found = (Sent(op, network, axes, sent) for (op, network, axes), sent in sums.items())
    return tuple(sorted(found, key=lambda p: -p.sent_bytes))


def step_moves(shape: ModelShape, layout: Layout, recipe: Recipe, seq: int) -> Iterator[tuple[Move, float]]:
    """Every collective that costs.step prices, and how often a device does it in a step."""
    i, steps, stages = layout.ici, layout.accumulation_steps, layout.total("pipeline")
    micro = steps * layout.pipeline_microbatches
    tokens = layout.global_batch * seq / (layout.data_shards * micro)
    work = Shard(tokens, seq, i.tensor, i.context, i.expert)
    for layer in shape.layers:
        moves = layer_moves(layer, work, layout, recipe, micro)
        once = at_ends_of(moves, layout) if layout.keeps_gathered else ()
        each = tuple(m for m in moves if not (once and m.axis in ("fsdp", "dcn fsdp")))
        layers = layer.count / stages
        yield from ((m, layers * (m.forward + m.backward)) for m in once)
        yield from ((m, layers * micro * (m.forward + m.backward)) for m in each)
    if stages > 1:
        for moves in stage_moves(shape, work, layout):
            yield from ((m, m.forward + m.backward) for m in moves)
    share = layout.pipeline_microbatches / stages
    for move in end_moves(shape, tokens * share, layout, recipe):
        yield move, steps * (move.forward + move.backward)
