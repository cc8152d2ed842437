"""Writing weights as a Hugging Face model folder: the inverse of layouts.py, tensor by tensor."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from slicewise.errors import ExitCode, UserError
from slicewise.interop.huggingface import read_config, spec_from_config, text_config
from slicewise.interop.layouts import LAYOUTS, Source

FILE_BYTES = 5e9  # about as large as a published file is
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# What a folder has beside its weights and what describes its tokenizer.
COPIED = ("config.json", "generation_config.json", "*token*", "vocab*", "merges.txt", "chat_template*")
HEAD = "lm_head.weight"
Read = Callable[[str], np.ndarray]  # our name of a weight -> float32 array, as load_weights gives it


@dataclass(frozen=True)
class _Stored:
    """One tensor to write, and the weights of ours that make it up."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]  # (our name, place in its stack)


def save_weights(model: str | Path, folder: str | Path, read: Read) -> tuple[list[str], int]:
    """Writes what ``read`` gives for the model in the folder ``model``, with its config and tokenizer, to ``folder``.

    The type is that of the config. Returns the names of the files and the number of parameters. Raises UserError where
    ``folder`` holds something, ``model`` has no config.json, or a file cannot be written.
    """
    file, values = read_config(model)
    model_type, text = text_config(file, values)
    if text is not values:
        raise UserError(f"{file}: a multimodal model cannot be written, only the language model was trained.")
    sources = LAYOUTS[model_type](spec_from_config(file))
    dtype = _dtype(file, values)
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise UserError(f"{target} is not empty; choose another folder.")
        files = _write(target, _tensors(sources, _prefix(model_type)), sources, read, dtype)
        for pattern in COPIED:
            for path in file.parent.glob(pattern):
                if path.is_file():
                    shutil.copy(path, target)
    except OSError as e:
        raise UserError(f"{e.filename or target}: {e.strerror}.", code=ExitCode.INTERNAL) from e
    parameters = sum(math.prod(t.shape) for t in _tensors(sources, ""))
    return files, parameters


def _prefix(model_type: str) -> str:
    return "transformer." if model_type == "gpt2" else "model."


def _dtype(file: Path, values: dict[str, Any]) -> Any:
    name = values.get("dtype") or values.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise UserError(f"{file}: dtype = {name!r}: expected {', '.join(DTYPES)}.")
    return DTYPES[name]


def _tensors(sources: dict[str, Source], prefix: str) -> list[_Stored]:
    """Every tensor in the order of our weights; those that several weights share stand once."""
    found: dict[str, _Stored] = {}
    for ours, source in sources.items():
        for place, bare in enumerate(source.names()):
            name = bare if bare == HEAD else prefix + bare
            parts = found[name].parts if name in found else ()
            found[name] = _Stored(name, source.stored, (*parts, (ours, place)))
    return list(found.values())


def _write(
    target: Path, tensors: list[_Stored], sources: dict[str, Source], read: Read, dtype: Any
) -> list[str]:
    groups = list(_grouped(tensors, np.dtype(dtype).itemsize))
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    weights = _Recent(read)
    for name, group in zip(names, groups, strict=True):
        content = {t.name: _content(t, sources, weights).astype(dtype) for t in group}
        save_file(content, target / name, metadata={"format": "pt"})
    if len(groups) > 1:
        place = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
        size = sum(math.prod(t.shape) for t in tensors) * np.dtype(dtype).itemsize
        index = {"metadata": {"total_size": size}, "weight_map": place}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return names


def _grouped(tensors: list[_Stored], itemsize: int) -> Iterator[list[_Stored]]:
    group: list[_Stored] = []
    size = 0
    for tensor in tensors:
        bytes_ = math.prod(tensor.shape) * itemsize
        if group and size + bytes_ > FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += bytes_
    yield group


class _Recent:
    """The last few weights that were read: those that make up one tensor are asked for in turn."""

    def __init__(self, read: Read):
        self._read = read
        self._kept: dict[str, np.ndarray] = {}

    def __call__(self, name: str) -> np.ndarray:
        if name not in self._kept:
            while len(self._kept) > 3:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = self._read(name)
        return self._kept[name]


def _content(tensor: _Stored, sources: dict[str, Source], weights: _Recent) -> np.ndarray:
    """The stored form, float32. A conversion only moves and chooses elements, so that of their numbers inverts it."""
    flat = np.zeros(math.prod(tensor.shape), np.float32)
    numbers = np.arange(flat.size).reshape(tensor.shape)
    for name, place in tensor.parts:
        source = sources[name]
        weight = weights(name)
        stacked = weight.reshape(-1, *weight.shape[len(source.leading) :])
        flat[source.convert(numbers)] = stacked[place]
    return flat.reshape(tensor.shape)
