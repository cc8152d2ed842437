"""What the layers of a step and the ends of its model communicate: which collectives, over which axes, how often.

Bytes and counts of collectives: see the chapter on training of "How to Scale Your Model". Numbers may be
arrays.
"""

import math
from collections.abc import Mapping

import numpy as np

from slicewise.costs.compute import ACT, Shard
from slicewise.costs.layout import Layout, Number, Recipe
from slicewise.costs.network import Move, Op
from slicewise.costs.remat import recomputed
from slicewise.costs.shapes import Layer, ModelShape

INT = 4  # bytes of a token's position, and of its segment

Moves = tuple[Move, ...]


def layer_moves(layer: Layer, work: Shard, layout: Layout, recipe: Recipe, micro: Number) -> Moves:
    """Of one layer and one microbatch; gradients of data replicas are summed once in ``micro``."""
    return (
        *weight_moves(layer, layout, recipe),
        *tensor_moves(layer, work, layout, recipe),
        *context_moves(layer, work, layout, recipe),
        *expert_moves(layer, work, layout, recipe),
        *gradient_moves(layer, layout, recipe, micro),
    )


def weight_moves(layer: Layer, layout: Layout, recipe: Recipe) -> Moves:
    """FSDP: gathering a layer's weights for each pass and scattering its gradients, in a slice and between slices.

    Dense weights are spread over fsdp, context and expert axes; routed ones over fsdp and context, whole
    experts over the expert axis. With scales known beforehand weights are turned into 8 bits before they
    travel. Of a frozen layer only gradients of adapters are scattered.
    """
    i = layout.ici
    all_ways = {"fsdp": i.fsdp, "context": i.context, "expert": i.expert}
    dense = ACT * (layer.parameters - layer.routed_parameters) / i.tensor
    routed = ACT * layer.routed_parameters / (i.tensor * i.expert)
    trained = ACT * layer.adapter_parameters(1, i.tensor) if layer.frozen else dense
    moves = _gathered(all_ways, layout, dense, recipe) + _scattered(all_ways, layout, trained, recipe)
    if layer.active:
        few_ways = {"fsdp": i.fsdp, "context": i.context}
        moves += _gathered(few_ways, layout, routed, recipe)
        moves += () if layer.frozen else _scattered(few_ways, layout, routed, recipe)
    return moves


def _gathered(degrees: Mapping[str, Number], layout: Layout, whole_bytes: Number, recipe: Recipe) -> Moves:
    # Where it was not built here, weights whose scales are found in each step travel before they are quantised.
    is_8_bit = recipe.precision != "bf16" and (recipe.static_scales or recipe.as_compiled_here)
    eighth = 0.5 if is_8_bit else 1.0
    return _over_both("all-gather", degrees, layout, eighth * whole_bytes, 1, 1)


def _scattered(degrees: Mapping[str, Number], layout: Layout, whole_bytes: Number, recipe: Recipe) -> Moves:
    """Of gradients. Over slices too, compilers scatter within a slice, sum between slices, gather within and cut: what
    a device has of the scatter within its slice is not its even share of all slices.
    """
    ways, between = math.prod(degrees.values()), {"fsdp": layout.dcn.fsdp}
    part = recipe.summed_bytes / ACT * whole_bytes / ways
    is_crossing = np.where(layout.dcn.fsdp > 1, 1, 0)
    return (
        Move("reduce-scatter", "fsdp", degrees, whole_bytes, 0, 1),
        Move("all-gather", "fsdp", degrees, whole_bytes, 0, is_crossing, of_gradients=True),
        Move("all-reduce", "dcn fsdp", between, part, 0, 1),
    )


def _over_both(
    op: Op, degrees: Mapping[str, Number], layout: Layout, whole_bytes: Number, forward: int, backward: int
) -> Moves:
    """What a group of one slice holds, and what the devices that share its part hold of it between slices."""
    ways = math.prod(degrees.values())
    return (
        Move(op, "fsdp", degrees, whole_bytes, forward, backward),
        Move(op, "dcn fsdp", {"fsdp": layout.dcn.fsdp}, whole_bytes / ways, forward, backward),
    )


def tensor_moves(layer: Layer, work: Shard, layout: Layout, recipe: Recipe) -> Moves:
    """Tensor parallelism: the residual stream is gathered before and scattered after attention and MLP; the backward
    pass gathers the inputs again for the gradients of the weights, and recomputation scatters the attention's output
    once more."""
    degrees, stream = {"tensor": layout.ici.tensor}, ACT * work.tokens * layer.d_model
    again = "out_proj" in recomputed(layer, recipe.remat)
    return (
        Move("all-gather", "tensor", degrees, stream, 2, 4),
        Move("reduce-scatter", "tensor", degrees, stream, 2, 2 + again),
    )


