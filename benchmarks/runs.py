"""Published rows and expert configurations as runs of this project."""

import json
from pathlib import Path
from typing import Any

import rows
from slicewise.catalog import chips, flags
from slicewise.catalog.model import ModelSpec, names
from slicewise.catalog.model import load as load_model
from slicewise.config import AXES, RunConfig, load_config
from slicewise.costs.layout import AXES as ALL_AXES
from slicewise.costs.layout import Layout, Recipe
from slicewise.errors import UserError

VMEM = "scoped_vmem_limit_kib"  # a key of its own: tiles of kernels follow it


def config_of(point: dict[str, Any], layout: Layout, recipe: Recipe, seq: int, directory: Path) -> RunConfig:
    """The run that ``point`` describes. Raises UserError for what no config can ask for.

    A model file is written to ``directory`` where the catalog does not have the model.
    """
    unsupported = [a for a in ALL_AXES if a not in AXES and layout.total(a) > 1]
    if unsupported:
        raise UserError(f"its {unsupported[0]} axis is no axis of a run.")
    overrides = {
        "model": model_of(point["model"], directory),
        "sequence_length": seq,
        "global_batch_size": int(layout.global_batch),
        "attention": "splash" if recipe.attention.kind == "flash" and seq % 128 == 0 else "reference",
        "quantization": {"bf16": "none"}.get(recipe.precision, recipe.precision),
        "compiler_flags": ",".join(
            [*not_then(point["chip"]), *(f for f in known_flags(point) if VMEM not in f)]
        ),
        "scoped_vmem_limit_kib": next((f.split("=")[1] for f in known_flags(point) if VMEM in f), "0"),
    }
    for network, degrees in (("ici", layout.ici), ("dcn", layout.dcn)):
        overrides |= {f"{network}_{a}_parallelism": int(getattr(degrees, a)) for a in AXES}
    return load_config(None, [*(f"{k}={v}" for k, v in overrides.items()), *remat_of(point)]).config


def not_then(chip: str) -> list[str]:
    """Default groups that are left out: those that the rows of a chip are older than, and that few of them set."""
    kept = ("sparsecore-all-reduce",) if chip == "v6e" else ()
    return [f"no-{g.name}" for g in flags.groups().values() if chip in g.default and g.name not in kept]


def remat_of(point: dict[str, Any]) -> list[str]:
    remat = point.get("remat") or {}
    name = remat.get("policy") or "full"
    if name != "custom" and not remat.get("tensors"):
        return [f"remat_policy={'full' if name == 'SAVE_NOTHING' else rows.PAX_POLICIES.get(name, name)}"]
    places = ", ".join(f'{k} = "{v}"' for k, v in (remat.get("tensors") or {}).items())
    return ["remat_policy=custom", f"remat_tensors={{{places}}}"]


def known_flags(point: dict[str, Any]) -> list[str]:
    """The row's flags that the installed compiler takes on the row's chip."""
    chip = chips.load(point["chip"]).name
    taken: list[str] = []
    # the compiler takes the last of a flag that a row has twice
    last = {flag.partition("=")[0]: flag for flag in (point.get("xla_flags") or "").split()}
    for flag in last.values():
        if not flag.startswith("--xla"):
            continue
        try:
            flags.resolve([flag], chip)
            flags.resolve([*taken, flag], chip)
        except UserError:
            continue
        taken.append(flag)
    return taken


def model_of(m: dict[str, Any], directory: Path) -> str:
    """A model file of the row's dims; mixtures of experts from the catalog, which knows their routing."""
    name = (m.get("name") or "").replace("llama3.1", "llama3").replace("deepseek3-671b", "deepseek-v3")
    if m.get("moe") or m.get("mla"):
        if name not in names():
            raise UserError(f"the catalog has no {name}.")
        return name
    block = m.get("decoder_block") or "llama2"
    if block.startswith(("gemma", "llama4", "olmo")):
        raise UserError(f"layers of {block} are not built from dims.")
    spec = {
        "name": name or "row", "source": "published row", "layers": m["layers"], "d_model": m["d_model"],
        "heads": m["heads"], "kv_heads": m.get("kv_heads") or m["heads"],
        "head_dim": m.get("head_dim") or m["d_model"] // m["heads"], "d_ff": m["d_ff"], "vocab": m["vocab"],
        "tied_embeddings": bool(m.get("tied_embeddings")), "gated_mlp": m.get("gated_mlp") is not False,
        "activation": "silu" if m.get("gated_mlp") is not False else "gelu_tanh" if block == "gpt3" else "relu",
        "norm": "layer" if block == "gpt3" else "rms", "max_context": 1 << 20,
    }  # fmt: skip
    path = directory / "model.toml"
    path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in spec.items()))
    assert isinstance(load_model(str(path)), ModelSpec)
    return str(path)
