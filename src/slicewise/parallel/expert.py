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
import numpy as np

from slicewise.parallel.rules import PIPELINE, in_stage, partition, unmapped

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
        w = prepare(weights)
        if not within_stage:
            x_BTD, choice_BTK, share_BTK, w = _varying((x_BTD, choice_BTK, share_BTK, w))
        if dispatch.kind == "capacity":
            y_BTD = _capacity(x_BTD, choice_BTK, share_BTK, w, experts, dispatch.factor, batched)
        else:
            y_BTD = _dropless(x_BTD, choice_BTK, share_BTK, w, experts, dispatch.factor, grouped, together)
        return jax.lax.psum(y_BTD, "tensor")

    within_stage = in_stage()
    together = tuple(
        a for a in jax.sharding.get_abstract_mesh().axis_names if not within_stage or a != PIPELINE
    )
    sharded = jax.shard_map(
        on_device,
        in_specs=(tokens, tokens, tokens, weight_specs),
        out_specs=tokens,
        axis_names={*unmapped()},
        check_vma=not within_stage,  # which would look for the stage's axes in residuals
    )
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


@dataclass(frozen=True)
class _Slots:
    """Rows R in places S: each row stands in one slot at most. Both directions are gathers, and so are transposes."""

    row_S: jax.Array
    taken_S: jax.Array
    slot_R: jax.Array
    kept_R: jax.Array
    copies: int  # rows of one token, which follow each other


jax.tree_util.register_dataclass(
    _Slots, data_fields=["row_S", "taken_S", "slot_R", "kept_R"], meta_fields=["copies"]
)


