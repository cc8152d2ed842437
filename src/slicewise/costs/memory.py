"""Device memory of a training step by component. Every function takes numbers or arrays of many layouts."""

from dataclasses import dataclass

import numpy as np

from slicewise.costs.compute import ACT
from slicewise.costs.layout import Layout, Number, Recipe
from slicewise.costs.remat import plain_name, tensor_widths
from slicewise.costs.shapes import Layer, ModelShape

QUERY_GRADIENTS = (
    3  # that the fused backward kernel of attention sums at its end (tokamax: dq_reduction_steps)
)
MARGIN = 0.04  # share of usable memory kept free: fragmentation, and what this model does not see


def local_parameters(shape: ModelShape, layout: Layout) -> Number:
    """Parameters of one device: dense ones are spread over every axis but data, routed ones over no idle
    expert."""
    return shape.parameters / _spread(layout)


def _spread(layout: Layout) -> Number:
    return layout.ici.tensor * layout.weight_shards * layout.total("pipeline")


def copied_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> Number:
    """The device's part of all layers' weights in the dtype that products take: compilers narrow wider ones once,
    before the loop over layers, and not a layer at a time. Narrow ones are copied where a circular schedule deals them
    out."""
    if not recipe.as_compiled_here:
        return 0.0
    stored = recipe.weight_bytes if shape.frozen_bytes is None else shape.frozen_bytes
    copied = ACT if stored > ACT else np.where(layout.pipeline_repeats > 1, stored, 0.0)
    return copied * sum(layer.count * layer.parameters for layer in shape.layers) / _spread(layout)


def trained_parameters(shape: ModelShape, layout: Layout) -> Number:
    """Parameters of one device that have gradients and optimiser state: all of them, or those of adapters."""
    if shape.frozen_bytes is None:
        return local_parameters(shape, layout)
    shards, t = layout.weight_shards, layout.ici.tensor
    layers = sum(layer.count * layer.adapter_parameters(shards, t) for layer in shape.layers)
    return layers / layout.total("pipeline")


def weight_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> Number:
    """Of one device: of what is trained, and of what is frozen beside it."""
    trained = trained_parameters(shape, layout) * recipe.weight_bytes
    if shape.frozen_bytes is None:
        return trained
    return trained + local_parameters(shape, layout) * shape.frozen_bytes


def kept_bytes(shape: ModelShape, layout: Layout) -> tuple[Number, Number]:
    """(weights, gradients) of the layers of one stage, whole over the axes that shard them as FSDP does; gradients in
    float32 and in the dtype of products.

    Frozen weights have no gradients, and are used where they lie if no axis shards them.
    """
    i, stages = layout.ici, layout.total("pipeline")
    routed = sum(layer.count * layer.routed_parameters for layer in shape.layers)
    dense = sum(layer.count * layer.parameters for layer in shape.layers) - routed
    if shape.frozen_bytes is None:
        kept = (dense + routed / i.expert) / (i.tensor * stages)
        return ACT * kept, (4 + ACT) * kept
    ways = i.fsdp * i.context * layout.dcn.fsdp
    gathered = np.where(ways * i.expert > 1, dense, 0.0) + np.where(ways > 1, routed / i.expert, 0.0)
    frozen = min(shape.frozen_bytes, ACT) * gathered / (i.tensor * stages)
    adapters = sum(layer.count * layer.adapter_parameters(1, i.tensor) for layer in shape.layers) / stages
    return frozen + ACT * adapters, (4 + ACT) * adapters


def saved_width(layer: Layer, recipe: Recipe, tensor: Number, *, where: str) -> Number:
    """Elements per token that one layer keeps for its backward pass, on the ``device`` or on the ``host``."""
    names = recipe.remat.saved if where == "device" else recipe.remat.offloaded
    width: Number = 0.0
    for name, (elements, sharded) in tensor_widths(layer).items():
        if plain_name(name) in names:
            width = width + elements / (tensor if sharded else 1)
    return width


def working_bytes(layer: Layer, layout: Layout, tokens: Number, recipe: Recipe) -> Number:
    """What one layer's backward pass holds at once: its activations, recomputed before it begins, with the gradient of
    the widest, its gathered weights, and the gradient of one matrix before it is scattered.

    Of other trainers' steps those of attention or of the MLP, whichever are more; train's own were compiled, and hold
    both, with the partial sums of the attention kernel and what a tensor axis has gathered or not yet summed.
    """
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
    attention = attention + context_width(layer, layout, recipe)
    # tokens in the order of their experts, both ways
    mlp = mlp + 2 * slots * layer.active * layer.d_model / t
    held = np.maximum(attention, mlp)
    if recipe.as_compiled_here:
        if recipe.attention.kind == "flash" and recipe.attention.fused_backward:
            attention = attention + QUERY_GRADIENTS * layer.attention.context_width / t
        held = attention + mlp - 2 * layer.d_model / t + np.where(t > 1, 3.0 * layer.d_model, 0.0)
    weights = (layer.parameters - layer.routed_parameters) / t + layer.routed_parameters / (t * e)
    dense = max(m.parameters for m in layer.matmuls if not m.routed)
    largest = np.maximum(dense, max((m.parameters for m in layer.matmuls if m.routed), default=0) / e) / t
    if layer.frozen:
        largest = 0.0
    return ACT * (tokens * (held + widest) + weights + largest)


