"""One way to serve a model: a slice, a batch and a quantization, with its times, memory and cost.

Times are lower bounds (data movement and arithmetic overlap perfectly) except prefill, which takes a
utilization. A replica is one slice with weights split over all its chips; throughput grows by adding
replicas. Source: How to Scale Your Model, chapters "inference" and "applied inference".
"""

import math
from dataclasses import dataclass
from typing import Literal

from slicewise.catalog.chips import BITS
from slicewise.catalog.model import ModelSpec
from slicewise.catalog.slices import Slice
from slicewise.costs import collectives, inference, roofline, switched, transformer
from slicewise.costs.collectives import Op
from slicewise.costs.params import parameter_count
from slicewise.errors import UserError, did_you_mean

MEMORY_SHARE = 0.95  # of usable memory for weights and caches; activations and fragments have the rest
COLLECTIVES_PER_LAYER = 4  # gather into and scatter out of attention and of the MLP


@dataclass(frozen=True)
class Workload:
    """Requests of ``prompt`` tokens answered with ``output`` tokens, each within ``latency_s`` if that is
    given."""

    prompt: int
    output: int
    latency_s: float | None = None  # bound on the time between two output tokens

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: expected 1 token or more.")
        if self.latency_s is not None and not 0 < self.latency_s < math.inf:
            raise UserError(f"latency = {self.latency_s} s: expected a time above 0.")

    @property
    def mean_context(self) -> int:
        """Tokens in a cache halfway through the answer."""
        return self.prompt + self.output // 2

    @property
    def full_context(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class Quantization:
    """Formats of the stored weights and cache, and the precision the matrix units compute in."""

    weights: str = "bf16"
    cache: str = "bf16"
    compute: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("weights", "cache", "compute"):
            value = getattr(self, name)
            if value not in BITS:
                raise UserError(
                    f"{name} = '{value}'.{did_you_mean(value, BITS)} Expected one of {', '.join(BITS)}."
                )

    @property
    def name(self) -> str:
        return f"{self.weights} weights, {self.cache} cache"


@dataclass(frozen=True)
class Point:
    """One way to serve: a slice, a batch and a quantization. Times are of one decode step unless they say
    prefill."""

    slice: Slice
    batch: int
    quantization: Quantization
    workload: Workload
    weights_s: float  # reading the weights that the batch touches
    cache_s: float  # reading the caches
    math_s: float  # of all matrices
    network_s: float  # gathering and scattering activations
    prefill_s: float  # of one prompt
    weight_bytes: float
    cache_bytes: float  # of one full sequence
    max_batch: int
    price_per_chip_hour: float | None

    @property
    def step_s(self) -> float:
        """Time between two tokens: the caches, then the larger of math and weights; the network overlaps
        both."""
        return max(self.cache_s + max(self.weights_s, self.math_s), self.network_s)

    @property
    def bound(self) -> Literal["network", "cache", "weights", "compute"]:
        """What most of a step waits for."""
        if self.network_s >= self.step_s:
            return "network"
        if self.cache_s >= max(self.weights_s, self.math_s):
            return "cache"
        return "weights" if self.weights_s >= self.math_s else "compute"

    @property
    def tokens_per_s(self) -> float:
        """Decode throughput of the replica."""
        return inference.tokens_per_s(self.batch, self.step_s)

    @property
    def prefill_per_decode(self) -> float:
        """Slices for prefill beside each decoding slice, when the two are separate."""
        return inference.prefill_to_decode_ratio(
            self.batch, self.prefill_s, self.step_s, self.workload.output
        )

    @property
    def tokens_per_s_per_chip(self) -> float:
        """Output tokens with the prefill they need paid for; the same whether it is separate or
        interleaved."""
        return self.tokens_per_s / (self.slice.chips * (1 + self.prefill_per_decode))

    @property
    def requests_per_s_per_chip(self) -> float:
        return self.tokens_per_s_per_chip / self.workload.output

    @property
    def price_per_million_tokens(self) -> float | None:
        """Of output tokens, prefill included; None without a price."""
        if self.price_per_chip_hour is None:
            return None
        return inference.price_per_million_tokens(1, self.price_per_chip_hour, self.tokens_per_s_per_chip)

    @property
    def used_bytes(self) -> float:
        """Weights and full caches of the replica."""
        return self.weight_bytes + self.batch * self.cache_bytes

    @property
    def meets_latency(self) -> bool:
        return self.workload.latency_s is None or self.step_s <= self.workload.latency_s


def touched_share(experts: int, experts_per_token: int, batch: float) -> float:
    """Expected share of the experts that ``batch`` tokens use: 1 - (1 - k/E)^B."""
    return 1 - (1 - experts_per_token / experts) ** batch


def weight_bytes(spec: ModelSpec, bits: float) -> float:
    """Of all weights, all in one format."""
    return parameter_count(spec).total * bits / 8


def point(
    spec: ModelSpec,
    slice_: Slice,
    batch: int,
    workload: Workload,
    quantization: Quantization | None = None,
    *,
    prefill_utilization: float = 0.4,
) -> Point:
    """Prices one ``batch`` on one replica ``slice_``, whether it fits or not (see ``max_batch``).

    Caches split over KV heads, then over the batch; more chips than that read copies. Raises UserError when
    the chip cannot compute in the precision asked for.
    """
    quantization = quantization or Quantization()
    chip, p = slice_.chip, parameter_count(spec)
    n, hbm = slice_.chips, chip.hbm_bytes_per_s
    peak = chip.peak_flops_per_s(quantization.compute)
    stored = weight_bytes(spec, BITS[quantization.weights])
    touched = stored
    if spec.experts:
        idle = 1 - touched_share(spec.experts.experts, spec.experts.per_token, batch)
        touched -= idle * p.experts * BITS[quantization.weights] / 8
    cache_bits = BITS[quantization.cache]
    linear = inference.linear_s(
        batch, touched, chips=n, hbm_bytes_per_s=hbm, active_params=p.active, flops_per_s=peak
    )
    full = transformer.kv_cache_bytes(spec, workload.full_context, bits=cache_bits)
    mean = transformer.kv_cache_bytes(spec, workload.mean_context, bits=cache_bits)
    heads = 1 if spec.latent_attention else spec.kv_heads
    reading = min(n, heads * batch)
    prompt = transformer.forward_flops(spec, workload.prompt, workload.prompt).total
    return Point(
        slice=slice_,
        batch=batch,
        quantization=quantization,
        workload=workload,
        weights_s=linear.comms_s,
        cache_s=batch * mean / (reading * hbm),
        math_s=linear.math_s,
        network_s=_network_s(spec, slice_, batch, split_batch=n > heads),
        prefill_s=roofline.compute_s(prompt, peak, ways=n, utilization=prefill_utilization),
        weight_bytes=stored,
        cache_bytes=full,
        max_batch=inference.max_batch(n, MEMORY_SHARE * chip.usable_hbm_bytes, stored, full),
        price_per_chip_hour=chip.price_per_chip_hour,
    )


def _network_s(spec: ModelSpec, slice_: Slice, batch: int, *, split_batch: bool) -> float:
    """Gathers and scatters of activations [B, D] (bf16), and where caches are split over the batch too, the
    all-to-alls that bring queries [B, N H] to them and the answers back."""
    if slice_.chips == 1:
        return 0.0
    gather_s = _collective_s("all_gather", slice_, 2 * batch * spec.d_model)
    resharding_s = _collective_s("all_to_all", slice_, 2 * batch * spec.heads * spec.head_dim)
    return spec.layers * (COLLECTIVES_PER_LAYER * gather_s + (2 * resharding_s if split_batch else 0.0))


def _collective_s(op: Op, slice_: Slice, bytes_: float) -> float:
    """Over all chips of ``slice_``, at least its hops."""
    chip = slice_.chip
    if chip.levels:
        levels = switched.levels_spanned(chip, slice_.chips)
        price = switched.all_to_all_s if op == "all_to_all" else switched.all_gather_s
        return max(price(bytes_, levels), chip.hop_s)
    axes = collectives.axes_of(slice_)
    return collectives.collective(op, bytes_, axes, chip.ici_link_bytes_per_s, hop_s=chip.hop_s).time_s
