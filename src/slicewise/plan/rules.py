"""The inequalities behind a layout, each with its numbers put in: what decides for or against every axis."""

import math
from dataclasses import dataclass
from typing import Literal

from slicewise.catalog.slices import Cluster
from slicewise.costs import parallelism
from slicewise.costs.device import Device, device_of
from slicewise.costs.layout import Layout
from slicewise.costs.memory import MARGIN
from slicewise.costs.shapes import ModelShape

WEIGHT_BITS = 16  # as they are gathered
DCN_GRADIENT_BITS = 32  # Multislice reduces float32 gradients
MULTISLICE_MARGIN = 2.0  # what the Multislice overview advises over the threshold
PIPELINE_DEPTHS = (2, 4, 8)


@dataclass(frozen=True)
class Inequality:
    """``left`` must be at least (or at most) ``right``; ``text`` says so in words with the numbers."""

    rule: str
    left: float
    right: float
    sense: Literal[">=", "<="]
    text: str

    @property
    def holds(self) -> bool:
        return self.left >= self.right if self.sense == ">=" else self.left <= self.right


@dataclass(frozen=True)
class Setting:
    """What the rules read of a workload on a cluster."""

    shape: ModelShape
    cluster: Cluster
    seq: int
    tokens: int  # of a global batch

    @property
    def device(self) -> Device:
        return device_of(self.cluster.chip)

    @property
    def axes(self) -> int:
        """Physical axes of a slice that a collective over all of it can use."""
        return max(1, sum(d > 1 for d in self.cluster.slice.topology))

    @property
    def alpha(self) -> float:
        """FLOP per byte of one torus axis (both directions), or of a GPU's egress."""
        chip = self.cluster.chip
        rate = chip.ici_axis_bytes_per_s or chip.levels[0].egress_bytes_per_s
        return parallelism.alpha(chip.bf16_flops_per_s, rate)

    @property
    def switched(self) -> bool:
        """Whether a slice is a domain of NVLink and not a torus."""
        return not self.cluster.chip.ici_dims

    @property
    def sparsity(self) -> float:
        """Experts over experts a token uses, 1 for a dense model."""
        return max((layer.experts / layer.active for layer in self.shape.layers if layer.active), default=1.0)

    @property
    def d_ff(self) -> int:
        """Hidden width that a token passes in one layer."""
        return max(layer.mlp_width for layer in self.shape.layers)

    @property
    def tokens_per_chip(self) -> float:
        return self.tokens / self.cluster.chips

    @property
    def tokens_per_slice(self) -> float:
        return self.tokens / self.cluster.num_slices


def number(value: float) -> str:
    """Short: 850, 12.8k, 1.4M."""
    if abs(value) < 1000:
        return f"{value:.3g}"
    if abs(value) < 1e6:
        return f"{value / 1e3:.3g}k"
    return f"{value / 1e6:.3g}M"


def binary(bytes_: float) -> str:
    """Such as 63.2 GiB, or 7.9 MiB."""
    return f"{bytes_ / 2**30:.1f} GiB" if bytes_ >= 2**30 / 20 else f"{bytes_ / 2**20:.2g} MiB"


def fsdp(s: Setting) -> Inequality:
    """FSDP over all axes of a slice is compute bound from alpha / M_X tokens a chip, times E / k for
    experts."""
    need = parallelism.min_tokens_per_chip(s.alpha, s.axes) * s.sparsity
    factor = f" x E/k {s.sparsity:g}" if s.sparsity > 1 else ""
    over = "NVLink" if s.switched else f"{s.axes} ICI {'axis' if s.axes == 1 else 'axes'}"
    share = "" if s.switched else f" / {s.axes}"
    return Inequality(
        "fsdp", s.tokens_per_chip, need, ">=",
        f"FSDP over {over} needs {number(need)} tokens a chip"
        f" (alpha {number(s.alpha)}{share}{factor}); you have {number(s.tokens_per_chip)}",
    )  # fmt: skip


def tensor(s: Setting, ways: int, axes: int = 1) -> Inequality:
    """Tensor parallelism over one axis is compute bound up to F / alpha ways."""
    need = parallelism.min_d_ff(ways, s.alpha, axes)
    over, share = ("NVLink", "") if s.switched else ("ICI", f" / {axes} axis")
    return Inequality(
        "tensor", s.d_ff, need, ">=",
        f"tensor {ways} over {over} needs d_ff > {number(need)}"
        f" (alpha {number(s.alpha)} x {ways}{share}); the model has {number(s.d_ff)}",
    )  # fmt: skip


def mixed(s: Setting) -> Inequality:
    """FSDP with tensor parallelism at the best split: alpha^2 / (M_X M_Y F) tokens a chip."""
    product = max(1, s.axes - 1)
    need = parallelism.min_tokens_per_chip_mixed(s.alpha, s.d_ff, product) * s.sparsity
    return Inequality(
        "fsdp+tensor", s.tokens_per_chip, need, ">=",
        f"FSDP with tensor at their best split needs {number(need)} tokens a chip;"
        f" you have {number(s.tokens_per_chip)}",
    )  # fmt: skip


