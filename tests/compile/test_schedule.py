"""The replay on schedules with known answers, and its bounds on any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.compile import hlo
from slicewise.compile.schedule import COPY, CORE, FROM_HOST, TO_HOST, Work, replay


def module(lines: list[str], rounds: int | None = None) -> hlo.Module:
    """A program of ``lines``; with ``rounds`` they are the body of a loop."""
    body = "\n".join(f"  %{line}" for line in lines)
    if rounds is None:
        return hlo.parse(f"HloModule m\n\nENTRY %main (p: f32[1]) -> f32[1] {{\n{body}\n}}\n")
    return hlo.parse(
        f"HloModule m\n\n%body (t: (s32[])) -> (s32[]) {{\n  %t = (s32[]) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n  %one = s32[] constant(1)\n"
        f"{body}\n  %next = s32[] add(%i, %one)\n  ROOT %r = (s32[]) tuple(%next)\n}}\n\n"
        "%condition (c: (s32[])) -> pred[] {\n  %c = (s32[]) parameter(0)\n"
        f"  %j = s32[] get-tuple-element(%c), index=0\n  %n = s32[] constant({rounds})\n"
        "  ROOT %less = pred[] compare(%j, %n), direction=LT\n}\n\n"
        "ENTRY %main (p: f32[1]) -> f32[1] {\n  %zero = s32[] constant(0)\n  %first = (s32[]) tuple(%zero)\n"
        "  ROOT %loop = (s32[]) while(%first), condition=%condition, body=%body\n}\n"
    )


def describe(works: dict[str, Work]):
    return lambda module, computation, instruction: works.get(instruction.name)


def compute(seconds: float) -> Work:
    return Work("matmul", seconds)


def transfer(seconds: float, *resources: str, starts: bool = True, label: str = "fsdp") -> Work:
    return Work("collective", seconds, resources or ("x+",), label, 1.0, is_start=starts)


ONE = [
    "ag-start = f32[1] all-gather-start(%p)",
    "dot = f32[1] dot(%p, %p)",
    "ag-done = f32[1] all-gather-done(%ag-start)",
]


@pytest.mark.parametrize(("gather_s", "step_s", "exposed_s"), [(2.0, 3.0, 0.0), (5.0, 5.0, 2.0)])
def test_a_transfer_behind_compute_shows_only_what_compute_does_not_cover(gather_s, step_s, exposed_s):
    played = replay(module(ONE), describe({"ag-start": transfer(gather_s), "dot": compute(3.0)}))
    assert played.seconds == pytest.approx(step_s)
    assert played.totals.exposed.get("fsdp", 0.0) == pytest.approx(exposed_s)
    assert played.totals.communication["fsdp"] == gather_s


def test_what_is_waited_for_is_known_by_instruction_and_kind():
    lines = ["ag = f32[1] all-gather(%p)", *ONE]
    works = {
        "ag": transfer(2.0, starts=False),
        "ag-start": transfer(5.0, label="fsdp"),
        "dot": compute(3.0),
    }
    assert replay(module(lines, 4), describe(works)).totals.waited == {
        ("ag", True): pytest.approx(8.0),
        ("ag-start", False): pytest.approx(8.0),
    }


def test_a_synchronous_collective_is_exposed_whole():
    lines = ["ag = f32[1] all-gather(%p)", "dot = f32[1] dot(%ag, %p)"]
    played = replay(module(lines), describe({"ag": transfer(2.0, starts=False), "dot": compute(3.0)}))
    assert played.seconds == pytest.approx(5.0)
    assert played.totals.exposed["fsdp"] == pytest.approx(2.0)


def test_transfers_on_one_axis_queue_and_on_two_axes_do_not():
    lines = [
        "a-start = f32[1] all-gather-start(%p)", "b-start = f32[1] all-gather-start(%p)",
        "a-done = f32[1] all-gather-done(%a-start)", "b-done = f32[1] all-gather-done(%b-start)",
    ]  # fmt: skip
    same = replay(module(lines), describe({"a-start": transfer(1.0, "x+"), "b-start": transfer(1.0, "x+")}))
    apart = replay(module(lines), describe({"a-start": transfer(1.0, "x+"), "b-start": transfer(1.0, "y+")}))
    assert (same.seconds, apart.seconds) == (pytest.approx(2.0), pytest.approx(1.0))


def test_copies_to_the_host_share_the_link_and_the_way_back_is_free():
    lines = [
        "a-start = f32[1] copy-start(%p)", "b-start = f32[1] copy-start(%p)", "c-start = f32[1] copy-start(%p)",
        "a-done = f32[1] copy-done(%a-start)", "b-done = f32[1] copy-done(%b-start)",
        "c-done = f32[1] copy-done(%c-start)",
    ]  # fmt: skip

    def host(seconds: float, link: str) -> Work:
        return Work("host copy", seconds, (link,), "host", 1.0, is_start=True)

    works = {"a-start": host(1.0, TO_HOST), "b-start": host(3.0, TO_HOST), "c-start": host(4.0, FROM_HOST)}
    played = replay(module(lines), describe(works))
    waits = [s for s in played.spans if s.track == CORE]
    assert waits[0].seconds == pytest.approx(2.0)  # the short one has half of the link
    assert played.seconds == pytest.approx(4.0)


def test_a_done_finds_its_start_through_tuples():
    lines = [
        "s = (f32[1], f32[1]) all-gather-start(%p)", "e = f32[1] get-tuple-element(%s), index=1",
        "d = f32[1] all-gather-done(%e)",
    ]  # fmt: skip
    assert replay(module(lines), describe({"s": transfer(2.0)})).seconds == pytest.approx(2.0)


@given(rounds=st.integers(1, 60), gather_s=st.floats(0.1, 9), dot_s=st.floats(0.1, 9))
def test_a_long_loop_takes_as_long_as_its_rounds_one_by_one(rounds, gather_s, dot_s):
    works = {"ag-start": transfer(gather_s), "dot": compute(dot_s)}
    played = replay(module(ONE, rounds), describe(works))
    assert played.seconds == pytest.approx(rounds * max(gather_s, dot_s))
    assert played.totals.busy[CORE] == pytest.approx(rounds * dot_s)


TRACKS = ("x+", "y+", COPY)


@st.composite
def schedules(draw):
    lines, works, open_starts = [], {}, []
    for k in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["compute", "start", "done", "sync"]))
        seconds = draw(st.floats(0.01, 5))
        if kind == "compute":
            lines.append(f"op{k} = f32[1] dot(%p, %p)")
            works[f"op{k}"] = compute(seconds)
        elif kind == "sync":
            lines.append(f"op{k} = f32[1] all-reduce(%p)")
            works[f"op{k}"] = transfer(seconds, draw(st.sampled_from(TRACKS)), starts=False)
        elif kind == "start":
            lines.append(f"op{k} = f32[1] all-gather-start(%p)")
            works[f"op{k}"] = transfer(seconds, draw(st.sampled_from(TRACKS)))
            open_starts.append(f"op{k}")
        elif open_starts:
            lines.append(f"op{k} = f32[1] all-gather-done(%{open_starts.pop(0)})")
    lines += [f"end{n} = f32[1] all-gather-done(%{name})" for n, name in enumerate(open_starts)]
    return lines or ["op = f32[1] dot(%p, %p)"], works


@given(schedules())
def test_never_faster_than_the_busiest_resource_nor_slower_than_all_in_turn(schedule):
    lines, works = schedule
    played = replay(module(lines), describe(works))
    everything = sum(w.seconds for w in works.values())
    assert played.seconds <= everything + 1e-9
    for resource in (CORE, *TRACKS):
        assert played.seconds >= played.totals.busy.get(resource, 0.0) - 1e-9
    exposed = sum(played.totals.exposed.values()) + played.totals.busy.get(CORE, 0.0)
    assert played.seconds == pytest.approx(exposed)
