"""What a schedule could hide, on programs with known answers; the flow against its cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.compile import hlo
from slicewise.compile.hiding import covered, hiding
from slicewise.compile.schedule import Work, replay


def program(*lines):
    body = "\n".join(f"  %{line}" for line in lines)
    return hlo.parse(f"HloModule m\n\nENTRY %main (p: f32[1]) -> f32[1] {{\n{body}\n}}\n")


def of(lines, **works):
    """(what could be hidden, what is), in seconds, of works such as dot=3.0 and of transfers such as ag=(2.0, 'x+')."""

    def describe(module, computation, i):
        work = works.get(i.name.replace("-", "_"))
        if isinstance(work, tuple):
            seconds, *links = work
            return Work(
                "collective", seconds, tuple(links), "fsdp", 1.0, is_start="start" in i.name, op="all-gather"
            )
        return Work("matmul", work) if work else None

    module = program(*lines)
    (found,) = hiding(module, describe, replay(module, describe).totals.waited)
    return found.could_s, found.hidden_s


GATHERED = (
    "ag-start = f32[1] all-gather-start(%p)",
    "{first} = f32[1] dot(%p, %p)",
    "ag-done = f32[1] all-gather-done(%ag-start)",
    "{second} = f32[1] dot(%ag-done, %{first})",
)


def test_only_what_neither_feeds_a_collective_nor_waits_for_it_could_hide_it():
    lines = [line.format(first="a", second="b") for line in GATHERED]
    assert of(lines, ag_start=(5.0, "x+"), a=2.0, b=9.0) == (2.0, 2.0)
    behind = ["a = f32[1] dot(%p, %p)", "ag = f32[1] all-gather(%a)", "b = f32[1] dot(%ag, %p)"]
    assert of(behind, ag=(5.0, "x+"), a=2.0, b=9.0) == (0.0, 0.0)


def test_a_synchronous_collective_could_be_hidden_by_independent_work_and_is_not():
    lines = ["ag = f32[1] all-gather(%p)", "a = f32[1] dot(%p, %p)", "b = f32[1] add(%ag, %a)"]
    assert of(lines, ag=(5.0, "x+"), a=7.0) == (5.0, 0.0)


@pytest.mark.parametrize(("link", "could_s"), [("x+", 3.0), ("y+", 6.0)])
def test_work_hides_two_collectives_at_once_only_where_they_share_no_link(link, could_s):
    lines = [
        "ag-start = f32[1] all-gather-start(%p)", "rs-start = f32[1] all-gather-start(%p)",
        "a = f32[1] dot(%p, %p)",
        "ag-done = f32[1] all-gather-done(%ag-start)", "rs-done = f32[1] all-gather-done(%rs-start)",
        "b = f32[1] add(%ag-done, %rs-done)",
    ]  # fmt: skip
    assert of(lines, ag_start=(5.0, "x+"), rs_start=(5.0, link), a=3.0) == pytest.approx((could_s, could_s))


def test_fusions_that_carry_a_collective_on_could_hide_it():
    lines = [
        "ag-start = (f32[1], u32[]) all-gather-start(%p)",
        "state = f32[1] get-tuple-element(%ag-start), index=0",
        "a = f32[1] dot(%p, %state)",
        "ag-done = f32[1] all-gather-done(%state)",
    ]
    assert of(lines, ag_start=(5.0, "x+"), a=3.0) == (3.0, 3.0)


def test_between_slices_what_waits_for_the_receipt_could_not_hide_the_sending():
    said = ', frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.9_0",x="y"}'
    lines = [
        f"send = (f32[1], u32[]) send(%p){said}", f"recv = (f32[1], u32[]) recv(%p){said}",
        "a = f32[1] dot(%p, %p)",
        "send-done = token[] send-done(%send)", "recv-done = (f32[1], token[]) recv-done(%recv)",
        "b = f32[1] dot(%recv-done, %a)",
    ]  # fmt: skip

    def describe(module, computation, i):
        if i.opcode in ("send", "recv"):
            return Work("collective", 5.0 if i.opcode == "send" else 0.0, ("dcn",), "dcn data", is_start=True)
        return {"a": Work("matmul", 2.0), "b": Work("matmul", 9.0)}.get(i.name)

    module = program(*lines)
    (found,) = hiding(module, describe, replay(module, describe).totals.waited)
    assert found.most_s == {"send": 2.0}


@st.composite
def problems(draw):
    names = "abcd"[: draw(st.integers(1, 4))]
    seconds = {n: draw(st.floats(0.1, 9)) for n in names}
    subsets = [s for k in range(1, len(names) + 1) for s in itertools.combinations(names, k)]
    chosen = draw(st.lists(st.sampled_from(subsets), unique=True, max_size=6))
    return seconds, {s: draw(st.floats(0.1, 9)) for s in chosen}


@given(problems())
def test_the_flow_is_its_least_cut(problem):
    seconds, pools = problem
    found = covered(seconds, pools)
    assert all(-1e-9 <= found[n] <= seconds[n] + 1e-9 for n in seconds)
    cuts = []
    for k in range(len(seconds) + 1):
        for inside in itertools.combinations(
            seconds, k
        ):  # cut at the pools that reach these, and at the others
            reached = sum(s for pool, s in pools.items() if set(pool) & set(inside))
            cuts.append(reached + sum(s for n, s in seconds.items() if n not in inside))
    assert sum(found.values()) == pytest.approx(min(cuts))


def test_offloaded_activations_travel_beside_compute(compiled_step):
    step = compiled_step("tiny_v5p_two_slices")
    totals = step.replay.totals
    assert totals.communication["host"] > 0
    assert totals.exposed["host"] < totals.communication["host"] / 3  # of steps of microseconds


def test_a_compiled_step_says_what_it_could_hide_and_what_it_waits_for(compiled_step):
    step = compiled_step("tiny_v5p_two_slices")
    assert 0 < step.hideable_s < 1.001 * sum(c.seconds for c in step.communication)
    assert 0 <= step.hidden_share <= 1
    exposed = sum(c.exposed_s for c in step.communication)
    assert sum(e.seconds for e in step.exposed) == pytest.approx(exposed)
