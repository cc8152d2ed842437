"""A mixture of experts: which experts a token uses, their sum, and what keeps them evenly used.

Dims in names: B batch, T tokens, D d_model, E experts, K experts a token uses, Q groups of experts, R rows, one for
each choice, in the order of their experts, G experts of a device, S rows of one expert, F width of an expert, L layers.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from slicewise.catalog.model import Experts, ModelSpec
from slicewise.kernels.grouped_matmul.api import REFERENCE, Kernel, grouped_matmul
from slicewise.model import quantized_experts
from slicewise.model.layers import activate, mlp
from slicewise.model.linear import linear
from slicewise.model.lora import Packed, unpacked
from slicewise.model.params import Layers, Moe, Params
from slicewise.model.quantization import Marked
from slicewise.model.remat import GATHERED, named
from slicewise.parallel.context import whole_rows
from slicewise.parallel.expert import Dispatch, mixed
from slicewise.parallel.rules import gathered, partition, residual

BALANCE_STEP = 1e-3  # change of a balancing bias at each optimiser step (DeepSeek-V3, 2024, section 4.2)

DIMS = {
    "w_gate": ("experts", "expert_embed", "mlp"),
    "w_up": ("experts", "expert_embed", "mlp"),
    "w_down": ("experts", "mlp", "expert_embed"),
    "b_gate": ("experts", "mlp"),
    "b_up": ("experts", "mlp"),
    "b_down": ("experts", "activation"),
}
# Those of DIMS that the model has: arrays or Marked, quantized_experts.Whole once gathered.
Weights = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Usage:
    """How evenly experts are used, as sums over the tokens of a batch; of several layers with a leading L."""

    loss: Any  # each token counts that of its row: 1 where all experts are used alike (DeepSeek-V3, section 2.1.2)
    choices_E: Any


def moe(
    w: Moe,
    spec: ModelSpec,
    h_BTD: jax.Array,
    segments_BT: jax.Array,
    weight: Callable,
    dispatch: Dispatch,
    kernel: Kernel = REFERENCE,
) -> tuple[jax.Array, Usage]:
    """The output [B, T, D] of routed and shared experts on normed tokens; padding (segment 0) is not routed."""
    e = spec.experts
    assert e is not None
    h_BTD = jax.sharding.reshard(h_BTD, partition("batch", "sequence", "activation"))
    choice_BTK, share_BTK, usage = route(w, e, h_BTD, segments_BT > 0)
    given = {name: getattr(w, name) for name in DIMS if getattr(w, name) is not None}
    routed = {
        name: unpacked(matrix, h_BTD.dtype) if isinstance(matrix, Packed) else matrix
        for name, matrix in given.items()
    }
    specs = jax.tree.map(lambda matrix: jax.typeof(matrix).sharding.spec, routed)
    out_BTD = mixed(
        h_BTD,
        choice_BTK,
        share_BTK,
        routed,
        specs,
        experts=e.experts,
        dispatch=dispatch,
        prepare=lambda weights: _whole(weights, specs, h_BTD.dtype),
        grouped=lambda x_RD, sizes_G, weights: _grouped(weights, spec, x_RD, sizes_G, kernel),
        batched=lambda x_GSD, weights: _batched(weights, spec, x_GSD),
    )
    out_BTD = jax.sharding.reshard(out_BTD, residual(out_BTD.shape[1]))
    if w.shared is not None:
        out_BTD = out_BTD + mlp(w.shared, spec, h_BTD, weight, prefix="shared_")
    return out_BTD, usage


def route(w: Moe, e: Experts, h_BTD: jax.Array, real_BT: jax.Array) -> tuple[jax.Array, jax.Array, Usage]:
    """(experts [B, T, K], or their number for tokens that are not ``real``; their shares float32 [B, T, K]; usage).

    Scores are computed in float32: a rounded one would send a token elsewhere.
    """
    whole = partition("batch", "sequence", "activation")
    router_DE = checkpoint_name(gathered(w.router, "embed", "activation"), GATHERED)
    logits_BTE = linear(h_BTD.astype(jnp.float32), router_DE, whole)
    if w.b_router is not None:
        logits_BTE = logits_BTE + w.b_router
    scores_BTE = jax.nn.softmax(logits_BTE) if e.score == "softmax" else jax.nn.sigmoid(logits_BTE)
    wanted_BTE = scores_BTE if w.balance_bias is None else scores_BTE + w.balance_bias
    wanted_BTE = _within_groups(jax.lax.stop_gradient(wanted_BTE), e)
    choice_BTK = jax.lax.top_k(wanted_BTE, e.per_token)[1]
    # Sums over a mask, not gathers: their transposes are sums again.
    chosen_BTKE = jax.nn.one_hot(choice_BTK, e.experts)
    share_BTK = (chosen_BTKE * scores_BTE[:, :, None]).sum(-1)
    if e.normalize_scores:
        share_BTK = share_BTK / (share_BTK.sum(-1, keepdims=True) + 1e-20)
    usage = _usage(chosen_BTKE, scores_BTE / scores_BTE.sum(-1, keepdims=True), real_BT)
    return jnp.where(real_BT[..., None], choice_BTK, e.experts), share_BTK * e.score_scale, usage


def _within_groups(wanted_BTE: jax.Array, e: Experts) -> jax.Array:
    """Node-limited routing: minus infinity outside a token's best groups, judged by their two best experts when a bias
    balances them (DeepSeek-V3, section 2.1.2), else by their best one (DeepSeek-V2, section 2.2.2)."""
    if e.groups_per_token == e.groups:
        return wanted_BTE
    best = 2 if e.balancing_bias else 1
    wanted_BTQX = wanted_BTE.reshape(*wanted_BTE.shape[:2], e.groups, e.experts // e.groups)
    group_BTQ = jax.lax.top_k(wanted_BTQX, best)[0].sum(-1)
    groups = jax.lax.top_k(group_BTQ, e.groups_per_token)[1]
    open_BTQ = jax.nn.one_hot(groups, e.groups).sum(2) > 0
    return jnp.where(open_BTQ[..., None], wanted_BTQX, -jnp.inf).reshape(wanted_BTE.shape)


def _usage(chosen_BTKE: jax.Array, probability_BTE: jax.Array, real_BT: jax.Array) -> Usage:
    """Balance is judged row by row, so that it does not depend on how a batch is divided.

    Within a stage of a pipeline these are sums over a device's own part of each row.
    """
    real_B1 = whole_rows(real_BT.sum(1, keepdims=True))
    chosen_BE = (jax.lax.stop_gradient(chosen_BTKE).sum(2) * real_BT[..., None]).sum(1)
    share_BE = whole_rows(chosen_BE) / jnp.maximum(real_B1 * chosen_BTKE.shape[2], 1)
    probability_BE = (probability_BTE * real_BT[..., None]).sum(1) / jnp.maximum(real_B1, 1)
    E = chosen_BE.shape[1]
    return Usage(E * (share_BE * probability_BE * real_B1).sum(), chosen_BE.sum(0))


def _whole(weights: Weights, specs: Weights, dtype: jnp.dtype) -> Weights:
    """This device's experts, gathered over the axes that spread them as FSDP does, unless a stage of a pipeline has
    done so; the transpose reduce-scatters.

    Those that are Marked travel and are multiplied in 8 bits.
    """

    def gather(name: str, w: Any, spec: Any) -> Any:
        is_marked = isinstance(w, Marked)
        shared = None
        if "expert_embed" in DIMS[name]:
            dim = DIMS[name].index("expert_embed")
            axes = (spec.weight if is_marked else spec)[dim]
            shared = None if axes is None else (dim, axes)
        if is_marked:
            return quantized_experts.whole(w.weight.astype(dtype), w.limit, w.how, shared)
        w = w.astype(dtype)
        if shared is None:
            return w
        dim, axes = shared
        return checkpoint_name(jax.lax.all_gather(w, axes, axis=dim, tiled=True), GATHERED)

    return {name: gather(name, w, specs[name]) for name, w in weights.items()}


def _grouped(w: Weights, spec: ModelSpec, x_RD: jax.Array, sizes_G: jax.Array, kernel: Kernel) -> jax.Array:
    """Each row through the MLP of its group."""
    group_R = jnp.searchsorted(jnp.cumsum(sizes_G), jnp.arange(len(x_RD)), side="right", method="compare_all")

    def product(x: jax.Array, matrix: str, bias: str, name: str) -> jax.Array:
        if isinstance(w[matrix], quantized_experts.Whole):
            out = quantized_experts.grouped(x, w[matrix], sizes_G, kernel)
        else:
            out = grouped_matmul(x, w[matrix], sizes_G, kernel)
        if bias in w:
            out = out + w[bias].at[group_R].get(mode="fill", fill_value=0)
        return named(out, name)

    if "w_gate" not in w:
        hidden_RF = activate(spec, None, product(x_RD, "w_up", "b_up", "moe_mlpwi_0"))
    else:
        gate_RF = product(x_RD, "w_gate", "b_gate", "moe_mlpwi_0")
        hidden_RF = activate(spec, gate_RF, product(x_RD, "w_up", "b_up", "moe_mlpwi_1"))
    return product(hidden_RF, "w_down", "b_down", "moe_mlpwo")


def _batched(w: Weights, spec: ModelSpec, x_GSD: jax.Array) -> jax.Array:
    """Equally many rows of each expert through its MLP; rows that stand for no token give what nobody reads."""

    def product(x: jax.Array, matrix: str, bias: str, name: str) -> jax.Array:
        if isinstance(w[matrix], quantized_experts.Whole):
            out = quantized_experts.batched(x, w[matrix])
        else:
            out = jnp.einsum("GSI,GIO->GSO", x, w[matrix])
        return named(out + w[bias][:, None] if bias in w else out, name)

    if "w_gate" not in w:
        hidden_GSF = activate(spec, None, product(x_GSD, "w_up", "b_up", "moe_mlpwi_0"))
    else:
        gate_GSF = product(x_GSD, "w_gate", "b_gate", "moe_mlpwi_0")
        hidden_GSF = activate(spec, gate_GSF, product(x_GSD, "w_up", "b_up", "moe_mlpwi_1"))
    return product(hidden_GSF, "w_down", "b_down", "moe_mlpwo")


def balanced(params: Params, share_LE: jax.Array) -> Params:
    """``params`` with the balancing biases moved towards even use: up where an expert had too few choices, and down.

    ``share_LE``: each expert's share of all choices in the sparse layers, prediction layers last (DeepSeek-V3, 2.1.2).
    """

    def moved(layers: Layers, share_LE: jax.Array) -> Layers:
        step = BALANCE_STEP * jnp.sign(1 / share_LE.shape[1] - share_LE)
        bias_LE = layers.moe.balance_bias + step
        return dataclasses.replace(layers, moe=dataclasses.replace(layers.moe, balance_bias=bias_LE))

    count = len(params.layers.moe.balance_bias)
    prediction = params.prediction
    if prediction is not None:
        prediction = dataclasses.replace(prediction, layers=moved(prediction.layers, share_LE[count:]))
    return dataclasses.replace(params, layers=moved(params.layers, share_LE[:count]), prediction=prediction)
