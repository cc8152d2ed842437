"""Where instructions come from: stacks of source lines, parts of the model, passes. Total time: one second."""

from collections import Counter

import pytest

from slicewise.compile import hlo
from slicewise.compile.places import PASSES, origin, pass_of, places

HEAD = """HloModule jit_update, is_scheduled=true

FileNames
1 "/src/slicewise/model/linear.py"
2 "/src/slicewise/model/layers.py"
3 "/site-packages/optax/_src/update.py"

FunctionNames
1 "linear"
2 "mlp"
3 "apply"

FileLocations
1 {file_name_id=3 function_name_id=3 line=7}
2 {file_name_id=2 function_name_id=2 line=60}
3 {file_name_id=1 function_name_id=1 line=19}

StackFrames
%s

ENTRY %%main (p: f32[8]) -> f32[8] {
  %%p = f32[8]{0} parameter(0)
  ROOT %%add.1 = f32[8]{0} add(%%p, %%p), metadata={op_name="jit(update)/jvp()/add" stack_frame_id=3}
}
"""
PLUS_ONE = """1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}"""
PLAIN = """1 {file_location_id=1 parent_frame_id=0}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=2}"""


@pytest.mark.parametrize("frames", [PLUS_ONE, PLAIN])
def test_a_stack_is_whole_whichever_way_its_parents_are_numbered(frames):
    module = hlo.parse(HEAD % frames)
    assert [f.function for f in module.frames(3)] == ["linear", "mlp", "apply"]
    add = module.entry.instructions["add.1"]
    assert origin(module, add) == ("jit(update)/jvp()/add", "model/layers.py:60")  # plumbing says less
    assert places(module, "update")["add.1"] == ("mlp", "forward")


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(update)/jvp()/while/body/dot_general", "forward"),
        ("jit(update)/transpose(jvp())/while/body/checkpoint/dot_general", "backward"),
        ("jit(update)/transpose(jvp())/while/body/checkpoint/rematted_computation/exp", "recomputed"),
        ("jit(update)/add", "update"),
        ("", "update"),
    ],
)
def test_passes_are_told_from_the_name_of_the_operation(op_name, expected):
    i = hlo.Instruction("x", "add", "f32[]", "", f'metadata={{op_name="{op_name}"}}')
    assert pass_of(i) == expected


@pytest.mark.parametrize("name", ["tiny_v5e", "tiny_v5p_two_slices", "too_large_v5e"])
def test_what_the_compiler_added_to_a_loop_belongs_to_the_pass_of_the_loop(compiled_step, name):
    step = compiled_step(name)
    module = step.module
    for loop in (i for i in module.entry.instructions.values() if i.opcode == "while"):
        body = module.computations[loop.attribute("body").lstrip("%")]
        found = Counter(step.places[i][1] for i in body.instructions)
        assert "update" not in found
        silent = [i.name for i in body.instructions.values() if not i.op_name and i.opcode != "fusion"]
        assert {step.places[i][1] for i in silent} <= {found.most_common(1)[0][0]}


def test_a_program_without_a_backward_pass_has_one_pass(compiled_step):
    step = compiled_step("tiny_v5e_decode")
    assert {of_pass for _, of_pass in step.places.values()} == {"forward"}
    assert {part for part, _ in step.places.values()} >= {"attention", "mlp", "output", "embedding"}


def test_every_instruction_has_a_place(compiled_step):
    step = compiled_step("tiny_v5e")
    names = {i for c in step.module.computations.values() for i in c.instructions}
    assert step.places.keys() == names
    assert {of_pass for _, of_pass in step.places.values()} <= set(PASSES)
    assert all((part == "optimizer") == (of_pass == "update") for part, of_pass in step.places.values())
