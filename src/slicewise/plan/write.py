"""Writing planned values into a run's config: a new file, or in place with comments and order kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slicewise.config import SECTION_OF, RunConfig, load_config
from slicewise.errors import UserError, write_whole
from slicewise.plan.run_config import Value, as_overrides


def write_config(path: str, values: Mapping[str, Value], *, note: str = "", create: bool = True) -> RunConfig:
    """Sets ``values`` (by config key) in the TOML file ``path`` and returns the config it then holds.

    An existing file keeps its other keys, comments and order; a new one starts with ``note`` as a comment.
    Raises UserError, before anything is written, when the file is not a config or would not be one, and when
    it is missing and may not be created.
    """
    import tomlkit

    exists = Path(path).exists()
    loaded = load_config(path if exists or not create else None, as_overrides(values))
    try:
        document = tomlkit.parse(Path(path).read_text(encoding="utf-8-sig")) if exists else tomlkit.document()
    except tomlkit.exceptions.TOMLKitError as e:
        raise UserError(f"config file {path} is not TOML: {e}.") from e
    if not exists and note:
        document.add(tomlkit.comment(note))
        document.add(tomlkit.nl())
    for section in RunConfig.model_fields:
        keys = [key for key in values if SECTION_OF[key] == section]
        if keys and section not in document:
            document.add(section, tomlkit.table())
        for key in keys:
            _set(document[section], key, values[key])
    write_whole(path, tomlkit.dumps(document).encode(), f"config file {path}")
    return loaded.config


def _set(table: Any, key: str, value: Value) -> None:
    """An empty table is what a key holds by default: it is left out."""
    import tomlkit

    if not isinstance(value, Mapping):
        table[key] = value
    elif value:
        table[key] = tomlkit.inline_table()
        table[key].update(value)
    else:
        table.pop(key, None)
