"""Published rows in this project's terms: model shapes, layout, recipe and the step time they report."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slicewise.catalog import chips, slices
from slicewise.catalog.slices import Cluster, Slice
from slicewise.costs.layout import AttentionKernel, Degrees, Layout, Recipe
from slicewise.costs.remat import RematPolicy, custom, policy
from slicewise.costs.shapes import (
    Attention,
    Layer,
    Matmul,
    ModelShape,
    latent_projections,
    mlp,
    projections,
)
from slicewise.errors import UserError

ALIASES = {
    "fsdp_transpose": "fsdp",
    "data_fsdp": "fsdp",
    "sequence": "context",
    "context_ulysses": "context",
    "tensor_transpose": "tensor",
    "tensor_sequence": "tensor",
    "autoregressive": "tensor",
    "mdl_tensor": "tensor",
    "replica": "data",
}
GLOBAL_EVERY = {"gemma2": 2, "gemma3": 6, "gemma4": 6, "gpt_oss": 2, "olmo3": 4, "llama4": 4}
# MLPerf publishes the time of a block of training steps and one evaluation. On the one system whose plain
# step time is also known (512 chips of v5p) the block is longer by this factor.
EVAL_ALLOWANCE = 23.815 / 22.197
PAX_POLICIES = {  # Praxis: save_dot_except_* keeps every dot but the named ones, attention included
    "save_dot_except_logits": "minimal_with_context",
    "save_dot_except_logits_ffn1": "save_dot_with_context_except_mlp",
}


@dataclass(frozen=True)
class Row:
    id: str
    family: str  # the model's name, for leave-one-model-out
    chip: str
    shape: ModelShape
    cluster: Cluster
    layout: Layout
    recipe: Recipe
    seq: int
    step_time_s: float
    kind: str
    newest: bool
    allowance: float  # what the published time holds beside the training step, as a factor


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def scorable(point: dict[str, Any]) -> bool:
    return bool((point.get("target") or {}).get("scorable"))


def row(point: dict[str, Any]) -> Row:
    """Raises UserError for a row that does not state its layout, batch or step time; other fields have the
    defaults of the schema."""
    chip = chips.load(point["chip"])
    cluster = Cluster(slice_of(point, chip), point.get("num_slices") or 1)
    asked = point.get("parallelism") or {}
    if not asked.get("resolved"):
        raise UserError("its mesh is not stated.")
    ici, dcn = (degrees(asked["resolved"].get(network) or {}) for network in ("ici", "dcn"))
    layout = Layout(ici, dcn, global_batch=batch_of(point, cluster))
    target = point["target"]
    kind = target.get("kind") or "measured"
    seconds = target.get("step_time_s")
    if not seconds or not point.get("seq_len"):
        raise UserError("its step time or its sequence length is not stated.")
    name = point["model"].get("name") or "?"
    return Row(
        point.get("id") or "?", name, point["chip"], shape_of(point["model"]), cluster, layout,
        recipe_of(point), point["seq_len"], seconds, kind, target.get("newest_of_workload") is not False,
        EVAL_ALLOWANCE if kind.startswith("upper_bound") else 1.0,
    )  # fmt: skip


def slice_of(point: dict[str, Any], chip: chips.Chip) -> Slice:
    """The topology as stated, else the standard shape of the slice's name or size."""
    if point.get("topology"):
        return Slice(chip, tuple(int(d) for d in point["topology"].split(" ")[0].split("x")))
    if name := point.get("slice_name"):
        shape = name.rpartition("-")[2]
        return slices.parse(shape if "x" in shape else name, chip)
    return slices.of_chips(chip, point["chips_per_slice"])


def batch_of(point: dict[str, Any], cluster: Cluster) -> float:
    """Sequences a step; the per-device batch counts every device, those of the tensor axis too."""
    if point.get("global_batch_seqs"):
        return point["global_batch_seqs"]
    if point.get("per_device_batch"):
        return point["per_device_batch"] * cluster.devices
    tokens = point.get("global_batch_tokens") or (point.get("tokens_per_device") or 0) * cluster.devices
    if not tokens:
        raise UserError("its batch is not stated.")
    return tokens / point["seq_len"]


def degrees(named: dict[str, int]) -> Degrees:
    """MaxText's axes: fsdp_transpose is a second fsdp axis, sequence and context_ulysses are context axes."""
    total: dict[str, int] = {}
    for axis, degree in named.items():
        if degree is None:
            raise UserError(f"the degree of its {axis} axis is not stated.")
        axis = ALIASES.get(axis, axis)
        total[axis] = total.get(axis, 1) * degree
    return Degrees(**total)


def shape_of(m: dict[str, Any]) -> ModelShape:
    """The layers of a row's model, from its dims alone."""
    block = m.get("decoder_block") or ""
    layers = m["layers"] * (2 if block == "gemma2" else 1)
    every = next((n for name, n in GLOBAL_EVERY.items() if block.startswith(name)), 0)
    if block == "gemma4_small" and layers % 6:
        every = 5
    window = m.get("sliding_window_size") or m.get("chunk_attn_window_size")
    moe = m.get("moe")
    dense_first = (moe.get("first_dense_layers") or 0) if moe else layers
    shared_from = layers - (m.get("num_kv_shared_layers") or 0)
    kinds: dict[tuple[bool, bool, bool], int] = {}
    for index in range(layers):
        everything = not window or (bool(every) and index % every == every - 1)
        kind = (index >= dense_first, everything, index >= shared_from)
        kinds[kind] = kinds.get(kind, 0) + 1
    built = tuple(_layer(m, count, *kind) for kind, count in kinds.items())
    tied = bool(m.get("tied_embeddings"))
    return ModelShape(m.get("name") or "?", built, m["d_model"], m["vocab"], tied)


