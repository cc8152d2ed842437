"""Typed reading of a Hugging Face config.json, with errors that name the key."""

import json
from collections.abc import Mapping
from typing import Any

from slicewise.errors import UserError


class ConfigKeys:
    """The keys of one config.json, or of one table inside it. A null reads as absent.

    Every method raises UserError for a missing key without default and for a value of another type.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = ""):
        self._values, self._where, self._prefix = values, where, prefix

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the key is there and null, which switches off what would have a default."""
        return key in self._values and self._values[key] is None

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer that may be zero."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, "zero or a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.error(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice[T](self, key: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """The entry of ``choices`` under the key's string."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, f"one of {', '.join(choices)}; nothing else is supported")
        return choices[value]

    def only(self, key: str, *supported: Any) -> None:
        """Refuses a feature that is not built: the key may be absent or one of ``supported``."""
        if self.has(key) and self._values[key] not in supported:
            raise self.error(key, f"{' or '.join(map(json.dumps, supported))}; nothing else is supported")

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return value

    def sizes(self, key: str) -> list[int]:
        """A list of integers from zero, empty when the key is absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(key, "a list of integers")
        return value

    def table(self, key: str) -> "ConfigKeys":
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.error(key, "a table")
        return ConfigKeys(value, self._where, f"{self._prefix}{key}.")

    def error(self, key: str, expected: str) -> UserError:
        """The error for a value that is not what was ``expected``."""
        shown = json.dumps(self._values.get(key))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return UserError(f"{self._where}: {self._prefix}{key} = {shown}: expected {expected}.")

    def _get(self, key: str, default: Any) -> Any:
        if self.has(key):
            return self._values[key]
        if default is None:
            raise UserError(f"{self._where}: key '{self._prefix}{key}' is missing.")
        return default
