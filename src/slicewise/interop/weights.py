"""Weights from a Hugging Face model folder, under the names and in the layout of our own parameter tree."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import ml_dtypes  # noqa: F401  (lets numpy name bfloat16, which safetensors needs)
import numpy as np
from safetensors import SafetensorError, safe_open

from slicewise.catalog.model import ModelSpec
from slicewise.errors import UserError
from slicewise.interop.huggingface import read_config, spec_from_config, text_config
from slicewise.interop.layouts import LAYOUTS, Source

READABLE = ("F32", "F16", "BF16")


def load_weights(path: str | Path) -> dict[str, np.ndarray]:
    """Every weight of the model in the folder ``path``, float32, by dotted names as layers.attn_norm.scale.

    Shapes, with leading L for what is in layers: embed VD, position PD, wq DNH, wk and wv DKH, wo NHD, biases
    bq NH, bk and bv KH, bo D, q_norm and k_norm H, norms D, w_gate and w_up DF, w_down FD, b_up F, b_down D,
    head DV; experts have a leading E behind the L. Layers without experts of a model that has some are in dense_layers,
    those of multi-token prediction in prediction. A weight that the model does not have is absent. Rotary pairs are
    (i, i + H/2).

    Raises UserError for quantised weights, tensors that are missing, unexpected or of another shape (named), and
    unreadable files.
    """
    with open_weights(path) as files:
        return {name: files.whole(name) for name in files.sources}


class WeightFiles:
    """The weights of a Hugging Face folder under our names, read piece by piece."""

    def __init__(self, path: str | Path, stack: ExitStack):
        file, values = read_config(path)
        model_type, _ = text_config(file, values)
        if values.get("quantization_config"):
            raise UserError(f"{file}: quantization_config: expected float weights, not quantised ones.")
        self.spec = spec_from_config(file)
        self.sources = LAYOUTS[model_type](self.spec)
        self._tensors = _Tensors(file.parent, stack)
        self._prefix = _prefix(self._tensors, self.sources["embed"].tensor)
        _check_names(self._tensors, self._prefix, self.sources, self.spec)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of our weight ``name``."""
        source = self.sources[name]
        return (*source.leading, *source.convert(np.empty(source.stored, np.bool_)).shape)

    def pieces(self, name: str) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """(place in the stacked dims, float32 array of the others) of each stored tensor of ``name``, in order."""
        source = self.sources[name]
        places = product(*(range(size) for size in source.leading))
        for place, stored in zip(places, source.names(), strict=True):
            tensor = self._tensors.read(_full(self._prefix, stored), source.stored)
            yield place, source.convert(tensor).astype(np.float32)

    def whole(self, name: str) -> np.ndarray:
        """The weight ``name``, float32."""
        stacked = np.empty(self.shape(name), np.float32)
        for place, piece in self.pieces(name):
            stacked[place] = piece
        return stacked


@contextmanager
def open_weights(path: str | Path) -> Iterator[WeightFiles]:
    """The weights in the folder ``path``. Raises UserError as load_weights does."""
    with ExitStack() as stack:
        yield WeightFiles(path, stack)


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
    expected = {_full(prefix, name) for source in sources.values() for name in source.names()}
    if missing := expected - tensors.names():
        raise UserError(f"{tensors}: tensors are missing: {_some(missing)}.")
    extra = {name for name in tensors.names() - expected if not _is_no_weight(name, spec)}
    head, embed = _full(prefix, "lm_head.weight"), _full(prefix, sources["embed"].tensor)
    if spec.tied_embeddings and head in extra:
        shape = sources["embed"].stored
        if not np.array_equal(tensors.read(head, shape), tensors.read(embed, shape)):
            raise UserError(f"{tensors}: {head} differs from {embed}, although tie_word_embeddings is true.")
        extra.remove(head)
    if extra:
        raise UserError(f"{tensors}: unexpected tensors: {_some(extra)}.")


def _is_no_weight(name: str, spec: ModelSpec) -> bool:
    """Constants that older files store, the vision part of Gemma 3, and what prediction layers share with the model."""
    constant = name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
    copies = tuple(
        f"layers.{layer}.{part}.weight"
        for layer, part in product(
            range(spec.layers, spec.layers + spec.prediction_layers), ("embed_tokens", "shared_head.head")
        )
    )
    bare = name.removeprefix("model.")
    return constant or bare in copies or bare.startswith(("vision_tower.", "multi_modal_projector."))


def _some(names: set[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(sorted(names)[:limit]) + rest
