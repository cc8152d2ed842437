"""Seconds of the collectives of one layer and one microbatch, per mesh axis, on the links that the axis
has.

Bytes and counts of collectives: see the chapter on training of "How to Scale Your Model". Numbers may be
arrays.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slicewise.costs.compute import ACT, Shard
from slicewise.costs.device import Device
from slicewise.costs.layout import Layout, Number, Recipe
from slicewise.costs.remat import recomputed
from slicewise.costs.shapes import Layer
from slicewise.costs.torus import AxisLinks

CORE_LINKS = 6  # the link between the two devices of one chip, in ICI links


@dataclass(frozen=True)
class Network:
    """Of each ICI axis: the ``links`` of a chip that a collective over it keeps busy, the longest way in
    ``hops``, and whether it ``joins`` the devices of one chip."""

    device: Device
    links: Mapping[str, Number]
    hops: Mapping[str, Number]
    joins: Mapping[str, Number]

    @property
    def link_bytes_per_s(self) -> float:
        """One link, one way."""
        return self.device.link_bytes_per_s * self.device.calibration.ici_efficiency

    def group(self, degrees: Mapping[str, Number]) -> tuple[Number, Number, Number]:
        """Size, bytes/s per device and latency of a collective over the axes of ``degrees`` at once.

        Devices of one chip share its links unless the group joins them; a group inside one chip has the link
        between its devices.
        """
        size: Number = 1
        links: Number = 0.0
        hops: Number = 0.0
        joins: Number = False
        for axis, degree in degrees.items():
            size = size * degree
            links = links + np.where(degree > 1, self.links[axis], 0.0)
            hops = hops + np.where(degree > 1, self.hops[axis], 0.0)
            joins = joins | ((degree > 1) & self.joins[axis])
        if not self.device.torus:
            links = np.minimum(links, 1.0)  # a switch gives a device its egress once, whatever the axes
        shared = links * np.where(joins, 1.0, 1.0 / self.device.per_chip)
        return size, np.where(links > 0, shared, CORE_LINKS) * self.link_bytes_per_s, hops * self.device.hop_s

    def gather_s(self, full_bytes: Number, degrees: Mapping[str, Number]) -> Number:
        """All-gather (or reduce-scatter) to ``full_bytes`` over several axes at once."""
        size, rate, latency = self.group(degrees)
        return np.where(size > 1, np.maximum(full_bytes * (size - 1) / size / rate, latency), 0.0)

    def exchange_s(self, full_bytes: Number, degrees: Mapping[str, Number]) -> Number:
        """All-to-all of ``full_bytes`` held by the whole group: a quarter of an all-gather of as much."""
        size, rate, latency = self.group(degrees)
        return np.where(size > 1, np.maximum(full_bytes / 4 / rate, latency), 0.0)

    def dcn_s(self, sent_bytes: Number) -> Number:
        """``sent_bytes`` leave one device for another slice."""
        return sent_bytes / self.device.dcn_bytes_per_s


def network_of(device: Device, placed: Mapping[str, AxisLinks]) -> Network:
    """The network of axes laid out as ``placed``."""
    return Network(
        device,
        {axis: a.links for axis, a in placed.items()},
        {axis: a.hops for axis, a in placed.items()},
        {axis: a.crosses_core for axis, a in placed.items()},
    )


@dataclass(frozen=True)
class WeightTraffic:
    """FSDP: gathering one layer's weights and scattering its gradients, in a slice and between slices."""

    gather_s: Number
    scatter_s: Number
    dcn_gather_s: Number
    dcn_scatter_s: Number


def weight_traffic(layer: Layer, layout: Layout, net: Network, recipe: Recipe) -> WeightTraffic:
    """Dense weights are spread over fsdp, context and expert axes; routed ones over fsdp and context, whole
    experts over the expert axis. With scales known beforehand weights are turned into 8 bits before they
    travel."""
    i, n = layout.ici, layout.dcn.fsdp
    dense = ACT * (layer.parameters - layer.routed_parameters) / i.tensor
    routed = ACT * layer.routed_parameters / (i.tensor * i.expert)
    ici = net.gather_s(dense, {"fsdp": i.fsdp, "context": i.context, "expert": i.expert})
    if layer.active:
        ici = ici + net.gather_s(routed, {"fsdp": i.fsdp, "context": i.context})
    shard = dense / (i.fsdp * i.context * i.expert * n) + routed / (i.fsdp * i.context * n)
    dcn = net.dcn_s(shard * (n - 1))
    reduced = dcn * recipe.gradient_bytes / ACT  # between slices gradients are summed in their own type
    scatter = ici
    if layer.frozen:  # only gradients of adapters are scattered
        adapters = layer.adapter_parameters(1, i.tensor)
        scatter = net.gather_s(ACT * adapters, {"fsdp": i.fsdp, "context": i.context, "expert": i.expert})
        sharded = adapters / (i.fsdp * i.context * i.expert * n)
        reduced = net.dcn_s(recipe.gradient_bytes * sharded * (n - 1))
    eighth = 0.5 if recipe.static_scales and recipe.precision != "bf16" else 1.0
    return WeightTraffic(ici * eighth, scatter, dcn * eighth, reduced)


