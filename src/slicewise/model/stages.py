"""The layers of a model over the stages of a pipeline: what a stage does with a microbatch and with its weights.

Dims in names: R rounds of the schedule, K groups of layers a stage and round, B batch, T tokens, D d_model.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slicewise.catalog.model import ModelSpec
from slicewise.kernels.attention.api import Tokens
from slicewise.model import params, rope
from slicewise.model.lora import Packed, by_array
from slicewise.model.remat import GATHERED
from slicewise.parallel.pipeline import Pipeline, of_round, pipelined
from slicewise.parallel.rules import FSDP_DIMS, PIPELINE, RULES, partition, unmapped


def places(spec: ModelSpec, where: Tokens) -> tuple[Tokens, list | None]:
    """What every layer is told of its tokens: ``where`` they stand, and their rotary tables."""
    return where, rope.tables(spec, where.positions_BT) if spec.position == "rope" else None


def through_stages(
    spec: ModelSpec,
    layer: Callable,
    checkpointed: Callable,
    dtype: jnp.dtype,
    where: Tokens,
    pipeline: Pipeline,
    layers_per_round: int,
    pattern: tuple,
    sparse: tuple[bool, ...],
    is_global: jax.Array,
    x_BTD: jax.Array,
) -> tuple[jax.Array, Any]:
    """``x`` through the groups of layers whose weights are ``pattern``, one tree with leading L for each layer of a
    group; and the usage of the groups' sparse layers. ``is_global``: bool [L, layers of a group].
    """
    trees = params.weights(spec)
    dense = trees.layers if spec.experts is None else trees.dense_layers
    layout = tuple(trees.layers if is_sparse else dense for is_sparse in sparse)

    def one(
        place: int, w: Any, x_BTD: jax.Array, is_global: jax.Array, round_: jax.Array, here: tuple
    ) -> tuple:
        if pipeline.repeats > 1:  # within the checkpoint, for else each tick would keep a copy of its weights
            w = jax.tree.map(lambda w_R: of_round(w_R, round_), w)
            is_global = is_global[round_]
        elif pipeline.gather == "microbatch" or _has_packed(w):
            # What is made of weights alone JAX would make before the loop over ticks, and keep for all layers at once.
            w = jax.tree.map(lambda x: of_round(x[None], round_), w)
        if pipeline.gather == "microbatch":
            w = jax.tree.map(_gathered, layout[place], w)
        x_BTD, _, usage = layer(w, x_BTD, is_global, None, here)
        return x_BTD, usage

    ones = [checkpointed(functools.partial(one, place)) for place in range(len(sparse))]

    def stage(weights: tuple, round_: jax.Array, x_BTD: jax.Array, where: Tokens) -> tuple[jax.Array, Any]:
        here = places(spec, where)

        def group(x_BTD: jax.Array, given: tuple) -> tuple[jax.Array, Any]:
            usage = None
            for one, w, is_global in zip(ones, *given, strict=True):
                x_BTD, found = one(w, x_BTD, is_global, round_, here)
                usage = usage if found is None else found
            return x_BTD, usage

        return jax.lax.scan(group, x_BTD, weights, unroll=layers_per_round)

    def narrowed(weights: tuple) -> tuple:
        matrices, is_global = weights
        cast = functools.partial(_cast, dtype=dtype)
        return jax.tree.map_with_path(cast, layout, matrices), is_global

    def prepare(weights: tuple) -> tuple:
        matrices, is_global = weights
        if pipeline.gather == "step":
            matrices = jax.tree.map(_gathered, layout, matrices)
        return matrices, is_global

    by_place = tuple(
        jax.sharding.reshard(is_global[:, place], partition("staged_layers")) for place in range(len(sparse))
    )
    return pipelined(
        stage,
        (pattern, by_place),
        x_BTD,
        where,
        pipeline,
        narrowed=narrowed,
        prepare=prepare,
        idle=_without_tokens,
    )


def _without_tokens(where: Tokens, is_real: jax.Array) -> Tokens:
    """In an idle tick every token is padding, which no expert is given."""
    return Tokens(where.positions_BT, jnp.where(is_real, where.segments_BT, 0))


def _cast(path: tuple, weight: params.Weight, w: Any, dtype: jnp.dtype) -> Any:
    """Matrices and adapters in the type in which a layer multiplies them, which for a router is its own. What is frozen
    in 8 bits stays so."""
    if path[-1].name == "router" or not any(dim in FSDP_DIMS for dim in weight.dims):
        return w

    def cast(x: Any) -> Any:
        return x if isinstance(x, Packed) else x.astype(dtype)

    return jax.tree.map(cast, w, is_leaf=lambda x: isinstance(x, Packed))


def _has_packed(w: Any) -> bool:
    return any(isinstance(x, Packed) for x in jax.tree.leaves(w, is_leaf=lambda x: isinstance(x, Packed)))


def _gathered(weight: params.Weight, w: Any) -> Any:
    """A weight, its arrays [..., dims of one layer], whole over the axes that divide it as FSDP does."""
    return by_array(_gathered_array, w, weight.dims[1:])


def _gathered_array(w: jax.Array, dims: tuple[str, ...]) -> jax.Array:
    """The transpose scatters."""
    sizes, spec = jax.sharding.get_abstract_mesh().shape, jax.typeof(w).sharding.spec
    for place, dim in enumerate(dims, w.ndim - len(dims)):
        rule = RULES[dim] if dim in FSDP_DIMS else ()
        axes = tuple(axis for axis in rule if axis != PIPELINE and sizes[axis] > 1)
        if axes:
            # Mapped over the axes that are left: the reduce-scatter of an array that they divide cannot be lowered.
            gather = functools.partial(jax.lax.all_gather, axis_name=axes, axis=place, tiled=True)
            mapped = jax.shard_map(
                gather, in_specs=spec, out_specs=spec, axis_names={*unmapped()}, check_vma=False
            )
            w = checkpoint_name(mapped(w), GATHERED)
    return w
