"""Sharded arrays and matmuls: which collectives a layout needs, their bytes and time, and the cheapest
strategy.

Written A[I_X, J_YZ] in the book: dim I over mesh axis X, J over Y and Z. Here x[B, D] . w[D, F] -> y[B, F]
and a sharding is, per dim, the mesh axes it is split over. Source: How to Scale Your Model, chapter
"sharding".
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slicewise.costs.collectives import Axis, Op, collective
from slicewise.costs.roofline import Roofline, matmul_flops
from slicewise.errors import UserError

Mesh = Mapping[str, tuple[Axis, ...]]  # logical axis -> the physical axes it spans


def mesh_size(mesh: Mapping[str, int], axes: Iterable[str]) -> int:
    """Ways of the product of ``axes``."""
    return math.prod(mesh[a] for a in axes)


def replication(mesh: Mapping[str, int], used: Iterable[str]) -> int:
    """Copies of an array over the whole mesh: the product of the axes that do not shard it."""
    return mesh_size(mesh, set(mesh) - set(used))


def device_bytes(total_bytes: float, mesh: Mapping[str, int], used: Iterable[str]) -> float:
    """Bytes of an array on one device: total / product of the axes that shard it."""
    return total_bytes / mesh_size(mesh, used)


def global_dim(local: int, ways: int) -> int:
    """Size of a dim of which one shard in the compiled program has ``local`` elements."""
    return local * ways


def gather_over_scatter(contracted: float, output: float) -> float:
    """Traffic of gathering A[N, M_X] over that of scattering the partial sums of A . B[M, K]: M / K."""
    return contracted / output


@dataclass(frozen=True)
class Layout:
    """Mesh axes of each dim of x[B, D], w[D, F] and y[B, F]; y None = as x and w have it."""

    x_B: tuple[str, ...] = ()
    x_D: tuple[str, ...] = ()
    w_D: tuple[str, ...] = ()
    w_F: tuple[str, ...] = ()
    y_B: tuple[str, ...] | None = None
    y_F: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Step:
    """One collective of a strategy: on which array, over which mesh axes, and its bytes as its group sees
    them."""

    op: Op
    array: str
    axes: tuple[str, ...]
    bytes_: float
    time_s: float
    bound: str


@dataclass(frozen=True)
class Strategy:
    """One way to do a sharded matmul. ``roles`` says what each mesh axis splits while it multiplies."""

    roles: tuple[tuple[str, str], ...]  # (axis, B, D, F or 'none')
    steps: tuple[Step, ...]
    flops_per_device: float
    time: Roofline

    @property
    def comms_bytes(self) -> float:
        return sum(s.bytes_ for s in self.steps)

    @property
    def name(self) -> str:
        """Such as 'all-gather w over X'; 'no communication' when there is none."""
        said = [f"{s.op.replace('_', '-')} {s.array} over {''.join(s.axes)}" for s in self.steps]
        return ", then ".join(said) or "no communication"


def matmul_strategies(
    B: int,
    D: int,
    F: int,
    layout: Layout,
    mesh: Mesh,
    *,
    flops_per_s: float,
    link_bytes_per_s: float,
    hop_s: float = 1e-6,
    weight_bits: float = 16,
    activation_bits: float = 16,
    all_to_all: bool = False,
) -> tuple[Strategy, ...]:
    """Ways to do x[B, D] . w[D, F] in ``layout`` over ``mesh``, the fastest first (math and comms
    overlapped).

    While multiplying, each mesh axis splits B, F, the contraction D (leaving partial sums), or nothing;
    operands reach that state by slicing (free) or all-gather, and the result its layout by all-reduce,
    reduce-scatter or all-gather: the book's four cases are the cheapest of these. ``all_to_all`` also moves a
    mesh axis from one dim to another, which can be cheaper still.
    Raises UserError for an axis that is not in the mesh or shards an array twice.
    """
    _check(layout, mesh)
    names = tuple(sorted(mesh))
    bits = {"x": activation_bits, "w": weight_bits, "y": activation_bits}
    elements = {"x": B * D, "w": D * F, "y": B * F}
    sizes = {a: math.prod(p.size for p in mesh[a]) for a in names}
    found = []
    for roles in itertools.product("BDF-", repeat=len(names)):
        role = dict(zip(names, roles, strict=True))
        moves = _moves(role, layout, sizes)
        if not all_to_all and any(op == "all_to_all" for op, *_ in moves):
            continue
        used = [a for a in names if role[a] != "-"]
        flops = matmul_flops(B, D, F) / math.prod(sizes[a] for a in used)
        steps = [
            _step(op, array, axes, elements[array] * bits[array] / 8 / split, mesh, link_bytes_per_s, hop_s)
            for op, array, axes, split in moves
        ]
        time = Roofline(flops / flops_per_s, sum(s.time_s for s in steps))
        shown = tuple((a, role[a] if role[a] != "-" else "none") for a in names)
        found.append(Strategy(shown, tuple(steps), flops, time))
    return tuple(sorted(found, key=lambda s: (s.time.lower_s, s.time.upper_s, len(s.steps))))


def _step(
    op: Op, array: str, axes: tuple[str, ...], bytes_: float, mesh: Mesh, link: float, hop_s: float
) -> Step:
    done = collective(op, bytes_, [p for a in axes for p in mesh[a]], link, hop_s=hop_s)
    return Step(op, array, axes, bytes_, done.time_s, done.bound)


Move = tuple[
    Op, str, tuple[str, ...], float
]  # collective, array, its axes, ways the array is split by others


def _moves(role: Mapping[str, str], layout: Layout, sizes: Mapping[str, int]) -> list[Move]:
    """The collectives that ``role`` needs, in order: operands, then the result."""
    here = {
        "x": {**dict.fromkeys(layout.x_B, "B"), **dict.fromkeys(layout.x_D, "D")},
        "w": {**dict.fromkeys(layout.w_D, "D"), **dict.fromkeys(layout.w_F, "F")},
    }
    moves = []
    for array, dims in (("x", "BD"), ("w", "DF")):
        wanted = {a: r for a, r in role.items() if r in dims}
        moves += _reshard(array, here[array], wanted, sizes)
    made = {a: r for a, r in role.items() if r in "BF"}
    partial = [a for a, r in role.items() if r == "D"]
    return moves + _finish(made, partial, _wanted_result(layout, made), sizes)


def _wanted_result(layout: Layout, made: Mapping[str, str]) -> Mapping[str, str]:
    """Where y's axes belong; an axis that x and w both hand down stays where the product puts it."""
    B = layout.x_B if layout.y_B is None else layout.y_B
    F = layout.w_F if layout.y_F is None else layout.y_F
    free = set(B) & set(F)
    wanted = {**dict.fromkeys(F, "F"), **dict.fromkeys(B, "B")}
    return {a: made.get(a, "B") if a in free else dim for a, dim in wanted.items()}


