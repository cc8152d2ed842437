"""A decoder-only transformer as frozen dataclass pytrees and functions.

Dims in names: B batch, T tokens, D d_model, V vocabulary, L layers. Weights are described in model/params.py.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slicewise.catalog.model import ModelSpec
from slicewise.config import ContextStrategy
from slicewise.costs.remat import POLICIES, RematPolicy
from slicewise.kernels.attention.api import REFERENCE, Kernel, Tokens
from slicewise.kernels.grouped_matmul.api import Kernel as Grouped
from slicewise.model import attention
from slicewise.model.attention import Cache
from slicewise.model.embedding import lookup
from slicewise.model.layers import mlp, normed, weights_in
from slicewise.model.linear import linear
from slicewise.model.moe import Usage, moe
from slicewise.model.params import Layers, Params, Prediction, init, leaves, padded_vocab, start, weights
from slicewise.model.quantization import Quantization, all_marked, marked
from slicewise.model.remat import checkpoint_policy, named
from slicewise.model.stages import places, through_stages
from slicewise.parallel.context import ahead
from slicewise.parallel.expert import Dispatch
from slicewise.parallel.pipeline import Pipeline
from slicewise.parallel.rules import partition, residual, unstacked

__all__ = [
    "Caches",
    "Params",
    "States",
    "empty_cache",
    "forward",
    "hidden_states",
    "init",
    "leaves",
    "output_matrix",
    "padded_vocab",
    "start",
    "states",
    "weights",
]

Caches = tuple[
    tuple[Cache, ...], ...
]  # by run and by layer of its pattern, each with a leading dim of repeats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class States:
    """What the layers make of a batch."""

    x_BTD: jax.Array  # behind the final norm: what the output matrix multiplies
    cache: Any  # Caches, None without
    usage: Any  # Usage of the sparse layers, prediction layers last; None without experts
    predicted: Any  # a list, by prediction layer, of what the output matrix multiplies


@dataclass(frozen=True)
class Run:
    """``repeats`` times the layers of one pattern, as one scan."""

    first: int  # layer
    sparse: tuple[bool, ...]  # of the pattern: whether each layer is a mixture of experts
    repeats: int
    is_staged: bool = False  # a pipeline divides it


def runs(spec: ModelSpec) -> tuple[Run, ...]:
    """The layers of ``spec`` in order: leading dense ones, groups that end in a sparse one, dense ones left over."""
    lead, every, groups = spec.groups
    group = (*(False,) * (every - 1), spec.experts is not None)
    end = lead + groups * every
    found = (Run(0, (False,), lead), Run(lead, group, groups, True), Run(end, (False,), spec.layers - end))
    return tuple(run for run in found if run.repeats)


def forward(
    params: Params, spec: ModelSpec, tokens_BT: jax.Array, where: Tokens, *, dtype: jnp.dtype, **how: Any
) -> tuple[jax.Array, Caches | None]:
    """Logits [B, T, V padded] of the next token in ``dtype``; entries at or above spec.vocab are -1e30.

    Arguments and cache as those of states. Training does without: see model/loss.py.
    """
    x_BTD, cache = hidden_states(params, spec, tokens_BT, where, dtype=dtype, **how)
    return _logits(params, spec, x_BTD, weights_in(dtype)), cache


def hidden_states(
    params: Params, spec: ModelSpec, tokens_BT: jax.Array, where: Tokens, **how: Any
) -> tuple[jax.Array, Caches | None]:
    """What the output matrix multiplies, [B, T, D], and the cache; arguments as those of states."""
    found = states(params, spec, tokens_BT, where, **how)
    return found.x_BTD, found.cache


def states(
    params: Params,
    spec: ModelSpec,
    tokens_BT: jax.Array,
    where: Tokens,
    *,
    dtype: jnp.dtype,
    remat: RematPolicy = POLICIES["minimal"],
    layers_per_round: int = 1,
    cache: Caches | None = None,
    kernel: Kernel = REFERENCE,
    dispatch: Dispatch = Dispatch(),  # noqa: B008  (frozen)
    quantization: Quantization | None = None,
    ranges: Mapping[str, jax.Array] | None = None,
    grouped: Grouped = Grouped(),  # noqa: B008
    predict: bool = False,
    pipeline: Pipeline | None = None,
) -> States:
    """The model in ``dtype`` without its output matrix; with ``predict`` also its prediction layers.

    ``pipeline`` is for a mesh whose pipeline axis has several stages, and goes without a cache. ``ranges`` are those of
    quantization.ranges_of, where ``quantization`` is calibrated, which does not go with a pipeline.

    With ``cache`` the tokens are appended to it at slots ``where.positions_BT`` and attend to all that it holds; the
    new cache is returned.
    """
    weight = weights_in(dtype)
    if pipeline is None:
        params = all_marked(params, quantization, ranges)

    def layer(
        w: Layers, x_BTD: jax.Array, is_global: jax.Array, cached: Cache | None, here: tuple
    ) -> tuple[jax.Array, Cache | None, Usage | None]:
        where, tables = here
        if pipeline is not None:  # whose stages prepare weights as they are stored
            w = marked(w, quantization)
        x_BTD = jax.sharding.reshard(x_BTD, residual(x_BTD.shape[1]))
        x_BTD = named(x_BTD, "decoder_layer_input")
        attended_BTD, cached, w = attention.attend(
            w, spec, x_BTD, where, tables, is_global, cached, weight, kernel
        )
        x_BTD = x_BTD + attended_BTD
        h_BTD, usage = normed(x_BTD, w.mlp_norm, spec), None
        if w.moe is None:
            out_BTD = mlp(w, spec, h_BTD, weight)
        else:
            out_BTD, usage = moe(w.moe, spec, h_BTD, where.segments_BT, weight, dispatch, grouped)
        if w.post_mlp_norm is not None:
            out_BTD = normed(out_BTD, w.post_mlp_norm, spec)
        return x_BTD + out_BTD, cached, usage

    # A scan prevents common subexpressions of the two passes.
    checkpointed = functools.partial(jax.checkpoint, policy=checkpoint_policy(remat), prevent_cse=False)
    staged = None
    if pipeline is not None:
        staged = functools.partial(
            through_stages, spec, layer, checkpointed, dtype, where, pipeline, layers_per_round
        )
    layer = functools.partial(checkpointed(layer), here=places(spec, where))
    embedded_BTD = _embed(params, spec, tokens_BT, where, weight, dtype)
    if params.prediction is not None:
        embedded_BTD = jax.sharding.reshard(embedded_BTD, partition("batch", "sequence", "activation"))
    x_BTD = jax.sharding.reshard(embedded_BTD, residual(tokens_BT.shape[1]))
    x_BTD, caches, usages = _scan(params, spec, layer, x_BTD, cache, staged, layers_per_round)
    x_BTD = jax.sharding.reshard(x_BTD, partition("batch", "sequence", "activation"))
    predicted: list[jax.Array] = []
    if predict and params.prediction is not None:
        predicted, more = _predict(
            params.prediction, spec, layer, x_BTD, embedded_BTD, weight, kernel.strategy
        )
        usages += more
    usage = jax.tree.map(lambda *parts: jnp.concatenate(parts), *usages) if usages else None
    return States(normed(x_BTD, params.final_norm, spec), None if cache is None else caches, usage, predicted)


def _scan(
    params: Params,
    spec: ModelSpec,
    layer: Callable,
    x_BTD: jax.Array,
    cache: Caches | None,
    staged: Callable | None,
    layers_per_round: int,
) -> tuple[jax.Array, Caches, list[Usage]]:
    """``x`` through all layers, those of a pipeline by ``staged``; usages have a leading L.

    A round of the loop may compute several layers: only there can the gather of a layer's weights lie beside the
    compute of the layer before.
    """
    stacks = {True: params.layers, False: params.layers if spec.experts is None else params.dense_layers}
    used = {True: 0, False: 0}  # layers of each stack so far
    caches, usages = [], []
    for number, run in enumerate(runs(spec)):
        pattern, over_stages = [], run.is_staged and staged is not None
        for place, sparse in enumerate(run.sparse):
            count = run.sparse.count(sparse)
            first = used[sparse] + run.sparse[:place].count(sparse)
            stack = stacks[sparse] if over_stages else jax.tree.map(_unstaged, stacks[sparse])
            pattern.append(_every(stack, first, count, run.repeats))
        for sparse in run.sparse:
            used[sparse] += run.repeats
        ids = run.first + jnp.arange(run.repeats * len(run.sparse)).reshape(run.repeats, -1)
        is_global = jnp.array([spec.layer_is_global(i) for i in range(spec.layers)])[ids]
        if over_stages and staged is not None:
            x_BTD, usage = staged(tuple(pattern), run.sparse, is_global, x_BTD)
            usages += [] if usage is None else [usage]
            continue

        def body(x_BTD: jax.Array, given: tuple) -> tuple[jax.Array, tuple]:
            pattern, is_global, cached = given
            new, usage = [], None
            for place, w in enumerate(pattern):
                x_BTD, now, found = layer(
                    w, x_BTD, is_global[place], None if cached is None else cached[place]
                )
                new.append(now)
                usage = usage if found is None else found
            return x_BTD, (tuple(new), usage)

        given = (tuple(pattern), is_global, None if cache is None else cache[number])
        x_BTD, (new, usage) = jax.lax.scan(body, x_BTD, given, unroll=layers_per_round)
        caches.append(new)
        usages += [] if usage is None else [usage]
    return x_BTD, tuple(caches), usages


def _unstaged(w: jax.Array) -> jax.Array:
    """Layers that no pipeline divides, as a scan takes them."""
    return jax.sharding.reshard(w, PartitionSpec(None, *jax.typeof(w).sharding.spec[1:]))


def _every(stack: Layers, first: int, step: int, count: int) -> Layers:
    """``count`` layers of ``stack`` from ``first``, each ``step`` behind the one before."""

    def take(w: jax.Array) -> jax.Array:
        if first == 0 and step == 1 and count == len(w):
            return w
        if first < step and step * count == len(w):
            return unstacked(w, step)[:, first]
        return w[first : first + step * (count - 1) + 1 : step]

    return jax.tree.map(take, stack)


def _predict(
    w: Prediction,
    spec: ModelSpec,
    layer: Callable,
    x_BTD: jax.Array,
    embedded_BTD: jax.Array,
    weight: Callable,
    strategy: ContextStrategy,
) -> tuple[list[jax.Array], list[Usage]]:
    """The states of each prediction layer: at its depth d a token sees the one that is d ahead (DeepSeek-V3, 2.2).

    The last d tokens of a document see what is not theirs; they have no target at that depth.
    """
    found, usages = [], []
    activation = partition("batch", "sequence", "activation")
    is_global = jnp.array(spec.layer_is_global(spec.layers - 1))
    for index in range(spec.prediction_layers):
        one = jax.tree.map(lambda stacked, index=index: stacked[index], w)
        embedded_BTD = ahead(embedded_BTD, 1, 0, strategy)
        both_BTX = jnp.concatenate(
            [normed(embedded_BTD, one.embed_norm, spec), normed(x_BTD, one.hidden_norm, spec)], axis=-1
        )
        x_BTD = linear(both_BTX, weight(one.projection, "embed", "activation"), activation)
        x_BTD, _, usage = layer(one.layers, x_BTD, is_global, None)
        x_BTD = jax.sharding.reshard(x_BTD, activation)
        found.append(normed(x_BTD, one.final_norm, spec))
        usages += [] if usage is None else [jax.tree.map(lambda u: u[None], usage)]
    return found, usages


def output_matrix(params: Params) -> jax.Array:
    """[D, V padded], or the embedding table [V padded, D] where that is tied."""
    return params.embed if params.head is None else params.head


def _embed(
    params: Params, spec: ModelSpec, tokens_BT: jax.Array, where: Tokens, weight: Callable, dtype: jnp.dtype
) -> jax.Array:
    activation = partition("batch", "sequence", "activation")
    if isinstance(params.embed, jax.Array) and jax.sharding.get_abstract_mesh().shape.get("tensor", 1) > 1:
        x_BTD = lookup(params.embed.astype(dtype), tokens_BT)
    else:
        table_VD = jax.sharding.reshard(
            weight(params.embed, "vocab", "embed"), partition("activation", "activation")
        )
        x_BTD = table_VD.at[tokens_BT].get(out_sharding=activation)
    if spec.embedding_scale:
        x_BTD = x_BTD * jnp.asarray(math.sqrt(spec.d_model), x_BTD.dtype)
    if params.position is not None:
        position_PD = weight(params.position, "position", "embed")
        x_BTD = x_BTD + position_PD.at[where.positions_BT].get(out_sharding=jax.typeof(x_BTD).sharding.spec)
    return x_BTD


def _logits(params: Params, spec: ModelSpec, x_BTD: jax.Array, weight: Callable) -> jax.Array:
    head_DV = weight(params.embed, "vocab", "embed").T if params.head is None else None
    if head_DV is None:
        head_DV = weight(params.head, "embed", "vocab")
    logits_BTV = linear(x_BTD, head_DV, partition("batch", "sequence", "vocab"))
    if spec.logits_softcap is not None:
        logits_BTV = spec.logits_softcap * jnp.tanh(logits_BTV / spec.logits_softcap)
    if padded_vocab(spec) == spec.vocab:
        return logits_BTV
    ids_V = jax.lax.broadcasted_iota(
        jnp.int32, (1, 1, padded_vocab(spec)), 2, out_sharding=partition("activation", "activation", "vocab")
    )
    return jnp.where(ids_V < spec.vocab, logits_BTV, jnp.asarray(-1e30, logits_BTV.dtype))


def empty_cache(spec: ModelSpec, rows: int, slots: int, dtype: jnp.dtype) -> Caches:
    """A cache for ``rows`` sequences of up to ``slots`` tokens under the mesh in force."""
    return tuple(
        tuple(attention.empty_cache(spec, run.repeats, rows, slots, dtype) for _ in run.sparse)
        for run in runs(spec)
    )
