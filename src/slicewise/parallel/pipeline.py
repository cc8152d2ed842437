"""Layers divided over stages, and microbatches that pass through all stages one after the other.

All stages run one program. At each tick a stage takes what the stage before it made at the last tick, the first stage
a new microbatch. Autodiff runs the ticks backwards: all forward passes, then all backward passes (GPipe, Huang et al.
2019). With several rounds a stage holds that many shares of the layers, which are far apart in the model, and a
microbatch comes by as often: the schedule is circular (Narayanan et al. 2021, section 2.2), and the ends of a step idle
for shorter.

The program is mapped over the axes that divide the batch and its sequences as well (shard_map over STAGE_AXES; the
others stay as the model has them), so that gradients are summed over them once a step and not at each tick.

A batch is divided over the pipeline axis outside of the layers: each stage embeds its own rows and computes their loss.
So a microbatch travels to the first stage and its output back; both hops lie beside a tick's work and not before it.

Dims in names: P stages, M microbatches, G = M / P of one stage, N ticks, R rounds, K layers of one stage and round,
B batch, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slicewise.parallel.rules import PIPELINE as AXIS
from slicewise.parallel.rules import RULES, STAGE_AXES, unstacked

Weights = Any  # a tree of arrays that belong to layers; [R, K, ...] for one stage
# (weights of a stage [K, R, ...], round, x, rows of the tree that goes with x) -> (x, sums [K, ...])
Stage = Callable[[Weights, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Pipeline:
    """How layers are run on a mesh whose pipeline axis has several stages."""

    microbatches: int  # a multiple of the stages
    repeats: int = 1  # rounds
    gather: Literal["step", "microbatch"] = "step"  # of weights that fsdp divides


@dataclass(frozen=True)
class Place:
    """What a stage does at a tick."""

    is_real: jax.Array  # else it idles: what it computes is not used
    round_: jax.Array
    microbatch: jax.Array


def ticks(stages: int, how: Pipeline) -> int:
    """Each stage works on M R microbatches; the last stage starts P - 1 ticks late."""
    return how.microbatches * how.repeats + stages - 1


def place(tick: jax.Array, stage: jax.Array, stages: int, how: Pipeline) -> Place:
    """Groups of P microbatches pass through all rounds before the next group: what comes round from the last stage is
    just what the first stage is to take next."""
    own = tick - stage
    group, rest = jnp.divmod(own, stages * how.repeats)
    round_, number = jnp.divmod(rest, stages)
    is_real = (own >= 0) & (own < how.microbatches * how.repeats)
    return Place(is_real, round_, jnp.clip(group * stages + number, 0, how.microbatches - 1))


def pipelined(
    stage: Stage,
    weights: Weights,
    x: jax.Array,
    beside: Any,
    how: Pipeline,
    *,
    narrowed: Callable[[Weights], Weights],
    prepare: Callable[[Weights], Weights],
    idle: Callable[[Any, jax.Array], Any],
) -> tuple[jax.Array, Any]:
    """``x`` [B, T, ...] through all layers, and the sums [L, ...] over microbatches of what they return.

    ``weights``: leaves [L, ...] in the order of the layers, divided over the pipeline axis. ``beside``: a tree of small
    arrays [B, T], of which every stage holds all. On each stage ``narrowed`` casts its weights before they travel,
    ``prepare`` is applied once to those that it computes, and ``idle`` to the rows of ``beside`` at every tick, with
    whether the tick is real. Gradients are summed over the axes that do not divide a weight in the type of ``weights``.
    """
    stages = jax.sharding.get_abstract_mesh().shape[AXIS]
    M, R = how.microbatches, how.repeats
    assert M % stages == 0, (M, stages)

    def on_stage(weights: Weights, x_G: jax.Array, beside_M: Any) -> tuple[jax.Array, Any]:
        me = jax.lax.axis_index(AXIS)
        weights = narrowed(weights)
        weights = prepare(weights if R == 1 else _dealt(weights, stages, R))
        sinks = jax.tree.map(lambda w: _sink(w) if _is_narrow(w) else w, weights)
        weights = jax.tree.map(lambda w: jax.lax.stop_gradient(w) if _is_narrow(w) else w, weights)

        def tick(carry: tuple, number: jax.Array) -> tuple[tuple, Any]:
            last, waiting_G = carry
            now = place(number, me, stages, how)
            fresh, waiting_G = _exchanged(waiting_G, last, number, me, stages, how)
            came = jax.lax.ppermute(last, AXIS, _ring(stages, 1))
            x = jnp.where((me == 0) & (now.round_ == 0), fresh, came)
            x = jnp.where(now.is_real, x, 0)
            rows = jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, now.microbatch, 0, False), beside_M)
            used = jax.tree.map(
                lambda w, sink: _summed_in_float32(w, sink) if _is_narrow(w) else w, weights, sinks
            )
            x, sums = stage(used, now.round_, x, idle(rows, now.is_real))
            return (x, waiting_G), sums

        start = (jnp.zeros_like(x_G[0]), x_G)
        count = ticks(stages, how)
        (last, waiting_G), sums_N = jax.lax.scan(tick, start, jnp.arange(count))
        _, out_G = _exchanged(waiting_G, last, jnp.int32(count), me, stages, how)
        done = place(jnp.arange(count), me, stages, how)
        of_round_NR = jax.nn.one_hot(done.round_, R) * done.is_real[:, None]
        sums = jax.tree.map(lambda s_N: jnp.einsum("nr,n...->r...", of_round_NR, s_N)[None], sums_N)
        sums = jax.lax.psum(sums, STAGE_AXES[1:])
        return jnp.roll(out_G, -(stages % len(out_G)), axis=0), sums

    arguments = (
        weights,
        _cut(x, M // stages),
        jax.tree.map(lambda b: _whole(_cut(b, M // stages)), beside),
    )
    specs = jax.tree.map(_mapped, arguments)
    mapped = jax.shard_map(
        on_stage,
        in_specs=specs,
        out_specs=(specs[1], PartitionSpec(AXIS)),
        axis_names={*STAGE_AXES},
        check_vma=False,  # else a mapping within, such as that over experts, looks for these axes in its residuals
    )
    out_M, sums = mapped(*arguments)
    return _joined(out_M, x), jax.tree.map(_in_order, sums)


def _exchanged(
    waiting_G: jax.Array, last: jax.Array, tick: jax.Array, me: jax.Array, stages: int, how: Pipeline
) -> tuple[jax.Array, jax.Array]:
    """(what waits in the place of this tick, the places afterwards).

    Microbatches wait where their rows are, in G places of each stage. One place a tick moves on by a stage towards the
    first, which takes what comes; the last stage puts what it made into the place that became free. After M + P such
    moves every output is where its microbatch was, P places on.
    """
    within = tick % (stages * how.repeats)
    move = tick // (stages * how.repeats) * stages + within
    number = move % len(waiting_G)
    here = jax.lax.dynamic_index_in_dim(waiting_G, number, 0, False)
    moved = jax.lax.ppermute(here, AXIS, _ring(stages, -1))
    moved = jnp.where(me == stages - 1, last, moved)
    if how.repeats > 1:  # while a group goes round again nothing moves
        moved = jnp.where(within < stages, moved, here)
    return here, jax.lax.dynamic_update_index_in_dim(waiting_G, moved, number, 0)


def _ring(stages: int, by: int) -> list[tuple[int, int]]:
    return [(stage, (stage + by) % stages) for stage in range(stages)]


def _dealt(weights: Weights, stages: int, rounds: int) -> Weights:
    """Leaves [K R, ...] of the layers that a stage stores, as [K, R, ...] of those that it computes.

    A stage stores consecutive layers whatever the schedule, so that a checkpoint knows none. It computes every P-th
    share of K layers. Of the ``rounds`` permutes each moves one share from every stage, and to every stage: stages
    whose first shares go to the same stage (P / g apart, g the common divisor) start with different ones.
    """
    apart = stages // math.gcd(stages, rounds)
    me = jax.lax.axis_index(AXIS)

    def deal(w: jax.Array) -> jax.Array:
        shares = unstacked(w, len(w) // rounds)
        dealt = jnp.zeros_like(shares)
        for turn in range(rounds):
            own = [(turn + stage // apart) % rounds for stage in range(stages)]
            share = [stage * rounds + own[stage] for stage in range(stages)]
            source = {number % stages: stage for stage, number in enumerate(share)}
            assert len(source) == stages
            round_ = jnp.array([share[source[stage]] // stages for stage in range(stages)])
            sent = jax.lax.dynamic_index_in_dim(shares, jnp.array(own)[me], 0, False)
            to = [(stage, number % stages) for stage, number in enumerate(share)]
            came = jax.lax.ppermute(sent, AXIS, to)
            dealt = jax.lax.dynamic_update_index_in_dim(dealt, came, round_[me], 0)
        return dealt.swapaxes(0, 1)

    return jax.tree.map(deal, weights)


@jax.custom_vjp
def of_round(w_R: jax.Array, round_: jax.Array) -> jax.Array:
    """The weight of one round. The transpose is spelled out as a mask, which fuses with what comes next."""
    return jax.lax.dynamic_index_in_dim(w_R, round_, 0, False)


def _of_round_backward(is_round_R: jax.Array, grad: jax.Array) -> tuple:
    return jnp.where(is_round_R.reshape(-1, *[1] * grad.ndim), grad, 0), None


of_round.defvjp(
    lambda w_R, round_: (of_round(w_R, round_), jnp.arange(len(w_R)) == round_), _of_round_backward
)


def _cut(x: jax.Array, per_stage: int) -> jax.Array:
    """[M, B / M, ...]: each device cuts its own rows, nothing moves. Microbatches are divided over the pipeline."""
    spec = jax.typeof(x).sharding.spec
    return jax.shard_map(
        lambda x: x.reshape(per_stage, len(x) // per_stage, *x.shape[1:]),
        in_specs=spec,
        out_specs=PartitionSpec(AXIS, RULES["batch"][1:], *spec[1:]),
    )(x)


def _joined(x_M: jax.Array, like: jax.Array) -> jax.Array:
    """[B, ...], the inverse of _cut."""
    return jax.shard_map(
        lambda x: x.reshape(-1, *x.shape[2:]),
        in_specs=jax.typeof(x_M).sharding.spec,
        out_specs=jax.typeof(like).sharding.spec,
    )(x_M)


def _mapped(x: jax.Array) -> PartitionSpec:
    """What the axes of a stage divide of ``x``; the others go on to divide it within."""

    def axes(entry: Any) -> Any:
        entry = entry if isinstance(entry, tuple) else (entry,)
        return tuple(axis for axis in entry if axis in STAGE_AXES) or None

    return PartitionSpec(*map(axes, jax.typeof(x).sharding.spec))


def _whole(x_M: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x_M, PartitionSpec(None, *jax.typeof(x_M).sharding.spec[1:]))


def _in_order(sums: jax.Array) -> jax.Array:
    """[P, R, K, ...] divided over stages, as [L, ...] in the order of the layers."""
    whole = jax.sharding.reshard(sums, PartitionSpec())
    return whole.swapaxes(0, 1).reshape(-1, *sums.shape[3:])


# Gradients of narrow weights are summed over microbatches in float32: they flow into a zero that stands for the weight
# in all ticks, and only their sum is rounded.


def _is_narrow(w: jax.Array) -> bool:
    return jnp.issubdtype(w.dtype, jnp.floating) and w.dtype != jnp.float32


@jax.custom_vjp
def _sink(w: jax.Array) -> jax.Array:
    """Zero in float32; its gradient becomes that of ``w``."""
    return jnp.zeros(w.shape, jnp.float32, out_sharding=jax.typeof(w).sharding.spec)


_sink.defvjp(lambda w: (_sink(w), jnp.zeros(0, w.dtype)), lambda like, grad: (grad.astype(like.dtype),))


@jax.custom_vjp
def _summed_in_float32(w: jax.Array, sink: jax.Array) -> jax.Array:
    """``w``; its gradient goes to ``sink``."""
    return w


_summed_in_float32.defvjp(lambda w, sink: (w, None), lambda _, grad: (None, grad.astype(jnp.float32)))