LOSS_PARTS = 8  # of the output matrix's gradient, which are computed and summed over devices one by one


def loss_blocks(tokens: Number, d_model: int) -> Number:
    """Blocks of a device's ``tokens``, each with one product for the gradient of the output matrix, which several
    blocks sum in float32.

    In 16 bits the gradients of the logits of twice as many tokens as the model is wide are as large as that sum, which
    one block does not need. Several blocks of as many tokens as the model is wide hold no more than that beside it.
    """
    width = max(d_model, 1024)
    return np.where(tokens <= 2 * width, 1, np.ceil(tokens / width))


def loss_chunk_tokens(d_model: int) -> int:
    """Tokens of a block whose float32 logits the loss holds at a time: all that a chunk costs is reading the output
    matrix again, while its product takes longer."""
    return max(d_model // 4, 1024)


def output_bytes(shape: ModelShape, layout: Layout, tokens: Number, recipe: Recipe) -> Number:
    """The gathered output matrix, the gradients of a block's logits and a chunk's logits in float32; or the gradient of
    the matrix: of one block part by part, of several in float32. A frozen matrix has none; then
    also the final norm of all tokens counts, in float32 with its gradient: nothing larger follows in the memory it had.
    """
    t, columns = layout.ici.tensor, shape.vocab / layout.ici.tensor
    matrix, trained = ACT * shape.d_model * columns, shape.frozen_bytes is None
    if not recipe.loss_in_chunks:
        return (1 + 2 * trained) * matrix + 4 * tokens * columns / recipe.vocab_tiles
    blocks = loss_blocks(tokens, shape.d_model)
    logits = 4 * np.minimum(loss_chunk_tokens(shape.d_model), tokens / blocks) * columns
    held = matrix + ACT * tokens / blocks * columns
    if not trained:
        norm = (4 + 4 + ACT * (t > 1)) * tokens * shape.d_model if recipe.as_compiled_here else 0.0
        return held + logits + norm
    in_parts = matrix * (2 / LOSS_PARTS + 1 / layout.weight_shards)
    return held + np.where(blocks > 1, 2 * matrix + logits, np.maximum(logits, in_parts))


def context_width(layer: Layer, layout: Layout, recipe: Recipe) -> Number:
    """Elements per token for what attention has of other devices: all keys and values of a row with their gradients,
    or round a ring one more share of them, and two of their float32 gradients."""
    n = layout.ici.context
    shares = n - 1 if recipe.context_exchange == "all_gather" else 0
    if recipe.context_exchange == "ring":
        shares = np.where(n > 1, (1 + 2 * 4 / ACT) / 2, 0)
    return 2 * shares * layer.attention.kv_width / layout.ici.tensor


@dataclass(frozen=True)
class Peak:
    """What does not depend on the remat policy: bytes of a device, and tokens of a microbatch."""

    weights: Number
    optimizer: Number  # moments, wherever they are
    copies: Number  # of weights, in the dtype of products
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
    trained = trained_parameters(shape, layout)
    working: Number = 0.0
    for layer in shape.layers:
        working = np.maximum(working, working_bytes(layer, layout, tokens, recipe))
    accumulator = np.where(layout.accumulation_steps > 1, 4.0, 0.0) if recipe.gradient_bytes < 4 else 0.0
    kept = [np.where(layout.keeps_gathered, size, 0.0) for size in kept_bytes(shape, layout)]
    rows = tokens * layout.pipeline_microbatches / stages  # that a device embeds and computes the loss of
    return Peak(
        weights=weight_bytes(shape, layout, recipe) + kept[0],
        optimizer=trained * recipe.held_moment_bytes(layout),
        copies=copied_bytes(shape, layout, recipe),
        gradients=trained * (recipe.gradient_bytes + accumulator) + kept[1],
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
    the last layer's backward pass (all gradients and a working set, with what comes from the host for the layer that
    is next), on top of weights, their copies for products, optimiser state and saved activations; the components of
    the smaller of the two are 0. ``host`` is memory of the host. Moments that are kept there pass through the device a
    few weights at a time.

    ``peak`` = `peak_bytes` of the same arguments, where it is known already.
    """
    p = peak or peak_bytes(shape, layout, recipe, seq)
    t = layout.ici.tensor
    saved: Number = 0.0
    host: Number = 0.0
    fetched: Number = 0.0  # by one layer
    for layer in shape.layers:
        saved = saved + layer.count * saved_width(layer, recipe, t, where="device")
        of_layer = saved_width(layer, recipe, t, where="host")
        host, fetched = host + layer.count * of_layer, np.maximum(fetched, of_layer)
    working = p.working + ACT * p.tokens * fetched * recipe.as_compiled_here
    at_loss = p.output > working + p.gradients
    return {
        "weights": p.weights,
        "optimizer": 0.0 if recipe.moments_on_host else p.optimizer,
        "copies of weights": p.copies,
        "gradients": np.where(at_loss & (layout.accumulation_steps == 1), 0.0, p.gradients),
        "activations": ACT * p.in_flight * saved + p.waiting,
        "working set": np.where(at_loss, 0.0, working),
        "logits": np.where(at_loss, p.output, 0.0),
        "host": ACT * p.in_flight * host + (p.optimizer if recipe.moments_on_host else 0.0),
    }


def device_total(components: dict[str, Number]) -> Number:
    """Bytes in device memory."""
    return sum(value for name, value in components.items() if name != "host")