def dcn_data(s: Setting) -> Inequality:
    """Data parallelism between slices: float32 gradients cross the network at 32 bits a parameter for two
    slices, nearly 64 for many, against 4 FLOPs of the backward pass per parameter and token (Multislice
    overview)."""
    chip, n = s.cluster.chip, s.cluster.num_slices
    per_bit = chip.bf16_flops_per_s / (8 * chip.dcn_bytes_per_s)
    need = (
        parallelism.min_tokens_per_slice_by_bit(per_bit, num_slices=n, gradient_bits=DCN_GRADIENT_BITS)
        * s.sparsity
    )
    advised = parallelism.min_tokens_per_slice_by_bit(
        per_bit, num_slices=n, gradient_bits=DCN_GRADIENT_BITS, margin=MULTISLICE_MARGIN
    )
    bits = 2 * DCN_GRADIENT_BITS * (n - 1) / n
    factor = f" x E/k {s.sparsity:g}" if s.sparsity > 1 else ""
    return Inequality(
        "dcn data", s.tokens_per_slice, need, ">=",
        f"data parallelism over DCN needs {number(need)} tokens a slice ({number(per_bit)} FLOP/bit"
        f" x {bits:.0f} bits a parameter / 4{factor}; {number(advised * s.sparsity)} advised);"
        f" you have {number(s.tokens_per_slice)}",
    )  # fmt: skip


def dcn_fsdp(s: Setting) -> Inequality:
    """FSDP between slices, in the backward pass: bf16 weights are gathered and float32 gradients scattered,
    48 bits a parameter for many slices, against 4 FLOPs per parameter and token."""
    chip, n = s.cluster.chip, s.cluster.num_slices
    per_bit = chip.bf16_flops_per_s / (8 * chip.dcn_bytes_per_s)
    bits = (WEIGHT_BITS + DCN_GRADIENT_BITS) * (n - 1) / n
    need = per_bit * bits / 4 * s.sparsity
    factor = f" x E/k {s.sparsity:g}" if s.sparsity > 1 else ""
    return Inequality(
        "dcn fsdp", s.tokens_per_slice, need, ">=",
        f"FSDP over DCN needs {number(need)} tokens a slice ({number(per_bit)} FLOP/bit x {bits:.0f} bits a"
        f" parameter / 4{factor}); you have {number(s.tokens_per_slice)}",
    )  # fmt: skip


def memory(need_bytes: float, s: Setting, what: str) -> Inequality:
    """Whether ``what`` fits beside the margin."""
    have = (1 - MARGIN) * s.device.hbm_bytes
    return Inequality(
        "memory", need_bytes, have, "<=",
        f"{what} needs {binary(need_bytes)} a device; {binary(have)} can be used"
        f" ({MARGIN:.0%} kept free)",
    )  # fmt: skip


def expert(s: Setting, ways: int) -> Inequality:
    """Experts over one ring are compute bound up to 4 F / alpha ways (two all-to-alls of the chosen
    tokens); over a switch for any number of ways if F > alpha."""
    routed = [m.d_in for layer in s.shape.layers for m in layer.matmuls if m.name == "moe_mlpwo"]
    width = max(routed, default=0)
    if s.switched:
        return Inequality(
            "expert", width, s.alpha, ">=",
            f"expert {ways} over NVLink needs an expert's d_ff > alpha {number(s.alpha)};"
            f" the model has {number(width)}",
        )  # fmt: skip
    most = parallelism.max_expert_ways(width, s.alpha)
    return Inequality(
        "expert", ways, most, "<=",
        f"expert {ways} over one ICI ring saturates at {most:.3g} ways"
        f" (4 x expert d_ff {number(width)} / alpha {number(s.alpha)})",
    )  # fmt: skip


def context(s: Setting, ways: int) -> Inequality:
    """Attention that gathers keys and values does s N / (K ways) FLOP per byte."""
    a = s.shape.layers[0].attention
    intensity = parallelism.context_attention_intensity(s.seq, a.heads, a.kv_heads, ways)
    return Inequality(
        "context", intensity, s.alpha, ">=",
        f"context {ways} gives attention {number(intensity)} FLOP per byte of gathered keys and values (seq"
        f" {number(s.seq)} x {a.heads} / ({a.kv_heads} x {ways}));"
        f" {'NVLink' if s.switched else 'one ICI axis'} needs {number(s.alpha)}",
    )  # fmt: skip


def whole_sequences(s: Setting, data_shards: int) -> Inequality:
    """Without a context axis a data shard holds whole sequences."""
    sequences = s.tokens / s.seq
    return Inequality(
        "batch", data_shards, sequences, "<=",
        f"{data_shards} data shards need as many sequences; the global batch has {sequences:.0f}",
    )  # fmt: skip


