"""Seconds on the core of one instruction of a scheduled program.

At full depth the compiler's own cycles over its clock. Before code generation there are none: then FLOPs and bytes
over rates that were fitted once per chip to the cycles of full compiles (calibration.toml).
"""

import functools
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from slicewise.compile.collectives import OPS
from slicewise.compile.hlo import HBM, Array, Computation, Instruction, Module, arrays
from slicewise.costs.compute import SOFTMAX_BACKWARD, SOFTMAX_FORWARD
from slicewise.costs.device import Device

FREE = frozenset({
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
    "optimization-barrier", "iota", "domain", "add-dependency",
})  # fmt: skip
FREE_CALLS = frozenset({"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"})


@dataclass(frozen=True)
class Rates:
    """Of one device, before code generation; calibration.toml says how they were found."""

    clock_hz: float  # that the compiler counts cycles with
    matmul_efficiency: float
    hbm_efficiency: float
    vector_elements_per_s: float
    overhead_s: float  # of one instruction
    host_bytes_per_s: float | None = None  # each way; None = the planner's


@dataclass(frozen=True)
class AttentionRates:
    """Of the attention kernel, on every chip; see calibration.toml."""

    mxu_overhead: float  # time of a block over that of its products, where these decide
    grid_step_s: float


@functools.cache
def _calibration() -> dict:
    return tomllib.loads((resources.files("slicewise.compile") / "calibration.toml").read_text())


@functools.cache
def rates() -> Mapping[str, Rates]:
    return {name: Rates(**values) for name, values in _calibration().items() if name != "attention"}


@functools.cache
def attention_rates() -> AttentionRates:
    return AttentionRates(**_calibration()["attention"])


@dataclass(frozen=True)
class OpCost:
    """What an instruction takes of the core and does."""

    kind: str  # matmul, attention, grouped matmul, memory, kernel, none
    seconds: float
    flops: float = 0.0
    hbm_bytes: float = 0.0
    estimated: bool = False  # by the compiler


def op_cost(module: Module, computation: Computation, instruction: Instruction, device: Device) -> OpCost:
    """The cost of a synchronous instruction that is neither a loop nor a collective."""
    if instruction.opcode in FREE:
        return OpCost("none", 0.0)
    if instruction.opcode == "custom-call":
        return _custom_call(computation, instruction, device)
    known = rates()[device.name]
    work = _work(module, computation, instruction)
    kind = "matmul" if work.flops else "memory"
    cycles = instruction.estimated_cycles
    if cycles is not None:
        return OpCost(kind, cycles / known.clock_hz, work.flops, work.hbm_bytes, True)
    peak = device.peak_flops_per_s(work.precision)
    seconds = known.overhead_s + max(
        work.flops / (peak * known.matmul_efficiency),
        work.hbm_bytes / (device.hbm_bytes_per_s * known.hbm_efficiency),
        work.elements / known.vector_elements_per_s,
    )
    return OpCost(kind, seconds, work.flops, work.hbm_bytes)


@dataclass(frozen=True)
class _Work:
    flops: float
    hbm_bytes: float
    elements: float  # that the vector unit makes
    precision: str = "bf16"


def _work(module: Module, computation: Computation, instruction: Instruction) -> _Work:
    if instruction.opcode != "fusion":
        read = sum(
            a.bytes for name in instruction.operands for a in computation.shape_of(name) if a.space == HBM
        )
        written = sum(a.bytes for a in instruction.shape if a.space == HBM)
        if instruction.opcode == "dynamic-slice":
            read = written
        if instruction.opcode == "dynamic-update-slice":
            update = sum(a.bytes for a in computation.shape_of(instruction.operands[1]))
            read = written = update
        flops, found = _flops(computation, instruction)
        return _Work(
            flops, read + written, sum(a.elements for a in instruction.shape) if not flops else 0.0, found
        )
    inner = module.computations[instruction.called[0]]
    flops, elements, found = _inner_work(module, inner)
    moved = 0.0
    for name, parameter in zip(instruction.operands, inner.parameters, strict=False):
        moved += _read_bytes(module, inner, parameter, computation.shape_of(name))
    return _Work(flops, moved + _written_bytes(inner, instruction), elements, found)


@functools.cache
def _inner_work(module: Module, inner: Computation) -> tuple[float, float, str]:
    """(FLOPs of products, elements of other instructions, precision of the products) of a fusion."""
    flops, elements, found = 0.0, 0.0, "bf16"
    for i in inner.instructions.values():
        if _is_view(i):
            continue
        if i.opcode == "fusion":
            f, e, b = _inner_work(module, module.computations[i.called[0]])
            flops, elements, found = flops + f, elements + e, b if f else found
        elif i.opcode in ("convolution", "dot"):
            f, b = _flops(inner, i)
            flops, found = flops + f, b
        elif (
            i.opcode not in FREE
            and i.opcode not in ("broadcast", "reshape", "custom-call")
            and not _is_collective(i)
        ):
            made = inner.shape_of(i.operands[1]) if i.opcode == "dynamic-update-slice" else i.shape
            elements += max((a.elements for a in made), default=0)
    return flops, elements, found


