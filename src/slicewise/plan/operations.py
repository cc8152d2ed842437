"""The operations of a step as a roofline sees them: FLOPs, memory traffic and time of one device."""

from dataclasses import dataclass

from slicewise.costs.compute import ACT, Shard, attention_s, matmul_s
from slicewise.costs.device import Device, device_of
from slicewise.costs.flops import attention_flops, computed_logits
from slicewise.costs.shapes import Matmul
from slicewise.plan.search import Candidate, Workload


@dataclass(frozen=True)
class Operation:
    """One forward product of one microbatch on one device. ``share`` = of the time of all of them."""

    name: str
    flops: float
    bytes_: float
    seconds: float
    share: float

    @property
    def intensity(self) -> float:
        """FLOP per byte of device memory."""
        return self.flops / self.bytes_

    @property
    def flops_per_s(self) -> float:
        """What the cost model expects it to attain."""
        return self.flops / self.seconds


def operations(work: Workload, candidate: Candidate) -> tuple[Operation, ...]:
    """The matrix products and attention kernels of one layer of each kind, and the output matrix; equal
    products of several kinds are one entry. Shares count all layers."""
    layout, recipe = candidate.layout, candidate.recipe
    device = device_of(candidate.cluster.chip)
    micro = layout.accumulation_steps * layout.pipeline_microbatches
    tokens = work.tokens / (layout.data_shards * micro)
    i = layout.ici
    shard = Shard(tokens, work.seq, i.tensor, i.context, i.expert)
    found: dict[str, tuple[float, float, float, float]] = {}  # flops, bytes, seconds of one, of all layers
    for layer in work.shape.layers:
        for m in layer.matmuls:
            flops, bytes_ = _matmul(m, shard)
            seconds = float(matmul_s(m, shard, device, recipe))
            _add(found, m.name, flops, bytes_, seconds, layer.count)
        a = layer.attention
        kernel = "attention" if a.window is None else f"attention, window {a.window}"
        logits = tokens * computed_logits(a, work.seq, recipe.attention) / work.seq
        moved = ACT * tokens * (a.heads * (a.qk_dim + a.v_dim) + a.kv_width) / i.tensor
        flops = attention_flops(a, logits) / i.tensor
        _add(found, kernel, flops, moved, float(attention_s(a, shard, device, recipe)[0]), layer.count)
    head = Matmul("output matrix", work.shape.d_model, work.shape.vocab)
    _add(found, head.name, *_matmul(head, shard), _head_s(head, shard, device), 1)
    total = sum(v[3] for v in found.values())
    return tuple(Operation(name, f, b, s, every / total) for name, (f, b, s, every) in found.items())


def _add(found: dict, name: str, flops: float, bytes_: float, seconds: float, count: int) -> None:
    every = seconds * count + (found[name][3] if name in found else 0.0)
    found[name] = (flops, bytes_, seconds, every)


def _matmul(m: Matmul, work: Shard) -> tuple[float, float]:
    """(FLOPs, bytes) of the local shard of x . w."""
    d_in = m.d_in / work.tensor if m.sharding == "row" else m.d_in
    d_out = m.d_out / work.tensor if m.sharding == "column" else m.d_out
    tokens = work.tokens * m.active
    weights = d_in * d_out * (m.experts / work.expert if m.routed else 1)
    return float(2 * tokens * d_in * d_out), float(ACT * (tokens * (d_in + d_out) + weights))


def _head_s(head: Matmul, work: Shard, device: Device) -> float:
    flops, bytes_ = _matmul(head, work)
    c = device.calibration
    return max(
        flops / (device.flops_per_s * c.matmul_efficiency),
        bytes_ / (device.hbm_bytes_per_s * c.hbm_efficiency),
    )
