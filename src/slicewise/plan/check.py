"""Whether a model and a batch allow a layout somebody asks for; refusals name the nearest legal choice."""

import math

import numpy as np

from slicewise.catalog.slices import Cluster
from slicewise.costs import batch, columns
from slicewise.costs.experts import check_capacity, check_divided
from slicewise.costs.layout import AXES, ContextExchange, Layout, Number, Recipe
from slicewise.costs.pipeline import check_layers, check_remat
from slicewise.costs.shapes import ModelShape
from slicewise.errors import UserError
from slicewise.plan.layouts import MAX_TENSOR, Limits, divisors, limits_of

SUBJECTS = {
    "tensor": "the heads and hidden widths of {model}",
    "expert": "the {experts} experts of {model}",
    "pipeline": "the {layers} layers of {model}",
}


def check_layout(shape: ModelShape, cluster: Cluster, layout: Layout, seq: int) -> None:
    """Raises UserError where an axis cannot divide what it must, or sequences cannot be shared out whole."""
    limits = limits_of(shape, seq, int(layout.global_batch))
    check_divided(shape.name, is_sparse=bool(shape.routed_parameters), ways=int(layout.total("expert")))
    for axis, subject in SUBJECTS.items():
        degree = int(layout.total(axis))
        if degree > 1 and not limits.allows(axis, degree):
            what = subject.format(model=shape.name, experts=limits.experts, layers=limits.layers)
            raise UserError(
                f"{axis} = {degree} does not divide {what}; {_nearest(limits, axis, degree, cluster)}."
            )
    dims = [(dim, "latent rank" if k else "d_model") for k, dim in enumerate(limits.embed)]
    columns.check(shape.name, dims, {axis: int(layout.total(axis)) for axis in AXES})
    if layout.global_batch < 1:
        raise UserError(
            f"the global batch is below one sequence of {seq} tokens; expected {seq} tokens or more."
        )
    shards = layout.data_shards // layout.ici.context
    shards *= layout.accumulation_steps * layout.pipeline_microbatches
    if (stages := int(layout.total("pipeline"))) > 1:
        check_layers(shape.name, shape.staged_groups, stages, int(layout.pipeline_repeats))
    if layout.global_batch % shards:
        near = max(1, round(layout.global_batch / shards)) * shards
        raise UserError(
            f"a global batch of {layout.global_batch} sequences cannot be divided over {shards} data shards"
            f" and microbatches; the nearest that can is {near}."
        )


def check_recipe(shape: ModelShape, layout: Layout, recipe: Recipe, seq: int) -> None:
    """Raises UserError where ``layout`` cannot be run on sequences of ``seq`` as ``recipe`` says."""
    check_remat(int(layout.total("pipeline")), recipe.remat)
    n, exchange = int(layout.total("context")), recipe.context_exchange
    batch.check_divided(seq, n, exchange, shape.prediction_heads)
    batch.check_heads(shape.name, limits_of(shape, seq, 1).heads, n, int(layout.total("tensor")), exchange)
    check_capacity(n, is_capacity=bool(shape.routed_parameters and recipe.expert_capacity_factor))


def heads_allow(shape: ModelShape, layout: Layout, exchange: ContextExchange) -> Number:
    """Whether there are key-value heads for every device that shares a sequence, where heads are exchanged."""
    if exchange != "ulysses":
        return True
    ways = layout.total("tensor") * layout.total("context")
    return np.logical_and.reduce([layer.attention.kv_heads % ways == 0 for layer in shape.layers])


def _nearest(limits: Limits, axis: str, degree: int, cluster: Cluster) -> str:
    legal = [d for d in divisors(cluster.slice.devices) if limits.allows(axis, d)]
    near = min(legal, key=lambda d: (abs(math.log(d / degree)), d))
    most = f" (at most {MAX_TENSOR})" if axis == "tensor" and degree > MAX_TENSOR else ""
    return f"the nearest degree that does is {near}{most}"
