"""Weights from a Hugging Face model folder, under the names and in the layout of our own parameter tree."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes  # noqa: F401  (lets numpy name bfloat16, which safetensors needs)
import numpy as np
from safetensors import SafetensorError, safe_open

from slicewise.catalog.model import ModelSpec
from slicewise.errors import UserError
from slicewise.interop.huggingface import read_config, spec_from_config, text_config

READABLE = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Source:
    """Where one of our weights comes from: a stored tensor, its shape there, and how it becomes ours.

    ``tensor`` comes without the model's prefix; with ``{layer}`` in it, the weight stacks all layers'.
    """

    tensor: str
    stored: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray]


def load_weights(path: str | Path) -> dict[str, np.ndarray]:
    """Every weight of the model in the folder ``path``, float32, by dotted names as layers.attn_norm.scale.

    Shapes, with leading L for what is in layers: embed VD, position PD, wq DNH, wk and wv DKH, wo NHD, biases
    bq NH, bk and bv KH, bo D, q_norm and k_norm H, norms D, w_gate and w_up DF, w_down FD, b_up F, b_down D,
    head DV. A weight that the model does not have is absent. Rotary pairs are (i, i + H/2) on both sides.

    Raises UserError for a model_type whose weights are not supported, quantised weights, tensors that are
    missing, unexpected or of another shape (named), and unreadable files.
    """
    file, values = read_config(path)
    model_type, _ = text_config(file, values)
    if model_type not in LAYOUTS:
        raise UserError(f"{file}: weights are read for {', '.join(LAYOUTS)}, not for {model_type}.")
    if values.get("quantization_config"):
        raise UserError(f"{file}: quantization_config: expected float weights, not quantised ones.")
    spec = spec_from_config(file)
    sources = LAYOUTS[model_type](spec)
    with ExitStack() as stack:
        tensors = _Tensors(file.parent, stack)
        prefix = _prefix(tensors, sources["embed"].tensor)
        _check_names(tensors, prefix, sources, spec)
        return {name: _read(tensors, prefix, source, spec.layers) for name, source in sources.items()}


def _read(tensors: "_Tensors", prefix: str, source: Source, layers: int) -> np.ndarray:
    def read(name: str) -> np.ndarray:
        return source.convert(tensors.read(name, source.stored))

    if "{layer}" not in source.tensor:
        # A copy: the conversion may be a view of a larger tensor that would stay in memory.
        return np.array(read(_full(prefix, source.tensor)), dtype=np.float32)
    first = read(_full(prefix, source.tensor.format(layer=0)))
    stacked = np.empty((layers, *first.shape), np.float32)
    stacked[0] = first
    for layer in range(1, layers):
        stacked[layer] = read(_full(prefix, source.tensor.format(layer=layer)))
    return stacked


class _Tensors:
    """The tensors of model.safetensors, or of the files that model.safetensors.index.json lists."""

    def __init__(self, folder: Path, stack: ExitStack):
        self._folder = folder
        self._file_of: dict[str, safe_open] = {}
        for file in _weight_files(folder):
            try:
                handle = stack.enter_context(safe_open(file, framework="numpy"))
            except FileNotFoundError as e:
                raise UserError(f"weights file {file}: No such file or directory.") from e
            except OSError as e:
                raise UserError(f"weights file {file} cannot be read: {e}.") from e
            except SafetensorError as e:
                raise UserError(f"weights file {file} is not a safetensors file: {e}.") from e
            self._file_of |= dict.fromkeys(handle.keys(), handle)

    def __str__(self) -> str:
        return str(self._folder)

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        piece = self._file_of[name].get_slice(name)
        if tuple(piece.get_shape()) != shape:
            raise UserError(f"{self}: tensor {name} has shape {piece.get_shape()}, expected {list(shape)}.")
        if piece.get_dtype() not in READABLE:
            raise UserError(f"{self}: tensor {name} is {piece.get_dtype()}; expected {', '.join(READABLE)}.")
        return self._file_of[name].get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [folder / "model.safetensors"]
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"weights index {index}: expected a weight_map from tensor names to files.") from e


def _prefix(tensors: _Tensors, embed: str) -> str:
    """What comes before every name but the head's; multimodal models and bare GPT-2 differ here."""
    for prefix in ("model.", "transformer.", "", "model.language_model.", "language_model.model."):
        if prefix + embed in tensors.names():
            return prefix
    raise UserError(f"{tensors}: no tensor is called {embed}, with or without model. in front.")


def _full(prefix: str, name: str) -> str:
    if name != "lm_head.weight":
        return prefix + name
    return "language_model.lm_head.weight" if prefix == "language_model.model." else name


def _check_names(tensors: _Tensors, prefix: str, sources: Mapping[str, Source], spec: ModelSpec) -> None:
    expected = {_full(prefix, s.tensor.format(layer=i)) for s in sources.values() for i in range(spec.layers)}
    if missing := expected - tensors.names():
        raise UserError(f"{tensors}: tensors are missing: {_some(missing)}.")
    extra = {name for name in tensors.names() - expected if not _is_no_weight(name)}
    head, embed = _full(prefix, "lm_head.weight"), _full(prefix, sources["embed"].tensor)
    if spec.tied_embeddings and head in extra:
        shape = sources["embed"].stored
        if not np.array_equal(tensors.read(head, shape), tensors.read(embed, shape)):
            raise UserError(f"{tensors}: {head} differs from {embed}, although tie_word_embeddings is true.")
        extra.remove(head)
    if extra:
        raise UserError(f"{tensors}: unexpected tensors: {_some(extra)}.")


def _is_no_weight(name: str) -> bool:
    """Constants that older files store, and the vision part of Gemma 3."""
    constant = name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
    return constant or name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector."))