def context_moves(layer: Layer, work: Shard, layout: Layout, recipe: Recipe) -> Moves:
    """Context parallelism.

    Gathered keys and values are gathered again, and their gradients scattered. Round a ring of n go n - 1 shares of
    them, and as many of their float32 gradients; again where the context is recomputed. Heads are exchanged (Ulysses)
    of queries, keys, values and context, and again with those of their gradients.
    """
    a, t, n = layer.attention, layout.ici.tensor, layout.ici.context
    ulysses = n if recipe.context_exchange == "ulysses" else np.minimum(recipe.context_ulysses, n)
    ring = n / ulysses
    kv = ACT * work.tokens * a.kv_width / t  # of one share
    heads = ACT * work.tokens * (a.heads * a.qk_dim + a.kv_width + a.context_width) / t
    exchange = Move("all-to-all", "context", {"context": ulysses}, heads * ulysses, 1, 2)
    degrees = {"context": ring}
    if recipe.context_exchange == "ring":  # neighbours send one way, over one link
        runs = 1 + ("context" in recomputed(layer, recipe.remat))
        return (
            exchange,
            Move("collective-permute", "context", degrees, kv, ring - 1, runs * (ring - 1), one_link=True),
            Move("collective-permute", "context", degrees, 4 / ACT * kv, 0, ring - 1, one_link=True),
        )
    return (
        exchange,
        Move("all-gather", "context", degrees, kv * ring, 1, 1),
        Move("reduce-scatter", "context", degrees, kv * ring, 0, 1),
    )


def expert_moves(layer: Layer, work: Shard, layout: Layout, recipe: Recipe) -> Moves:
    """Expert parallelism: tokens go to their experts and back (all-to-all), or to all of them (gather, scatter)."""
    if not layer.active:
        return ()
    n = layout.ici.expert
    degrees = {"expert": n}
    tokens = ACT * work.tokens * layer.d_model / layout.ici.tensor * n
    names = recomputed(layer, recipe.remat)
    again = any(m.routed and m.name in names for m in layer.matmuls)
    if recipe.expert_exchange == "all_gather":
        return (
            Move("all-gather", "expert", degrees, tokens, 1, 1 + again),
            Move("reduce-scatter", "expert", degrees, tokens, 1, 1 + again),
        )
    slots = layer.active * (recipe.expert_capacity_factor or 1.0)
    return (Move("all-to-all", "expert", degrees, tokens * slots, 2, 2 + 2 * again),)


def gradient_moves(layer: Layer, layout: Layout, recipe: Recipe, micro: Number) -> Moves:
    """All-reduce of one layer's gradients over data replicas, in the slice and over DCN, on the shards of FSDP."""
    i, d = layout.ici, layout.dcn
    trained = layer.parameters / (i.tensor * layout.weight_shards)
    if layer.frozen:
        trained = layer.adapter_parameters(layout.weight_shards, i.tensor)
    size = recipe.summed_bytes * trained
    return (
        Move("all-reduce", "data", {"data": i.data}, size, 0, 1 / micro),
        Move("all-reduce", "dcn data", {"data": d.data}, size, 0, 1 / micro),
    )


def hop_moves(sent_bytes: Number, layout: Layout, forward: Number, backward: Number) -> Moves:
    """``sent_bytes`` of every device to the same place of the next stage, in a slice and between slices."""
    return tuple(
        Move("collective-permute", axis, {"pipeline": degree}, sent_bytes, forward, backward)
        for axis, degree in (("pipeline", layout.ici.pipeline), ("dcn pipeline", layout.dcn.pipeline))
    )


def end_moves(shape: ModelShape, tokens: Number, layout: Layout, recipe: Recipe) -> Moves:
    """The embedding table and the output matrix in an accumulation step of ``tokens`` a device, as train uses them.

    Both are gathered, each device's part of the vocabulary, and their gradients scattered and summed over replicas. The
    residual stream is scattered over the tensor axis behind the table and gathered before the output matrix, whose
    parts sum its gradient. A pipeline divides both as fsdp does, and all its stages know where all tokens stand. Frozen
    ones have no gradient. Over slices too, see _scattered; of the matrix's gradient a slice's part is scattered.
    """
    i, d, heads = layout.ici, layout.dcn, 1 + shape.prediction_heads
    matrix = ACT * shape.vocab * shape.d_model / i.tensor
    within = {"pipeline": i.pipeline, "fsdp": i.fsdp, "context": i.context, "expert": i.expert}
    between = {"pipeline": d.pipeline, "fsdp": d.fsdp}
    slice_part = matrix / math.prod(within.values())
    tensor, stream = {"tensor": i.tensor}, ACT * tokens * shape.d_model
    # Of the matrix also where a pipeline divides it: its gradient is summed whole, and then cut.
    whole = np.where(math.prod(between.values()) > 1, 1 + heads, np.where(i.pipeline > 1, heads, 0))
    where = 2 * INT * tokens * layout.total("pipeline")
    moves: Moves = (
        Move("all-gather", "pipeline", {"pipeline": i.pipeline}, where, 1),
        Move("all-gather", "dcn pipeline", {"pipeline": d.pipeline}, where, 1),
        Move("all-gather", "fsdp", within, matrix, 1 + heads),
        Move("all-gather", "dcn fsdp", between, slice_part, 1 + heads),
        Move("reduce-scatter", "tensor", tensor, stream, 1),
        Move("all-gather", "tensor", tensor, stream, heads, 1),
        Move("all-reduce", "tensor", tensor, stream, 0, heads),
    )
    if shape.frozen_bytes is not None:
        return moves
    share = recipe.summed_bytes / ACT
    part = share * slice_part / math.prod(between.values())
    return (
        *moves,
        Move("reduce-scatter", "fsdp", within, matrix, 0, 1 + heads),
        Move("all-gather", "fsdp", within, matrix, 0, whole),
        Move("all-reduce", "dcn fsdp", between, share * slice_part, 0, 1),
        Move("reduce-scatter", "dcn fsdp", between, share * slice_part, 0, heads),
        Move("all-reduce", "data", {"data": i.data}, part, 0, 1 + heads),
        Move("all-reduce", "dcn data", {"data": d.data}, part, 0, 1 + heads),
    )
