"""What a Hugging Face config.json of each model_type says, as the fields of a ModelSpec.

Rates of dropout, initialisation and auxiliary losses are about training, not about the shape, and are not
read. A key that changes the model in a way that is not built is refused. Defaults, for keys that published
files leave out, are those of the transformers config classes.
"""

import math
from collections.abc import Callable
from typing import Any

from slicewise.interop.config_keys import ConfigKeys

Fields = dict[str, Any]

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def llama(keys: ConfigKeys) -> Fields:
    keys.only("mlp_bias", False)
    return _decoder(keys) | _rope(keys) | _biases(keys)


def mistral(keys: ConfigKeys) -> Fields:
    window = None if keys.is_null("sliding_window") else keys.size("sliding_window", 4096)
    return _decoder(keys) | _rope(keys) | {"sliding_window": window}


def qwen3(keys: ConfigKeys) -> Fields:
    fields = _decoder(keys, head_dim=keys.size("head_dim")) | _rope(keys) | _biases(keys) | {"qk_norm": True}
    if not keys.flag("use_sliding_window", False):
        return fields
    first_local = keys.count("max_window_layers")
    types = ["full_attention" if i < first_local else "sliding_attention" for i in range(fields["layers"])]
    return fields | _windows(keys, types)


def gemma2(keys: ConfigKeys) -> Fields:
    keys.only("use_bidirectional_attention", False)
    fields = _gemma(keys) | _rope(keys)
    fields["max_context"] = keys.size("max_position_embeddings", 8192)
    fields |= _softcaps(keys, attention=50.0, logits=30.0)
    return fields | _windows(keys, _alternating(fields["layers"], 2), default_window=4096)


def gemma3(keys: ConfigKeys) -> Fields:
    """The text part; defaults matter, since the published files of the larger models leave most keys out."""
    keys.only("use_bidirectional_attention", False)
    fields = _gemma(keys) | {"qk_norm": True}
    fields["max_context"] = keys.size("max_position_embeddings", 131072)
    fields |= _softcaps(keys, attention=None, logits=None)
    if keys.has("rope_parameters"):
        both = keys.table("rope_parameters")
        whole, local = both.table("full_attention"), both.table("sliding_attention")
        local.only("rope_type", "default")
        fields["rope_theta"] = whole.number("rope_theta", 1_000_000.0)
        fields["rope_scaling"] = _rope_scaling(whole, fields["max_context"])
        fields["local_rope_theta"] = local.number("rope_theta", 10_000.0)
    else:
        fields |= _rope(keys, default_theta=1_000_000.0, max_context=fields["max_context"])
        fields["local_rope_theta"] = keys.number("rope_local_base_freq", 10_000.0)
    pattern = keys.size("sliding_window_pattern", 6)
    return fields | _windows(keys, _alternating(fields["layers"], pattern), default_window=4096)


def gpt2(keys: ConfigKeys) -> Fields:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    d_model, heads = keys.size("n_embd"), keys.size("n_head")
    return {
        "layers": keys.size("n_layer"),
        "d_model": d_model,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": _head_dim(keys, "n_head", d_model, heads),
        "d_ff": keys.size("n_inner", 4 * d_model),
        "vocab": keys.size("vocab_size"),
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "gated_mlp": False,
        "activation": keys.choice("activation_function", ACTIVATIONS, "gelu_new"),
        "mlp_bias": True,
        "norm": "layer",
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "qkv_bias": True,
        "attention_output_bias": True,
        "position": "learned",
        "max_context": keys.size("n_positions"),
    }


def mixtral(keys: ConfigKeys) -> Fields:
    fields = _decoder(keys) | _rope(keys, default_theta=1_000_000.0)
    if keys.has("sliding_window"):
        fields["sliding_window"] = keys.size("sliding_window")
    return fields | {"experts": _experts(keys, "num_local_experts", fields["d_ff"])}


def qwen3_moe(keys: ConfigKeys) -> Fields:
    fields = _decoder(keys) | _rope(keys) | _biases(keys) | {"qk_norm": True}
    if keys.flag("use_sliding_window", False):
        fields["sliding_window"] = keys.size("sliding_window")
    dense = keys.sizes("mlp_only_layers")
    if dense != list(range(len(dense))):
        raise keys.error("mlp_only_layers", "the first layers, as in [0, 1]; nothing else is supported")
    name = "num_local_experts" if keys.has("num_local_experts") else "num_experts"
    return fields | {
        "experts": _experts(keys, name, keys.size("moe_intermediate_size"))
        | {
            "first_dense_layers": len(dense),
            "every": keys.size("decoder_sparse_step", 1),
            "normalize_scores": keys.flag("norm_topk_prob", False),
        }
    }


