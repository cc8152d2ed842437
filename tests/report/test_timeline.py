"""The predicted timeline: nested, whole, and in forms that Perfetto and xprof open. Total time: two seconds."""

import gzip
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.compile.schedule import CORE
from slicewise.errors import ExitCode, UserError
from slicewise.report import timeline, xplane

NAMES = ("tiny_v5e", "tiny_v5p_two_slices", "tiny_v5e_decode", "too_large_v5e")


def of_track(step, track):
    return sorted(
        (s for s in timeline.slices(step) if s.track == track), key=lambda s: (s.start_ns, -s.end_ns)
    )


@pytest.mark.parametrize("name", NAMES)
def test_slices_of_a_track_lie_one_behind_or_inside_the_other(compiled_step, name):
    step = compiled_step(name)
    for track in timeline.tracks(step):
        open_until = []
        for s in of_track(step, track):
            assert 0 <= s.start_ns <= s.end_ns
            while open_until and open_until[-1] <= s.start_ns:
                open_until.pop()
            assert not open_until or s.end_ns <= open_until[-1], s
            if track != timeline.LAYERS and s.start_ns < s.end_ns:
                assert not open_until, s
            open_until.append(s.end_ns)


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_on_a_track_within_the_step(compiled_step, name):
    step = compiled_step(name)
    found = timeline.slices(step)
    assert {s.track for s in found} == set(timeline.tracks(step))
    last = max(s.end_ns for s in found if s.track != timeline.track_name("copies"))
    assert last == pytest.approx(1e9 * step.replay.seconds, rel=0.02)
    (whole,) = of_track(step, timeline.STEPS)
    assert (whole.start_ns, whole.end_ns) == (0, round(1e9 * step.replay.seconds))


def test_layers_are_nested_loop_over_round_over_part(compiled_step):
    layers = of_track(compiled_step("tiny_v5e"), timeline.LAYERS)
    loop = next(s for s in layers if s.name == "forward layers x 2")
    rounds = [s for s in layers if s.name.startswith("forward layers ") and s.name.endswith(" of 2")]
    assert [s.name for s in rounds] == ["forward layers 1 of 2", "forward layers 2 of 2"]
    assert rounds[0].start_ns == loop.start_ns
    assert rounds[0].end_ns == rounds[1].start_ns
    assert rounds[1].end_ns == loop.end_ns
    for one in rounds:
        inside = [s.name for s in layers if one.start_ns <= s.start_ns and s.end_ns <= one.end_ns]
        assert {"forward attention", "forward mlp"} <= set(inside)


def test_rounds_beyond_those_recorded_are_one_slice(compiled_step):
    layers = of_track(compiled_step("too_large_v5e"), timeline.LAYERS)
    loop = next(s for s in layers if s.name == "forward layers x 32")
    rest = next(s for s in layers if s.name == f"forward layers 3 to 32, {timeline.ALIKE}")
    second = next(s for s in layers if s.name == "forward layers 2 of 32")
    assert rest.start_ns == second.end_ns
    assert rest.end_ns == loop.end_ns
    assert (rest.end_ns - rest.start_ns) / 30 == pytest.approx(second.end_ns - second.start_ns, rel=0.05)


def test_links_network_host_and_copies_have_tracks_of_their_own(compiled_step):
    assert {"ICI x+", "ICI x-", "ICI y+", "ICI y-"} <= set(timeline.tracks(compiled_step("tiny_v5e")))
    two = timeline.tracks(compiled_step("tiny_v5p_two_slices"))
    assert {"DCN", "Host link, out", "Host link, in", "Copies between memories"} <= set(two)
    assert two[:4] == ["Steps", "XLA Modules", "Layers", "XLA Ops"]


def test_an_operation_says_where_it_comes_from(compiled_step):
    ops = of_track(compiled_step("tiny_v5e"), timeline.OPS)
    product = max(ops, key=lambda s: s.details.get("flops", 0))
    assert product.details["kind"] in ("matmul", "attention")
    assert product.details["tf_op"].startswith("jit(update)")
    assert product.details["source"].partition(":")[0].endswith(".py")
    assert product.details["time from"] == "fitted rates"
    waits = [s for s in ops if s.details["kind"] == "wait"]
    assert waits
    assert all(s.name.startswith("wait for ") for s in waits)


