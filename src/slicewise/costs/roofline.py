"""Rooflines: how long arithmetic and data movement take, and from which batch the arithmetic dominates.

Symbols: B tokens, D and F the dims of a weight matrix [D, F]. Rates are FLOP/s and bytes/s of what the caller
counts (one device, or all of them). Source: How to Scale Your Model, chapters "rooflines" and "profiling".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


def compute_s(flops: float, flops_per_s: float, *, ways: float = 1, utilization: float = 1.0) -> float:
    """Seconds for ``flops`` on ``ways`` devices of ``flops_per_s``, each reaching ``utilization`` of it."""
    return flops / (ways * flops_per_s * utilization)


def transfer_s(bytes_: float, bytes_per_s: float, *, ways: float = 1) -> float:
    """Seconds to move ``bytes_`` through ``ways`` equal links or memories of ``bytes_per_s``."""
    return bytes_ / (ways * bytes_per_s)


VMEM_OVER_HBM = 22  # bandwidth of on-chip memory into the matrix unit over HBM's, about the same on every TPU


@dataclass(frozen=True)
class Roofline:
    """A step that computes for ``math_s`` and moves data for ``comms_s``."""

    math_s: float
    comms_s: float

    @property
    def lower_s(self) -> float:
        """Perfect overlap; never less than half of `upper_s`."""
        return max(self.math_s, self.comms_s)

    @property
    def upper_s(self) -> float:
        """No overlap."""
        return self.math_s + self.comms_s

    @property
    def bound(self) -> Literal["compute", "bandwidth"]:
        return "compute" if self.math_s >= self.comms_s else "bandwidth"


def critical_intensity(flops_per_s: float, bytes_per_s: float) -> float:
    """FLOP per byte from which work is compute bound: C / W, for any of HBM, ICI (alpha), DCN or PCIe."""
    return flops_per_s / bytes_per_s


def matmul_flops(B: float, D: float, F: float) -> float:
    """FLOPs of [B, D] x [D, F]: 2BDF."""
    return 2 * B * D * F


def matmul_bytes(
    B: float, D: float, F: float, *, weight_bits: float = 16, activation_bits: float = 16
) -> float:
    """Bytes to read x [B, D] and w [D, F] and write y [B, F] once."""
    return activation_bits / 8 * (B * D + B * F) + weight_bits / 8 * D * F


def matmul_intensity(
    B: float, D: float, F: float, *, weight_bits: float = 16, activation_bits: float = 16
) -> float:
    """FLOP per byte of [B, D] x [D, F]; about 2B / weight bytes for B much less than D and F.

    A dot product is B = F = 1; a batch of products with a weight matrix each has B = 1 as well.
    """
    moved = matmul_bytes(B, D, F, weight_bits=weight_bits, activation_bits=activation_bits)
    return matmul_flops(B, D, F) / moved


def elementwise_intensity(*, reads: int = 2, writes: int = 1, bits: float = 32, flops: float = 1) -> float:
    """FLOP per byte of an elementwise operation: a fp32 addition has 1/12."""
    return flops / ((reads + writes) * bits / 8)


def critical_batch(
    flops_per_s: float,
    bytes_per_s: float,
    *,
    weight_bits: float = 16,
    experts: int = 1,
    experts_per_token: int = 1,
) -> float:
    """Tokens per weight replica from which a matmul is compute bound, for B much less than D and F.

    2BDF / C > weight bytes * DF / W gives B > (weight_bits / 16) C / W, where C is the peak of the precision
    that is computed in (int8 x int8 on v5e: weight_bits 8 and twice the bf16 peak). MoE weights are touched
    by experts_per_token / experts of the tokens.
    """
    return weight_bits / 16 * flops_per_s / bytes_per_s * experts / experts_per_token


def critical_batch_in_vmem(flops_per_s: float, hbm_bytes_per_s: float, *, weight_bits: float = 16) -> float:
    """`critical_batch` when the weights stay in on-chip memory: about 11 on v5e (20 in practice)."""
    return critical_batch(flops_per_s, VMEM_OVER_HBM * hbm_bytes_per_s, weight_bits=weight_bits)


def critical_batch_exact(
    D: float,
    F: float,
    flops_per_s: float,
    bytes_per_s: float,
    *,
    weight_bits: float = 16,
    activation_bits: float = 16,
) -> float:
    """Tokens from which [B, D] x [D, F] is compute bound, activations counted; inf where it never is.

    Solves B (2DF W / C - a (D + F)) = w DF with a, w the bytes of an activation and a weight.
    """
    gain = 2 * D * F * bytes_per_s / flops_per_s - activation_bits / 8 * (D + F)
    return weight_bits / 8 * D * F / gain if gain > 0 else math.inf


def matmul(
    B: float,
    D: float,
    F: float,
    *,
    flops_per_s: float,
    bytes_per_s: float,
    weight_bits: float = 16,
    activation_bits: float = 16,
) -> Roofline:
    """Times of [B, D] x [D, F] on one device of ``flops_per_s`` with memory of ``bytes_per_s``."""
    moved = matmul_bytes(B, D, F, weight_bits=weight_bits, activation_bits=activation_bits)
    return Roofline(compute_s(matmul_flops(B, D, F), flops_per_s), transfer_s(moved, bytes_per_s))


def tile_bytes(B: int, D: int, F: int, tile_B: int, tile_D: int, tile_F: int, *, bits: float = 16) -> float:
    """Bytes moved by [B, D] x [D, F] in tiles: operands once per tile product, each output tile once."""
    tiles_B, tiles_D, tiles_F = math.ceil(B / tile_B), math.ceil(D / tile_D), math.ceil(F / tile_F)
    operands = tiles_D * (tile_B * tile_D + tile_D * tile_F)
    return bits / 8 * tiles_B * tiles_F * (operands + tile_B * tile_F)


def tile_intensity(tile_B: float, tile_F: float, *, bits: float = 16) -> float:
    """FLOP per byte of a matmul in tiles of the output, long contraction: bm bn / (bm + bn) in bf16."""
    return 2 * tile_B * tile_F / (bits / 8 * (tile_B + tile_F))


def min_contracting_dim(
    flops_per_s: float, link_bytes_per_s: float, chips: int, *, bits: float = 16
) -> float:
    """Smallest D of [B, D] x [D, F] split over ``chips`` on D that hides the exchange of partial sums [B, F].

    2BDF / (n C) > bytes * BF / W gives D > n (bits / 16) C / W.
    """
    return chips * bits / 16 * flops_per_s / link_bytes_per_s


def contraction_flops(equation: str, sizes: Mapping[str, int]) -> float:
    """FLOPs of an einsum such as 'IJ,JK->IK': the product of all distinct dims, twice if any is summed."""
    inputs, _, output = equation.partition("->")
    dims = set(inputs) - {","}
    product = math.prod(sizes[d] for d in dims)
    return 2 * product if dims - set(output) else product


def padded_elements(shape: Sequence[int], tile: Sequence[int]) -> int:
    """Elements of ``shape`` once its last dims are rounded up to whole tiles."""
    assert len(tile) <= len(shape), "a tile covers the last dims of an array"
    untiled = len(shape) - len(tile)
    rounded = (math.ceil(d / t) * t for d, t in zip(shape[untiled:], tile, strict=True))
    return math.prod(shape[:untiled]) * math.prod(rounded)


def padding_expansion(shape: Sequence[int], tile: Sequence[int]) -> float:
    """Stored elements per real element under ``tile``."""
    return padded_elements(shape, tile) / math.prod(shape)


def vector_lanes(*, lanes: int, units: int, cores: int = 1) -> int:
    """Vector ALUs: TPU v5p 8x128 lanes x 4 units x 2 cores; a GPU 32 lanes x 4 units x SMs."""
    return lanes * units * cores


def vector_flops_per_s(alus: int, clock_hz: float, *, flops_per_cycle: float = 1) -> float:
    """Peak of ``alus`` vector ALUs; ``flops_per_cycle`` is 2 when fused multiply-adds are counted."""
    return alus * clock_hz * flops_per_cycle


def clock_hz(flops_per_s: float, alus: int, *, flops_per_cycle: float = 1) -> float:
    """The clock at which ``alus`` reach ``flops_per_s``."""
    return flops_per_s / (alus * flops_per_cycle)


def flops_per_cycle(flops_per_s: float, units: int, clock_hz: float) -> float:
    """What each of ``units`` matrix or vector units does in a cycle."""
    return flops_per_s / (units * clock_hz)


def register_bytes(registers: int, *, sublanes: int = 8, lanes: int = 128, bits: int = 32) -> int:
    """Bytes of a file of vector registers."""
    return registers * sublanes * lanes * bits // 8