def _layer(m: dict[str, Any], count: int, sparse: bool, everything: bool, shared: bool) -> Layer:
    d = m["d_model"]
    window = m.get("sliding_window_size") or m.get("chunk_attn_window_size")
    head = (m.get("global_head_dim") if everything else None) or m.get("head_dim") or d // m["heads"]
    kv = (m.get("global_num_kv_heads") if everything else None) or m.get("kv_heads") or m["heads"]
    block = m.get("decoder_block") or ""
    if m.get("mla"):
        a = m["mla"]
        attention = Attention(
            m["heads"], m["heads"], a["qk_nope_head_dim"] + a["qk_rope_head_dim"], a["v_head_dim"]
        )
        matmuls = latent_projections(
            d, attention, q_rank=a["q_lora_rank"], kv_rank=a["kv_lora_rank"], rope_dim=a["qk_rope_head_dim"]
        )
    else:
        attention = Attention(m["heads"], kv, head, head, None if everything else window)
        matmuls = projections(d, attention, shared_kv=bool(m.get("share_kv_projections")) and everything)
        if shared:
            matmuls = [x for x in matmuls if x.name not in ("key_proj", "value_proj")]
    gated = m.get("gated_mlp") is not False
    if sparse:
        moe = m["moe"]
        matmuls.append(Matmul("router", d, moe["num_experts"], "replicated"))
        matmuls += mlp(d, moe["moe_d_ff"], gated, "moe_", moe["num_experts"], moe["top_k"])
        if moe.get("shared_experts"):
            width = m["d_ff"] if block == "gemma4" else moe["moe_d_ff"] * moe["shared_experts"]
            matmuls += mlp(d, width, gated, "shared_")
    else:
        matmuls += mlp(d, m["d_ff"] * (2 if shared and m.get("use_double_wide_mlp") else 1), gated)
    per_layer = m.get("hidden_size_per_layer_input")
    if per_layer:
        matmuls += [Matmul("per_layer_gate", d, per_layer), Matmul("per_layer_proj", per_layer, d, "row")]
    post = block in ("gemma2", "gemma3", "gemma4", "gemma4_small", "olmo3")
    return Layer(count, tuple(matmuls), attention, d, d * (4 if post else 2), post)


def recipe_of(point: dict[str, Any]) -> Recipe:
    attention = point.get("attention") or {}
    flash = "dot_product" not in (attention.get("attention") or "flash")
    block = attention.get("block_sizes") or 512
    other, moe, dtype = (point.get(name) or {} for name in ("other_flags", "moe_impl", "dtype"))
    resolved = ((point.get("parallelism") or {}).get("resolved") or {}).get("ici") or {}
    quantization = (point.get("quantization") or "").strip('"') or "none"
    precision = next((p for p in ("int8", "fp8") if quantization.startswith(p)), "bf16")
    capacity = moe.get("capacity_factor") if not moe.get("megablox") else None
    return Recipe(
        remat=remat_of(point.get("remat") or {}),
        precision=precision,
        static_scales="fixed" in str(other.get("weight_quantization_calibration_method")),
        attention=AttentionKernel(
            "flash" if flash else "dot",
            attention.get("sa_block_q") or block,
            attention.get("sa_block_kv") or block,
            bool(attention.get("sa_use_fused_bwd_kernel") or attention.get("use_tokamax_splash")),
        ),
        expert_capacity_factor=capacity if capacity and capacity > 0 else None,
        expert_exchange="all_gather" if moe.get("use_ring_of_experts") else "all_to_all",
        context_exchange=exchange_of(point),
        context_balanced=other.get("context_parallel_load_balance", True) is not False,
        context_ulysses=resolved.get("context_ulysses") or 1,
        one_hot_embedding=bool(other.get("use_iota_embed")),
        vocab_tiles=int(other.get("num_vocab_tiling") or 1),
        async_collectives=point["chip"] != "v6e" or "async" in (point.get("xla_flags") or ""),
        **bytes_of(dtype, point.get("optimizer")),
    )


def bytes_of(dtype: dict[str, Any], optimizer: str | None) -> dict[str, int]:
    """Moments and gradients are of the weights' type unless the row says otherwise; SGD has no moments."""
    if optimizer == "sgd":
        return {**bytes_of(dtype, None), "moment_bytes": 0}
    if dtype.get("weights") == "bfloat16":
        return {"weight_bytes": 2, "moment_bytes": 4, "gradient_bytes": 2, "summed_bytes": 2}
    gradient_bytes = 2 if dtype.get("grad") == "bfloat16" else 4
    return {
        "weight_bytes": 4,
        "moment_bytes": 6 if dtype.get("mu") == "bfloat16" else 8,
        "gradient_bytes": gradient_bytes,
        "summed_bytes": gradient_bytes,
    }


def exchange_of(point: dict[str, Any]) -> str:
    """How the context axis exchanges keys and values; 'usp' is a ring whose members exchange heads."""
    strategy = (point.get("parallelism") or {}).get("context_parallel_strategy") or "all_gather"
    if strategy.startswith(("ring", "usp")):
        return "ring"
    return "ulysses" if strategy == "ulysses" else "all_gather"


def remat_of(remat: dict[str, Any]) -> RematPolicy:
    name = remat.get("policy") or "full"
    if name == "custom" or (name == "full" and remat.get("tensors")):
        return custom(remat.get("tensors") or {})
    name = PAX_POLICIES.get(name, name)
    return policy("full" if name == "SAVE_NOTHING" else name)