def _reshard(
    array: str, now: Mapping[str, str], wanted: Mapping[str, str], sizes: Mapping[str, int]
) -> list[Move]:
    """From sharding ``now`` to ``wanted``: slice (free), then all-to-all, then all-gather."""
    swapped = tuple(a for a in now if a in wanted and wanted[a] != now[a])
    gathered = tuple(a for a in now if a not in wanted)
    others = math.prod(sizes[a] for a in wanted)
    moves: list[Move] = []
    if swapped:
        waiting = math.prod(sizes[a] for a in gathered)
        moves.append(("all_to_all", array, swapped, others / math.prod(sizes[a] for a in swapped) * waiting))
    if gathered:
        moves.append(("all_gather", array, gathered, others))
    return moves


def _finish(
    made: Mapping[str, str], partial: Sequence[str], wanted: Mapping[str, str], sizes: Mapping[str, int]
) -> list[Move]:
    """From a product split as ``made`` with sums partial over ``partial`` to ``wanted``."""
    sliced = [a for a in wanted if a not in made and a not in partial]
    split = math.prod(sizes[a] for a in (*made, *sliced))
    scattered = tuple(a for a in partial if a in wanted)
    summed = tuple(a for a in partial if a not in wanted)
    moves: list[Move] = []
    if scattered:
        moves.append(("reduce_scatter", "y", scattered, split))
        split *= math.prod(sizes[a] for a in scattered)
    if summed:
        moves.append(("all_reduce", "y", summed, split))
    now = {**made, **{a: wanted[a] for a in scattered}}
    return moves + _reshard("y", now, wanted, sizes)


def _check(layout: Layout, mesh: Mesh) -> None:
    arrays = {
        "x": (*layout.x_B, *layout.x_D),
        "w": (*layout.w_D, *layout.w_F),
        "y": (*(layout.y_B or ()), *(layout.y_F or ())),
    }
    for array, axes in arrays.items():
        if unknown := [a for a in axes if a not in mesh]:
            raise UserError(
                f"{array} is sharded over '{unknown[0]}', which is no axis of the mesh ({', '.join(mesh)})."
            )
        if len(set(axes)) < len(axes):
            twice = next(a for a in axes if axes.count(a) > 1)
            raise UserError(
                f"{array} is sharded twice over '{twice}'; one mesh axis can split only one dim of an array."
            )
