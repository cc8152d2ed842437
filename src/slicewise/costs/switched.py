"""Times of collectives on a switched network (NVLink inside a node, InfiniBand above), and its thresholds.

A network is its levels from the inside out: D units of the level below, each with egress W into the switches
of this level. ``bytes_`` is the whole gathered array as in `collectives`. Source: How to Scale Your Model,
chapter "GPUs".
"""

import math
from collections.abc import Sequence

from slicewise.catalog.chips import Chip, Level
from slicewise.errors import UserError


def levels_spanned(chip: Chip, gpus: int) -> tuple[Level, ...]:
    """The levels of ``chip``'s network that ``gpus`` neighbouring GPUs use; the last may be partly filled.

    Raises UserError when they do not fill whole units or are more than the network holds.
    """
    spanned: list[Level] = []
    left = gpus
    for level in chip.levels:
        if left <= level.units:
            return (*spanned, Level(units=left, egress_bytes_per_s=level.egress_bytes_per_s))
        if left % level.units:
            raise UserError(
                f"{gpus} {chip.name} GPUs do not fill whole units of {level.units}; use a multiple of it."
            )
        spanned.append(level)
        left //= level.units
    raise UserError(
        f"{gpus} {chip.name} GPUs: the network described joins {math.prod(v.units for v in chip.levels)}."
    )


def effective_bytes_per_s(level: Level) -> float:
    """Bandwidth an all-gather sees at one level: D W / (D - 1)."""
    return level.units * level.egress_bytes_per_s / (level.units - 1) if level.units > 1 else math.inf


def all_gather_s(bytes_: float, levels: Sequence[Level], *, inner_ways: int = 1, exact: bool = True) -> float:
    """All-gather (or reduce-scatter) of ``bytes_`` over all units of ``levels``.

    V max_i (D_i - 1) / (D_i W_i). When the array is also sharded ``inner_ways`` over neighbouring GPUs,
    ``bytes_`` still counts all of it, and level i, with S GPUs in a unit, takes V S / (W_i max(inner_ways,
    S)). ``exact=False`` takes (D - 1) / D as one.
    """
    slowest, held = 0.0, 1
    for level in levels:
        share = (level.units - 1) / level.units if exact else float(level.units > 1)
        slowest = max(slowest, share * bytes_ * held / (max(inner_ways, held) * level.egress_bytes_per_s))
        held *= level.units
    return slowest


def all_reduce_s(
    bytes_: float,
    levels: Sequence[Level],
    *,
    inner_ways: int = 1,
    in_network: bool = False,
    in_network_gain: float | None = None,
) -> float:
    """Twice an all-gather. ``in_network`` reduces in the switches (SHARP): every unit sends its array once, V
    / W.

    In practice it gains about 1.3 instead of nearly 2: ``in_network_gain`` divides by a measured gain
    instead.
    """
    if in_network and in_network_gain is None:
        return all_gather_s(bytes_, levels, inner_ways=inner_ways, exact=False)
    gain = in_network_gain if in_network and in_network_gain is not None else 1.0
    return 2 * all_gather_s(bytes_, levels, inner_ways=inner_ways) / gain


def all_to_all_s(bytes_: float, levels: Sequence[Level], *, nonzero_of_group: int | None = None) -> float:
    """All-to-all over all units: level i has U_i units in all, each sends (U_i - 1) / U_i of its V / U_i.

    In a node of N: V (N - 1) / (N^2 W). ``nonzero_of_group`` says that only so many of the destinations get
    data (top-k experts over Z GPUs): times min(k / Z, 1).
    """
    group = math.prod(level.units for level in levels)
    filled = 1.0 if nonzero_of_group is None else min(nonzero_of_group / group, 1.0)
    slowest, units = 0.0, group
    for level in levels:
        slowest = max(slowest, bytes_ * (units - 1) / (units**2 * level.egress_bytes_per_s))
        units //= level.units
    return filled * slowest


def ragged_share(experts_per_token: int, gpus: int) -> float:
    """Expected share of the other GPUs that a token with k random experts must reach, one copy to each.

    (1 - ((Z - 1) / Z)^k) (Z - 1) / Z; about min(k / Z, 1).
    """
    return (1 - ((gpus - 1) / gpus) ** experts_per_token) * (gpus - 1) / gpus


def switch_bytes_per_s(switches: int, ports: int, port_bytes_per_s: float) -> float:
    """What the switches of one level can carry."""
    return switches * ports * port_bytes_per_s


def node_bytes_per_s(switches_bytes_per_s: float, gpus: int, gpu_egress_bytes_per_s: float) -> float:
    """What a node's GPUs can exchange: the lesser of its switches and its GPUs."""
    return min(switches_bytes_per_s, gpus * gpu_egress_bytes_per_s)


def unit_bytes_per_s(level_bytes_per_s: float, units: int) -> float:
    """Egress of one of ``units`` that share the bandwidth of a level."""
    return level_bytes_per_s / units


def egress_bytes_per_s(adapters: int, bits_per_s: float) -> float:
    """Egress of a node or host with ``adapters`` network cards."""
    return adapters * bits_per_s / 8


def min_tokens_per_gpu(
    flops_per_s: float,
    egress: float,
    *,
    units: float = math.inf,
    experts: int = 1,
    experts_per_token: int = 1,
    model_parallel: int = 1,
    node_gpus: int = 1,
) -> float:
    """Tokens per GPU from which data parallelism (or FSDP) is compute bound.

    C / W, with W the egress per GPU inside a node and of a whole node across nodes; (X - 1) / X for X units;
    E / k for experts. Model parallelism over more than a node divides by the nodes it spans.
    """
    exact = 1.0 if math.isinf(units) else (units - 1) / units
    nodes = max(1.0, model_parallel / node_gpus)
    return flops_per_s / egress * exact * experts / experts_per_token / nodes


def max_tensor_ways(d_ff: float, flops_per_s: float, egress: float, *, node_gpus: int = 0) -> float:
    """Tensor-parallel ways that stay compute bound: F / alpha; F / alpha + ``node_gpus`` over two nodes."""
    return d_ff * egress / flops_per_s + node_gpus


def expert_parallel_s(
    tokens: float,
    d_model: float,
    d_ff: float,
    experts_per_token: int,
    gpus: int,
    flops_per_s: float,
    node_egress: float,
    *,
    node_gpus: int = 8,
) -> tuple[float, float]:
    """(math, communication) seconds of the forward pass of a two-matrix MoE layer over ``gpus`` across nodes.

    4BkDF / (Z C), and two all-to-alls: 4BD (Z - 8) / (W Z) min(8k / Z, 1).
    """
    math_s = 4 * tokens * experts_per_token * d_model * d_ff / (gpus * flops_per_s)
    crossing = max(gpus - node_gpus, 0) / gpus
    comms_s = 4 * tokens * d_model * crossing / node_egress * min(node_gpus * experts_per_token / gpus, 1)
    return math_s, comms_s


def min_expert_d_ff(
    experts_per_token: int, gpus: int, flops_per_s: float, node_egress: float, *, node_gpus: int = 8
) -> float:
    """Expert width F from which expert parallelism over ``gpus`` is compute bound.

    alpha (Z - 8) / k while k > Z / 8; 8 alpha (Z - 8) / Z, nearly 8 alpha, for many more GPUs.
    """
    alpha = flops_per_s / node_egress
    return alpha * max(gpus - node_gpus, 0) / experts_per_token * min(node_gpus * experts_per_token / gpus, 1)
