"""Tile sizes of splash attention: tuned for the very shape, or by the rules of the table beside this file."""

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources

from slicewise.catalog.model import Record
from slicewise.errors import UserError
from slicewise.kernels import tuned
from slicewise.kernels.tuned import Key

LANES = 128
KERNEL = "splash"
PARTS = {
    "forward": ("q", "kv", "kv_compute"),
    "backward": ("q_backward", "kv_backward", "kv_compute_backward"),
}
# Rows of q, of kv and of kv in one product that a search tries: those of published recipes and their neighbours.
TRIED = (
    (1024, 1024, 512), (1024, 1024, 256), (1024, 1024, 1024), (2048, 1024, 512), (2048, 2048, 512), (2048, 2048, 256),
    (2048, 2048, 1024), (2048, 2048, 2048), (1024, 2048, 512), (512, 1024, 512), (512, 512, 512), (512, 2048, 512),
    (4096, 1024, 512), (4096, 2048, 1024),
)  # fmt: skip


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


def key(
    chip: str,
    sequence_length: int,
    qk_dim: int,
    v_dim: int,
    window: int | None = None,
    vmem_limit_kib: int = 0,
    dtype: str = "bfloat16",
) -> Key:
    """What tuned tiles are for."""
    shape = {"tokens": sequence_length, "qk": qk_dim, "v": v_dim, "window": window or 0}
    return Key(kernel=KERNEL, chip=chip, shape=shape, dtype=dtype, vmem_limit_kib=vmem_limit_kib)


def chosen(k: Key) -> Tiles:
    """The tiles for ``k``: tuned ones, or those of the rules. Raises UserError as tiles does."""
    shape = k.shape
    if values := tuned.find(k, [name for names in PARTS.values() for name in names]):
        found, tokens = Tiles(**values), shape["tokens"]
        if found != fitted(found, tokens, tokens):
            raise tuned.wrong(
                k, values, f"tiles are multiples of {LANES} that divide {tokens}, and kv_compute kv"
            )
        return found
    return tiles(k.chip, shape["tokens"], max(shape["qk"], shape["v"]), k.vmem_limit_kib)


def fitted(t: Tiles, queries: int, keys: int) -> Tiles:
    """The nearest tiles that divide rows of ``queries`` and of ``keys``, multiples of 128, where a row is divided."""
    forward, backward = (t.q, t.kv, t.kv_compute), (t.q_backward, t.kv_backward, t.kv_compute_backward)
    return Tiles(*_fitted(forward, queries, keys), *_fitted(backward, queries, keys))


def candidates(k: Key, part: str) -> list[Tiles]:
    """Tiles to try for ``k``, those of the rules first; only those of one part of PARTS vary."""
    length = k.shape["tokens"]
    first = tiles(k.chip, length, max(k.shape["qk"], k.shape["v"]), k.vmem_limit_kib)
    fitting = [sizes for sizes in TRIED if length % sizes[0] == 0 and length % sizes[1] == 0]
    changed = [replace(first, **dict(zip(PARTS[part], sizes, strict=True))) for sizes in fitting]
    return list(dict.fromkeys([first, *changed]))


def values(t: Tiles) -> dict[str, int]:
    """As a table of tuned settings holds them."""
    return asdict(t)


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
            found = Tiles(*entry.forward, *entry.backward)
            return fitted(found, sequence_length, sequence_length)
    raise UserError(
        f"head_dim = {head_dim} is too large for splash attention; use attention = 'xla_chunked'."
    )


def _fitted(sizes: Sequence[int], queries: int, keys: int) -> tuple[int, int, int]:
    q, kv, compute = sizes
    kv = _divisor(keys, kv)
    return _divisor(queries, q), kv, _divisor(kv, compute)


def _divisor(length: int, most: int) -> int:
    """The largest multiple of 128 up to ``most`` that divides ``length``."""
    return max(size for size in range(LANES, min(most, length) + 1, LANES) if length % size == 0)
