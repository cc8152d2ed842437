"""Routing and dispatch against definitions that go token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slicewise.catalog.model import Experts, ModelSpec
from slicewise.kernels.attention.api import REFERENCE, Tokens
from slicewise.model import moe, params, rope, transformer
from slicewise.model.attention import attend
from slicewise.model.layers import mlp, normed, weights_in
from slicewise.parallel.expert import Dispatch
from slicewise.parallel.rules import partition, residual

SPEC = ModelSpec(
    name="tiny", source="test", layers=2, d_model=16, heads=2, kv_heads=2, head_dim=8, d_ff=32, vocab=50,
    experts=Experts(experts=8, per_token=2, d_ff=12),
)  # fmt: skip
B, T = 3, 8


@pytest.fixture(autouse=True)
def exact_products(one_device):
    with jax.default_matmul_precision("highest"):
        yield


def with_experts(**changes):
    return SPEC.model_copy(update={"experts": SPEC.experts.model_copy(update=changes)})


def layer_of(spec, seed=0):
    """Weights of the first layer's experts, with biases that matter."""
    tree = params.init(spec, jax.random.key(seed)).layers.moe
    keys = iter(jax.random.split(jax.random.key(seed + 1), 20))
    return jax.tree.map(
        lambda w: w[0] if w.ndim > 2 else 0.3 * jax.random.normal(next(keys), w.shape)[0], tree
    )


def tokens(seed=3):
    x = jax.random.normal(jax.random.key(seed), (B, T, SPEC.d_model))
    return jax.sharding.reshard(x, partition("batch", "sequence", "activation"))


def segments(value=1):
    return jax.sharding.reshard(jnp.full((B, T), value, jnp.int32), partition("batch", "sequence"))


def run(spec, w, x_BTD, dispatch, segments_BT):
    return jax.jit(lambda w, x: moe.moe(w, spec, x, segments_BT, weights_in(jnp.float32), dispatch))(w, x_BTD)


