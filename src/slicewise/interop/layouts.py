"""Where each weight of a model family lies in its Hugging Face files, and how it becomes ours."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np

from slicewise.catalog.model import ModelSpec


@dataclass(frozen=True)
class Source:
    """Where one of our weights comes from: a stored tensor, its shape there, and how it becomes ours.

    ``tensor`` comes without the model's prefix; with ``{layer}`` and ``{expert}`` in it, the weight stacks those of
    ``layers`` and of so many ``experts``.
    """

    tensor: str
    stored: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray]
    layers: tuple[int, ...] = ()
    experts: int = 0

    @property
    def leading(self) -> tuple[int, ...]:
        """The dims that stacking adds."""
        return (len(self.layers),) * bool(self.layers) + (self.experts,) * bool(self.experts)

    def names(self) -> list[str]:
        """The stored tensors in the order of the stack."""
        return [
            self.tensor.format(layer=layer, expert=expert)
            for layer in self.layers or (None,)
            for expert in range(self.experts or 1)
        ]


Sources = dict[str, Source]


def _linear(tensor: str, out: tuple[int, ...], into: tuple[int, ...], experts: int = 0) -> Source:
    """A torch Linear, stored [out, in]; ours is [*in, *out]."""
    stored = (prod(out), prod(into))
    return Source(tensor, stored, lambda w: w.T.reshape(*into, *out), experts=experts)


def _conv1d(tensor: str, into: tuple[int, ...], out: tuple[int, ...]) -> Source:
    """A GPT-2 Conv1D, stored [in, out]; ours is [*in, *out]."""
    return Source(tensor, (prod(into), prod(out)), lambda w: w.reshape(*into, *out))


def _plain(tensor: str, *dims: int, flat: bool = True) -> Source:
    """A vector that we keep as [*dims], or with ``flat`` false an array stored as it is."""
    return Source(tensor, (prod(dims),) if flat else dims, lambda w: w.reshape(dims))


def _part(source: Source, change: Callable[[np.ndarray], np.ndarray]) -> Source:
    """``source`` with ``change`` after its conversion."""
    return dataclasses.replace(source, convert=lambda w: change(source.convert(w)))


def _stacked(prefix: str, layers: tuple[int, ...], sources: Sources) -> Sources:
    """``sources`` of one layer, named below layers.{layer}, as weights of the stack ``prefix``."""
    return {
        f"{prefix}.{name}": dataclasses.replace(s, tensor=f"layers.{{layer}}.{s.tensor}", layers=layers)
        for name, s in sources.items()
    }


def _around(spec: ModelSpec) -> Sources:
    """What is not in layers."""
    sources = {
        "embed": _plain("embed_tokens.weight", spec.vocab, spec.d_model, flat=False),
        "final_norm.scale": _plain("norm.weight", spec.d_model),
    }
    if not spec.tied_embeddings:
        sources["head"] = _linear("lm_head.weight", (spec.vocab,), (spec.d_model,))
    return sources


def _attention(spec: ModelSpec) -> Sources:
    D, N, K, H = spec.d_model, spec.heads, spec.kv_heads, spec.head_dim
    sources = {
        "attn_norm.scale": _plain("input_layernorm.weight", D),
        "wq": _linear("self_attn.q_proj.weight", (N, H), (D,)),
        "wk": _linear("self_attn.k_proj.weight", (K, H), (D,)),
        "wv": _linear("self_attn.v_proj.weight", (K, H), (D,)),
        "wo": _linear("self_attn.o_proj.weight", (D,), (N, H)),
        "mlp_norm.scale": _plain("post_attention_layernorm.weight", D),
    }
    if spec.qkv_bias:
        sources["bq"] = _plain("self_attn.q_proj.bias", N, H)
        sources["bk"] = _plain("self_attn.k_proj.bias", K, H)
        sources["bv"] = _plain("self_attn.v_proj.bias", K, H)
    if spec.attention_output_bias:
        sources["bo"] = _plain("self_attn.o_proj.bias", D)
    if spec.qk_norm:
        sources["q_norm"] = _plain("self_attn.q_norm.weight", H)
        sources["k_norm"] = _plain("self_attn.k_norm.weight", H)
    if spec.attention_sinks:
        sources["sinks"] = _plain("self_attn.sinks", N)
    return sources


def _latent_attention(spec: ModelSpec) -> Sources:
    """Of DeepSeek, whose rotary pairs are neighbours (2i, 2i + 1): its rotary dims are put in our order."""
    D, N, a = spec.d_model, spec.heads, spec.latent_attention
    assert a is not None
    Q, R, plain, C = a.q_lora_rank, a.kv_lora_rank, a.nope_head_dim, a.rope_head_dim
    pairs = np.concatenate([np.arange(0, C, 2), np.arange(1, C, 2)])

    def in_pairs(w: np.ndarray) -> np.ndarray:
        return np.concatenate([w[..., :-C], w[..., -C:][..., pairs]], axis=-1)

    up = _linear("self_attn.kv_b_proj.weight", (N, plain + a.v_head_dim), (R,))
    sources = {
        "attn_norm.scale": _plain("input_layernorm.weight", D),
        "latent.wkv_a": _part(_linear("self_attn.kv_a_proj_with_mqa.weight", (R + C,), (D,)), in_pairs),
        "latent.kv_norm": _plain("self_attn.kv_a_layernorm.weight", R),
        "latent.wk_b": _part(up, lambda w: w[..., :plain]),
        "latent.wv_b": _part(up, lambda w: w[..., plain:]),
        "wo": _linear("self_attn.o_proj.weight", (D,), (N, a.v_head_dim)),
        "mlp_norm.scale": _plain("post_attention_layernorm.weight", D),
    }
    if Q is None:
        sources["wq"] = _part(_linear("self_attn.q_proj.weight", (N, plain + C), (D,)), in_pairs)
        return sources
    sources["latent.wq_a"] = _linear("self_attn.q_a_proj.weight", (Q,), (D,))
    sources["latent.q_norm"] = _plain("self_attn.q_a_layernorm.weight", Q)
    sources["latent.wq_b"] = _part(_linear("self_attn.q_b_proj.weight", (N, plain + C), (Q,)), in_pairs)
    return sources


def _mlp(spec: ModelSpec, width: int, at: str, experts: int = 0) -> Sources:
    """A gated MLP of that ``width`` below the name ``at``."""
    D = spec.d_model
    return {
        "w_gate": _linear(f"{at}gate_proj.weight", (width,), (D,), experts),
        "w_up": _linear(f"{at}up_proj.weight", (width,), (D,), experts),
        "w_down": _linear(f"{at}down_proj.weight", (D,), (width,), experts),
    }


def _experts(spec: ModelSpec) -> Sources:
    """As Qwen and DeepSeek name them."""
    e = spec.experts
    assert e is not None
    sources = {"moe.router": _linear("mlp.gate.weight", (e.experts,), (spec.d_model,))}
    if e.balancing_bias:
        sources["moe.balance_bias"] = _plain("mlp.gate.e_score_correction_bias", e.experts)
    sources |= _below("moe.", _mlp(spec, e.d_ff, "mlp.experts.{expert}.", e.experts))
    if e.shared_d_ff:
        sources |= _below("moe.shared.", _mlp(spec, e.shared_d_ff, "mlp.shared_experts."))
    return sources


def _below(prefix: str, sources: Sources) -> Sources:
    return {prefix + name: source for name, source in sources.items()}


def _llama(spec: ModelSpec) -> Sources:
    layer = _attention(spec) | _mlp(spec, spec.d_ff, "mlp.")
    return _around(spec) | _stacked("layers", tuple(range(spec.layers)), layer)


def _gemma(spec: ModelSpec) -> Sources:
    """As Llama, but post_attention_layernorm follows attention, and the MLP has norms on both sides."""
    norms = {
        "post_attn_norm.scale": _plain("post_attention_layernorm.weight", spec.d_model),
        "mlp_norm.scale": _plain("pre_feedforward_layernorm.weight", spec.d_model),
        "post_mlp_norm.scale": _plain("post_feedforward_layernorm.weight", spec.d_model),
    }
    return _llama(spec) | _stacked("layers", tuple(range(spec.layers)), norms)


def _gpt2(spec: ModelSpec) -> Sources:
    D, N, H, F, V = spec.d_model, spec.heads, spec.head_dim, spec.d_ff, spec.vocab
    layer = {
        "wo": _conv1d("attn.c_proj.weight", (N, H), (D,)),
        "bo": _plain("attn.c_proj.bias", D),
        "w_up": _conv1d("mlp.c_fc.weight", (D,), (F,)),
        "b_up": _plain("mlp.c_fc.bias", F),
        "w_down": _conv1d("mlp.c_proj.weight", (F,), (D,)),
        "b_down": _plain("mlp.c_proj.bias", D),
    }
    for part, which in (("q", 0), ("k", 1), ("v", 2)):
        layer[f"w{part}"] = _third("attn.c_attn.weight", (D,), (N, H), which)
        layer[f"b{part}"] = _third("attn.c_attn.bias", (), (N, H), which)
    for ours, theirs in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
        layer[f"{ours}.scale"] = _plain(f"{theirs}.weight", D)
        layer[f"{ours}.bias"] = _plain(f"{theirs}.bias", D)
    layers = tuple(range(spec.layers))
    sources = {
        "embed": _plain("wte.weight", V, D, flat=False),
        "position": _plain("wpe.weight", spec.max_context, D, flat=False),
        "final_norm.scale": _plain("ln_f.weight", D),
        "final_norm.bias": _plain("ln_f.bias", D),
    }
    for name, source in layer.items():
        sources[f"layers.{name}"] = dataclasses.replace(
            source, tensor=f"h.{{layer}}.{source.tensor}", layers=layers
        )
    if not spec.tied_embeddings:
        sources["head"] = _linear("lm_head.weight", (V,), (D,))
    return sources


def _third(tensor: str, into: tuple[int, ...], out: tuple[int, ...], which: int) -> Source:
    """Queries, keys or values (0, 1, 2) of GPT-2's fused projection, stored [*in, 3 * out]."""
    width = prod(out)
    part = slice(which * width, (which + 1) * width)
    return Source(tensor, (*into, 3 * width), lambda w: w[..., part].reshape(*into, *out))


