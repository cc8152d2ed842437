"""What a compiled program holds in memory, from the compiler's own assignment of buffers: by component, by buffer, and
over the schedule."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slicewise.compile.hlo import HBM, HOST, Computation, Instruction, Module
from slicewise.compile.places import origin, usual_pass
from slicewise.costs.remat import TENSORS

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(?:, color (\d+))?, (.*):$")
_VALUE = re.compile(
    r"^ value: <\d+ ([\w.\-]+)((?:\{[\d,]*\})?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$"
)
_ARGUMENT = re.compile(r"parameter (\d+)")
_RANGE = re.compile(r"^    ([\w.\-]+)(\{[\d,]*\}):(\d+)-(\d+)$")
_STEP = re.compile(r"^    (\d+):([\w.\-]+)$")
_TENSOR = re.compile(rf"/((?:moe_|shared_)?(?:{'|'.join(TENSORS)}))/")  # the scope that model/remat.py names
SHOWN_BUFFERS = 12
FORMS = ("bitcast", "reshape", "convert", "copy", "transpose", "reduce-precision")  # other forms of one value
MOST_FORMS = 32


@dataclass(frozen=True)
class Value:
    """A value of the program and its place within an allocation."""

    name: str
    index: str  # {} or {3}: the element of a tuple
    bytes: int
    offset: int
    shape: str


@dataclass(frozen=True)
class Allocation:
    bytes: int
    space: int
    argument: int | None  # number of the entry parameter, None for what is not one
    kind: str  # the compiler's words: 'preallocated-temp', 'constant', ...
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Buffer:
    """Memory held at the peak: one buffer, whatever values take turns in it."""

    bytes: float
    component: str
    shape: str
    op_name: str  # of the instruction that makes it, or its name; of an argument its name
    source: str  # file:line, empty for an argument
    tensor: str = ""  # of a saved activation its name, as remat policies know it


@dataclass(frozen=True)
class Memory:
    """Of one device. ``over_schedule`` is (instruction, bytes of HBM) along the schedule, loops once."""

    hbm_bytes: Mapping[str, float]  # by component
    host_bytes: float
    limit_bytes: float
    largest: tuple[Buffer, ...]
    over_schedule: tuple[tuple[str, float], ...]
    saved: Mapping[str, float]  # saved activations by name

    @property
    def total_bytes(self) -> float:
        return sum(self.hbm_bytes.values())

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.limit_bytes


def parse_allocations(text: str) -> list[Allocation]:
    """The allocations of a buffer-assignment dump."""
    found: list[Allocation] = []
    values: list[Value] = []
    head: tuple[int, int, int | None, str] | None = None
    for line in text.splitlines():
        if match := _ALLOCATION.match(line):
            if head:
                found.append(Allocation(*head, tuple(values)))
            argument = _ARGUMENT.search(match[4])
            kind = "argument" if argument else match[4].split(", ")[-1]
            head = int(match[2]), int(match[3] or 0), int(argument[1]) if argument else None, kind
            values = []
        elif head and (match := _VALUE.match(line)):
            values.append(Value(match[1], match[2] or "{}", int(match[3]), int(match[4]), match[5]))
    if head:
        found.append(Allocation(*head, tuple(values)))
    return found


def parse_live_ranges(text: str) -> tuple[list[str], dict[tuple[str, str], tuple[int, int]]]:
    """(instructions in the order of the schedule, bodies of loops once; (value, index) -> first and last step)."""
    steps: list[str] = []
    ranges: dict[tuple[str, str], tuple[int, int]] = {}
    for line in text.splitlines():
        if match := _RANGE.match(line):
            ranges[match[1], match[2]] = int(match[3]), int(match[4])
        elif match := _STEP.match(line):
            steps.append(match[2])
    return steps, ranges


def memory_of(module: Module, buffers: str, live_ranges: str, limit_bytes: float) -> Memory:
    """From the compiler's dumps ``buffers`` and ``live_ranges``; bytes of HBM as the compiler counts them: arguments,
    temporaries and results that are no arguments. Host memory stands apart."""
    allocations = parse_allocations(buffers)
    steps, ranges = parse_live_ranges(live_ranges)
    instructions = {i.name: i for c in module.computations.values() for i in c.instructions.values()}
    arguments = {int(i.operand_text): i for i in module.entry.parameters}
    components: dict[str, float] = {}
    held: list[Buffer] = []
    fixed, host = 0.0, 0.0
    temporaries: list[Allocation] = []
    for a in allocations:
        if "thread-local" in a.kind or a.space not in (HBM, HOST):
            continue
        if a.space == HOST:
            host += a.bytes
        elif a.kind == "preallocated-temp":
            temporaries.append(a)
        else:
            component = "results" if "live-out" in a.kind else "other"
            if a.argument is not None:
                component = _argument_component(arguments, a.argument)
            components[component] = components.get(component, 0.0) + a.bytes
            fixed += a.bytes
            if a.argument is not None and a.argument in arguments:
                op_name = arguments[a.argument].op_name
                held.append(Buffer(a.bytes, component, arguments[a.argument].shape_text, op_name, ""))
            elif component == "results" and a.values:
                value = a.values[0]
                op_name, source = origin(module, instructions.get(value.name))
                held.append(Buffer(a.bytes, component, value.shape, op_name or value.name, source))
    profile = np.zeros(len(steps) + 1)
    for a in temporaries:
        for component, size in _temporaries(module, a, steps, ranges, instructions, profile, held).items():
            components[component] = components.get(component, 0.0) + size
    held.sort(key=lambda b: -b.bytes)
    saved: dict[str, float] = {}
    for b in held:
        if b.component == "saved activations":
            saved[b.tensor or "unnamed"] = saved.get(b.tensor or "unnamed", 0.0) + b.bytes
    over = tuple((step, fixed + float(b)) for step, b in zip(steps, profile, strict=False))
    return Memory(components, host, limit_bytes, tuple(held[:SHOWN_BUFFERS]), over, saved)


def _argument_component(arguments: Mapping[int, Instruction], number: int) -> str:
    name = arguments[number].op_name if number in arguments else ""
    if ".params" in name or ".frozen" in name or name.startswith("params"):
        return "weights"
    if "opt_state" in name:
        return "optimizer"
    return "cache" if "cache" in name else "batch"


@dataclass(frozen=True)
class _Region:
    """Bytes of a temporary allocation that hold a value from one step to another."""

    start: int
    end: int
    written: int  # last step that writes into it, -1 where values only pass through a loop
    value: Value  # the most telling of those that take turns


def _temporaries(
    module: Module,
    allocation: Allocation,
    steps: Sequence[str],
    ranges: Mapping[tuple[str, str], tuple[int, int]],
    instructions: Mapping[str, Instruction],
    profile: np.ndarray,
    held: list[Buffer],
) -> dict[str, float]:
    """Components of the temporaries at the step where most are live; what no live value explains is fragmentation."""
    made = {(v.name, v.index): _made(module, instructions, v) for v in allocation.values}
    ranks = {
        key: (bool(m.tensor), m.by_slices, bool(m.source), bool(m.op_name), not _carried(key[0]))
        for key, m in made.items()
    }
    regions = _regions(allocation, ranges, ranks)
    live = np.zeros(len(profile) + 1)
    for r in regions:
        live[r.start] += r.value.bytes
        live[min(r.end + 1, len(profile))] -= r.value.bytes
    live = np.cumsum(live)[: len(profile)]
    profile += live
    peak = int(live.argmax())
    passes = _passes(module, steps)
    components: dict[str, float] = {}
    for r in regions:
        if not r.start <= peak <= r.end:
            continue
        component = _component(r, passes)
        components[component] = components.get(component, 0.0) + r.value.bytes
        m = made[r.value.name, r.value.index]
        tensor = m.tensor if component == "saved activations" else ""
        op_name = m.op_name or r.value.name
        held.append(Buffer(r.value.bytes, component, r.value.shape, op_name, m.source, tensor))
    components["fragmentation"] = allocation.bytes - sum(components.values())
    return components


def _carried(name: str) -> bool:
    """Whether a value only passes through a loop."""
    return name.startswith(("while", "wide", "param", "get-tuple"))


@dataclass(frozen=True)
class _Made:
    """How a value comes to be. ``tensor`` is the name under which a remat policy keeps it."""

    op_name: str
    source: str
    tensor: str = ""
    by_slices: bool = False  # a loop writes it, a slice a round


def _made(module: Module, instructions: Mapping[str, Instruction], value: Value) -> _Made:
    i = instructions.get(value.name)
    chain = list(_written(module, instructions, i, value.index)) if i is not None else []
    tensor = next((found[1] for c in chain if (found := _TENSOR.search(c.op_name))), "")
    said = next((o for c in reversed(chain) if (o := origin(module, c))[1]), origin(module, i))
    return _Made(*said, tensor, bool(chain))


def _written(
    module: Module, instructions: Mapping[str, Instruction], i: Instruction, index: str
) -> Iterator[Instruction]:
    """What a fusion writes into its result slice by slice, followed back to what computes it."""
    if i.opcode != "fusion":
        return
    inner = module.computations[i.called[0]]
    node = _element(inner, inner.root, index)
    for _ in range(MOST_FORMS):
        if node.opcode != "bitcast":
            break
        node = inner.instructions[node.operands[0]]
    if node.opcode != "dynamic-update-slice":
        return
    node = inner.instructions[node.operands[1]]
    for _ in range(MOST_FORMS):
        yield node
        if node.opcode in FORMS:
            node = inner.instructions[node.operands[0]]
        elif node.opcode == "parameter":
            outer = instructions.get(i.operands[int(node.operand_text)])
            index = "{}"
            if outer is not None and outer.opcode == "get-tuple-element":
                index = f"{{{outer.attribute('index')}}}"
                outer = instructions.get(outer.operands[0])
            if outer is None or outer.opcode == "parameter":
                return
            yield outer
            if outer.opcode != "fusion":
                return
            i, inner = outer, module.computations[outer.called[0]]
            node = _element(inner, inner.root, index)
        else:
            return


def _element(inner: Computation, root: Instruction, index: str) -> Instruction:
    """The element ``{n}`` of a tuple; of the whole tuple, or of what is none, the instruction itself."""
    number = index.strip("{}")
    if root.opcode != "tuple" or not number.isdigit():
        return root
    return inner.instructions[root.operands[int(number)]]


def _regions(
    allocation: Allocation,
    ranges: Mapping[tuple[str, str], tuple[int, int]],
    ranks: Mapping[tuple[str, str], tuple[bool, ...]],
) -> list[_Region]:
    """Values that take turns in the same bytes without a gap (a loop's input, state and result) are one region, named
    after the one of the highest rank: that tells most of where it comes from."""
    by_place: dict[tuple[int, int], list[_Region]] = {}
    for value in allocation.values:
        span = ranges.get((value.name, value.index))
        if span is not None:
            region = _Region(*span, -1 if _carried(value.name) else span[0], value)
            by_place.setdefault((value.offset, value.bytes), []).append(region)
    merged: list[_Region] = []
    for regions in by_place.values():
        regions.sort(key=lambda r: (r.start, r.end))
        current = regions[0]
        for r in regions[1:]:
            if r.start <= current.end:
                best = max(current, r, key=lambda region: ranks[region.value.name, region.value.index])
                end, written = max(current.end, r.end), max(current.written, r.written)
                current = _Region(current.start, end, written, best.value)
            else:
                merged.append(current)
                current = r
        merged.append(current)
    return merged


@dataclass(frozen=True)
class _Passes:
    """Steps at which the layers' forward and backward loops begin and end."""

    forward_start: int
    forward_end: int
    backward_start: int
    backward_end: int


def _component(region: _Region, passes: _Passes | None) -> str:
    """By when it lives. What is made before the layers and outlives their forward pass is a copy of weights, what that
    pass leaves for the backward pass is saved, what comes later and is still there in it, or after it, is a gradient.
    """
    if passes is None or region.end < passes.backward_start:
        return "temporaries"
    if max(region.start, region.written) < passes.forward_start:
        return "copies of weights"
    if region.start <= passes.forward_end:
        return "saved activations"
    outlives = region.start <= passes.backward_end < region.end
    return "gradients" if region.start < passes.backward_start or outlives else "temporaries"


def _passes(module: Module, steps: Sequence[str]) -> _Passes | None:
    """None for a program without a backward pass. The loop of the loss belongs to neither."""
    numbers = {name: n for n, name in enumerate(steps)}
    forward: list[int] = []
    backward: list[int] = []
    for i in module.entry.instructions.values():
        if i.opcode != "while":
            continue
        body = module.computations[i.attribute("body").lstrip("%")]
        mine = [numbers[name] for name in body.instructions if name in numbers]
        if usual_pass(body) in ("backward", "recomputed"):
            backward += mine
        elif not any(origin(module, j)[1].startswith("model/loss.py") for j in body.instructions.values()):
            forward += mine
    if not backward:
        return None
    before = [n for n in forward if n < min(backward)]
    return _Passes(min(before, default=0), max(before, default=0), min(backward), max(backward))
