"""Device memory of a training step by component. Every function takes numbers or arrays of many layouts."""

from dataclasses import dataclass

import numpy as np

from slicewise.costs.compute import ACT
from slicewise.costs.layout import Layout, Number, Recipe
from slicewise.costs.remat import plain_name, tensor_widths
from slicewise.costs.shapes import Layer, ModelShape

MARGIN = 0.04  # share of usable memory kept free: fragmentation, and what this model does not see


def local_parameters(shape: ModelShape, layout: Layout) -> Number:
    """Parameters of one device: dense ones are spread over every axis but data, routed ones over no idle
    expert."""
    i, d = layout.ici, layout.dcn
    spread = i.tensor * i.fsdp * i.context * i.expert * d.fsdp * layout.total("pipeline")
    return shape.parameters / spread


def kept_parameters(shape: ModelShape, layout: Layout) -> Number:
    """Parameters of the layers of one stage, whole over the axes that shard them as FSDP does."""
    i = layout.ici
    routed = sum(layer.count * layer.routed_parameters for layer in shape.layers)
    dense = sum(layer.count * layer.parameters for layer in shape.layers) - routed
    return (dense + routed / i.expert) / (i.tensor * layout.total("pipeline"))


def saved_width(layer: Layer, recipe: Recipe, tensor: Number, *, where: str) -> Number:
    """Elements per token that one layer keeps for its backward pass, on the ``device`` or on the ``host``."""
    names = recipe.remat.saved if where == "device" else recipe.remat.offloaded
    width: Number = 0.0
    for name, (elements, sharded) in tensor_widths(layer).items():
        if plain_name(name) in names:
            width = width + elements / (tensor if sharded else 1)
    return width


def working_bytes(layer: Layer, layout: Layout, tokens: Number, recipe: Recipe) -> Number:
    """What one layer's backward pass holds at once: the activations of its attention or of its MLP with the
    gradient of the widest, its gathered weights, and the gradient of one matrix before it is scattered."""
    t, e = layout.ici.tensor, layout.ici.expert
    slots = recipe.expert_capacity_factor or 1.0
    attention: Number = 2 * layer.d_model / t
    mlp: Number = 2 * layer.d_model / t
    widest: Number = 0.0
    for name, (elements, sharded) in tensor_widths(layer).items():
        width = elements * (slots if name.startswith("moe_") else 1.0) / (t if sharded else 1)
        widest = np.maximum(widest, width)
        if "mlp" in name:
            mlp = mlp + width
        else:
            attention = attention + width
    mlp = (
        mlp + 2 * slots * layer.active * layer.d_model / t
    )  # tokens in the order of their experts, both ways
    weights = (layer.parameters - layer.routed_parameters) / t + layer.routed_parameters / (t * e)
    dense = max(m.parameters for m in layer.matmuls if not m.routed)
    largest = np.maximum(dense, max((m.parameters for m in layer.matmuls if m.routed), default=0) / e) / t
    return ACT * (tokens * (np.maximum(attention, mlp) + widest) + weights + largest)


def loss_chunks(tokens: Number, d_model: int) -> Number:
    """Chunks of a device's ``tokens`` whose logits the loss holds at a time.

    As many tokens as the model is wide make a chunk's logits as large as the gradient of the output matrix, which
    is read and written once a chunk: larger chunks save little time, smaller ones little memory.
    """
    return np.ceil(tokens / max(d_model, 1024))


def output_bytes(shape: ModelShape, layout: Layout, tokens: Number, recipe: Recipe) -> Number:
    """Logits in float32 (of a chunk also their gradient), and the gathered output matrix with its float32 gradient."""
    t = layout.ici.tensor
    if recipe.loss_in_chunks:
        logits = (4 + ACT) * tokens * shape.vocab / t / loss_chunks(tokens, shape.d_model)
    else:
        logits = 4 * tokens * shape.vocab / t / recipe.vocab_tiles
    return logits + (ACT + 4) * shape.vocab * shape.d_model / t


@dataclass(frozen=True)
class Peak:
    """What does not depend on the remat policy: bytes of a device, and tokens of a microbatch."""

    weights: Number
    optimizer: Number  # moments, wherever they are
    gradients: Number
    working: Number
    output: Number
    tokens: Number
    in_flight: (
        Number  # tokens whose activations one stage keeps, in units of all layers: idle ticks keep some too
    )
    waiting: Number  # bytes of microbatches before and behind the stages, and of their gradients


def peak_bytes(shape: ModelShape, layout: Layout, recipe: Recipe, seq: int) -> Peak:
    micro, stages = layout.accumulation_steps * layout.pipeline_microbatches, layout.total("pipeline")
    tokens = layout.global_batch * seq / (layout.data_shards * micro)
    local = local_parameters(shape, layout)
    working: Number = 0.0
    for layer in shape.layers:
        working = np.maximum(working, working_bytes(layer, layout, tokens, recipe))
    accumulator = np.where(layout.accumulation_steps > 1, 4.0, 0.0) if recipe.gradient_bytes < 4 else 0.0
    kept = np.where(layout.keeps_gathered, kept_parameters(shape, layout), 0.0)
    rows = tokens * layout.pipeline_microbatches / stages  # that a device embeds and computes the loss of
    return Peak(
        weights=local * recipe.weight_bytes + ACT * kept,
        optimizer=local * recipe.moment_bytes / recipe.moment_shards,
        gradients=local * (recipe.gradient_bytes + accumulator) + (4 + ACT) * kept,
        working=working,
        output=output_bytes(shape, layout, rows, recipe),
        tokens=tokens,
        in_flight=tokens * layout.ticks / (stages * layout.pipeline_repeats),
        waiting=np.where(stages > 1, 2 * ACT * rows * shape.d_model / layout.ici.tensor, 0.0),
    )


def memory_bytes(
    shape: ModelShape, layout: Layout, recipe: Recipe, seq: int, *, peak: Peak | None = None
) -> dict[str, Number]:
    """Bytes of one device by component, at the peak. That is either the loss (logits and output matrix) or
    the last layer's backward pass (all gradients and a working set), on top of weights, optimiser state and
    saved activations; the components of the smaller of the two are 0. ``host`` is memory of the host. Moments that are
    kept there pass through the device a few weights at a time.

    ``peak`` = `peak_bytes` of the same arguments, where it is known already.
    """
    p = peak or peak_bytes(shape, layout, recipe, seq)
    t = layout.ici.tensor
    saved: Number = 0.0
    host: Number = 0.0
    for layer in shape.layers:
        saved = saved + layer.count * saved_width(layer, recipe, t, where="device")
        host = host + layer.count * saved_width(layer, recipe, t, where="host")
    at_loss = p.output > p.working + p.gradients
    return {
        "weights": p.weights,
        "optimizer": 0.0 if recipe.moments_on_host else p.optimizer,
        "gradients": np.where(at_loss & (layout.accumulation_steps == 1), 0.0, p.gradients),
        "activations": ACT * p.in_flight * saved + p.waiting,
        "working set": np.where(at_loss, 0.0, p.working),
        "logits": np.where(at_loss, p.output, 0.0),
        "host": ACT * p.in_flight * host + (p.optimizer if recipe.moments_on_host else 0.0),
    }


def device_total(components: dict[str, Number]) -> Number:
    """Bytes in device memory."""
    return sum(value for name, value in components.items() if name != "host")