def routed(spec, w, x_BTD):
    """(experts, shares) [B, T, K] of each token, as the papers define them."""
    e = spec.experts
    logits = np.asarray(x_BTD, np.float64) @ np.asarray(w.router, np.float64)
    if w.b_router is not None:
        logits += np.asarray(w.b_router)
    scores = 1 / (1 + np.exp(-logits))
    if e.score == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = scores + (0 if w.balance_bias is None else np.asarray(w.balance_bias))
    size = e.experts // e.groups
    experts, shares = np.zeros((B, T, e.per_token), int), np.zeros((B, T, e.per_token))
    for b, t in np.ndindex(B, T):
        groups = wanted[b, t].reshape(e.groups, size)
        worth = np.sort(groups)[:, -(2 if e.balancing_bias else 1) :].sum(1)
        open_groups = np.argsort(-worth)[: e.groups_per_token]
        allowed = np.isin(np.arange(e.experts) // size, open_groups)
        experts[b, t] = np.argsort(-np.where(allowed, wanted[b, t], -np.inf))[: e.per_token]
        shares[b, t] = scores[b, t, experts[b, t]]
    if e.normalize_scores:
        shares /= shares.sum(-1, keepdims=True)
    return experts, shares * e.score_scale


ROUTINGS = {
    "softmax": {},
    "softmax, not normalised": {"normalize_scores": False, "score_scale": 4.0},
    "router bias": {"router_bias": True},
    "groups by their best expert": {"groups": 4, "groups_per_token": 2},
    "sigmoid with a balancing bias in groups": {
        "score": "sigmoid", "balancing_bias": True, "groups": 4, "groups_per_token": 2, "score_scale": 2.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tokens_choose_their_experts_as_defined(routing):
    spec = with_experts(**ROUTINGS[routing])
    w, x = layer_of(spec), tokens()
    choice, share, usage = jax.jit(lambda w, x: moe.route(w, spec.experts, x, segments() > 0))(w, x)
    experts, shares = routed(spec, w, x)
    np.testing.assert_array_equal(choice, experts)
    np.testing.assert_allclose(share, shares, rtol=1e-5)
    np.testing.assert_array_equal(usage.choices_E, np.bincount(experts.ravel(), minlength=8))


def expert_outputs(w, x_D):
    gate, up = (np.einsum("D,EDF->EF", x_D, np.asarray(m)) for m in (w.w_gate, w.w_up))
    return np.einsum("EF,EFD->ED", gate / (1 + np.exp(-gate)) * up, np.asarray(w.w_down))


@pytest.mark.parametrize("dispatch", [Dispatch(), Dispatch("capacity", 8.0)])
def test_with_room_for_all_every_choice_counts(dispatch):
    w, x = layer_of(SPEC), tokens()
    got, _ = run(SPEC, w, x, dispatch, segments())
    experts, shares = routed(SPEC, w, x)
    wanted = np.zeros((B, T, SPEC.d_model))
    for b, t in np.ndindex(B, T):
        wanted[b, t] = shares[b, t] @ expert_outputs(w, np.asarray(x[b, t]))[experts[b, t]]
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_a_full_expert_drops_what_comes_last_and_first_choices_come_first():
    w, x = layer_of(SPEC), tokens()
    got, _ = run(SPEC, w, x, Dispatch("capacity", 1.0), segments())
    experts, shares = routed(SPEC, w, x)
    capacity, dropped = T * 2 // 8, 0
    wanted = np.zeros((B, T, SPEC.d_model))
    for b in range(B):
        taken = np.zeros(8, int)
        for k in range(2):
            for t in range(T):
                e = experts[b, t, k]
                if taken[e] < capacity:
                    wanted[b, t] += shares[b, t, k] * expert_outputs(w, np.asarray(x[b, t]))[e]
                dropped += taken[e] >= capacity
                taken[e] += 1
    assert dropped > 4
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize("dispatch", [Dispatch(), Dispatch("capacity", 1.0)])
def test_padding_takes_no_room_and_counts_for_nothing(dispatch):
    w, x = layer_of(SPEC), tokens()
    rows = partition("batch", "sequence")
    none = jax.sharding.reshard(jnp.where(jnp.arange(T) < 5, np.asarray(segments()), 0), rows)
    got, usage = run(SPEC, w, x, dispatch, none)
    assert not np.asarray(got[:, 5:]).any()
    other = jnp.where(jnp.arange(T)[:, None] < 5, np.asarray(x), 7.0)
    again, _ = run(SPEC, w, jax.sharding.reshard(other, jax.typeof(x).sharding.spec), dispatch, none)
    np.testing.assert_array_equal(got[:, :5], again[:, :5])
    assert float(usage.choices_E.sum()) == B * 5 * 2


def test_shared_experts_are_added_once():
    spec = with_experts(shared_d_ff=24)
    w, x = layer_of(spec), tokens()
    both, _ = run(spec, w, x, Dispatch(), segments())
    only_routed, _ = run(spec, dataclasses.replace(w, shared=None), x, Dispatch(), segments())
    gate, up = (np.asarray(x) @ np.asarray(m) for m in (w.shared.w_gate, w.shared.w_up))
    shared = (gate / (1 + np.exp(-gate)) * up) @ np.asarray(w.shared.w_down)
    np.testing.assert_allclose(both - only_routed, shared, atol=1e-5)


def test_even_use_costs_one_and_one_expert_for_all_costs_more():
    w, x = layer_of(SPEC), tokens()
    even = dataclasses.replace(w, router=jnp.zeros_like(w.router))
    _, usage = run(SPEC, even, x, Dispatch(), segments())
    assert float(usage.loss) / (B * T) == pytest.approx(1)
    one = dataclasses.replace(w, router=jnp.zeros_like(w.router).at[:, :2].set(9.0))
    _, usage = run(SPEC, one, jnp.abs(x), Dispatch(), segments())
    assert float(usage.loss) / (B * T) == pytest.approx(4, rel=1e-3)


def test_balancing_moves_biases_against_the_use_of_their_experts():
    spec = with_experts(balancing_bias=True, score="sigmoid").model_copy(update={"prediction_layers": 1})
    before = params.init(spec, jax.random.key(0))
    share = jnp.tile(jnp.array([0.5, 0.25, 0.125, 0.125, 0, 0, 0, 0]), (3, 1))
    after = moe.balanced(before, share)
    step = moe.BALANCE_STEP * np.array([-1, -1, 0, 0, 1, 1, 1, 1])
    np.testing.assert_allclose(after.layers.moe.balance_bias, np.tile(step, (2, 1)), rtol=1e-6)
    np.testing.assert_allclose(after.prediction.layers.moe.balance_bias, step[None], rtol=1e-6)
    assert after.layers.moe.router is before.layers.moe.router


def test_layers_run_in_order_when_every_second_one_is_sparse():
    spec = with_experts(every=2, first_dense_layers=1).model_copy(update={"layers": 5})
    assert [(r.first, r.sparse, r.repeats) for r in transformer.runs(spec)] == [
        (0, (False, True), 2),
        (4, (False,), 1),
    ]
    tree = params.init(spec, jax.random.key(0))
    rows = partition("batch", "sequence")
    ids, positions = (
        jax.sharding.reshard(x, rows) for x in (jnp.arange(16).reshape(2, 8), jnp.tile(jnp.arange(8), (2, 1)))
    )
    where, weight = Tokens(positions, jnp.ones_like(ids)), weights_in(jnp.float32)

    def one_by_one(tree):
        x = tree.embed.at[ids].get(out_sharding=residual(8))
        tables = rope.tables(spec, positions)
        for stack, layer in (
            ("dense_layers", 0),
            ("layers", 0),
            ("dense_layers", 1),
            ("layers", 1),
            ("dense_layers", 2),
        ):
            w = jax.tree.map(lambda stacked, layer=layer: stacked[layer], getattr(tree, stack))
            x = x + attend(w, spec, x, where, tables, jnp.array(True), None, weight, REFERENCE)[0]
            h = normed(x, w.mlp_norm, spec)
            sparse = w.moe is not None
            x = x + (
                moe.moe(w.moe, spec, h, where.segments_BT, weight, Dispatch())[0]
                if sparse
                else mlp(w, spec, h, weight)
            )
        return normed(x, tree.final_norm, spec)

    together = jax.jit(lambda tree: transformer.hidden_states(tree, spec, ids, where, dtype=jnp.float32)[0])
    np.testing.assert_allclose(together(tree), jax.jit(one_by_one)(tree), atol=1e-5)
