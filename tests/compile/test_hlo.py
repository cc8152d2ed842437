"""The reader of scheduled programs, on text that the compiler could have written."""
# ruff: noqa: E501  (the compiler's lines)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.compile import hlo

PROGRAM = """\
HloModule jit_update, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

FileNames
1 "/site/slicewise/model/layers.py"
2 "/site/slicewise/train/step.py"

FunctionNames
1 "mlp"
2 "build_train_step.<locals>.update"

FileLocations
1 {file_name_id=1 function_name_id=1 line=61 end_line=61 column=4 end_column=40}
2 {file_name_id=2 function_name_id=2 line=89 end_line=89 column=4 end_column=40}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}


%add.step (param_0: s32[], param_1: s32[]) -> s32[] {
  %param_0 = s32[]{:T(128)} parameter(0)
  %param_1 = s32[]{:T(128)} parameter(1)
  ROOT %add.9 = s32[]{:T(128)} add(%param_0, %param_1)
}

%body (wide: (s32[], f32[8])) -> (s32[], f32[8]) {
  %wide = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%wide), index=0
  %x = f32[8]{0:T(128)} get-tuple-element(%wide), index=1
  %step = s32[]{:T(128)} constant(2)
  %kernel.1 = f32[8]{0:T(128)S(1)} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"note\\": \\"a } brace\\"}"
}}, metadata={op_name="jit(update)/batch[\\'tokens\\']/mul" stack_frame_id=2}
  %next = s32[]{:T(128)} fusion(%counter, %step), kind=kLoop, calls=%add.step
  ROOT %out = (s32[]{:T(128)}, f32[8]{0:T(128)}) tuple(%next, %kernel.1)
}

%condition (carried: (s32[], f32[8])) -> pred[] {
  %carried = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%carried), index=0
  %limit = s32[]{:T(128)} constant(LIMIT)
  ROOT %less = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0)
  %zero = s32[]{:T(128)} constant(START)
  %start = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) tuple(%zero, %p)
  %loop = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[8]{0:T(128)} get-tuple-element(%loop), index=1, backend_config={"window_config":{"estimated_cycles":"123"}}
}
"""


def program(start: int = 0, limit: int = 10) -> hlo.Module:
    return hlo.parse(PROGRAM.replace("LIMIT", str(limit)).replace("START", str(start)))


def test_computations_keep_the_order_of_the_schedule():
    module = program()
    assert list(module.computations) == ["add.step", "body", "condition", "main"]
    assert list(module.entry.instructions) == ["p", "zero", "start", "loop", "result"]
    assert module.entry.root.name == "result"


def test_attributes_may_span_lines_and_hold_brackets_in_quotes():
    kernel = program().computations["body"].instructions["kernel.1"]
    assert kernel.attribute("custom_call_target") == '"tpu_custom_call"'
    assert "block_q" in kernel.attributes
    assert kernel.op_name == "jit(update)/batch['tokens']/mul"
    assert kernel.operands == ("x",)
    assert list(program().computations["body"].instructions)[-2:] == ["next", "out"]


def test_shapes_tell_memory_spaces_and_bytes():
    body = program().computations["body"]
    assert body.instructions["kernel.1"].shape == (hlo.Array("f32", (8,), hlo.VMEM, (0,)),)
    assert body.instructions["out"].shape[1].bytes == 32
    packed = hlo.arrays("(s4[3]{0}, pred[], f8e4m3fn[2,3]{1,0:T(8,128)S(5)})")
    assert [a.bytes for a in packed] == [1.5, 1, 6]
    assert packed[2].space == hlo.HOST


def test_lines_of_source_are_found_from_the_inside_out():
    module = program()
    frames = module.frames(module.computations["body"].instructions["kernel.1"].frame)
    assert [(f.function, f.line) for f in frames] == [("mlp", 61), ("build_train_step.<locals>.update", 89)]


def test_cycles_are_the_compilers_and_the_largest_integer_is_none():
    assert program().entry.root.estimated_cycles == 123
    text = PROGRAM.replace("123", "9223372036854775807").replace("LIMIT", "1").replace("START", "0")
    assert hlo.parse(text).entry.root.estimated_cycles is None


@given(start=st.integers(-50, 50), limit=st.integers(-50, 200))
def test_a_counting_loop_runs_as_often_as_it_counts(start, limit):
    module = program(start, limit)
    assert hlo.trip_count(module, module.entry, module.entry.instructions["loop"]) == len(
        range(start, limit, 2)
    )


def test_a_loop_up_to_a_number_of_the_device_runs_once():
    text = (
        PROGRAM.replace("constant(LIMIT)", "get-tuple-element(%carried), index=2")
        .replace("f32[8]{0:T(128)})", "f32[8]{0:T(128)}, s32[]{:T(128)})")
        .replace("tuple(%zero, %p)", "tuple(%zero, %p, %rounds)")
        .replace("%start = ", "%rounds = s32[]{:T(128)} parameter(1)\n  %start = ")
    )
    module = hlo.parse(text.replace("START", "0"))
    assert hlo.trip_count(module, module.entry, module.entry.instructions["loop"]) == 1


def test_a_loop_that_does_not_count_is_refused():
    text = (
        PROGRAM.replace("LIMIT", "4")
        .replace("START", "0")
        .replace("fusion(%counter, %step)", "copy(%counter)")
    )
    module = hlo.parse(text)
    with pytest.raises(ValueError, match="loop loop"):
        hlo.trip_count(module, module.entry, module.entry.instructions["loop"])


@pytest.mark.parametrize("text", ["", "garbage", "HloModule empty\n"])
def test_what_is_no_program_is_refused(text):
    with pytest.raises(ValueError, match="program"):
        hlo.parse(text)
