"""Where an instruction of a compiled program comes from: the pass, the part of the model, the line of our source."""

import functools
from collections import Counter
from collections.abc import Mapping

from slicewise.compile.hlo import Computation, Frame, Instruction, Module

ROOT = "/slicewise/"
PASSES = ("forward", "backward", "recomputed", "update")
# Modules that everything goes through: their callers say more.
_PLUMBING = ("model/linear.py", "model/remat.py", "parallel/rules.py", "compile/")
# The first that matches (file, function) from the innermost line outwards.
_PARTS = (
    ("kernels/attention", "", "attention"),
    ("kernels/grouped_matmul", "", "experts"),
    ("model/moe.py", "", "experts"),
    ("parallel/expert.py", "", "experts"),
    ("model/attention.py", "", "attention"),
    ("model/mla.py", "", "attention"),
    ("model/rope.py", "", "attention"),
    ("model/loss.py", "", "output"),
    ("model/layers.py", "mlp", "mlp"),
    ("model/transformer.py", "_embed", "embedding"),
    ("model/transformer.py", "_logits", "output"),
    ("train/optimizer.py", "", "optimizer"),
)


def origin(module: Module, i: Instruction | None) -> tuple[str, str]:
    """(op_name, file:line of our own code that made it, without plumbing where possible)."""
    if i is None:
        return "", ""
    i = _telling(module, i)
    own = _own(module, i.frame)
    said = next((f for f in own if not f.file.startswith(_PLUMBING)), own[0] if own else None)
    return i.op_name, f"{said.file}:{said.line}" if said else ""


def places(module: Module, program: str) -> Mapping[str, tuple[str, str]]:
    """(part of the model, pass) of every instruction of ``program``, by name.

    What says nothing of itself, as copies that the compiler added, belongs to the pass of its loop, and so do constants
    that the compiler made within one. Only a training step has passes.
    """
    found = {}
    for computation in module.computations.values():
        usual = usual_pass(computation) if computation is not module.entry else "update"
        for i in computation.instructions.values():
            told = _telling(module, i)
            of_pass = pass_of(told)
            if program != "update":
                of_pass = "forward"
            elif of_pass == "update":
                of_pass = usual
            found[i.name] = part_of(module, told, of_pass), of_pass
    return found


def usual_pass(computation: Computation) -> str:
    """That of most instructions that say it."""
    said = Counter(pass_of(i) for i in computation.instructions.values() if i.op_name)
    return said.most_common(1)[0][0] if said else "update"


def _telling(module: Module, i: Instruction) -> Instruction:
    """``i``, or where it says nothing of itself the last instruction within it that does."""
    if i.op_name or i.opcode != "fusion":
        return i
    inner = module.computations[i.called[0]].instructions.values()
    return next((j for j in reversed(list(inner)) if j.op_name), i)


@functools.lru_cache(maxsize=10_000)
def _own(module: Module, frame: int) -> tuple[Frame, ...]:
    """The lines within this package, paths from its root."""
    return tuple(
        Frame(f.file.rpartition(ROOT)[2], f.function, f.line) for f in module.frames(frame) if ROOT in f.file
    )


def pass_of(i: Instruction) -> str:
    """One of PASSES: recomputed is forward work done again for the backward pass, update changes the weights."""
    name = i.op_name
    if "rematted_computation" in name:
        return "recomputed"
    if "transpose(" in name:
        return "backward"
    return "forward" if "jvp(" in name else "update"


def part_of(module: Module, i: Instruction, of_pass: str) -> str:
    """attention, mlp, experts, output, embedding, optimizer, or layer for norms, residuals and what has no line."""
    if of_pass == "update":
        return "optimizer"
    for line in _own(module, i.frame):
        for file, function, part in _PARTS:
            if line.file.startswith(file) and line.function.split(".")[0].startswith(function):
                return part
    return "layer"
