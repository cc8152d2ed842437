"""Is a JobSet manifest what the API server would accept? Answered here, with the schema of its CRD.

Unlike the server, which drops them, unknown fields are refused. The schema in data/ is the project's own (its source
and licence stand in the file).
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from slicewise.errors import UserError, did_you_mean

_METADATA = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "maxLength": 253, "pattern": "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$"},
        "namespace": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"},
        "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
}
_RULE_NAME = re.compile(
    r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"
)  # the webhook's rule, which no schema holds


def validate(manifest: Mapping[str, Any]) -> None:
    """Raises UserError for the first thing that is wrong, with its path."""
    try:
        import jsonschema
    except ImportError as error:
        raise UserError(
            "checking a manifest needs jsonschema: pip install 'slicewise[kubernetes]'."
        ) from error
    validator = jsonschema.Draft202012Validator(_schema())
    errors = sorted(
        validator.iter_errors(manifest), key=lambda e: (len(e.absolute_path), str(e.absolute_path))
    )
    if errors:
        raise UserError(f"JobSet manifest: {_path(errors[0].absolute_path)}{_sentence(errors[0])}")
    policy = manifest["spec"].get("failurePolicy", {})
    names = [rule["name"] for rule in policy.get("rules", [])]
    for name in names:
        if not _RULE_NAME.fullmatch(name) or names.count(name) > 1:
            raise UserError(
                f"JobSet manifest: spec.failurePolicy.rules: name {name!r} is taken, or not of letters, digits, _"
                " and first a letter."
            )


@functools.cache
def _schema() -> dict[str, Any]:
    text = resources.files("slicewise.launch").joinpath("data/jobset-v1alpha2.json").read_text()
    document = json.loads(text)
    schema = _closed(document["openAPIV3Schema"])
    schema["properties"] |= {
        "apiVersion": {"const": document["apiVersion"]},
        "kind": {"const": document["kind"]},
        "metadata": _METADATA,
    }
    return {**schema, "required": ["apiVersion", "kind", "metadata", "spec"]}


def _closed(schema: Any) -> Any:
    """``schema`` with no other properties than it names, all the way down."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    is_object = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    opened = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    if is_object and not opened:
        closed["additionalProperties"] = False
    return closed


def _path(parts: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
    return f"{text}: " if text else ""


def _sentence(error: Any) -> str:
    if error.validator == "additionalProperties" and isinstance(error.schema.get("properties"), dict):
        known = error.schema["properties"]
        unknown = [key for key in error.instance if key not in known]
        return f"unknown field '{unknown[0]}'.{did_you_mean(unknown[0], known)}"
    return f"{error.message[:200]}."