def gpt_oss(keys: ConfigKeys) -> Fields:
    keys.only("hidden_act", "silu")
    keys.only("swiglu_limit", 7.0)
    keys.only("swiglu_alpha", 1.702)
    if _rope_table(keys) is None:  # transformers would stretch the context 32 times
        keys.table("rope_parameters")
    fields = _decoder(keys) | _rope(keys, default_theta=150_000.0)
    fields |= _biases(keys, default=True) | _windows(keys, _alternating(fields["layers"], 2))
    return fields | {
        "activation": "clamped_swiglu",
        "mlp_bias": True,
        "attention_sinks": True,
        "experts": _experts(keys, "num_local_experts", fields["d_ff"]) | {"router_bias": True},
    }


def deepseek_v2(keys: ConfigKeys) -> Fields:
    keys.only("scoring_func", "softmax")
    keys.only("norm_topk_prob", False)
    grouped = keys.choice("topk_method", {"greedy": False, "group_limited_greedy": True}, "greedy")
    scale = keys.number("routed_scaling_factor", 1.0)
    return _deepseek(keys, grouped, normalize_scores=False, score_scale=scale)


def deepseek_v3(keys: ConfigKeys) -> Fields:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("rope_interleave", True)
    fields = _deepseek(
        keys,
        grouped=True,
        score="sigmoid",
        normalize_scores=keys.flag("norm_topk_prob", True),
        score_scale=keys.number("routed_scaling_factor", 2.5),
        balancing_bias=True,
    )
    return fields | {"prediction_layers": keys.count("num_nextn_predict_layers", 0)}


FAMILIES: dict[str, Callable[[ConfigKeys], Fields]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
}


def _decoder(keys: ConfigKeys, head_dim: int | None = None) -> Fields:
    """What the Llama-like families share."""
    d_model, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return {
        "layers": keys.size("num_hidden_layers"),
        "d_model": d_model,
        "heads": heads,
        "kv_heads": keys.size("num_key_value_heads", heads),
        "head_dim": head_dim or _head_dim(keys, "num_attention_heads", d_model, heads),
        "d_ff": keys.size("intermediate_size"),
        "vocab": keys.size("vocab_size"),
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "activation": keys.choice("hidden_act", ACTIVATIONS, "silu"),
        "norm_eps": keys.number("rms_norm_eps"),
        "max_context": keys.size("max_position_embeddings"),
    }


def _head_dim(keys: ConfigKeys, heads_key: str, d_model: int, heads: int) -> int:
    if keys.has("head_dim"):
        return keys.size("head_dim")
    if d_model % heads:
        raise keys.error(heads_key, f"a divisor of the model width {d_model}, or a head_dim")
    return d_model // heads


def _gemma(keys: ConfigKeys) -> Fields:
    """What Gemma 2 and 3 share, without rotary positions and windows."""
    head_dim = keys.size("head_dim", 256)
    query_scalar = keys.number("query_pre_attn_scalar", 256.0)
    return {
        "layers": keys.size("num_hidden_layers"),
        "d_model": keys.size("hidden_size"),
        "heads": keys.size("num_attention_heads", 8),
        "kv_heads": keys.size("num_key_value_heads", 4),
        "head_dim": head_dim,
        "d_ff": keys.size("intermediate_size"),
        "vocab": keys.size("vocab_size", 262208),
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "activation": keys.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        "norm_eps": keys.number("rms_norm_eps", 1e-6),
        "zero_centered_norm": True,
        "post_norms": True,
        "embedding_scale": True,
        "query_scale": None if query_scalar == head_dim else query_scalar**-0.5,
    } | _biases(keys)


def _softcaps(keys: ConfigKeys, attention: float | None, logits: float | None) -> Fields:
    def cap(key: str, default: float | None) -> float | None:
        if keys.is_null(key) or (default is None and not keys.has(key)):
            return None
        return keys.number(key, default)

    return {
        "attention_softcap": cap("attn_logit_softcapping", attention),
        "logits_softcap": cap("final_logit_softcapping", logits),
    }


def _biases(keys: ConfigKeys, default: bool = False) -> Fields:
    bias = keys.flag("attention_bias", default)
    return {"qkv_bias": bias, "attention_output_bias": bias}


def _experts(keys: ConfigKeys, count_key: str, d_ff: int) -> Fields:
    keys.only("router_jitter_noise", 0.0)
    return {"experts": keys.size(count_key), "per_token": keys.size("num_experts_per_tok"), "d_ff": d_ff}


