"""Numbers as people write them: 8k, 16M, 15T, 2e6, 30d, 34MB. Each reader names the option in its error."""

import math
import re

from slicewise.errors import UserError

POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "b": 3, "t": 4, "p": 5, "e": 6}  # b = billion
SECONDS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0,
    "y": 365.25 * 86400,
}  # fmt: skip
MOST = 2**53  # beyond it floats skip whole numbers
NUMBER = re.compile(r"([0-9][0-9_,]*\.?[0-9]*(?:e[+-]?[0-9]+)?)\s*([a-z]*)")


def size(text: str, what: str) -> int:
    """A length, width or batch: 8k is 8192 and 16M is 16,777,216, for they are powers of two by custom.

    Raises UserError unless it is a whole number above 0 (and at most `MOST`).
    """
    return _whole(text, what, 1024, "8192, 8k or 16M; k and M are powers of two here")


def whole(text: str, what: str, *, zero: bool = False) -> int:
    """A count: 4, 1k (= 1000). Raises UserError unless it is a whole number above 0, or 0 with ``zero`` (and at
    most `MOST`)."""
    return _whole(text, what, 1000, "4 or 2k", zero=zero)


def amount(text: str, what: str) -> float:
    """A large number of things with decimal prefixes: 15T tokens, 2e6 dollars. Raises UserError unless above
    0."""
    return _scaled(text, what, 1000, "15T, 1.5M or 2e6")


def byte_count(text: str, what: str) -> float:
    """Bytes: 34MB (decimal), 2GiB (powers of two), 1e9. Raises UserError unless above 0."""
    expected = "34MB, 2GiB or 1e9"
    number, suffix = _split(text, what, expected)
    prefix = suffix.removesuffix("b") if suffix != "b" else ""
    base = 1024 if prefix.endswith("i") else 1000
    prefix = prefix.removesuffix("i")
    if prefix not in POWERS or prefix == "b":
        raise _wrong(text, what, expected)
    return number * base ** POWERS[prefix]


def seconds(text: str, what: str, *, zero: bool = False) -> float:
    """A time: 30d, 12h, 5min, 11.6s, 30ms; a bare number is seconds. Raises UserError unless above 0 (or at
    least 0 with ``zero``)."""
    expected = "30d, 12h, 5min, 11.6s or 30ms"
    number, suffix = _split(text, what, expected, zero=zero)
    if suffix and suffix not in SECONDS:
        raise _wrong(text, what, expected)
    return number * SECONDS[suffix or "s"]


def minutes(text: str, what: str) -> float:
    """Seconds of a time in minutes: 20, 0.5; or in another unit, 2h. Raises UserError unless above 0."""
    expected = "minutes above 0, such as 20, or a time such as 2h"
    number, suffix = _split(text, what, expected)
    if suffix and suffix not in SECONDS:
        raise _wrong(text, what, expected)
    return number * SECONDS[suffix or "min"]


def coordinates(text: str, what: str) -> tuple[int, ...]:
    """Whole numbers from 0 on, separated by commas: 0,3,1. Raises UserError for anything else."""
    parts = text.replace(" ", "").split(",")
    if not all(p.isascii() and p.isdigit() and len(p) <= 9 for p in parts):
        raise _wrong(text, what, "numbers such as 0,3,1")
    return tuple(map(int, parts))


def _whole(text: str, what: str, base: int, examples: str, *, zero: bool = False) -> int:
    expected = f"a whole number{'' if zero else ' above 0'}, such as {'0, ' * zero}{examples}"
    value = _scaled(text, what, base, expected, zero=zero)
    if value != int(value):
        raise _wrong(text, what, expected)
    if value > MOST:
        raise UserError(f"{what} {text}: expected at most 2^53.")
    return int(value)


def _scaled(text: str, what: str, base: int, expected: str, *, zero: bool = False) -> float:
    number, suffix = _split(text, what, expected, zero=zero)
    if suffix not in POWERS:
        raise _wrong(text, what, expected)
    return number * base ** POWERS[suffix]


def _split(text: str, what: str, expected: str, *, zero: bool = False) -> tuple[float, str]:
    """(number, suffix in lower case)."""
    found = NUMBER.fullmatch(text.strip().lower())
    value = float(re.sub("[_,]", "", found[1])) if found else math.nan
    if found is None or not math.isfinite(value) or not (value > 0 or (zero and value == 0)):
        raise _wrong(text, what, expected)
    return value, found[2]


def _wrong(text: str, what: str, expected: str) -> UserError:
    return UserError(f"{what} {text}: expected {expected}.")