def precision(*operands: Array) -> str:
    """The matrix unit that a product of these uses."""
    if all(a.dtype.startswith("f8") for a in operands):
        return "fp8"
    return "int8" if all(a.dtype in ("s8", "u8", "s4", "u4") for a in operands) else "bf16"


def _flops(computation: Computation, instruction: Instruction) -> tuple[float, str]:
    """2 x (batch x rows x columns x contracted) of a product, and its precision.

    A product is lhs = b m k, rhs = b k n, out = b m n elements, so sqrt(lhs rhs out / b) = b m k n. A batch dim is one
    that is longer than one in all three; the compiler writes it as a spatial dim of a convolution.
    """
    if instruction.opcode not in ("convolution", "dot"):
        return 0.0, "bf16"
    lhs, rhs = (computation.shape_of(name)[0] for name in instruction.operands[:2])
    out = instruction.shape[0]
    batch = 1
    if instruction.opcode == "dot":
        dims = instruction.attribute("lhs_batch_dims").strip("{}")
        batch = math.prod(lhs.dims[int(d)] for d in dims.split(",") if d)
    else:
        labels, _, out_labels = instruction.attribute("dim_labels").partition("->")
        lhs_labels, _, rhs_labels = labels.partition("_")
        for label in (c for c in lhs_labels if c.isdigit()):
            sizes = [
                array.dims[names.index(label)]
                for array, names in ((lhs, lhs_labels), (rhs, rhs_labels), (out, out_labels))
            ]
            if min(sizes) > 1:
                batch *= min(sizes)
    macs = math.sqrt(float(lhs.elements) * rhs.elements * out.elements / batch)
    return 2.0 * macs, precision(lhs, rhs)


def _is_view(i: Instruction) -> bool:
    """Whether the result is the operand itself: a bitcast, or within a fusion a change of tiling on the way."""
    return i.opcode == "bitcast" or (
        i.opcode == "fusion" and "output_to_operand_aliasing={{}: (0, {})}" in i.attributes
    )


def _is_collective(i: Instruction) -> bool:
    return i.opcode.startswith(OPS)


def _read_bytes(
    module: Module, inner: Computation, parameter: Instruction, given: tuple[Array, ...]
) -> float:
    """Bytes of HBM that a fusion reads of one operand: only the slices, where it only slices it."""
    full = sum(a.bytes for a in given if a.space == HBM)
    if not full:
        return 0.0
    read = 0.0
    for use in _uses(inner).get(parameter.name, ()):
        if _is_collective(use) or use.opcode in ("custom-call", "tuple"):
            continue  # passed on to a collective that goes on beside the fusion
        if use.opcode in ("dynamic-slice", "slice", "gather") and use.operands[0] == parameter.name:
            read += sum(a.bytes for a in use.shape)
        elif use.opcode == "dynamic-update-slice" and use.operands[0] == parameter.name:
            continue  # updated in place
        elif use.opcode == "fusion":
            nested = module.computations[use.called[0]]
            at = use.operands.index(parameter.name)
            read += _read_bytes(module, nested, nested.parameters[at], given)
        else:
            return full
    return min(full, read)


@functools.cache
def _uses(inner: Computation) -> dict[str, list[Instruction]]:
    """Who reads each value, seen through views."""
    alias: dict[str, str] = {}
    uses: dict[str, list[Instruction]] = {}
    for i in inner.instructions.values():
        if _is_view(i) and i.operands:
            alias[i.name] = alias.get(i.operands[0], i.operands[0])
            continue
        for o in i.operands:
            uses.setdefault(o, []).append(i)
            if o in alias:
                seen = Instruction(
                    i.name,
                    i.opcode,
                    i.shape_text,
                    i.operand_text.replace(f"%{o}", f"%{alias[o]}", 1),
                    i.attributes,
                )
                uses.setdefault(alias[o], []).append(seen)
    return uses


