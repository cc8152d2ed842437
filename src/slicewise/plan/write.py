"""Writing planned values into a run's config: a new file, or in place with comments and order kept."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slicewise.config import SECTION_OF, RunConfig, load_config
from slicewise.errors import UserError, cannot_write
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
        document = tomlkit.parse(Path(path).read_text()) if exists else tomlkit.document()
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
    _replace(Path(path), tomlkit.dumps(document))
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


def _replace(path: Path, text: str) -> None:
    """All of the file or nothing. Raises UserError when it cannot be written."""
    name = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        mode = path.stat().st_mode if path.exists() else 0o644
        os.chmod(name, mode & 0o777)
        os.replace(name, path)
    except BaseException as e:
        if name:
            os.unlink(name)
        if isinstance(e, OSError):
            raise cannot_write(f"config file {path}", e) from e
        raise
