"""Mapping of logical mesh axes onto the physical axes of a slice, and the bandwidth each one gets."""

import functools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class AxisLinks:
    """Network of one logical axis. ``links`` = one-way links per device that a collective over the axis
    keeps busy (a wrapped ring 2, a line 1, a ring of stride s 2/s); ``hops`` = sum over its rings of the
    longest way."""

    links: float
    hops: float
    crosses_core: bool = False  # includes the two devices of one chip


ORDER = ("tensor", "context", "expert", "fsdp", "data", "pipeline")  # most traffic on the critical path first


@functools.lru_cache(maxsize=100_000)
def map_axes(
    topology: tuple[int, ...], wrap: tuple[bool, ...], cores: int, degrees: tuple[int, ...]
) -> tuple[AxisLinks, ...] | None:
    """AxisLinks of each axis of ``ORDER`` for ICI ``degrees`` in that order; None where they cannot be laid
    out.

    ``cores`` = devices per chip, an extra axis of that size. Each logical axis takes whole physical axes
    when a set of them has the right product (the one with most links), else parts of axes: the first comer
    gets neighbours (a line), the rest of the axis is left as rings of that stride.
    """
    free = [Piece(size, 1, w, False) for size, w in zip(topology, wrap, strict=True) if size > 1]
    if cores > 1:
        free.append(Piece(cores, 1, False, True))
    mapped = []
    for degree in degrees:
        taken = _take(free, degree)
        if taken is None:
            return None
        links = sum(p.links for p in taken)
        core = any(p.core for p in taken)
        mapped.append(AxisLinks(links, sum(p.hops for p in taken), core))
    return tuple(mapped)


@dataclass(frozen=True)
class Piece:
    size: int
    stride: int
    wrap: bool
    core: bool

    @property
    def links(self) -> float:
        if self.core:
            return 0.0
        return (2 if self.wrap else 1) / self.stride

    @property
    def hops(self) -> float:
        if self.core:
            return 0.0
        return (self.size / 2 if self.wrap else self.size - 1) * self.stride


def _take(free: list[Piece], degree: int) -> list[Piece] | None:
    """Removes pieces of product ``degree`` from ``free``."""
    if degree == 1:
        return []
    best: list[Piece] | None = None
    for mask in range(1, 1 << len(free)):
        chosen = [p for i, p in enumerate(free) if mask >> i & 1]
        if math.prod(p.size for p in chosen) == degree and (best is None or _worth(chosen) > _worth(best)):
            best = chosen
    if best is not None:
        for piece in best:
            free.remove(piece)
        return best
    taken = []
    for piece in sorted(free, key=lambda p: (-p.links, p.size)):
        part = math.gcd(piece.size, degree)
        if part == 1:
            continue
        free.remove(piece)
        if part == piece.size:
            taken.append(piece)
        else:
            taken.append(Piece(part, piece.stride, False, piece.core))
            free.append(Piece(piece.size // part, piece.stride * part, piece.wrap, piece.core))
        degree //= part
        if degree == 1:
            return taken
    return None


def _worth(pieces: list[Piece]) -> tuple[float, int]:
    return (sum(p.links for p in pieces), -len(pieces))
