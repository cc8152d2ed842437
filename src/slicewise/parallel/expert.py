"""Tokens to their experts and back: dropless or with a fixed capacity, over the expert axis of the mesh.

Every device runs the code below on its own tokens and its own experts (shard_map). With several expert ways rows travel
by all-to-all of equal parts, one part for each pair of devices.

Dims in names: B batch, T tokens of a row, M = B T, D d_model, K experts a token uses, R = M K rows, E experts,
G experts of this device, P expert ways, C rows of a part.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from slicewise.parallel.rules import partition

AXIS = "expert"


@dataclass(frozen=True)
class Dispatch:
    """``dropless`` computes every choice. ``capacity`` drops what exceeds an expert's share of a row of the batch.

    ``factor`` is the room that is planned for, relative to an even share: of each expert's tokens with capacity, and
    when dropless of each part of an all-to-all; what does not fit goes in further rounds.
    """

    kind: Literal["dropless", "capacity"] = "dropless"
    factor: float = 1.25


# (rows of this device's experts, sizes of their groups, weights) -> rows; see grouped_matmul for rows past the groups
Grouped = Callable[[jax.Array, jax.Array, Any], jax.Array]
# (rows [G, rows, D], weights) -> rows
Batched = Callable[[jax.Array, Any], jax.Array]


def mixed(
    x_BTD: jax.Array,
    choice_BTK: jax.Array,
    share_BTK: jax.Array,
    weights: Any,
    weight_specs: Any,
    *,
    experts: int,
    dispatch: Dispatch,
    prepare: Callable[[Any], Any],
    grouped: Grouped,
    batched: Batched,
) -> jax.Array:
    """The sum over the chosen experts' outputs times their shares, [B, T, D] in the dtype of ``x``.

    ``choice`` holds expert numbers, or ``experts`` where a token is not to be computed. On each device ``prepare``
    makes what ``grouped`` and ``batched`` take from its part of ``weights``. Their output may be a partial sum over
    the tensor axis.
    """
    tokens = partition("batch", "sequence", "activation")

    def on_device(x_BTD: jax.Array, choice_BTK: jax.Array, share_BTK: jax.Array, weights: Any) -> jax.Array:
        x_BTD, share_BTK, w = _varying((x_BTD, share_BTK, prepare(weights)))
        choice_BTK = _varying(choice_BTK)
        if dispatch.kind == "capacity":
            y_BTD = _capacity(x_BTD, choice_BTK, share_BTK, w, experts, dispatch.factor, batched)
        else:
            y_BTD = _dropless(x_BTD, choice_BTK, share_BTK, w, experts, dispatch.factor, grouped)
        return jax.lax.psum(y_BTD, "tensor")

    sharded = jax.shard_map(on_device, in_specs=(tokens, tokens, tokens, weight_specs), out_specs=tokens)
    weights = jax.tree.map(jax.sharding.reshard, weights, weight_specs)
    return sharded(x_BTD, choice_BTK, share_BTK, weights)


def _varying(tree: Any) -> Any:
    """Typed as different on every device, so that gradients are summed once, where the values come in."""
    axes = jax.sharding.get_abstract_mesh().axis_names

    def vary(x: jax.Array) -> jax.Array:
        absent = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
        return jax.lax.pcast(x, absent, to="varying") if absent else x

    return jax.tree.map(vary, tree)


@dataclass(frozen=True)
class _Sorted:
    """Rows in the order of their experts; those that no expert computes come last."""

    expert_R: jax.Array  # of each row before sorting
    order_R: jax.Array
    place_R: jax.Array  # of each row among the sorted ones
    sizes_E: jax.Array


jax.tree_util.register_dataclass(
    _Sorted, data_fields=["expert_R", "order_R", "place_R", "sizes_E"], meta_fields=[]
)


def _sort(expert_R: jax.Array, experts: int) -> _Sorted:
    order_R = jnp.argsort(expert_R, stable=True)
    sizes_E = (expert_R[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    return _Sorted(expert_R, order_R, jnp.argsort(order_R), sizes_E)


def _dropless(
    x_BTD: jax.Array,
    choice_BTK: jax.Array,
    share_BTK: jax.Array,
    w: Any,
    experts: int,
    factor: float,
    grouped: Grouped,
) -> jax.Array:
    (B, T, D), K = x_BTD.shape, choice_BTK.shape[-1]
    x_MD, share_MK = x_BTD.reshape(B * T, D), share_BTK.reshape(B * T, K)
    rows = _sort(choice_BTK.reshape(B * T * K), experts)
    ways = jax.lax.axis_size(AXIS)
    if ways == 1:
        out_RD = grouped(_repeated(x_MD, rows.order_R, rows.place_R, K), rows.sizes_E, w)
        y_MD = _shared_out(_permuted(out_RD, rows.place_R, rows.order_R), share_MK)
        return y_MD.reshape(B, T, D)
    part = min(math.ceil(B * T * K / ways * factor), B * T * min(K, experts // ways))
    needed = -(-rows.sizes_E.reshape(ways, -1).sum(1).max() // part)
    # The same number of rounds on all devices: they meet in every all-to-all.
    rounds = jax.lax.pmax(needed, tuple(jax.sharding.get_abstract_mesh().axis_names))
    one = functools.partial(_one_round, ways=ways, part=part, grouped=grouped)
    return _summed_rounds(one, rounds, rows, (x_MD, share_MK, w)).reshape(B, T, D)


def _one_round(
    number: jax.Array, rows: _Sorted, args: tuple, *, ways: int, part: int, grouped: Grouped
) -> jax.Array:
    """What the rows of round ``number`` add to [M, D]: of each part's rows, the next ``part`` ones."""
    x_MD, share_MK, w = args
    K, experts, D = share_MK.shape[1], len(rows.sizes_E), x_MD.shape[1]
    here = experts // ways
    sizes_P = rows.sizes_E.reshape(ways, here).sum(1)
    first_P = jnp.cumsum(sizes_P) - sizes_P
    index_C = number * part + jnp.arange(part)
    sent_PC = index_C < sizes_P[:, None]
    row_PC = rows.order_R.at[first_P[:, None] + index_C].get(mode="clip")
    x_PCD = jnp.where(sent_PC[..., None], x_MD[row_PC // K], 0)
    expert_PC = jnp.where(sent_PC, rows.expert_R[row_PC] % here, here)

    x_PCD, expert_PC = (jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True) for x in (x_PCD, expert_PC))
    arrived = _sort(expert_PC.reshape(-1), here)
    out_RD = _permuted(x_PCD.reshape(-1, D), arrived.order_R, arrived.place_R)
    out_RD = _permuted(grouped(out_RD, arrived.sizes_E, w), arrived.place_R, arrived.order_R)
    out_PCD = jax.lax.all_to_all(out_RD.reshape(ways, part, D), AXIS, 0, 0, tiled=True)

    to_R = jnp.minimum(rows.expert_R // here, ways - 1)
    index_R = rows.place_R - first_P[to_R]
    back_R1 = ((index_R // part == number) & (rows.expert_R < experts))[:, None]
    return _shared_out(jnp.where(back_R1, out_PCD[to_R, index_R % part], 0), share_MK)


def _shared_out(out_RD: jax.Array, share_MK: jax.Array) -> jax.Array:
    """The outputs of a token's experts, summed by their shares in float32."""
    M, K = share_MK.shape
    out_MKD = out_RD.reshape(M, K, -1).astype(jnp.float32)
    return (out_MKD * share_MK[..., None]).sum(1).astype(out_RD.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_rounds(one: Callable[..., jax.Array], rounds: jax.Array, rows: _Sorted, args: Any) -> jax.Array:
    """The sum of ``one(number, rows, args)`` over ``rounds``, a number that is only known on the device.

    Nothing of a round is kept for the backward pass, which computes it again.
    """
    zero = jnp.zeros_like(args[0])
    return _loop(rounds, lambda number, sum: sum + one(number, rows, args), zero)


def _loop(rounds: jax.Array, step: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    def body(carry: tuple) -> tuple:
        number, value = carry
        return number + 1, step(number, value)

    number = jnp.zeros_like(rounds)
    return jax.lax.while_loop(lambda carry: carry[0] < rounds, body, (number, start))[1]


def _rounds_forward(one: Callable, rounds: jax.Array, rows: _Sorted, args: Any) -> tuple:
    return _summed_rounds(one, rounds, rows, args), (rounds, rows, args)


def _rounds_backward(one: Callable, saved: tuple, grad: jax.Array) -> tuple:
    rounds, rows, args = saved

    def step(number: jax.Array, sums: Any) -> Any:
        _, pull = jax.vjp(lambda args: one(number, rows, args), args)
        return jax.tree.map(jnp.add, sums, pull(grad)[0])

    return None, None, _loop(rounds, step, jax.tree.map(jnp.zeros_like, args))


_summed_rounds.defvjp(_rounds_forward, _rounds_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _repeated(x_MD: jax.Array, order_R: jax.Array, place_R: jax.Array, K: int) -> jax.Array:
    """Each token ``K`` times, in ``order``. Its transpose gathers, where that of a gather would scatter."""
    return x_MD[order_R // K]


def _repeated_forward(x_MD: jax.Array, order_R: jax.Array, place_R: jax.Array, K: int) -> tuple:
    return x_MD[order_R // K], place_R


def _repeated_backward(K: int, place_R: jax.Array, grad_RD: jax.Array) -> tuple:
    return grad_RD[place_R].reshape(-1, K, grad_RD.shape[1]).sum(1), None, None


_repeated.defvjp(_repeated_forward, _repeated_backward)


@jax.custom_vjp
def _permuted(x_RD: jax.Array, order_R: jax.Array, inverse_R: jax.Array) -> jax.Array:
    return x_RD[order_R]


def _permuted_forward(x_RD: jax.Array, order_R: jax.Array, inverse_R: jax.Array) -> tuple:
    return x_RD[order_R], inverse_R


def _permuted_backward(inverse_R: jax.Array, grad_RD: jax.Array) -> tuple:
    return grad_RD[inverse_R], None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)


def _capacity(
    x_BTD: jax.Array,
    choice_BTK: jax.Array,
    share_BTK: jax.Array,
    w: Any,
    experts: int,
    factor: float,
    batched: Batched,
) -> jax.Array:
    """Each expert takes at most ceil(T K / E x factor) choices of a row; all first choices go before second ones."""
    (B, T, D), K, ways = x_BTD.shape, choice_BTK.shape[-1], jax.lax.axis_size(AXIS)
    C = min(math.ceil(T * K / experts * factor), T)
    expert_BR = choice_BTK.swapaxes(1, 2).reshape(B, K * T)
    rows = jax.vmap(lambda expert_R: _sort(expert_R, experts))(expert_BR)
    first_BE = jnp.cumsum(rows.sizes_E, axis=1) - rows.sizes_E
    slot_BEC = first_BE[..., None] + jnp.arange(C)
    taken_BEC = jnp.arange(C) < rows.sizes_E[..., None]

    def gather(x_TD: jax.Array, order_R: jax.Array, slot_EC: jax.Array, taken_EC: jax.Array) -> jax.Array:
        return jnp.where(taken_EC[..., None], x_TD[order_R.at[slot_EC].get(mode="clip") % T], 0)

    x_EBCD = jax.vmap(gather, out_axes=1)(x_BTD, rows.order_R, slot_BEC, taken_BEC)
    x_ESD = x_EBCD.reshape(experts, B * C, D)
    if ways > 1:
        x_ESD = jax.lax.all_to_all(x_ESD, AXIS, 0, 1, tiled=True)
    out_ESD = batched(x_ESD, w)
    if ways > 1:
        out_ESD = jax.lax.all_to_all(out_ESD, AXIS, 1, 0, tiled=True)
    out_EBCD = out_ESD.reshape(experts, B, C, D)

    def back(out_ECD: jax.Array, expert_R: jax.Array, place_R: jax.Array, first_E: jax.Array) -> jax.Array:
        expert_or_last_R = jnp.minimum(expert_R, experts - 1)
        index_R = place_R - first_E[expert_or_last_R]
        kept_R1 = ((index_R < C) & (expert_R < experts))[:, None]
        return jnp.where(kept_R1, out_ECD.at[expert_or_last_R, index_R].get(mode="clip"), 0)

    out_BRD = jax.vmap(back, in_axes=(1, 0, 0, 0))(out_EBCD, expert_BR, rows.place_R, first_BE)
    out_BTKD = out_BRD.reshape(B, K, T, D).swapaxes(1, 2)
    return _shared_out(out_BTKD.reshape(B * T * K, D), share_BTK.reshape(B * T, K)).reshape(B, T, D)
