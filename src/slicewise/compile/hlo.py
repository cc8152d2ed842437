"""Reader of the compiler's scheduled programs: HLO text as records.

Text, not protocol buffers: it is what the compiler leaves at every depth, also when it is stopped half-way.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ITEM_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f4e2m1fn": 4, "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "f8e8m0fnu": 8, "bf16": 16, "f16": 16, "f32": 32,
    "f64": 64, "token": 0, "opaque": 0,
}  # fmt: skip
HBM, VMEM, HOST = 0, 1, 5  # memory spaces, as layouts name them

_INSTRUCTION = re.compile(r"^  (?:ROOT )?%", re.MULTILINE)
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$", re.MULTILINE)
_ARRAY = re.compile(r"(\w+)\[([\d,<= ]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_CALLED_LIST = re.compile(r"(?:called_computations|branch_computations)=\{([^}]*)\}")
_SPACE = re.compile(r"S\((\d+)\)")
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)")
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}")


@dataclass(frozen=True)
class Array:
    """One array of a shape: element type, dims, and the memory it lies in."""

    dtype: str
    dims: tuple[int, ...]
    space: int = HBM
    minor_to_major: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Without padding."""
        return self.elements * ITEM_BITS.get(self.dtype, 32) / 8


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a shape as printed, a tuple's in order."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype not in ITEM_BITS:
            continue
        space = _SPACE.search(layout)
        order = layout[1:].split(":")[0].rstrip("}") if layout else ""
        found.append(
            Array(
                dtype,
                tuple(int(d.lstrip("<= ")) for d in dims.split(",") if d.strip()),
                int(space[1]) if space else HBM,
                tuple(int(d) for d in order.split(",") if d.strip().isdigit()),
            )
        )
    return tuple(found)


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction. ``attributes`` is the text behind the operands, read on demand."""

    name: str
    opcode: str
    shape_text: str
    operand_text: str
    attributes: str
    is_root: bool = False

    @functools.cached_property
    def shape(self) -> tuple[Array, ...]:
        """The arrays of the result."""
        return arrays(self.shape_text)

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(_NAME.findall(self.operand_text))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that it runs, in the order of the text."""
        lists = [name for text in _CALLED_LIST.findall(self.attributes) for name in _NAME.findall(text)]
        return tuple(_CALLED.findall(self.attributes)) + tuple(lists)

    def attribute(self, name: str) -> str:
        """The text of attribute ``name``; empty without one."""
        start = self.attributes.find(f"{name}=")
        while start > 0 and self.attributes[start - 1] not in " ,{":
            start = self.attributes.find(f"{name}=", start + 1)
        return "" if start < 0 else _balanced(self.attributes, start + len(name) + 1)

    @functools.cached_property
    def op_name(self) -> str:
        """Where in the traced program it comes from, such as jit(update)/jvp()/while/body/dot_general."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1].replace("\\'", "'") if found else ""

    @functools.cached_property
    def frame(self) -> int:
        found = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return int(found[1]) if found else 0

    @property
    def estimated_cycles(self) -> float | None:
        """The compiler's own, of a TensorCore; None before code generation and for what it does not estimate."""
        found = re.search(
            r'"estimated_cycles":"(\d{1,15})"', self.attributes
        )  # longer: the largest integer, no estimate
        return float(found[1]) if found else None


@dataclass(frozen=True, eq=False)
class Computation:
    name: str
    instructions: Mapping[str, Instruction]  # in the order of the schedule

    @functools.cached_property
    def root(self) -> Instruction:
        return next(
            (i for i in self.instructions.values() if i.is_root), list(self.instructions.values())[-1]
        )

    def shape_of(self, name: str) -> tuple[Array, ...]:
        """The arrays of the value called ``name``; none where it is not of this computation."""
        instruction = self.instructions.get(name)
        return instruction.shape if instruction else ()

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.operand_text)))


@dataclass(frozen=True)
class Frame:
    """One line of our source on the way to an instruction."""

    file: str
    function: str
    line: int


