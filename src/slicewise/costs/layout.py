"""How a step is laid out (mesh degrees and batch) and how it is executed (precision, remat, kernels)."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from slicewise.catalog.slices import Slice
from slicewise.costs import torus
from slicewise.costs.remat import POLICIES, RematPolicy

Number = Any  # int, float or an array of them: every price can be taken for many layouts at once

AXES = ("data", "fsdp", "tensor", "context", "expert", "pipeline")
WEIGHT_AXES = ("pipeline", "fsdp", "expert", "context")  # over which d_model of weights is divided


@dataclass(frozen=True)
class Degrees:
    """Degrees of parallelism over one network."""

    data: Number = 1
    fsdp: Number = 1
    tensor: Number = 1
    context: Number = 1
    expert: Number = 1
    pipeline: Number = 1

    @property
    def product(self) -> Number:
        return self.data * self.fsdp * self.tensor * self.context * self.expert * self.pipeline


ONE = Degrees()


@dataclass(frozen=True)
class Layout:
    """Mesh and batch of one step. Fields may be arrays of one shape: many layouts at once."""

    ici: Degrees
    dcn: Degrees = ONE
    global_batch: Number = 1  # sequences
    accumulation_steps: Number = 1
    pipeline_microbatches: Number = 1  # within one accumulation step
    pipeline_repeats: Number = 1  # times a microbatch passes each stage (circular schedule)
    pipeline_gathers_once: Number = True  # a step, and keeps what it gathered; else for each microbatch

    @property
    def data_shards(self) -> Number:
        """Ways the tokens are divided."""
        return self.ici.data * self.dcn.data * self.weight_shards

    @property
    def weight_shards(self) -> Number:
        """Ways that the axes which divide d_model of dense weights divide it, but for the pipeline's."""
        return self.ici.fsdp * self.ici.context * self.ici.expert * self.dcn.fsdp

    @property
    def ticks(self) -> Number:
        """Times that a stage computes in an accumulation step, each with a share of its layers; some of them idly."""
        return self.pipeline_microbatches * self.pipeline_repeats + self.total("pipeline") - 1

    @property
    def keeps_gathered(self) -> Number:
        """Whether a stage keeps its weights whole over the axes that shard them as FSDP does."""
        return (self.total("pipeline") > 1) & np.asarray(self.pipeline_gathers_once)

    def total(self, axis: str) -> Number:
        return getattr(self.ici, axis) * getattr(self.dcn, axis)


@dataclass(frozen=True)
class AttentionKernel:
    """``flash`` never writes the logits to memory, ``dot`` does. Blocks in tokens."""

    kind: Literal["flash", "dot"] = "flash"
    block_q: int = 2048
    block_kv: int = 2048
    fused_backward: bool = True


FLASH = AttentionKernel()

ContextExchange = Literal["all_gather", "ring", "ulysses"]
CONTEXT_EXCHANGES: tuple[ContextExchange, ...] = get_args(ContextExchange)


Precision = Literal["bf16", "int8", "fp8"]


@dataclass(frozen=True)
class Recipe:
    """How the step is executed, apart from its layout."""

    remat: RematPolicy = POLICIES["full"]
    precision: Precision = "bf16"
    static_scales: bool = False  # quantisation without a pass that finds the largest value
    attention: AttentionKernel = FLASH
    expert_capacity_factor: float | None = None  # None = dropless (grouped matmul)
    expert_exchange: Literal["all_to_all", "all_gather"] = "all_to_all"
    context_exchange: ContextExchange = "all_gather"
    context_balanced: bool = True  # causal work spread evenly over the context axis
    context_ulysses: int = 1  # of the context degree, the part that exchanges heads instead of keys
    one_hot_embedding: bool = False  # the lookup as a matmul
    loss_in_chunks: bool = False  # of tokens, with their gradients: as train computes it
    as_compiled_here: bool = False  # memory as train's own compiled steps hold it, see costs.memory
    vocab_tiles: int = 1  # above 1 the logits are computed in parts and again in the backward pass
    async_collectives: bool = True
    weight_bytes: int = 4  # master weights
    moment_bytes: float = 8  # both moments together
    moments_over_data: bool = False  # replicas share them out (ZeRO-1)
    moments_on_host: bool = False
    gradient_bytes: int = 4
    summed_bytes: int = 4  # of a gradient while it is summed over devices

    def held_moment_bytes(self, layout: Layout) -> Number:
        """Of each parameter that a device holds."""
        return self.moment_bytes / (layout.total("data") if self.moments_over_data else 1)


def place(slice_: Slice, ici: Degrees) -> tuple[torus.AxisLinks, ...] | None:
    """The links of each axis (order of `torus.ORDER`) when ``ici`` is laid on ``slice_``; None if it cannot
    be."""
    return place_degrees(slice_, tuple(getattr(ici, axis) for axis in torus.ORDER))


def place_degrees(slice_: Slice, degrees: tuple[int, ...]) -> tuple[torus.AxisLinks, ...] | None:
    """As `place`, for degrees in the order of `torus.ORDER`. A switched domain gives every axis its full
    egress."""
    chip = slice_.chip
    assert math.prod(degrees) == slice_.devices, (degrees, slice_)
    if chip.ici_dims == 0:
        return tuple(torus.AxisLinks(1.0, 1.0) for _ in degrees)
    return torus.map_axes(slice_.topology, slice_.wrap, chip.jax_devices, degrees)