def _sparse(spec: ModelSpec, attention: Sources, experts: Sources) -> Sources:
    """A model with ``experts`` in its sparse layers and a dense MLP in the others."""
    sparse = tuple(i for i in range(spec.layers) if spec.layer_is_sparse(i))
    dense = tuple(i for i in range(spec.layers) if not spec.layer_is_sparse(i))
    sources = _around(spec) | _stacked("layers", sparse, attention | experts)
    if dense:
        sources |= _stacked("dense_layers", dense, attention | _mlp(spec, spec.d_ff, "mlp."))
    return sources


def _mixtral(spec: ModelSpec) -> Sources:
    e, D, at = spec.experts, spec.d_model, "block_sparse_moe."
    assert e is not None
    experts = {
        "moe.router": _linear(f"{at}gate.weight", (e.experts,), (D,)),
        "moe.w_gate": _linear(f"{at}experts.{{expert}}.w1.weight", (e.d_ff,), (D,), e.experts),
        "moe.w_up": _linear(f"{at}experts.{{expert}}.w3.weight", (e.d_ff,), (D,), e.experts),
        "moe.w_down": _linear(f"{at}experts.{{expert}}.w2.weight", (D,), (e.d_ff,), e.experts),
    }
    return _sparse(spec, _attention(spec), experts)


