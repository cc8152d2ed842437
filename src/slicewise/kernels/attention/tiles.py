"""Tile sizes of splash attention."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Rows of q and of kv that are in VMEM at a time, and rows of kv that one matrix product takes."""

    q: int
    kv: int
    kv_compute: int
    q_backward: int
    kv_backward: int
    kv_compute_backward: int


def tiles(chip: str, sequence_length: int, head_dim: int) -> Tiles:
    """The tiles for a row of ``sequence_length``, a multiple of 128."""
    block = max(b for b in range(128, min(1024, sequence_length) + 1, 128) if sequence_length % b == 0)
    compute = max(b for b in range(128, min(512, block) + 1, 128) if block % b == 0)
    return Tiles(block, block, compute, block, block, compute)
