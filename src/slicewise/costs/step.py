"""The price of one training step: its time by part, what of the communication is exposed, and what decided."""

from dataclasses import dataclass

import numpy as np

from slicewise.catalog.slices import Cluster
from slicewise.costs.compute import ACT, Compute, Shard, layer_compute
from slicewise.costs.device import Device, device_of
from slicewise.costs.flops import model_flops
from slicewise.costs.layout import Layout, Number, Recipe, place
from slicewise.costs.remat import tensor_widths
from slicewise.costs.shapes import Layer, ModelShape
from slicewise.costs import torus
from slicewise.costs.traffic import (
    Network, context_traffic, expert_traffic, gradient_traffic, network_of, tensor_traffic, weight_traffic
)



@dataclass(frozen=True)
class Pass:
    compute: Compute
    comm: dict[str, Number]
    host: Number


def combine(compute, comm, host, device, recipe):
    """Time of a pass, and the exposed share of its communication."""
    overlap = device.calibration.overlap if recipe.async_collectives else 0.0
    total = sum(comm.values())
    hidden = np.minimum(overlap * total, compute)
    time = compute + total - hidden
    exposed = (total - hidden) / np.maximum(total, 1e-30)
    return np.maximum(time, host), exposed, np.maximum(host - time, 0.0)


def price(shape: ModelShape, device: Device, layout: Layout, net: Network, recipe: Recipe, seq: int):
    i, d = layout.ici, layout.dcn
    stages = layout.total("pipeline")
    micro = layout.accumulation_steps * layout.pipeline_microbatches
    tokens = layout.global_batch * seq / (layout.data_shards * micro)
    work = Shard(tokens, seq, i.tensor, i.context, i.expert)
    parts = {k: 0.0 for k in ("matmul", "attention", "memory", "routing", "output", "optimizer", "host", "bubble", "dcn")}
    comm_parts: dict[str, Number] = {}
    body = 0.0
    dcn_grad = 0.0
    for layer in shape.layers:
        fwd, bwd, again = layer_compute(layer, work, device, recipe)
        ag_i, ag_d, rs_i, rs_d = weight_traffic(layer, layout, net, recipe)
        t_f, t_b = tensor_traffic(layer, work, layout, net, recipe)
        c_f, c_b = context_traffic(layer, work, layout, net, recipe)
        e_f, e_b = expert_traffic(layer, work, layout, net, recipe)
        g_i, g_d = gradient_traffic(layer, layout, net, recipe)
        host_bytes = sum(
            ACT * w * work.tokens / (work.tensor if s else 1)
            for n, (w, s) in tensor_widths(layer).items() if n in recipe.remat.offloaded
        )
        host = host_bytes / device.host_bytes_per_s
        f_comm = {"fsdp": ag_i, "tensor": t_f, "context": c_f, "expert": e_f, "dcn_fsdp": ag_d}
        b_comm = {"fsdp": ag_i + rs_i, "tensor": t_b, "context": c_b, "expert": e_b, "dcn_fsdp": ag_d + rs_d,
                  "data": g_i / micro, "dcn_data": g_d / micro}
        b_compute = bwd.total + again.total
        f_time, f_exp, f_host = combine(fwd.total, f_comm, host, device, recipe)
        b_time, b_exp, b_host = combine(b_compute, b_comm, host, device, recipe)
        count = layer.count / stages
        body = body + count * (f_time + b_time)
        for c in (fwd, bwd, again):
            for k in ("matmul", "attention", "memory", "routing"):
                parts[k] = parts[k] + count * micro * getattr(c, k)
        for k, v in f_comm.items():
            comm_parts[k] = comm_parts.get(k, 0.0) + count * micro * v * f_exp
        for k, v in b_comm.items():
            comm_parts[k] = comm_parts.get(k, 0.0) + count * micro * v * b_exp
        parts["host"] = parts["host"] + count * micro * (f_host + b_host)
    bubble = body * (stages - 1)
    parts["bubble"] = bubble
    body = body * micro + bubble
    out = output_s(shape, work, device, recipe) * micro
    parts["output"] = out
    local = shape.parameters / (i.tensor * i.fsdp * i.context * i.expert * d.fsdp * stages)
    opt = local * (2 * recipe.weight_bytes + 2 * recipe.moment_bytes + 2 * recipe.gradient_bytes) / (
        device.hbm_bytes_per_s * device.calibration.hbm_efficiency)
    parts["optimizer"] = opt
    total = body + out + opt
    slices = d.data * d.fsdp * d.pipeline
    straggle = total * device.kernels.straggler * np.log2(slices)
    parts["dcn"] = straggle
    return total + straggle, parts, comm_parts


def output_s(shape: ModelShape, work: Shard, device: Device, recipe: Recipe) -> Number:
    """Embedding lookup, output matrix and loss of one microbatch."""
    c = device.calibration
    heads = 1 + shape.prediction_heads
    product = 2.0 * work.tokens * shape.d_model * shape.vocab / work.tensor / (device.flops_per_s * c.matmul_efficiency)
    runs = 3 * heads + (recipe.vocab_tiles > 1) + 2 * recipe.one_hot_embedding
    logits = work.tokens * shape.vocab / work.tensor * 4 * 5 * heads
    return runs * product + logits / (device.hbm_bytes_per_s * c.hbm_efficiency)


def links_of(cluster: Cluster, layout: Layout):
    placed = place(cluster.slice, layout.ici)
    assert placed is not None
    return {axis: (l.links, l.hops, l.crosses_core) for axis, l in zip(torus.ORDER, placed, strict=True)}


def estimate(shape: ModelShape, cluster: Cluster, layout: Layout, recipe: Recipe, seq: int):
    device = device_of(cluster.chip)
    net = network_of(device, links_of(cluster, layout))
    return price(shape, device, layout, net, recipe, seq)
