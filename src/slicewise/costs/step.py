"""The price of one training step: time by part, exposed communication, memory, and what decided it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from slicewise.catalog.slices import Cluster
from slicewise.costs import torus
from slicewise.costs.compute import ACT, Compute, Shard, layer_compute
from slicewise.costs.device import Device, device_of
from slicewise.costs.flops import model_flops
from slicewise.costs.layout import Layout, Number, Recipe, place
from slicewise.costs.memory import (
    local_parameters,
    loss_blocks,
    memory_bytes,
    saved_width,
    trained_parameters,
)
from slicewise.costs.network import Move, Network, network_of
from slicewise.costs.shapes import Layer, ModelShape
from slicewise.costs.traffic import Moves, end_moves, hop_moves, layer_moves
from slicewise.errors import UserError

Parts = dict[str, Number]


@dataclass(frozen=True)
class StepEstimate:
    """One training step, as planned, as compiled or as measured: the same record, to be compared line by
    line."""

    source: Literal["plan", "compile", "measured"]
    step_time_s: float
    compute_s: Mapping[str, float]  # matmul, attention, memory, routing, output, optimizer
    exposed_s: Mapping[
        str, float
    ]  # communication that compute does not hide, by axis: 'fsdp', 'dcn data', ...
    communication_s: Mapping[str, float]  # all of it, hidden or not
    other_s: Mapping[str, float]  # pipeline bubble, waiting for host copies, waiting for the slowest slice
    hbm_bytes: Mapping[str, float]  # of one device, by component
    host_bytes: float  # of offloaded activations, per device
    hbm_limit_bytes: float
    tokens: int  # of one step
    devices: int
    model_flops: float  # that the model needs for one step
    peak_flops_per_s: float  # bf16, all devices

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_time_s

    @property
    def mfu(self) -> float:
        """Share of the bf16 peak spent on FLOPs the model needs (causal attention counted once)."""
        return self.model_flops / (self.step_time_s * self.peak_flops_per_s)

    @property
    def hbm_total_bytes(self) -> float:
        return sum(self.hbm_bytes.values())

    @property
    def decided_by(self) -> str:
        """The largest part of the step."""
        shares = {**self.compute_s, **self.exposed_s, **self.other_s}
        return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True)
class StepCosts:
    """Seconds and bytes of one layout, or of many at once (arrays of one shape)."""

    total_s: Number
    compute_s: Parts
    exposed_s: Parts
    communication_s: Parts
    other_s: Parts


@dataclass(frozen=True)
class Pass:
    """One layer forward, or backward with its recomputation, on one microbatch. ``at_ends`` is what a stage that keeps
    its gathered weights communicates instead, once a step."""

    compute: tuple[Compute, ...]
    communication: Parts
    host_s: Number
    at_ends: Parts

    def time(self, device: Device, recipe: Recipe) -> tuple[Number, Parts, Number]:
        """Seconds of the pass, its exposed communication by axis, and the wait for host copies.

        A share of every collective can run behind compute, and no more than there is compute; tensor
        collectives hide in the matmuls they feed, part by part. Host copies run beside both.
        """
        compute = sum(c.total for c in self.compute)
        asynchronous = 1.0 if recipe.async_collectives else 0.0
        own = {"tensor": device.kernels.tensor_overlap}
        can_hide = {
            axis: asynchronous * own.get(axis, device.calibration.overlap) * seconds
            for axis, seconds in self.communication.items()
        }
        room = np.minimum(1.0, compute / np.maximum(sum(can_hide.values()), 1e-30))
        exposed = {axis: spent - room * can_hide[axis] for axis, spent in self.communication.items()}
        busy = compute + sum(exposed.values())
        return np.maximum(busy, self.host_s), exposed, np.maximum(self.host_s - busy, 0.0)


def layer_passes(
    layer: Layer, work: Shard, device: Device, net: Network, layout: Layout, recipe: Recipe, micro: Number
) -> tuple[Pass, Pass]:
    """The forward and the backward pass of one layer; gradients of data replicas are reduced once in
    ``micro``."""
    forward, backward, again = layer_compute(layer, work, device, recipe)
    moves = layer_moves(layer, work, layout, recipe, micro)
    each, at_ends = seconds_of(moves, net), seconds_of(at_ends_of(moves, layout), net)
    host = work.tokens * ACT * saved_width(layer, recipe, work.tensor, where="host") / device.host_bytes_per_s
    return Pass((forward,), each[0], host, at_ends[0]), Pass((backward, again), each[1], host, at_ends[1])


def seconds_of(moves: Moves, net: Network) -> tuple[Parts, Parts]:
    """Seconds of all ``moves`` by the axis that they count to, of the forward and of the backward pass."""
    passes: tuple[Parts, Parts] = {}, {}
    for move in moves:
        one = move.seconds(net)
        for parts, times in zip(passes, (move.forward, move.backward), strict=True):
            parts[move.axis] = parts.get(move.axis, 0.0) + times * one
    return passes


def at_ends_of(moves: Moves, layout: Layout) -> Moves:
    """What a stage that keeps its gathered weights does with them once a step: no gathers for the backward pass."""
    steps = layout.accumulation_steps
    return tuple(
        replace(m, forward=m.forward * steps, backward=m.backward * steps * is_of_gradients(m))
        for m in moves
        if m.axis in ("fsdp", "dcn fsdp")
    )


def is_of_gradients(move: Move) -> bool:
    return move.op != "all-gather" or move.of_gradients


def price(
    shape: ModelShape, device: Device, layout: Layout, net: Network, recipe: Recipe, seq: int
) -> StepCosts:
    """Seconds of one step. ``layout`` and ``net`` may hold arrays: every term is elementwise."""
    stages = layout.total("pipeline")
    micro = layout.accumulation_steps * layout.pipeline_microbatches
    i = layout.ici
    tokens = layout.global_batch * seq / (layout.data_shards * micro)
    work = Shard(tokens, seq, i.tensor, i.context, i.expert)
    compute: Parts = dict.fromkeys(("matmul", "attention", "memory", "routing"), 0.0)
    exposed: Parts = {}
    communication: Parts = {}
    stage_s: Number = 0.0  # one microbatch through all layers of one stage, both passes
    once_s: Number = (
        0.0  # communication of a stage that no compute hides: before its first tick and after the last
    )
    is_staged, keeps = stages > 1, layout.keeps_gathered
    host_wait: Number = 0.0
    for layer in shape.layers:
        layers = layer.count / stages
        for one in layer_passes(layer, work, device, net, layout, recipe, micro):
            at_ends, one = _split(one, is_staged, keeps, micro)
            for axis, spent in at_ends.items():
                once_s = once_s + layers * spent
                communication[axis] = communication.get(axis, 0.0) + layers * spent
                exposed[axis] = exposed.get(axis, 0.0) + layers * spent
            seconds, shown, wait = one.time(device, recipe)
            stage_s = stage_s + layers * seconds
            host_wait = host_wait + layers * micro * wait
            for name in compute:
                compute[name] = compute[name] + layers * micro * sum(getattr(c, name) for c in one.compute)
            for axis, spent in one.communication.items():
                communication[axis] = communication.get(axis, 0.0) + layers * micro * spent
                exposed[axis] = exposed.get(axis, 0.0) + layers * micro * shown[axis]
    steps, hops_s = layout.accumulation_steps, 0.0
    for pieces in zip(*stage_moves(shape, work, layout), strict=True):
        # Of the two hops of a tick the one that brings and takes microbatches lies beside its work.
        moved, dealt = ((m.forward + m.backward) * m.seconds(net) for m in pieces)
        axis = pieces[0].axis
        exposed[axis] = moved / 2 + dealt
        communication[axis] = moved + dealt
        hops_s = hops_s + exposed[axis]
    bubble = stage_s * steps * (stages - 1) / layout.pipeline_repeats
    ends = ends_pass(shape, work, device, layout, net, recipe)
    ends_s, shown, _ = ends.time(device, recipe)
    compute["output"] = ends.compute[0].total
    for axis, spent in ends.communication.items():
        communication[axis] = communication.get(axis, 0.0) + spent
        exposed[axis] = exposed.get(axis, 0.0) + shown[axis]
    parameters = trained_parameters(shape, layout)
    compute["optimizer"] = optimizer_s(parameters, layout, device, recipe)
    moments_s = moment_copies_s(parameters, layout, device, recipe)
    total = stage_s * micro + bubble + hops_s + once_s + ends_s + compute["optimizer"] + moments_s
    d = layout.dcn
    wait = total * device.kernels.straggler * np.log2(d.data * d.fsdp * d.pipeline)
    other = {"pipeline bubble": bubble, "host copies": host_wait + moments_s, "slowest slice": wait}
    return StepCosts(total + wait, compute, exposed, communication, other)


def stage_moves(shape: ModelShape, work: Shard, layout: Layout) -> tuple[Moves, Moves]:
    """A step's hops of microbatches between stages, and of weights where a circular schedule deals layers out.

    At each tick a microbatch goes on to the next stage, and another one nearer to its first or from its last. Stages
    hold consecutive layers whatever the schedule: weights go to where they are used, and gradients back, which frozen
    weights have none of.
    """
    steps, t, stages = layout.accumulation_steps, layout.ici.tensor, layout.total("pipeline")
    ticks = 2 * layout.ticks * steps
    trained_bytes = ACT * trained_parameters(shape, layout)
    frozen_bytes = 0.0
    if shape.frozen_bytes is not None:
        frozen_bytes = min(shape.frozen_bytes, ACT) * local_parameters(shape, layout)
    dealt_bytes = (trained_bytes + frozen_bytes) * (stages - 1) / stages
    deals = np.where(layout.pipeline_repeats > 1, steps, 0)
    return (
        hop_moves(ACT * work.tokens * shape.d_model / t, layout, ticks, ticks),
        hop_moves(dealt_bytes, layout, deals, deals * trained_bytes / (trained_bytes + frozen_bytes)),
    )


def ends_pass(
    shape: ModelShape, work: Shard, device: Device, layout: Layout, net: Network, recipe: Recipe
) -> Pass:
    """The embedding and the loss of all microbatches of a step, both passes at once."""
    stages, steps = layout.total("pipeline"), layout.accumulation_steps
    share = layout.pipeline_microbatches / stages
    moves = end_moves(shape, work.tokens * share, layout, recipe)
    there, back = seconds_of(moves, net)
    output = Compute(output_s(shape, work, device, recipe) * share * steps, 0.0, 0.0, 0.0)
    return Pass((output,), {axis: steps * (there[axis] + back[axis]) for axis in there}, 0.0, {})


def _split(one: Pass, is_staged: Number, keeps: Number, micro: Number) -> tuple[Parts, Pass]:
    """(what a stage communicates once a step for a layer, the pass of a microbatch without that).

    Gradients are summed over replicas once whatever the layout. A stage that keeps its weights gathers them and
    scatters their gradients once in an accumulation step, and gathers none for the backward pass.
    """
    at_ends, each = {}, {}
    for axis, spent in one.communication.items():
        if axis in ("data", "dcn data"):
            at_ends[axis] = np.where(is_staged, spent * micro, 0.0)
            each[axis] = np.where(is_staged, 0.0, spent)
        else:
            each[axis] = spent
    for axis, spent in one.at_ends.items():
        at_ends[axis] = np.where(keeps, spent, 0.0)
        each[axis] = np.where(keeps, 0.0, each[axis])
    return at_ends, replace(one, communication=each)


def output_s(shape: ModelShape, work: Shard, device: Device, recipe: Recipe) -> Number:
    """Embedding lookup, output matrix and loss of one microbatch: three products a head, and float32 logits
    written once and read four times; and the float32 gradient of the matrix, read and written again a block. A frozen
    matrix has no gradient: two products, and no such traffic."""
    c = device.calibration
    heads = 1 + shape.prediction_heads
    columns = work.tokens * shape.vocab / work.tensor
    product = 2.0 * columns * shape.d_model / (device.flops_per_s * c.matmul_efficiency)
    trained = shape.frozen_bytes is None
    runs = (2 + trained) * heads + (recipe.vocab_tiles > 1) + 2 * recipe.one_hot_embedding
    moved = 5 * 4 * columns * heads
    if recipe.loss_in_chunks and trained:
        blocks = loss_blocks(work.tokens, shape.d_model)
        moved = moved + 2 * 4 * (blocks - 1) * heads * shape.vocab * shape.d_model / work.tensor
    return runs * product + moved / (device.hbm_bytes_per_s * c.hbm_efficiency)


def optimizer_s(parameters: Number, layout: Layout, device: Device, recipe: Recipe) -> Number:
    """Reading and writing weights, moments and gradients once each."""
    moments = recipe.held_moment_bytes(layout)
    moved = 2 * (recipe.weight_bytes + moments + recipe.gradient_bytes) * parameters
    return moved / (device.hbm_bytes_per_s * device.calibration.hbm_efficiency)


def moment_copies_s(parameters: Number, layout: Layout, device: Device, recipe: Recipe) -> Number:
    """Moments that wait on the host, to the device and back, with nothing to hide it."""
    moments = recipe.held_moment_bytes(layout) if recipe.moments_on_host else 0.0
    return 2 * moments * parameters / device.host_bytes_per_s


def network(cluster: Cluster, layout: Layout) -> Network:
    """The links that each axis of ``layout`` gets on ``cluster``. Raises UserError if the slice cannot hold
    it."""
    for what, degrees, size in (
        ("ICI", layout.ici.product, cluster.slice.devices),
        ("DCN", layout.dcn.product, cluster.num_slices),
    ):
        if degrees != size:
            units = "devices of a slice" if what == "ICI" else "slices"
            raise UserError(f"the {what} axes multiply to {degrees}; expected the {size} {units}.")
    placed = place(cluster.slice, layout.ici)
    if placed is None:
        raise UserError(f"the ICI axes {layout.ici} cannot be laid out on a {cluster.slice.name} slice.")
    return network_of(device_of(cluster.chip), dict(zip(torus.ORDER, placed, strict=True)))


def estimate(
    shape: ModelShape,
    cluster: Cluster,
    layout: Layout,
    recipe: Recipe,
    seq: int,
    *,
    device: Device | None = None,
) -> StepEstimate:
    """The price of one step of ``shape`` on ``cluster`` for sequences of ``seq`` tokens.

    ``device`` replaces the cluster's own (other constants). Raises UserError when the mesh does not fit the
    slice.
    """
    device = device or device_of(cluster.chip)
    net = replace(network(cluster, layout), device=device)
    costs = price(shape, device, layout, net, recipe, seq)
    memory = {k: float(v) for k, v in memory_bytes(shape, layout, recipe, seq).items()}
    tokens = round(layout.global_batch * seq)
    return StepEstimate(
        source="plan",
        step_time_s=float(costs.total_s),
        compute_s=_seconds(costs.compute_s),
        exposed_s=_seconds(costs.exposed_s),
        communication_s=_seconds(costs.communication_s),
        other_s=_seconds(costs.other_s),
        hbm_bytes={k: v for k, v in memory.items() if k != "host"},
        host_bytes=memory["host"],
        hbm_limit_bytes=device.hbm_bytes,
        tokens=tokens,
        devices=cluster.devices,
        model_flops=model_flops(shape, tokens, seq),
        peak_flops_per_s=device.flops_per_s * cluster.devices,
    )


def _seconds(parts: Parts) -> dict[str, float]:
    return {name: float(value) for name, value in parts.items() if float(value) > 0}
