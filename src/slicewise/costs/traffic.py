"""Seconds of the collectives of a step, per mesh axis, on the links that the axis has; FORMULAS of ring collectives."""

from dataclasses import dataclass

import numpy as np

from slicewise.costs.compute import ACT, Shard
from slicewise.costs.device import Device
from slicewise.costs.layout import Layout, Number, Recipe
from slicewise.costs.remat import recomputed
from slicewise.costs.shapes import Layer


@dataclass(frozen=True)
class Network:
    """Rates of one device. ``axis`` -> bytes/s of an all-gather over that ICI axis, and its latency in seconds."""

    bytes_per_s: dict[str, Number]
    latency_s: dict[str, Number]
    dcn_bytes_per_s: float
    link_bytes_per_s: float
    hop_s: float

    def gather_s(self, full_bytes: Number, degrees: dict[str, Number]) -> Number:
        """All-gather (or reduce-scatter) to ``full_bytes`` over several axes at once."""
        n = 1
        rate = 1e-30  # so that a product of degrees 1 costs nothing and divides by no zero
        latency = 0.0
        for axis, degree in degrees.items():
            n = n * degree
            rate = rate + np.where(degree > 1, self.bytes_per_s[axis], 0.0)
            latency = latency + np.where(degree > 1, self.latency_s[axis], 0.0)
        moved = full_bytes * (n - 1) / n
        return np.where(n > 1, np.maximum(moved / rate, latency), 0.0)


def weight_traffic(
    layer: Layer, layout: Layout, net: Network, recipe: Recipe
) -> tuple[Number, Number, Number, Number]:
    """FSDP: seconds over ICI and over DCN of gathering one layer's weights, and of scattering its gradients.

    Dense weights are spread over fsdp, context and expert axes; routed ones over fsdp and context, their experts
    over the expert axis.
    """
    i = layout.ici
    # With scales known beforehand weights are turned into 8 bits before they travel; gradients never are.
    size = 1 if recipe.static_scales else ACT
    dense = ACT * (layer.parameters - layer.routed_parameters) / i.tensor
    routed = ACT * layer.routed_parameters / (i.tensor * i.expert)
    over_all = {"fsdp": i.fsdp, "context": i.context, "expert": i.expert}
    over_fsdp = {"fsdp": i.fsdp, "context": i.context}
    ici = net.gather_s(dense, over_all) + net.gather_s(routed, over_fsdp)
    n = layout.dcn.fsdp
    local = dense / (i.fsdp * i.context * i.expert) + routed / (i.fsdp * i.context)
    dcn = local * (n - 1) / net.dcn_bytes_per_s
    return ici * size / ACT, dcn * size / ACT, ici, dcn


def tensor_traffic(layer: Layer, work: Shard, layout: Layout, net: Network, recipe: Recipe) -> tuple[Number, Number]:
    """Tensor parallelism, forward and backward: the residual stream is gathered before and scattered after
    attention and MLP; the backward pass gathers inputs again for the weights' gradients, and recomputation
    scatters the attention output once more."""
    full = ACT * work.tokens * layer.d_model
    one = net.gather_s(full, {"tensor": layout.ici.tensor})
    again = recomputed(layer, recipe.remat)
    return 4 * one, (6 + ("out_proj" in again)) * one


def context_traffic(layer: Layer, work: Shard, layout: Layout, net: Network, recipe: Recipe) -> tuple[Number, Number]:
    """Context parallelism: keys and values are gathered (or passed round a ring), or heads exchanged."""
    a = layer.attention
    n = layout.ici.context
    ulysses = n if recipe.context_exchange == "ulysses" else np.minimum(recipe.context_ulysses, n)
    ring = n / ulysses
    rate, latency = net.bytes_per_s["context"], net.latency_s["context"]
    kv = ACT * work.tokens * a.kv_width / layout.ici.tensor * ring  # of the ring group, for one share of the heads
    gather = np.where(ring > 1, np.maximum(kv * (ring - 1) / ring / rate, latency), 0.0)
    if recipe.context_exchange == "ring":  # neighbours send one way, over one link
        hop = kv / ring / (net.link_bytes_per_s) + net.hop_s
        gather = np.where(ring > 1, (ring - 1) * hop, 0.0)
    heads = ACT * work.tokens * (a.heads * a.qk_dim + a.kv_width + a.context_width) / layout.ici.tensor * ulysses
    exchange = np.where(ulysses > 1, np.maximum(heads / 4 / rate, latency), 0.0)
    again = "context" in recomputed(layer, recipe.remat)
    forward = gather + exchange
    return forward, (1 + again) * forward + gather  # keys again, and the gradients of keys and values back


def expert_traffic(layer: Layer, work: Shard, layout: Layout, net: Network, recipe: Recipe) -> tuple[Number, Number]:
    """Expert parallelism: tokens go to their experts and back (all-to-all), or to all (gather and scatter)."""
    if not layer.active:
        return 0.0, 0.0
    n = layout.ici.expert
    rate, latency = net.bytes_per_s["expert"], net.latency_s["expert"]
    tokens = ACT * work.tokens * layer.d_model / layout.ici.tensor
    if recipe.expert_exchange == "all_gather":
        one = net.gather_s(tokens * n, {"expert": n})
    else:
        slots = layer.active * (recipe.expert_capacity_factor or 1.0)
        one = np.where(n > 1, np.maximum(tokens * slots * n / 4 / rate, latency), 0.0)
    again = any(m.routed and m.name in recomputed(layer, recipe.remat) for m in layer.matmuls)
    return 2 * one, (2 + 2 * again) * one


def gradient_traffic(layer: Layer, layout: Layout, net: Network, recipe: Recipe) -> tuple[Number, Number]:
    """All-reduce of one layer's gradients over data replicas, in ICI and over DCN, on the shards of FSDP."""
    i, d = layout.ici, layout.dcn
    dense = (layer.parameters - layer.routed_parameters) / (i.tensor * i.fsdp * i.context * i.expert)
    routed = layer.routed_parameters / (i.tensor * i.expert * i.fsdp * i.context)
    size = recipe.gradient_bytes * (dense + routed)
    ici = 2 * net.gather_s(size, {"data": i.data})
    dcn = 2 * size / d.fsdp * (d.data - 1) / d.data / net.dcn_bytes_per_s
    return ici, dcn


def network_of(device: Device, links: dict[str, tuple[Number, Number, Number]]) -> Network:
    """``links``: axis -> (links of the chip, hops, whether it joins the devices of one chip)."""
    rate, latency = {}, {}
    per_link = device.link_bytes_per_s * device.calibration.ici_efficiency
    for axis, (count, hops, joins) in links.items():
        share = np.where(joins, 1.0, 1.0 / device.per_chip)  # devices of one chip share its links
        within = np.where(count > 0, count * per_link * share, CORE_LINKS * per_link)
        rate[axis] = within
        latency[axis] = hops * device.hop_s
    return Network(rate, latency, device.dcn_bytes_per_s, per_link, device.hop_s)


CORE_LINKS = 6  # the link between the devices of one TPU7x chip, in ICI links
