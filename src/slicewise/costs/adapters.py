"""Low-rank adapters (LoRA, Hu et al. 2021) as shapes: which matrices of a layer have them, by one rule for all."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slicewise.costs.shapes import Layer, Matmul, ModelShape
from slicewise.errors import UserError

FROZEN_BYTES = {"bfloat16": 2.0, "float32": 4.0, "int8": 1.0}
# Outputs of matrices (see costs.shapes) -> the matrix's name within its layer, plain and of latent attention.
NAMES = {
    "query_proj": ("wq", "latent.wq_b"),
    "key_proj": ("wk", "latent.wk_b"),
    "value_proj": ("wv", "latent.wv_b"),
    "query_wa_proj": ("", "latent.wq_a"),
    "kv_wa_proj": ("", "latent.wkv_a"),
    "out_proj": ("wo", "wo"),
}
PREFIXES = {"shared_": "moe.shared.", "moe_": "moe."}


@dataclass(frozen=True)
class Lora:
    """Adapters of ``rank`` on the matrices whose name ``layers`` matches, over frozen ones kept as ``base_dtype``."""

    rank: int
    alpha: float = 16.0
    layers: str = ""  # empty: all but routed experts
    base_dtype: str = "bfloat16"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, name: str) -> bool:
        """Whether the dense matrix called ``name`` within its layer has an adapter."""
        return not self.layers or re.fullmatch(self.layers, name) is not None


def check(lora: Lora | None, optimizer_type: str, quantization: str) -> None:
    """Raises UserError for an optimiser that is not for adapters, and for matrices that would be quantised twice.

    ``quantization`` is none where it is switched off.
    """
    if lora is None:
        return
    if optimizer_type == "muon":
        raise UserError(
            f"optimizer_type = muon is for whole matrices, not for adapters of lora_rank = {lora.rank}; choose adamw,"
            " adafactor or lion."
        )
    if lora.base_dtype == "int8" and quantization != "none":
        raise UserError(
            f"lora_base_dtype = int8 keeps matrices that quantization = '{quantization}' would quantise again; set one"
            " of them to bfloat16 or none."
        )


def check_pattern(key: str, pattern: str) -> None:
    """Raises UserError for a ``pattern`` of the names of matrices that is none."""
    try:
        re.compile(pattern)
    except re.error as e:
        raise UserError(f"{key} = '{pattern}' is no regular expression: {e}.") from e


def check_names(lora: Lora, model: str, dense: Sequence[str], routed: Sequence[str]) -> None:
    """Raises UserError for a pattern that is none, that names routed experts, or no matrix of ``model``.

    ``dense`` and ``routed`` are the names of its matrices within a layer.
    """
    check_pattern("lora_layers", lora.layers)
    if lora.layers and (experts := [name for name in routed if lora.adapts(name)]):
        raise UserError(
            f"lora_layers = '{lora.layers}' names {experts[0]}, and routed experts take no adapters;"
            f" choose of {', '.join(dense)}."
        )
    if not any(map(lora.adapts, dense)):
        raise UserError(
            f"lora_layers = '{lora.layers}' matches no matrix of {model}; the names are {', '.join(dense)}."
        )


def with_adapters(shape: ModelShape, lora: Lora | None) -> ModelShape:
    """``shape`` as it is trained: frozen, with the ranks of its adapters; as it is without ``lora``.

    Raises UserError as check_names does.
    """
    if lora is None:
        return shape
    matrices = [(layer, m) for layer in shape.layers for m in layer.matmuls if m.name != "router"]
    dense, routed = (
        list(dict.fromkeys(_matrix(layer, m) for layer, m in matrices if m.routed == is_routed))
        for is_routed in (False, True)
    )
    check_names(lora, shape.name, dense, routed)
    layers = tuple(
        replace(layer, matmuls=tuple(_adapted(layer, m, lora) for m in layer.matmuls), frozen=True)
        for layer in shape.layers
    )
    return replace(shape, layers=layers, frozen_bytes=FROZEN_BYTES[lora.base_dtype])


def _adapted(layer: Layer, m: Matmul, lora: Lora) -> Matmul:
    name = _name(layer, m)
    return replace(m, frozen=True, rank=lora.rank if name and lora.adapts(name) else 0)


def _name(layer: Layer, m: Matmul) -> str | None:
    """The weight of ``m`` within its layer; None for what has no adapter."""
    return None if m.routed or m.name == "router" else _matrix(layer, m)


def _matrix(layer: Layer, m: Matmul) -> str:
    outputs = {other.name for other in layer.matmuls}
    if m.name in NAMES:
        plain, latent = NAMES[m.name]
        compressed = "kv_wa_proj" in outputs and not (
            m.name == "query_proj" and "query_wa_proj" not in outputs
        )
        return latent if compressed else plain
    prefix = next((p for start, p in PREFIXES.items() if m.name.startswith(start)), "")
    part = m.name.removeprefix("shared_").removeprefix("moe_")
    gated = m.name.replace("mlpwi_0", "mlpwi_1").replace("mlpwo", "mlpwi_1") in outputs
    return prefix + {"mlpwo": "w_down", "mlpwi_1": "w_up", "mlpwi_0": "w_gate" if gated else "w_up"}[part]
