"""Tile sizes of splash attention, from the table beside this file."""

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from slicewise.catalog.model import Record
from slicewise.errors import UserError

LANES = 128


@dataclass(frozen=True)
class Tiles:
    """Rows of q and of kv that are in VMEM at a time, and rows of kv that one matrix product takes."""

    q: int
    kv: int
    kv_compute: int
    q_backward: int
    kv_backward: int
    kv_compute_backward: int


class Entry(Record):
    """Tiles (q, kv, kv_compute) for ``chips``, or for any other where that is empty."""

    chips: tuple[str, ...]
    vmem_limit_kib: int
    head_dim: int
    forward: tuple[int, int, int]
    backward: tuple[int, int, int]
    source: str


@functools.cache
def table() -> tuple[Entry, ...]:
    """The entries in their order: the first that fits counts."""
    text = (resources.files("slicewise.kernels.attention") / "tiles.toml").read_text()
    return tuple(Entry(**entry) for entry in tomllib.loads(text)["tiles"])


def tiles(chip: str, sequence_length: int, head_dim: int, vmem_limit_kib: int = 0) -> Tiles:
    """The tiles for rows of ``sequence_length``, a multiple of 128, in a program with this limit (0 = the compiler's).

    ``head_dim`` is the larger of that of queries and that of values. Raises UserError where it is too large.
    """
    for entry in table():
        is_for = not entry.chips or chip in entry.chips
        if is_for and vmem_limit_kib >= entry.vmem_limit_kib and head_dim <= entry.head_dim:
            return Tiles(*_fitted(entry.forward, sequence_length), *_fitted(entry.backward, sequence_length))
    raise UserError(
        f"head_dim = {head_dim} is too large for splash attention; use attention = 'xla_chunked'."
    )


def _fitted(sizes: Sequence[int], length: int) -> tuple[int, int, int]:
    q, kv, compute = sizes
    kv = _divisor(length, kv)
    return _divisor(length, q), kv, _divisor(kv, compute)


def _divisor(length: int, most: int) -> int:
    """The largest multiple of 128 up to ``most`` that divides ``length``."""
    return max(size for size in range(LANES, min(most, length) + 1, LANES) if length % size == 0)
