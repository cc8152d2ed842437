"""Tile sizes of the grouped matmul on a TPU: tuned for the very shape, or by one rule.

A tile is (rows, summed columns, other columns). The three products of a layer have tables of their own: forward (gmm),
the gradient of rows (gmm_t, whose matrices are transposed) and that of matrices (tgmm).
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from slicewise.kernels import tuned
from slicewise.kernels.tuned import Key

Product = Literal["gmm", "gmm_t", "tgmm"]
Tile = tuple[int, int, int]
# Operands twice, the sum in float32 and the result take 12 MiB of VMEM, the least that a compiler gives a kernel being
# 16 MiB.
RULE: Tile = (512, 1024, 1024)
LARGEST = 1024  # rows of a tile that is tried
MANY = 8  # tiles above which filling up the last one costs little
LANES = 128
SUBLANES = 16  # rows of a register of bfloat16
NEAR = (2.0, 0.5, 4.0, 0.25)  # rows of a product whose tuned tile is taken too
NAMES = ("rows", "summed", "columns")


def key(
    product: Product,
    chip: str,
    rows: int,
    summed: int,
    columns: int,
    groups: int,
    dtype: str,
    vmem_limit_kib: int,
) -> Key:
    """What a tuned tile is for. Rows count to the power of two below them: their number hardly matters, and varies."""
    shape = {"rows": 1 << (rows.bit_length() - 1), "summed": summed, "columns": columns, "groups": groups}
    return Key(kernel=product, chip=chip, shape=shape, dtype=dtype, vmem_limit_kib=vmem_limit_kib)


def chosen(k: Key, rows: int) -> Tile:
    """The tile for ``k`` with this many rows, a number that padded gave."""
    shape = k.shape
    values = _tuned(k)
    if values and rows % values["rows"] == 0:
        return values["rows"], values["summed"], values["columns"]
    return min(rows, RULE[0]), part(shape["summed"], RULE[1]), part(shape["columns"], RULE[2])


def _tuned(k: Key) -> Mapping[str, int] | None:
    """Of ``k``, or of a product with a few times more or fewer rows: that changes how many tiles there are, and little
    else."""
    for factor in (1.0, *NEAR):
        rows = int(k.shape["rows"] * factor)
        if values := tuned.find(k.model_copy(update={"shape": {**k.shape, "rows": rows}}), NAMES):
            return values
    return None


def padded(rows: int) -> int:
    """``rows`` filled up to whole tiles."""
    if rows >= MANY * LARGEST:
        return rows + -rows % LARGEST
    size = min(RULE[0], rows + -rows % SUBLANES)
    return rows + -rows % size


def part(size: int, most: int) -> int:
    """A divisor in whole registers of at least half of ``most``, or else ``most``: the last tile may stand over."""
    fitting = [part for part in range(LANES, min(size, most) + 1, LANES) if size % part == 0]
    return fitting[-1] if fitting and fitting[-1] >= min(size, most // 2) else min(size, most)


def vmem_bytes(product: str, tile: Tile, itemsize: int) -> int:
    """What a tile takes at least: its operands and its result twice, and the sum in float32."""
    rows, summed, columns = tile
    matrix, others = summed * columns, rows * summed
    if product == "tgmm":
        return 2 * itemsize * (others + rows * columns) + (4 + 2 * 2) * matrix
    return 2 * itemsize * (others + matrix) + (4 + 2 * 2) * rows * columns


def candidates(k: Key) -> Iterator[Tile]:
    """Tiles to try for ``k``, that of the rule first."""
    shape = k.shape
    seen = set()
    for rows in (512, 256, 1024, 128):
        for summed in (1024, 512, 2048, 4096):
            for columns in (1024, 512, 2048):
                tile = (rows, part(shape["summed"], summed), part(shape["columns"], columns))
                if padded(shape["rows"]) % rows == 0 and tile not in seen:
                    seen.add(tile)
                    yield tile