def _some(names: set[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(sorted(names)[:limit]) + rest


def _linear(tensor: str, out: tuple[int, ...], into: tuple[int, ...]) -> Source:
    """A torch Linear, stored [out, in]; ours is [*in, *out]."""
    return Source(tensor, (prod(out), prod(into)), lambda w: w.T.reshape(*into, *out))


def _conv1d(tensor: str, into: tuple[int, ...], out: tuple[int, ...]) -> Source:
    """A GPT-2 Conv1D, stored [in, out]; ours is [*in, *out]."""
    return Source(tensor, (prod(into), prod(out)), lambda w: w.reshape(*into, *out))


def _plain(tensor: str, *dims: int, flat: bool = True) -> Source:
    """A vector that we keep as [*dims], or with ``flat`` false a matrix stored as it is."""
    return Source(tensor, (prod(dims),) if flat else dims, lambda w: w.reshape(dims))


def _llama(spec: ModelSpec) -> dict[str, Source]:
    D, N, K, H, F, V = spec.d_model, spec.heads, spec.kv_heads, spec.head_dim, spec.d_ff, spec.vocab
    layer = "layers.{layer}."
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    sources = {
        "embed": _plain("embed_tokens.weight", V, D, flat=False),
        "layers.attn_norm.scale": _plain(f"{layer}input_layernorm.weight", D),
        "layers.wq": _linear(f"{attention}q_proj.weight", (N, H), (D,)),
        "layers.wk": _linear(f"{attention}k_proj.weight", (K, H), (D,)),
        "layers.wv": _linear(f"{attention}v_proj.weight", (K, H), (D,)),
        "layers.wo": _linear(f"{attention}o_proj.weight", (D,), (N, H)),
        "layers.mlp_norm.scale": _plain(f"{layer}post_attention_layernorm.weight", D),
        "layers.w_gate": _linear(f"{mlp}gate_proj.weight", (F,), (D,)),
        "layers.w_up": _linear(f"{mlp}up_proj.weight", (F,), (D,)),
        "layers.w_down": _linear(f"{mlp}down_proj.weight", (D,), (F,)),
        "final_norm.scale": _plain("norm.weight", D),
    }
    if spec.qkv_bias:
        sources["layers.bq"] = _plain(f"{attention}q_proj.bias", N, H)
        sources["layers.bk"] = _plain(f"{attention}k_proj.bias", K, H)
        sources["layers.bv"] = _plain(f"{attention}v_proj.bias", K, H)
    if spec.attention_output_bias:
        sources["layers.bo"] = _plain(f"{attention}o_proj.bias", D)
    if spec.qk_norm:
        sources["layers.q_norm"] = _plain(f"{attention}q_norm.weight", H)
        sources["layers.k_norm"] = _plain(f"{attention}k_norm.weight", H)
    if not spec.tied_embeddings:
        sources["head"] = _linear("lm_head.weight", (V,), (D,))
    return sources


def _gemma(spec: ModelSpec) -> dict[str, Source]:
    """As Llama, but post_attention_layernorm follows attention, and the MLP has norms on both sides."""
    layer = "layers.{layer}."
    return _llama(spec) | {
        "layers.post_attn_norm.scale": _plain(f"{layer}post_attention_layernorm.weight", spec.d_model),
        "layers.mlp_norm.scale": _plain(f"{layer}pre_feedforward_layernorm.weight", spec.d_model),
        "layers.post_mlp_norm.scale": _plain(f"{layer}post_feedforward_layernorm.weight", spec.d_model),
    }


def _gpt2(spec: ModelSpec) -> dict[str, Source]:
    D, N, H, F, V = spec.d_model, spec.heads, spec.head_dim, spec.d_ff, spec.vocab
    layer = "h.{layer}."
    sources = {
        "embed": _plain("wte.weight", V, D, flat=False),
        "position": _plain("wpe.weight", spec.max_context, D, flat=False),
        "layers.wo": _conv1d(f"{layer}attn.c_proj.weight", (N, H), (D,)),
        "layers.bo": _plain(f"{layer}attn.c_proj.bias", D),
        "layers.w_up": _conv1d(f"{layer}mlp.c_fc.weight", (D,), (F,)),
        "layers.b_up": _plain(f"{layer}mlp.c_fc.bias", F),
        "layers.w_down": _conv1d(f"{layer}mlp.c_proj.weight", (F,), (D,)),
        "layers.b_down": _plain(f"{layer}mlp.c_proj.bias", D),
    }
    for part, which in (("q", 0), ("k", 1), ("v", 2)):
        sources[f"layers.w{part}"] = _third(f"{layer}attn.c_attn.weight", (D,), (N, H), which)
        sources[f"layers.b{part}"] = _third(f"{layer}attn.c_attn.bias", (), (N, H), which)
    for ours, theirs in (
        ("layers.attn_norm", f"{layer}ln_1"),
        ("layers.mlp_norm", f"{layer}ln_2"),
        ("final_norm", "ln_f"),
    ):
        sources[f"{ours}.scale"] = _plain(f"{theirs}.weight", D)
        sources[f"{ours}.bias"] = _plain(f"{theirs}.bias", D)
    if not spec.tied_embeddings:
        sources["head"] = _linear("lm_head.weight", (V,), (D,))
    return sources


def _third(tensor: str, into: tuple[int, ...], out: tuple[int, ...], which: int) -> Source:
    """Queries, keys or values (0, 1, 2) of GPT-2's fused projection, stored [*in, 3 * out]."""
    width = prod(out)
    part = slice(which * width, (which + 1) * width)
    return Source(tensor, (*into, 3 * width), lambda w: w[..., part].reshape(*into, *out))


LAYOUTS: dict[str, Callable[[ModelSpec], dict[str, Source]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen3": _llama,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
}
