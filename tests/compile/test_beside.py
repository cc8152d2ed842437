"""A compiled step beside the planner's price."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.compile.beside import MEMORY, beside_plan, differences
from slicewise.costs.step import StepEstimate

SECONDS = st.floats(0, 10)
NAMES = st.sampled_from(["matmul", "attention", "memory", "output", "optimizer"])
AXES = st.sampled_from(["fsdp", "tensor", "dcn data", "fsdp x tensor"])
WAITS = ["host copies", "pipeline bubble", "slowest slice"]  # that the planner prices
COMPONENTS = st.sampled_from([n for groups in MEMORY.values() for names in groups for n in names])


@st.composite
def estimates(draw, waits=(*WAITS, "sparsecore")):
    whole = draw(st.dictionaries(AXES, SECONDS))
    return StepEstimate(
        "plan",
        1.0,
        draw(st.dictionaries(NAMES, SECONDS)),
        {axis: s * draw(st.floats(0, 1)) for axis, s in whole.items()},
        whole,
        draw(st.dictionaries(st.sampled_from(waits), SECONDS)),
        draw(st.dictionaries(COMPONENTS, st.integers(0, 2**36).map(float))),
        draw(st.integers(0, 2**36)),
        2**34,
        1,
        1,
        1.0,
        1.0,
    )


@given(estimates(WAITS))
@settings(max_examples=50, deadline=None)
def test_a_step_does_not_differ_from_itself_where_the_planner_has_a_price(estimate):
    lines = differences(estimate, estimate)
    assert {line.name for line in lines} <= {*MEMORY}  # where both use names of their own


@given(estimates(WAITS), estimates())
@settings(max_examples=50, deadline=None)
def test_lines_add_up_to_the_difference_and_the_largest_comes_first(planned, compiled):
    lines = differences(planned, compiled)
    for unit in ("s", "bytes"):
        sizes = [abs(line.difference) for line in lines if line.unit == unit]
        assert sizes == sorted(sizes, reverse=True)
        assert all(sizes)
    seconds = sum(line.difference for line in lines if line.unit == "s")
    total = lambda e: sum(sum(d.values()) for d in (e.compute_s, e.exposed_s, e.other_s))  # noqa: E731
    assert seconds == pytest.approx(total(compiled) - total(planned), abs=1e-9)


def test_what_the_planner_has_no_line_for_is_not_priced():
    base = StepEstimate("plan", 1.0, {}, {}, {"fsdp": 1.0}, {}, {}, 0, 1, 1, 1, 1.0, 1.0)
    other = replace(
        base,
        exposed_s={"fsdp": 0.5, "fsdp x tensor": 0.25},
        communication_s={"fsdp": 2.0, "fsdp x tensor": 1.0},
        other_s={"host copies": 0.1, "sparsecore": 0.2},
    )
    found = {line.name: line for line in differences(base, other)}
    assert found["fsdp exposed"].planned == 0.0
    assert "1.00 s planned, 2.00 s compiled" in found["fsdp exposed"].note
    assert found["fsdp x tensor exposed"].planned is None
    assert found["host copies"].planned == 0.0
    assert found["sparsecore"].planned is None


def test_a_training_step_has_a_price_and_other_programs_a_reason(compiled_step):
    step = compiled_step("tiny_v5e")
    comparison = beside_plan(step.request, step.estimate)
    assert comparison.planned.source == "plan"
    assert comparison.planned.tokens == step.estimate.tokens
    assert comparison.lines
    decode = compiled_step("tiny_v5e_decode")
    other = beside_plan(decode.request, decode.estimate)
    assert other.planned is None
    assert "no decode" in other.reason


def test_a_config_that_cannot_be_priced_gives_the_planners_own_words(compiled_step):
    step = compiled_step("tiny_v5e")
    model = step.request.config.model.model_copy(update={"compute_dtype": "float32"})
    request = replace(step.request, config=step.request.config.model_copy(update={"model": model}))
    comparison = beside_plan(request, step.estimate)
    assert comparison.planned is None
    assert "only bfloat16 steps can be priced" in comparison.reason
