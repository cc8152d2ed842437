"""Slice and Cluster: chips joined by ICI (or one NVLink domain); slices joined by the data-centre network."""

import functools
import itertools
import math
from dataclasses import dataclass

from slicewise.catalog import chips
from slicewise.catalog.chips import Chip
from slicewise.errors import UserError, did_you_mean

CUBE = 4  # chips along one edge of the block that optical switches join into larger tori
MAX_DIM = 256  # xpk's cap on one dim


@dataclass(frozen=True)
class Slice:
    """``topology`` is chips per physical axis; ``wrap`` says of each axis whether it closes into a ring."""

    chip: Chip
    topology: tuple[int, ...]

    @property
    def name(self) -> str:
        """The topology as text: 8x8x8."""
        return "x".join(map(str, self.topology))

    @property
    def chips(self) -> int:
        return math.prod(self.topology)

    @property
    def devices(self) -> int:
        """What JAX counts: two a chip on TPU7x."""
        return self.chips * self.chip.jax_devices

    @property
    def wrap(self) -> tuple[bool, ...]:
        """3D: every axis wraps once all are whole cubes, else none. 2D: an axis wraps at full size."""
        if self.chip.ici_dims == 3:
            return (all(d % CUBE == 0 for d in self.topology),) * 3
        return tuple(d == self.chip.shapes.wrap_at for d in self.topology)

    @property
    def twist_eligible(self) -> bool:
        """Whether the shape (n n 2n or n 2n 2n, in whole cubes) can be had as a twisted torus."""
        if self.chip.ici_dims != 3 or not all(self.wrap):
            return False
        a, b, c = sorted(self.topology)
        return c == 2 * a and b in (a, c)

    @property
    def hosts(self) -> int:
        """Worker machines. A 2x4 of v5e or v6e is one 8-chip host; their larger slices have 4-chip hosts."""
        if self.chip.ici_dims == 2 and self.topology == (2, 4):
            return 1
        return max(1, self.chips // math.prod(self.chip.host_shape))

    @property
    def chips_per_host(self) -> int:
        return self.chips // self.hosts

    @property
    def devices_per_host(self) -> int:
        return self.devices // self.hosts

    @property
    def accelerator_type(self) -> str:
        """Google Cloud's name, v5p-512: it gives the size only, and other shapes may share that size."""
        counted = self.chips * self.chip.cores if self.chip.type_counts == "cores" else self.chips
        return f"{self.chip.type_prefix}-{counted}"


@dataclass(frozen=True)
class Cluster:
    """``num_slices`` equal slices joined by the data-centre network."""

    slice: Slice
    num_slices: int = 1

    @property
    def chip(self) -> Chip:
        return self.slice.chip

    @property
    def chips(self) -> int:
        return self.slice.chips * self.num_slices

    @property
    def devices(self) -> int:
        return self.slice.devices * self.num_slices

    @property
    def hosts(self) -> int:
        return self.slice.hosts * self.num_slices


@functools.cache
def legal_shapes(chip: Chip) -> tuple[tuple[int, ...], ...]:
    """Every topology of ``chip`` one can ask for, small to large, the most cube-like of a size first."""
    shapes = set(chip.shapes.list) | set(chip.shapes.large)
    if chip.shapes.max_cubes:
        shapes |= _cube_boxes(chip.shapes.max_cubes)
    return tuple(sorted(shapes, key=lambda s: (math.prod(s), sum(s), s)))


def _cube_boxes(max_cubes: int) -> set[tuple[int, ...]]:
    """Boxes of at most ``max_cubes`` 4x4x4 cubes, dims nondecreasing (rule of xpk)."""
    edge = MAX_DIM // CUBE
    sides = itertools.combinations_with_replacement(range(1, edge + 1), 2)
    return {
        (CUBE * a, CUBE * b, CUBE * c)
        for a, b in sides
        for c in range(b, min(edge, max_cubes // (a * b)) + 1)
    }


def default_shape(chip: Chip, num_chips: int) -> tuple[int, ...] | None:
    """The topology that the accelerator type of ``num_chips`` chips stands for: the most cube-like one."""
    return next((s for s in legal_shapes(chip) if math.prod(s) == num_chips), None)


def parse(text: str, chip: Chip | None = None) -> Slice:
    """The slice that ``text`` names: 'v5p-512', 'v5e-16', 'v5p:8x8x8', 'h100-8', or '8x8x8' with ``chip``.

    Dims may come in any order. Raises UserError for an unknown chip, a malformed name, or a shape that
    cannot be had (with the nearest that can).
    """
    text = text.strip().lower()
    head, colon, tail = text.partition(":")
    if colon:
        return _of_shape(_chip_called(head, chip, text), tail)
    if text[:1].isdigit() and "-" not in text:
        if chip is None:
            raise UserError(f"topology '{text}' needs a chip: write v5p:{text} or name the chip.")
        return _of_shape(chip, text)
    head, dash, tail = text.rpartition("-")
    if not dash or _number(tail) is None:
        raise UserError(
            f"'{text}' is not a slice: expected a type such as v5p-512, or chip:topology such as v5p:8x8x8."
        )
    return _of_size(_chip_called(head, chip, text), int(tail), text)


def cluster(text: str, num_slices: int = 1, chip: Chip | None = None) -> Cluster:
    """``num_slices`` of the slice that ``text`` names (see `parse`). Raises UserError for fewer than one."""
    if num_slices < 1:
        raise UserError(f"num_slices = {num_slices}: expected 1 or more.")
    return Cluster(parse(text, chip), num_slices)


def _number(text: str) -> int | None:
    """``text`` as a whole number of at most nine digits, None if it is none."""
    return int(text) if text.isdecimal() and len(text) <= 9 else None


def of_chips(chip: Chip, num_chips: int) -> Slice:
    """The most cube-like slice of ``num_chips``. Raises UserError when there is none, with the nearest."""
    shape = default_shape(chip, num_chips)
    if shape is None:
        near = ", ".join(_describe(chip, s) for s in _near_sizes(chip, num_chips))
        raise UserError(
            f"{chip.name} has no slice of {num_chips} chips; the nearest that can be had: {near}."
        )
    return Slice(chip, shape)


def _chip_called(name: str, chip: Chip | None, text: str) -> Chip:
    """``chip`` when ``name`` is one of its names (it may be of the user's own file), else the catalog's."""
    if chip is not None:
        own = (chip.name, chip.type_prefix, *chip.aliases)
        if name not in own:
            raise UserError(
                f"'{text}' names chip '{name}' but the chip given is {chip.name}.{did_you_mean(name, own)}"
            )
        return chip
    return chips.load(name)


def _of_shape(chip: Chip, text: str) -> Slice:
    dims = text.split("x")
    if not all(_number(d) for d in dims):
        raise UserError(f"topology '{text}' is malformed: expected {_example(chip)}.")
    asked = tuple(map(int, dims))
    axes = len(chip.host_shape)
    if len(asked) != axes:
        raise UserError(
            f"topology '{text}' has {len(asked)} dims but {chip.name} slices have {axes},"
            f" as {_example(chip)}."
        )
    for shape in legal_shapes(chip):
        if sorted(shape) == sorted(asked):
            return Slice(chip, shape)
    near = sorted(legal_shapes(chip), key=lambda s: _distance(s, asked))[:3]
    raise UserError(
        f"{chip.name} has no {text} slice; the nearest that can be had:"
        f" {', '.join(_describe(chip, s) for s in near)}."
    )


def _of_size(chip: Chip, number: int, text: str) -> Slice:
    per_chip = chip.cores if chip.type_counts == "cores" else 1
    shape = default_shape(chip, number // per_chip) if number % per_chip == 0 else None
    if shape is not None:
        return Slice(chip, shape)
    near = _near_sizes(chip, number / per_chip)
    unit = f" (the number counts {per_chip} cores a chip)" if per_chip > 1 else ""
    raise UserError(
        f"there is no {text}{unit}; the nearest that can be had:"
        f" {', '.join(_describe(chip, s) for s in near)}."
    )


def _near_sizes(chip: Chip, num_chips: float) -> list[tuple[int, ...]]:
    """The most cube-like shapes of the two sizes nearest to ``num_chips``."""
    sizes = {math.prod(s) for s in legal_shapes(chip)}
    near = sorted(sizes, key=lambda n: abs(math.log(n / max(num_chips, 0.25))))[:2]
    return [s for n in sorted(near) if (s := default_shape(chip, n)) is not None]


def _distance(shape: tuple[int, ...], asked: tuple[int, ...]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(sorted(shape), sorted(asked), strict=True))


def _describe(chip: Chip, shape: tuple[int, ...]) -> str:
    here = Slice(chip, shape)
    return f"{here.name} ({here.accelerator_type})"


def _example(chip: Chip) -> str:
    return "x".join(map(str, chip.shapes.list[-1]))
