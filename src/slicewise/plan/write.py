"""Writing planned values into a run's config: a new file, or in place with comments and order kept."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slicewise.config import SECTION_OF, RunConfig, flat, load_config
from slicewise.costs import effects
from slicewise.errors import UserError, write_whole
from slicewise.plan.run_config import Value, as_overrides


@dataclass(frozen=True)
class Written:
    config: RunConfig
    left_out: tuple[str, ...]  # keys that what was written leaves without an effect

    @property
    def note(self) -> str:
        """What was left out, to follow the name of the file; empty where nothing was."""
        return f"; without {', '.join(self.left_out)}, which has no effect then" if self.left_out else ""


def write_config(path: str, values: Mapping[str, Value], *, note: str = "", create: bool = True) -> Written:
    """Sets ``values`` (by config key) in the TOML file ``path``.

    An existing file keeps its comments, order and other keys, except those that ``values`` leave without an effect: it
    would be no config with them. A new one starts with ``note`` as a comment.
    Raises UserError, before anything is written, when the file is not a config or would not be one, and when
    it is missing and may not be created.
    """
    import tomlkit

    exists = Path(path).exists()
    source = path if exists or not create else None
    default = flat(RunConfig())
    left_out = _idle(flat(load_config(source).config) | dict(values), default)
    values = {key: value for key, value in values.items() if key not in left_out}
    defaults = {key: default[key] for key in left_out}
    loaded = load_config(source, as_overrides(values | defaults))
    try:
        document = tomlkit.parse(Path(path).read_text(encoding="utf-8-sig")) if exists else tomlkit.document()
    except tomlkit.exceptions.TOMLKitError as e:
        raise UserError(f"config file {path} is not TOML: {e}.") from e
    if not exists and note:
        document.add(tomlkit.comment(note))
        document.add(tomlkit.nl())
    for key in left_out:
        document.get(SECTION_OF[key], {}).pop(key, None)
    for section in RunConfig.model_fields:
        keys = [key for key in values if SECTION_OF[key] == section]
        if keys and section not in document:
            document.add(section, tomlkit.table())
        for key in keys:
            _set(document[section], key, values[key])
    write_whole(path, tomlkit.dumps(document).encode(), f"config file {path}")
    return Written(loaded.config, left_out)


def _idle(values: Mapping[str, Any], default: Mapping[str, Any]) -> tuple[str, ...]:
    asked = {key: value for key, value in values.items() if value != default[key]}
    return tuple(dict.fromkeys(key for key, _ in effects.idle(values, asked)))


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