def test_memory_over_time_rises_to_the_peak_of_the_schedule(compiled_step):
    step = compiled_step("tiny_v5e")
    points = timeline.memory_over_time(step)
    assert [t for t, _ in points] == sorted(t for t, _ in points)
    assert max(b for _, b in points) == max(b for _, b in step.memory.over_schedule)
    assert 0 < points[-1][0] <= step.replay.seconds


@pytest.mark.parametrize("name", NAMES)
def test_the_chrome_trace_has_the_fields_that_perfetto_reads(compiled_step, name):
    step = compiled_step(name)
    trace = json.loads(json.dumps(timeline.chrome(step), allow_nan=False))
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert all(isinstance(e["pid"], int) and isinstance(e["name"], str) for e in events)
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = [e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"]
    assert list(threads.values()) == timeline.tracks(step)
    assert order == sorted(order)
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(timeline.slices(step))
    for e in complete:
        assert e["tid"] in threads
        assert e["ts"] >= 0
        assert e["dur"] >= 0
        assert all(isinstance(v, str | int | float) for v in e["args"].values())
    assert all(isinstance(e["args"]["GiB"], float) for e in events if e["ph"] == "C")
    assert trace["otherData"]["depth"] == "schedule"


def test_files_are_written_by_suffix(compiled_step, tmp_path):
    step = compiled_step("tiny_v5e")
    plain = json.loads((tmp_path / timeline.write(step, str(tmp_path / "a.json"))).read_text())
    packed = tmp_path / timeline.write(step, str(tmp_path / "plugins/profile/run/a.json.gz"))
    assert json.loads(gzip.decompress(packed.read_bytes())) == plain == timeline.chrome(step)


@pytest.mark.filterwarnings("ignore:builtin type event_stats:DeprecationWarning")
def test_the_profile_for_xprof_holds_the_same_slices(compiled_step, tmp_path):
    from jax.profiler import ProfileData

    step = compiled_step("tiny_v5p_two_slices")
    path = timeline.write(step, str(tmp_path / "plugins/profile/predicted/slicewise.xplane.pb"))
    profile = ProfileData.from_file(path)  # whatever is read of it dies with it
    (plane,) = profile.planes
    assert plane.name == "/device:TPU:0"
    lines = {line.name: list(line.events) for line in plane.lines}
    assert list(lines) == timeline.tracks(step)
    for track, events in lines.items():
        mine = of_track(step, track)
        assert [(e.name, e.start_ns, e.duration_ns) for e in events] == [
            (s.name, s.start_ns, s.end_ns - s.start_ns) for s in mine
        ]
    event, mine = lines[timeline.OPS][5], of_track(step, timeline.OPS)[5]
    assert dict(event.stats) == {k: v if isinstance(v, str) else round(v) for k, v in mine.details.items()}


@given(st.integers(0, 2**70))
def test_numbers_are_written_in_groups_of_seven_bits(value):
    data = xplane._varint(value)
    assert sum((byte & 0x7F) << (7 * k) for k, byte in enumerate(data)) == value
    assert [byte >> 7 for byte in data] == [1] * (len(data) - 1) + [0]


@pytest.mark.parametrize("name", ["trace", "trace.txt", "trace.pb", "trace.gz", ".json", "folder/.json.gz"])
def test_other_names_are_refused_with_those_that_are_known(name):
    with pytest.raises(
        UserError, match=r"expected a name that ends with \.json, \.json\.gz, \.xplane\.pb"
    ) as e:
        timeline.check_path(name)
    assert e.value.code == ExitCode.USER


def test_a_place_that_cannot_be_written_is_said(compiled_step, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--trace .*file/a.json") as e:
        timeline.write(compiled_step("tiny_v5e_decode"), str(tmp_path / "file" / "a.json"))
    assert e.value.code == ExitCode.USER


def test_a_step_without_loops_has_parts_only(compiled_step):
    step = compiled_step("tiny_v5e")
    flat = [s for s in step.replay.spans if s.track != timeline.LOOPS and s.depth == 0]
    layers = of_track(replace(step, replay=replace(step.replay, spans=tuple(flat))), timeline.LAYERS)
    assert layers
    assert not any(s.holds_others for s in layers)
    core_s = sum(s.seconds for s in flat if s.track == CORE)
    assert sum(s.end_ns - s.start_ns for s in layers) >= 1e9 * core_s * 0.99