@dataclass(frozen=True, eq=False)
class Module:
    """A scheduled program, with the source lines that its instructions come from."""

    computations: Mapping[str, Computation]
    entry: Computation
    locations: Mapping[int, Frame] = field(default_factory=dict)
    stack: Mapping[int, tuple[int, int]] = field(default_factory=dict)  # stack_frame_id -> (location, parent)

    def frames(self, frame: int) -> list[Frame]:
        """The lines of a stack_frame_id, the innermost first."""
        found: list[Frame] = []
        while frame in self.stack and len(found) < 50:
            location, parent = self.stack[frame]
            if location in self.locations:
                found.append(self.locations[location])
            if parent == frame:
                break
            frame = parent
        return found


def parse(text: str) -> Module:
    """The module that ``text`` prints. Raises ValueError for a text that is none."""
    if not text.startswith("HloModule"):
        raise ValueError("not a program of the compiler: it does not begin with HloModule")
    headers = list(_HEADER.finditer(text))
    if not headers:
        raise ValueError("a program without computations")
    computations, entry = {}, None
    for header, after in zip(headers, [*headers[1:], None], strict=True):
        body = text[header.end() : after.start() if after else len(text)]
        body = body[: body.rfind("\n}")]
        computation = Computation(header[2], {i.name: i for i in _instructions(body)})
        computations[computation.name] = computation
        if header[1]:
            entry = computation
    if entry is None:
        raise ValueError("a program without an entry computation")
    return Module(computations, entry, *_tables(text[: headers[0].start()]))


def _instructions(body: str) -> Iterator[Instruction]:
    starts = [m.start() for m in _INSTRUCTION.finditer(body)]
    for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
        yield _instruction(body[start:end].strip())


def _instruction(text: str) -> Instruction:
    is_root = text.startswith("ROOT ")
    name, _, rest = text.removeprefix("ROOT ").partition(" = ")
    shape = _balanced(rest, 0)
    opcode, _, rest = rest[len(shape) + 1 :].partition("(")
    operands = _balanced("(" + rest, 0)
    attributes = rest[len(operands) - 1 :].lstrip(", ")
    return Instruction(name.removeprefix("%"), opcode, shape, operands[1:-1], attributes, is_root)


def _balanced(text: str, start: int) -> str:
    """From ``start`` to the first space or comma outside brackets and quotes, or to the end of a bracket there."""
    depth, quoted, position = 0, False, start
    while position < len(text):
        c = text[position]
        if quoted:
            if c == "\\":
                position += 1
            elif c == '"':
                quoted = False
        elif c == '"':
            quoted = True
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if depth < 0:
                break
            if depth == 0 and text[start] in "({" and c in ")}":
                return text[start : position + 1]
        elif depth == 0 and c in " ,":
            break
        position += 1
    return text[start:position]


def _tables(head: str) -> tuple[dict[int, Frame], dict[int, tuple[int, int]]]:
    """The tables of source lines above the computations."""
    names: dict[str, dict[int, str]] = {"FileNames": {}, "FunctionNames": {}}
    locations: dict[int, Frame] = {}
    stack: dict[int, tuple[int, int]] = {}
    section = ""
    for line in head.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            section = line
        elif section in names and (found := re.match(r'^(\d+) "(.*)"$', line)):
            names[section][int(found[1])] = found[2]
        elif section == "FileLocations" and (found := _LOCATION.match(line)):
            number, file, function, at = map(int, found.groups())
            locations[number] = Frame(
                names["FileNames"].get(file, ""), names["FunctionNames"].get(function, ""), at
            )
        elif section == "StackFrames" and (found := _FRAME.match(line)):
            stack[int(found[1])] = int(found[2]), int(found[3])
    if any(frame == parent for frame, (_, parent) in stack.items()):
        # The compiler prints the parent's number plus one, so that one stands for none.
        stack = {frame: (location, parent - 1) for frame, (location, parent) in stack.items()}
    return locations, stack