def _deepseek(keys: ConfigKeys, grouped: bool, **routing: Any) -> Fields:
    """What DeepSeek V2 and V3 share; ``routing`` are further fields of Experts."""
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("moe_layer_freq", 1)
    nope, rope = keys.size("qk_nope_head_dim"), keys.size("qk_rope_head_dim")
    fields = _decoder(keys, head_dim=nope + rope) | _rope(keys)
    keys.only("num_key_value_heads", fields["heads"])
    expert_width = keys.size("moe_intermediate_size")
    experts = _experts(keys, "n_routed_experts", expert_width) | routing
    experts["shared_d_ff"] = keys.count("n_shared_experts", 0) * expert_width
    experts["first_dense_layers"] = keys.count("first_k_dense_replace", 0)
    if grouped:
        experts |= {"groups": keys.size("n_group"), "groups_per_token": keys.size("topk_group")}
    return fields | {
        "query_scale": _deepseek_query_scale(keys, nope + rope),
        "latent_attention": {
            "kv_lora_rank": keys.size("kv_lora_rank"),
            "q_lora_rank": keys.size("q_lora_rank") if keys.has("q_lora_rank") else None,
            "nope_head_dim": nope,
            "rope_head_dim": rope,
            "v_head_dim": keys.size("v_head_dim"),
        },
        "experts": experts,
    }


def _deepseek_query_scale(keys: ConfigKeys, head_dim: int) -> float | None:
    """head_dim ** -0.5 times the square of YaRN's temperature, or None when the context is not stretched."""
    table = _rope_table(keys)
    if table is None or not table.has("mscale_all_dim"):
        return None
    return head_dim**-0.5 * _yarn_temperature(table.number("factor"), table.number("mscale_all_dim")) ** 2


def _rope(keys: ConfigKeys, default_theta: float = 10_000.0, max_context: int | None = None) -> Fields:
    """Rotary fields from ``rope_parameters`` (transformers 5) or from ``rope_theta`` and ``rope_scaling``."""
    keys.only("partial_rotary_factor", 1.0)
    table = _rope_table(keys)
    theta = keys.number("rope_theta", default_theta)
    if table is None:
        return {"rope_theta": theta}
    context = max_context or keys.size("max_position_embeddings")
    return {"rope_theta": table.number("rope_theta", theta), "rope_scaling": _rope_scaling(table, context)}


def _rope_table(keys: ConfigKeys) -> ConfigKeys | None:
    return next((keys.table(key) for key in ("rope_parameters", "rope_scaling") if keys.has(key)), None)


def _rope_scaling(table: ConfigKeys, max_context: int) -> Fields | None:
    kinds = {"default": None, "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
    old_name = table.has("type") and not table.has("rope_type")
    kind = table.choice("type" if old_name else "rope_type", kinds, "default")
    table.only("partial_rotary_factor", 1.0)
    if kind is None:
        return None
    scaling: Fields = {"kind": kind, "factor": table.number("factor")}
    if kind == "llama3":
        scaling["original_context"] = table.size("original_max_position_embeddings")
        scaling["low_freq_factor"] = table.number("low_freq_factor")
        scaling["high_freq_factor"] = table.number("high_freq_factor")
    if kind == "yarn":
        scaling["original_context"] = table.size("original_max_position_embeddings", max_context)
        scaling["beta_fast"] = table.number("beta_fast", 32.0)
        scaling["beta_slow"] = table.number("beta_slow", 1.0)
        scaling["truncate"] = table.flag("truncate", True)
        scaling["attention_factor"] = _yarn_attention_factor(table, scaling["factor"])
    return scaling


def _yarn_attention_factor(table: ConfigKeys, factor: float) -> float:
    if table.has("attention_factor"):
        return table.number("attention_factor")
    if table.has("mscale") and table.has("mscale_all_dim"):
        whole = _yarn_temperature(factor, table.number("mscale_all_dim"))
        return _yarn_temperature(factor, table.number("mscale")) / whole
    return _yarn_temperature(factor, 1.0)


def _yarn_temperature(factor: float, weight: float) -> float:
    """0.1 * weight * ln(factor) + 1 (YaRN, 2023, equation 22, with DeepSeek's weight)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _alternating(layers: int, every: int) -> list[str]:
    """Layer types in groups of ``every`` with global attention in the last of each."""
    return ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(layers)]


def _windows(keys: ConfigKeys, implied: list[str], default_window: int | None = None) -> Fields:
    """Window fields from ``layer_types``, or from the types ``implied`` by other keys when it is absent."""
    types, layers = keys.texts("layer_types") if keys.has("layer_types") else implied, len(implied)
    if "sliding_attention" not in types:
        matching, fields = ["full_attention"] * layers, {}
    else:
        fields = {"sliding_window": keys.size("sliding_window", default_window)}
        if "full_attention" in types:
            fields["global_every"] = types.index("full_attention") + 1
            matching = _alternating(layers, fields["global_every"])
        else:
            matching = ["sliding_attention"] * layers
    if types != matching:
        # Without layer_types the pattern came from max_window_layers (Qwen3).
        key = "layer_types" if keys.has("layer_types") else "max_window_layers"
        pattern = f"{layers} layers, all full_attention or sliding_attention with every n-th full_attention"
        raise keys.error(key, f"{pattern}; nothing else is supported")
    return fields
