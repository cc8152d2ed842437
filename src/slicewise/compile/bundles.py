"""Cycles of a compiled kernel: the instruction bundles of its loop over the grid, region by region.

A TensorCore issues one bundle a cycle. Stalls, such as those of a full matrix unit or of late copies, are in no bundle:
who prices a kernel takes the slowest of bundles, products and bytes.
"""

import re
from dataclasses import dataclass

_ADDRESS = re.compile(r"\s*(0x[0-9a-f]+|0)\s*(?:LH|LB|LE|PB|PF|CT)?\s*:")
_REGION = re.compile(r"(Start|End) region (\d+)")
LEAST = 16  # bundles of a region that counts


@dataclass(frozen=True)
class Region:
    """Code that runs as a whole or not at all; ``inner`` regions lie within."""

    bundles: int
    inner: tuple["Region", ...]

    @property
    def branches(self) -> tuple["Region", ...]:
        """The innermost group of sibling regions that holds most of the bundles."""
        if not self.inner:
            return ()
        largest = max(self.inner, key=lambda r: r.bundles)
        deeper = largest.branches
        siblings = sum(r.bundles for r in self.inner)
        return deeper if sum(r.bundles for r in deeper) > 0.75 * siblings else self.inner


def parse(text: str) -> Region:
    """The regions of a kernel from the compiler's listing of its final bundles. Raises ValueError for another text."""
    address, starts, found = -1, {}, []
    for line in text.splitlines():
        if place := _ADDRESS.match(line):
            address = int(place[1], 16)
        for edge, name in _REGION.findall(line):
            if edge == "Start":
                starts[name] = address
            elif name in starts:
                found.append((starts[name], address))
    if address < 0:
        raise ValueError("no bundles in the listing of a kernel")
    found.sort(key=lambda region: (region[0], -region[1]))
    return _tree(0, address + 1, [r for r in dict.fromkeys(found) if r[1] - r[0] >= LEAST])


def _tree(start: int, end: int, regions: list[tuple[int, int]]) -> Region:
    inner = []
    while regions:
        first, *rest = regions
        within = [r for r in rest if r[0] < first[1]]
        inner.append(_tree(*first, within))
        regions = rest[len(within) :]
    return Region(end - start, tuple(inner))