# --- loops -----------------------------------------------------------------------------------------------------------


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int:
    """How often the body of ``loop`` runs: a counter from a constant, compared with a constant, stepped by a constant.

    Once where it is compared with a number that only the device knows: the rounds in which tokens reach experts, of
    which balanced ones need one. Raises ValueError where it is of neither kind.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
        return int(known[1])
    condition = module.computations[loop.attribute("condition").lstrip("%")]
    body = module.computations[loop.attribute("body").lstrip("%")]
    compare = _comparison(module, condition)
    for index, limit, direction in compare:
        start = _constant(module, caller, _tuple_element(caller, loop.operands[0], index))
        step = _step(module, body, index)
        if start is None or step in (None, 0):
            continue
        inclusive = 1 if direction in ("LE", "GE") else 0
        span = (limit - start) * (1 if step > 0 else -1)
        return max(0, -(-(span + inclusive) // abs(step)))
    if _is_up_to_the_device(condition):
        return 1
    raise ValueError(f"loop {loop.name}: its number of rounds cannot be told from its condition")


def _comparison(module: Module, condition: Computation) -> list[tuple[int, int, str]]:
    """(tuple index of the counter, limit, direction) that the condition compares."""
    root = condition.root
    where, names = condition, None
    if root.opcode == "fusion":
        inner = module.computations[root.called[0]]
        outer = dict(zip([p.name for p in inner.parameters], root.operands, strict=True))
        where, root, names = inner, inner.root, outer
    if root.opcode != "compare":
        return []
    direction = root.attribute("direction")
    sides = []
    for name in root.operands:
        value = _constant(module, where, name)
        if value is None and names and name in names:
            value = _constant(module, condition, names[name])
        index = None if value is not None else _index_of(condition, names.get(name, name) if names else name)
        sides.append((value, index))
    (left, left_index), (right, right_index) = sides
    if left_index is not None and right is not None:
        return [(left_index, right, direction)]
    if right_index is not None and left is not None:
        flipped = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
        return [(right_index, left, flipped)]
    return []


def _is_up_to_the_device(condition: Computation) -> bool:
    root = condition.root
    return root.opcode == "compare" and None not in [_index_of(condition, name) for name in root.operands]


def _index_of(computation: Computation, name: str) -> int | None:
    """The element of the loop's tuple that ``name`` is, seen through copies and bitcasts."""
    instruction = computation.instructions.get(name)
    while instruction and instruction.opcode in ("copy", "bitcast", "convert") and instruction.operands:
        instruction = computation.instructions.get(instruction.operands[0])
    if instruction and instruction.opcode == "get-tuple-element":
        return int(instruction.attribute("index"))
    return None


def _tuple_element(computation: Computation, name: str, index: int) -> str:
    instruction = computation.instructions.get(name)
    while instruction is not None:
        if instruction.opcode == "tuple":
            return instruction.operands[index]
        if instruction.opcode in ("while", "copy", "optimization-barrier"):
            instruction = computation.instructions.get(instruction.operands[0])
            continue
        break
    return ""


def _constant(module: Module, computation: Computation, name: str) -> int | None:
    """The integer that ``name`` is, through copies and fusions of constants."""
    instruction = computation.instructions.get(name)
    for _ in range(20):
        if instruction is None:
            return None
        if instruction.opcode == "constant":
            try:
                return int(instruction.operand_text)
            except ValueError:
                return None
        if instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start", "convert"):
            instruction = computation.instructions.get(instruction.operands[0])
        elif instruction.opcode == "fusion":
            inner = module.computations[instruction.called[0]]
            return _constant(module, inner, inner.root.name)
        else:
            return None
    return None


def _step(module: Module, body: Computation, index: int) -> int | None:
    """What the body adds to element ``index`` of its tuple."""
    root = body.root
    name = root.operands[index] if root.opcode == "tuple" else ""
    instruction = body.instructions.get(name)
    while instruction is not None and instruction.opcode in (
        "copy",
        "bitcast",
        "convert",
        "copy-done",
        "copy-start",
    ):
        instruction = body.instructions.get(instruction.operands[0])
    if instruction is None:
        return None
    where, names = body, {}
    if instruction.opcode == "fusion":
        where = module.computations[instruction.called[0]]
        names = dict(zip([p.name for p in where.parameters], instruction.operands, strict=True))
        instruction = where.root
    if instruction.opcode not in ("add", "subtract"):
        return None
    values = [_constant(module, where, o) for o in instruction.operands]
    values = [
        v if v is not None or o not in names else _constant(module, body, names[o])
        for v, o in zip(values, instruction.operands, strict=True)
    ]
    sign = -1 if instruction.opcode == "subtract" else 1
    return next((sign * v for v in reversed(values) if v is not None), None)