def _dropless(
    x_BTD: jax.Array,
    choice_BTK: jax.Array,
    share_BTK: jax.Array,
    w: Any,
    experts: int,
    factor: float,
    grouped: Grouped,
    together: tuple[str, ...],
) -> jax.Array:
    (B, T, D), K = x_BTD.shape, choice_BTK.shape[-1]
    x_MD, share_MK = x_BTD.reshape(B * T, D), share_BTK.reshape(B * T, K)
    rows = _sort(choice_BTK.reshape(B * T * K), experts)
    ways = jax.lax.axis_size(AXIS)
    if ways == 1:
        slots = _whole_order(rows, experts, K)
        out_RD = _read(grouped(_filled(x_MD, slots), rows.sizes_E, w), slots)
        return _shared_out(out_RD, share_MK).reshape(B, T, D)
    part = min(math.ceil(B * T * K / ways * factor), B * T * min(K, experts // ways))
    needed = -(-rows.sizes_E.reshape(ways, -1).sum(1).max() // part)
    # The same number of rounds on all devices: they meet in every all-to-all.
    rounds = jax.lax.pmax(needed, together)
    one = functools.partial(_one_round, ways=ways, part=part, grouped=grouped)
    return _summed_rounds(one, rounds, rows, (x_MD, share_MK, w)).reshape(B, T, D)


def _whole_order(rows: _Sorted, experts: int, copies: int) -> _Slots:
    """A slot for every row, in the order of the experts."""
    real_R = rows.expert_R < experts
    return _Slots(rows.order_R, real_R[rows.order_R], rows.place_R, real_R, copies)


def _one_round(
    number: jax.Array, rows: _Sorted, args: tuple, *, ways: int, part: int, grouped: Grouped
) -> jax.Array:
    """What the rows of round ``number`` add to [M, D]: of each part's rows, the next ``part`` ones."""
    x_MD, share_MK, w = args
    experts, D = len(rows.sizes_E), x_MD.shape[1]
    here = experts // ways
    sizes_P = rows.sizes_E.reshape(ways, here).sum(1)
    first_P = jnp.cumsum(sizes_P) - sizes_P
    index_C = number * part + jnp.arange(part)
    row_PC = rows.order_R.at[first_P[:, None] + index_C].get(mode="clip")
    sent_PC = index_C < sizes_P[:, None]
    to_R = jnp.minimum(rows.expert_R // here, ways - 1)
    index_R = rows.place_R - first_P[to_R]
    slots = _Slots(
        row_PC.reshape(-1),
        sent_PC.reshape(-1),
        to_R * part + index_R % part,
        (index_R // part == number) & (rows.expert_R < experts),
        share_MK.shape[1],
    )
    expert_PC = jnp.where(sent_PC, rows.expert_R[row_PC] % here, here)

    sent_PCD = _filled(x_MD, slots).reshape(ways, part, D)
    x_PCD, expert_PC = (jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True) for x in (sent_PCD, expert_PC))
    arrived = _sort(expert_PC.reshape(-1), here)
    order = _whole_order(arrived, here, 1)
    out_SD = _read(grouped(_filled(x_PCD.reshape(-1, D), order), arrived.sizes_E, w), order)
    out_PCD = jax.lax.all_to_all(out_SD.reshape(ways, part, D), AXIS, 0, 0, tiled=True)
    return _shared_out(_read(out_PCD.reshape(-1, D), slots), share_MK)


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
    leaves, tree = jax.tree.flatten(args)
    moved = [leaf if _has_gradient(leaf) else None for leaf in leaves]

    def with_leaves(moved: list) -> Any:
        whole = (given if new is None else new for given, new in zip(leaves, moved, strict=True))
        return jax.tree.unflatten(tree, whole)

    def step(number: jax.Array, sums: Any) -> Any:
        _, pull = jax.vjp(lambda moved: one(number, rows, with_leaves(moved)), moved)
        return jax.tree.map(jnp.add, sums, pull(grad)[0])

    sums = _loop(rounds, step, jax.tree.map(jnp.zeros_like, moved))
    still = (_no_gradient(leaf) if new is None else new for leaf, new in zip(leaves, sums, strict=True))
    return None, None, jax.tree.unflatten(tree, still)


def _has_gradient(x: jax.Array) -> bool:
    """Weights in 8 bits are constants: see model/quantized_experts.py."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def _no_gradient(x: jax.Array) -> Any:
    return (
        jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)
    )


_summed_rounds.defvjp(_rounds_forward, _rounds_backward)


@jax.custom_vjp
def _filled(x_MD: jax.Array, slots: _Slots) -> jax.Array:
    """Slots [S, D] with the tokens of their rows; zero where none stands."""
    return jnp.where(slots.taken_S[:, None], x_MD[slots.row_S // slots.copies], 0)


def _filled_forward(x_MD: jax.Array, slots: _Slots) -> tuple:
    return _filled(x_MD, slots), slots


def _filled_backward(slots: _Slots, grad_SD: jax.Array) -> tuple:
    return _read(grad_SD, slots).reshape(-1, slots.copies, grad_SD.shape[1]).sum(1), None


_filled.defvjp(_filled_forward, _filled_backward)


@jax.custom_vjp
def _read(out_SD: jax.Array, slots: _Slots) -> jax.Array:
    """Rows [R, D] from their slots; zero for those without."""
    return jnp.where(slots.kept_R[:, None], out_SD[slots.slot_R], 0)


def _read_forward(out_SD: jax.Array, slots: _Slots) -> tuple:
    return _read(out_SD, slots), slots


def _read_backward(slots: _Slots, grad_RD: jax.Array) -> tuple:
    return jnp.where(slots.taken_S[:, None], grad_RD[slots.row_S], 0), None


_read.defvjp(_read_forward, _read_backward)


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
    slots = jax.vmap(functools.partial(_capacity_slots, experts=experts, C=C))(choice_BTK)
    x_EBCD = jax.vmap(_filled)(x_BTD, slots).reshape(B, experts, C, D).swapaxes(0, 1)
    x_ESD = x_EBCD.reshape(experts, B * C, D)
    if ways > 1:
        x_ESD = jax.lax.all_to_all(x_ESD, AXIS, 0, 1, tiled=True)
    out_ESD = batched(x_ESD, w)
    if ways > 1:
        out_ESD = jax.lax.all_to_all(out_ESD, AXIS, 1, 0, tiled=True)
    out_BSD = out_ESD.reshape(experts, B, C, D).swapaxes(0, 1).reshape(B, experts * C, D)
    out_BRD = jax.vmap(_read)(out_BSD, slots)
    return _shared_out(out_BRD.reshape(B * T * K, D), share_BTK.reshape(B * T, K)).reshape(B, T, D)


def _capacity_slots(choice_TK: jax.Array, *, experts: int, C: int) -> _Slots:
    """``C`` slots of each expert for the choices of one row of the batch."""
    T, K = choice_TK.shape
    rows = _sort(choice_TK.T.reshape(-1), experts)  # all first choices, then all second ones
    first_E = jnp.cumsum(rows.sizes_E) - rows.sizes_E
    index_C = jnp.arange(C)
    at_EC = rows.order_R.at[first_E[:, None] + index_C].get(mode="clip")
    expert_R = jnp.minimum(rows.expert_R, experts - 1)
    index_R = rows.place_R - first_E[expert_R]
    kept_R = (index_R < C) & (rows.expert_R < experts)
    slot_R = jnp.minimum(expert_R * C + index_R, experts * C - 1)

    def by_token(x_R: jax.Array) -> jax.Array:
        return x_R.reshape(K, T).T.reshape(-1)

    return _Slots(
        (at_EC % T * K + at_EC // T).reshape(-1),
        (index_C < rows.sizes_E[:, None]).reshape(-1),
        by_token(slot_R),
        by_token(kept_R),
        K,
    )
