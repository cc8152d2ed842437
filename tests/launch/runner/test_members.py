import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import ExitCode
from slicewise.launch.runner.members import Clock, Member, State, exit_code, failures, names, verdict
from slicewise.launch.workers import Worker


def member(index, state=State.DONE, code=0, ended=0.0, ahead=0.0, **more):
    made = Member(Worker(index // 4, index % 4, f"h{index}", 22, "u", None, None), index)
    made.state, made.code, made.ended_there_s, made.clock.ahead_s = state, code, ended, ahead
    for key, value in more.items():
        setattr(made, key, value)
    return made


def test_clocks_that_differ_do_not_change_the_order_of_failures():
    late = member(0, State.FAILED, 3, ended=100.0, ahead=-50.0)
    early = member(1, State.FAILED, 4, ended=200.0, ahead=80.0)
    assert failures([late, early]) == [early, late]
    assert exit_code([late, early], None) == 4


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=9))
def test_the_quickest_exchange_tells_the_clock_to_half_its_length(ahead, delays):
    clock, now = Clock(), 1e6
    for there, back in delays:
        clock.exchanged(now, now + there + ahead, now + there + back)
        now += 10
    assert abs(clock.ahead_s - ahead) <= min(a + b for a, b in delays) / 2 + 1e-6


@pytest.mark.parametrize(
    ("members", "asked", "code"),
    [
        ([member(0), member(1)], None, 0),
        ([member(0), member(1, State.FAILED, 5)], None, 5),
        ([member(0, State.LOST, None, None, lost_s=1.0), member(1, State.FAILED, 5, 2.0)], None, 69),
        ([member(0, State.FAILED, 134, 1.0, error={"code": 75}, error_there_s=0.5)], None, 75),
        ([member(0, State.FAILED, 134, 1.0, error={"code": "x"}, error_there_s=0.5)], None, 134),
        ([member(0), member(1, State.STOPPED, 143)], signal.SIGINT, 130),
        ([member(0, code=ExitCode.PREEMPTED), member(1)], signal.SIGTERM, ExitCode.PREEMPTED),
        ([member(0), member(1)], signal.SIGTERM, 0),
        ([member(0, State.FAILED, 127, None, problem="x", lost_s=1.0)], None, 127),
    ],
)
def test_exit_codes(members, asked, code):
    assert exit_code(members, asked) == code


def test_names_are_short_whatever_the_number():
    assert names([member(i) for i in (0, 1, 2, 5, 7)]) == "slice 0 workers 0-2, slice 1 workers 1, 3"
    assert names([member(i) for i in range(400)]).endswith(
        "slice 7 workers 0-3 and workers of 92 more slices"
    )


def test_consequences_of_one_kind_share_a_line_and_the_cause_is_last():
    cause = member(9, State.FAILED, 7, 1.0)
    cause.output.feed(b"the reason\n")
    others = [member(i, State.FAILED, 134, 2.0, killed=True) for i in range(8)]
    stuck = member(10, State.STOPPED, 137, 3.0, left=[77])
    lines = verdict([*others, cause, stuck])
    assert lines == [
        "slice 2 worker 2: could not be killed: pid 77",
        "slice 0 workers 0-3, slice 1 workers 0-3 was killed by SIGABRT (a consequence)",
        "stopped as a consequence: slice 2 worker 2",
        "first failure: slice 2 worker 1 (h9) exited with code 7",
        "its last 1 lines:",
        "  the reason",
    ]
    assert verdict([member(0)]) == []


def test_one_that_said_why_is_not_followed_by_its_log():
    cause = member(
        0, State.FAILED, 2, error={"code": 2, "message": "steps must be positive"}, error_there_s=0.0
    )
    cause.output.feed(b"chatter\n")
    assert (
        verdict([cause])[-1]
        == "first failure: slice 0 worker 0 (h0) exited with code 2: steps must be positive"
    )


def test_one_that_printed_nothing_says_so():
    assert verdict([member(0, State.FAILED, 3, log_path="a.log")])[-1] == "it printed nothing (a.log)"