def _qwen3_moe(spec: ModelSpec) -> Sources:
    return _sparse(spec, _attention(spec), _experts(spec))


def _gpt_oss(spec: ModelSpec) -> Sources:
    """Gate and up projection of all experts are one tensor, with the columns of both in turn."""
    e, D = spec.experts, spec.d_model
    assert e is not None
    E, F, at = e.experts, e.d_ff, "mlp.experts."
    both = _plain(f"{at}gate_up_proj", E, D, 2 * F, flat=False)
    both_bias = _plain(f"{at}gate_up_proj_bias", E, 2 * F, flat=False)
    experts = {
        "moe.router": _linear("mlp.router.weight", (E,), (D,)),
        "moe.b_router": _plain("mlp.router.bias", E),
        "moe.w_gate": _part(both, lambda w: w[..., ::2]),
        "moe.w_up": _part(both, lambda w: w[..., 1::2]),
        "moe.w_down": _plain(f"{at}down_proj", E, F, D, flat=False),
        "moe.b_gate": _part(both_bias, lambda w: w[..., ::2]),
        "moe.b_up": _part(both_bias, lambda w: w[..., 1::2]),
        "moe.b_down": _plain(f"{at}down_proj_bias", E, D, flat=False),
    }
    return _sparse(spec, _attention(spec), experts)


def _deepseek(spec: ModelSpec) -> Sources:
    attention, experts, D = _latent_attention(spec), _experts(spec), spec.d_model
    sources = _sparse(spec, attention, experts)
    if spec.prediction_layers:
        layers = tuple(range(spec.layers, spec.layers + spec.prediction_layers))
        last = experts if spec.layer_is_sparse(spec.layers - 1) else _mlp(spec, spec.d_ff, "mlp.")
        sources |= _stacked("prediction.layers", layers, attention | last)
        joins = {
            "embed_norm.scale": _plain("enorm.weight", D),
            "hidden_norm.scale": _plain("hnorm.weight", D),
            "projection": _linear("eh_proj.weight", (D,), (2 * D,)),
            "final_norm.scale": _plain("shared_head.norm.weight", D),
        }
        sources |= _stacked("prediction", layers, joins)
    return sources


LAYOUTS: dict[str, Callable[[ModelSpec], Sources]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen3": _llama,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