def _written_bytes(inner: Computation, instruction: Instruction) -> float:
    """Bytes of HBM that a fusion writes: only the update, where its result is an array updated in place."""
    root = inner.root
    results = [inner.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for result, array in zip(results, instruction.shape, strict=False):
        while (
            result.opcode in ("bitcast", "copy")
            and result.operands
            and result.operands[0] in inner.instructions
        ):
            result = inner.instructions[result.operands[0]]
        if array.space != HBM or result.opcode == "parameter" or _is_collective(result):
            continue
        if result.opcode == "dynamic-update-slice":
            total += sum(a.bytes for a in inner.shape_of(result.operands[1]))
        else:
            total += array.bytes
    return total


# --- kernels ---------------------------------------------------------------------------------------------------------


def _custom_call(computation: Computation, instruction: Instruction, device: Device) -> OpCost:
    target = instruction.attribute("custom_call_target").strip('"')
    if target in FREE_CALLS:
        return OpCost("none", 0.0)
    if "splash" in instruction.name or "splash" in instruction.op_name:
        return _splash(instruction, device)
    if "gmm" in instruction.op_name:
        return _grouped(computation, instruction, device)
    moved = sum(
        a.bytes for name in instruction.operands for a in computation.shape_of(name) if a.space == HBM
    )
    moved += sum(a.bytes for a in instruction.shape if a.space == HBM)
    return OpCost(
        "kernel", moved / (device.hbm_bytes_per_s * rates()[device.name].hbm_efficiency), 0.0, moved
    )


def _splash(instruction: Instruction, device: Device) -> OpCost:
    """The attention kernel: its active blocks, each the slower of products and softmax, and its grid steps.

    Cycles of a logit are those of the bundles of compiled kernels (costs/compute.py), the block sizes those that the
    kernel names in its metadata, the active blocks those that it lists among its operands.
    """
    settings = _kernel_settings(instruction)
    backward = "dkv" in instruction.name or "_dq" in instruction.name
    q, k, v = _queries_keys_values(instruction)
    *lead, heads, tokens, qk_dim = q.dims
    rows, v_dim = math.prod(lead) if lead else 1, v.dims[-1]
    keys = k.dims[-2]
    block_q = min(int(settings.get("block_q_dkv" if backward else "block_q") or 512), tokens)
    block_kv = min(int(settings.get("block_kv_dkv" if backward else "block_kv") or 512), keys)
    active = _active_blocks(instruction, tokens, keys, block_q, block_kv)
    blocks = rows * heads * active
    logits = blocks * block_q * block_kv
    qk, vv = 128 * math.ceil(qk_dim / 128), 128 * math.ceil(v_dim / 128)
    if not backward:
        width, softmax = 2 * (qk + vv), SOFTMAX_FORWARD
    elif "dkv" in instruction.name:
        width, softmax = 2 * (3 * qk + 2 * vv), SOFTMAX_BACKWARD
    else:
        width, softmax = 2 * (2 * qk + vv), SOFTMAX_FORWARD
    known = attention_rates()
    product_s = known.mxu_overhead * width * device.cores / device.flops_per_s
    seconds = logits * max(product_s, softmax / device.clock_hz) + blocks * known.grid_step_s
    useful = rows * heads * tokens * keys / 2 * (2 * (qk_dim + v_dim)) * (2.5 if backward else 1)
    return OpCost("attention", seconds / device.cores, useful, q.bytes * 4)


def _kernel_settings(instruction: Instruction) -> Mapping[str, Any]:
    """What the kernel says of itself: tokamax puts its configuration beside the call."""
    found = re.search(r'"xprof_metadata":"(\{.*?\})"', instruction.attributes, re.DOTALL)
    if not found:
        return {}
    try:
        return json.loads(found[1].replace('\\"', '"'))
    except ValueError:
        return {}


def _queries_keys_values(instruction: Instruction) -> tuple[Array, Array, Array]:
    """The first three operands with heads, tokens and head dim in a floating type."""
    layouts = instruction.attribute("operand_layout_constraints")
    found = [a for a in arrays(layouts) if len(a.dims) >= 3 and a.dtype in ("bf16", "f32", "f16")]
    return found[0], found[1], found[2]


def _active_blocks(instruction: Instruction, tokens: int, keys: int, block_q: int, block_kv: int) -> float:
    """Blocks of one head that are not wholly masked: the kernel's list of active rows has as many entries."""
    lists = [
        a.dims[0] for a in arrays(instruction.attribute("operand_layout_constraints")) if len(a.dims) == 1
    ]
    whole = math.ceil(tokens / block_q) * math.ceil(keys / block_kv)
    return min(max(lists), whole) if lists else whole


def _grouped(computation: Computation, instruction: Instruction, device: Device) -> OpCost:
    """A grouped product: rows x inner x columns, at the planner's share of a plain product's rate."""
    shapes = [s for name in instruction.operands for s in computation.shape_of(name) if len(s.dims) >= 2]
    rows = max((s for s in shapes if len(s.dims) == 2), key=lambda s: s.elements)
    out = instruction.shape[0]
    inner = max((s for s in shapes if len(s.dims) == 3), key=lambda s: s.elements, default=None)
    if inner is not None and len(out.dims) == 2:
        flops = 2.0 * rows.dims[0] * inner.dims[1] * inner.dims[2]
    else:  # the weights' gradient: [groups, in, out] from two tall matrices
        flops = 2.0 * max(s.dims[0] for s in shapes if len(s.dims) == 2) * math.prod(out.dims[-2:])
    peak = device.peak_flops_per_s(precision(rows))
    efficiency = rates()[device.name].matmul_efficiency * device.kernels.grouped_efficiency
    moved = sum(s.bytes for s in shapes) + out.bytes
    return OpCost(
        "grouped matmul", max(flops / (peak * efficiency), moved / device.hbm_bytes_per_s), flops, moved
    )