def tensor_traffic(
    layer: Layer, work: Shard, layout: Layout, net: Network, recipe: Recipe
) -> tuple[Number, Number]:
    """Tensor parallelism, forward and backward: the residual stream is gathered before and scattered after
    attention and MLP; the backward pass gathers the inputs again for the gradients of the weights, and
    recomputation scatters the attention's output once more."""
    one = net.gather_s(ACT * work.tokens * layer.d_model, {"tensor": layout.ici.tensor})
    again = recomputed(layer, recipe.remat)
    return 4 * one, (6 + ("out_proj" in again)) * one


def context_traffic(
    layer: Layer, work: Shard, layout: Layout, net: Network, recipe: Recipe
) -> tuple[Number, Number]:
    """Context parallelism, forward and backward.

    Gathered keys and values are gathered again, and their gradients scattered. Round a ring of n go n - 1 shares of
    them, and n of their float32 gradients; again where the context is recomputed. Heads are exchanged (Ulysses) of
    queries, keys, values and context, and again with those of their gradients.
    """
    a, t, n = layer.attention, layout.ici.tensor, layout.ici.context
    ulysses = n if recipe.context_exchange == "ulysses" else np.minimum(recipe.context_ulysses, n)
    ring = n / ulysses
    kv = ACT * work.tokens * a.kv_width / t  # of one share
    heads = ACT * work.tokens * (a.heads * a.qk_dim + a.kv_width + a.context_width) / t
    exchange = net.exchange_s(heads * ulysses, {"context": ulysses})
    if recipe.context_exchange == "ring":  # neighbours send one way, over one link
        hop = kv / net.link_bytes_per_s + net.device.hop_s
        runs = 1 + ("context" in recomputed(layer, recipe.remat))
        gradients = ring * (4 / ACT * kv / net.link_bytes_per_s + net.device.hop_s)
        return (ring - 1) * hop + exchange, runs * (ring - 1) * hop + gradients + 2 * exchange
    keys = net.gather_s(kv * ring, {"context": ring})
    return keys + exchange, 2 * (keys + exchange)


def expert_traffic(
    layer: Layer, work: Shard, layout: Layout, net: Network, recipe: Recipe
) -> tuple[Number, Number]:
    """Expert parallelism: tokens go to their experts and back (all-to-all), or to all of them (gather,
    scatter)."""
    if not layer.active:
        return 0.0, 0.0
    n = layout.ici.expert
    tokens = ACT * work.tokens * layer.d_model / layout.ici.tensor
    if recipe.expert_exchange == "all_gather":
        one = net.gather_s(tokens * n, {"expert": n})
    else:
        slots = layer.active * (recipe.expert_capacity_factor or 1.0)
        one = net.exchange_s(tokens * slots * n, {"expert": n})
    names = recomputed(layer, recipe.remat)
    again = any(m.routed and m.name in names for m in layer.matmuls)
    return 2 * one, (2 + 2 * again) * one


def gradient_traffic(layer: Layer, layout: Layout, net: Network, recipe: Recipe) -> tuple[Number, Number]:
    """All-reduce of one layer's gradients over data replicas, in the slice and over DCN, on the shards of
    FSDP."""
    i, d = layout.ici, layout.dcn
    dense = (layer.parameters - layer.routed_parameters) / (i.tensor * i.fsdp * i.context * i.expert)
    routed = layer.routed_parameters / (i.tensor * i.expert * i.fsdp * i.context)
    trained = (dense + routed) / d.fsdp
    if layer.frozen:
        trained = layer.adapter_parameters(i.fsdp * i.context * i.expert * d.fsdp, i.tensor)
    size = recipe.gradient_bytes * trained
    ici = 2 * net.gather_s(size, {"data": i.data})
    return ici, net.dcn_s(2 * size * (d.data - 1) / d.data)


def pipeline_traffic(d_model: int, work: Shard, layout: Layout, net: Network) -> Number:
    """One microbatch's activations to the next stage, and its gradients back."""
    i, d = layout.ici, layout.dcn
    moved = 2 * ACT * work.tokens * d_model / i.tensor
    _, rate, _ = net.group({"pipeline": i.pipeline})
    inside = np.where(i.pipeline > 1, moved / rate + 2 * net.device.hop_s, 0.0)
    return inside + np.where(d.pipeline > 1, net.dcn_s(moved), 0.0)
