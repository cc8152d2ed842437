"""Model shapes from Hugging Face: config.json to ModelSpec. Needs neither transformers nor JAX."""

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slicewise.catalog import model
from slicewise.catalog.model import ModelSpec
from slicewise.errors import UserError, did_you_mean
from slicewise.interop.config_keys import ConfigKeys
from slicewise.interop.families import FAMILIES


def load_spec(name_or_path: str) -> ModelSpec:
    """The model of a catalog name, a ModelSpec .toml, a config.json, or a folder that holds a config.json.

    A catalog name wins over a folder of the same name; write ./name for the folder. Raises UserError as
    spec_from_config and catalog.model.load do.
    """
    if name_or_path not in model.names() and (name_or_path.endswith(".json") or Path(name_or_path).is_dir()):
        return spec_from_config(name_or_path)
    return model.load(name_or_path)


def spec_from_config(path: str | Path) -> ModelSpec:
    """The ModelSpec of a Hugging Face config.json (or of the folder that holds it), named after the folder.

    Raises UserError, which names the key, for an unreadable file, an unknown model_type, a missing or
    ill-typed key and a feature that is not supported.
    """
    file, values = read_config(path)
    model_type, text = text_config(file, values)
    fields = FAMILIES[model_type](ConfigKeys(text, str(file)))
    try:
        return ModelSpec(name=file.resolve().parent.name or "model", source=str(file), **fields)
    except ValidationError as e:
        raise UserError(f"{file}: {model.first_problem(e, ModelSpec)}") from e


def read_config(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The config.json that ``path`` is or holds, and its content. Raises UserError when it cannot be read."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        values = json.loads(file.read_bytes())
    except OSError as e:
        raise UserError(f"model file {file}: {e.strerror}.") from e
    except ValueError as e:
        raise UserError(f"model file {file} is not JSON: {e}.") from e
    if not isinstance(values, dict):
        raise UserError(f"model file {file} is not a config.json: expected a table of keys.")
    return file, values


def text_config(file: Path, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The model_type, a key of FAMILIES, and the table that describes the language model.

    Multimodal Gemma 3 nests the language model in text_config.
    """
    supported = sorted(FAMILIES.keys() | {"gemma3"})
    model_type = values.get("model_type")
    if model_type is None:
        raise UserError(f"{file}: key 'model_type' is missing; supported are {', '.join(supported)}.")
    if model_type == "gemma3":
        text = values.get("text_config")
        if not isinstance(text, dict):
            raise UserError(f"{file}: key 'text_config' is missing, where gemma3 keeps the language model.")
        return "gemma3_text", text
    if model_type not in FAMILIES:
        raise UserError(
            f"{file}: model_type = {model_type!r} is not supported.{did_you_mean(str(model_type), supported)}"
            f" Supported: {', '.join(supported)}."
        )
    return model_type, values