def pipeline(s: Setting, stages: int, microbatches: int, limit: float = 0.1) -> Inequality:
    """The bubble (P - 1) / (m + P - 1) of a pipeline, at most ``limit`` of the step."""
    bubble = parallelism.pipeline_bubble(stages, microbatches)
    return Inequality(
        "pipeline", bubble, limit, "<=",
        f"a pipeline of {stages} stages with {microbatches} microbatches idles {bubble:.0%}"
        f" (({stages} - 1) / ({microbatches} + {stages} - 1)); {limit:.0%} is worth it",
    )  # fmt: skip


def dcn_pipeline_depths(num_slices: int, layers: int) -> tuple[tuple[int, int], ...]:
    """(depth, data replicas) to try when DCN data parallelism is not enough: depths 2, 4, 8 against N /
    depth."""
    return tuple(
        (depth, num_slices // depth)
        for depth in PIPELINE_DEPTHS
        if num_slices % depth == 0 and layers % depth == 0
    )


def of_layout(s: Setting, layout: Layout) -> tuple[Inequality, ...]:
    """The inequalities that concern the axes ``layout`` uses."""
    i, d = layout.ici, layout.dcn
    found = []
    if i.fsdp * i.data > 1:
        found.append(fsdp(s) if i.tensor == 1 else mixed(s))
    if i.tensor > 1:
        found.append(tensor(s, i.tensor))
    if i.context > 1:
        found.append(context(s, i.context))
    if i.expert > 1:
        found.append(expert(s, i.expert))
    if d.data > 1:
        found.append(dcn_data(s))
    if d.fsdp > 1:
        found.append(dcn_fsdp(s))
    stages = layout.total("pipeline")
    if stages > 1:
        found.append(pipeline(s, stages, layout.pipeline_microbatches))
    return tuple(found)


Regime = Literal["short", "long", "ultra-large"]


@dataclass(frozen=True)
class Choice:
    """A row of the decision table: the axes to start with and what limits them."""

    axes: tuple[str, ...]
    bottleneck: str
    why: str


IRONWOOD: dict[tuple[bool, Regime], Choice] = {
    # (mixture of experts, regime): after Google Cloud's and MaxText's guides to training on TPU7x
    (False, "short"): Choice(
        ("fsdp",), "matrix units",
        "weights stream behind compute while tokens a chip exceed the FSDP threshold",
    ),
    (False, "long"): Choice(
        ("fsdp", "context"), "activation memory",
        "one sequence no longer fits a device; the smallest context degree that makes it fit",
    ),
    (False, "ultra-large"): Choice(
        ("fsdp", "pipeline"), "memory of weights and optimiser",
        "one slice cannot hold the state; stages over slices move activations only",
    ),
    (True, "short"): Choice(
        ("fsdp", "expert"), "ICI all-gather of all experts' weights",
        "FSDP needs E/k times the tokens; experts stay put on an expert axis while it is below 4 F / alpha",
    ),
    (True, "long"): Choice(
        ("fsdp", "context", "expert"), "activation memory and all-to-all",
        "sequences are split first, then experts, each as little as fits",
    ),
    (True, "ultra-large"): Choice(
        ("fsdp", "expert", "pipeline"), "memory of expert weights and DCN",
        "experts over ICI, stages over slices; data replicas with what is left",
    ),
}  # fmt: skip


def regime(s: Setting, state_bytes_per_parameter: float = 16.0) -> tuple[Regime, Inequality]:
    """Whether the state of the model exceeds a slice (ultra-large), one sequence a device (long), or neither.

    A sequence's least memory: the inputs of all layers and its logits in float32.
    """
    if s.shape.frozen_bytes is not None:
        state_bytes_per_parameter = s.shape.frozen_bytes
    state = state_bytes_per_parameter * s.shape.parameters / s.cluster.slice.devices
    fits = memory(state, s, "the weights' and optimiser's share of one slice")
    if not fits.holds:
        return "ultra-large", fits
    inputs = 2.0 * s.shape.layer_count * s.shape.d_model
    sequence = s.seq * (inputs + 4.0 * s.shape.vocab)
    fits = memory(state + sequence, s, "one whole sequence with its share of the state")
    return ("short" if fits.holds else "long"), fits


def ironwood(s: Setting) -> tuple[Choice, Regime, Inequality]:
    """The row of the decision table for a setting, and the inequality that chose it."""
    found, why = regime(s)
    return IRONWOOD[s.sparsity > 1, found], found, why


def multislice_order(s: Setting, replica_fits: bool) -> tuple[str, ...]:
    """Axes over DCN in the order to try: data first, FSDP only when memory asks, pipeline last."""
    enough = dcn_data(s).holds
    order = ["data"] if replica_fits else ["fsdp"]
    if not enough and not math.isinf(s.tokens_per_slice):
        order.append("pipeline")
    return tuple(order)
