"""Who is to blame, and who only ended at our word."""

import signal
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import ExitCode
from slicewise.launch.runner.course import Course
from slicewise.launch.runner.fleet import Timing
from slicewise.launch.runner.members import Member, State
from slicewise.launch.workers import Worker


def told(ahead_s=0.0, there_s=0.0, back_s=0.0):
    """A course that asks its one worker to stop, the worker, and between which times.

    The worker's clock is ``ahead_s``, known from one exchange, which took ``there_s`` and ``back_s`` on its ways.
    """
    member = Member(Worker(0, 0, "h", 22, "u", None, None), 0, State.RUNNING)
    fleet = SimpleNamespace(members=[member], timing=Timing(), signal=lambda number: None)
    course = Course(fleet, SimpleNamespace(say=lambda line: None), None, None)
    before_s = time.time() - 100
    member.clock.exchanged(before_s, before_s + there_s + ahead_s, before_s + there_s + back_s)
    first_s = time.time()
    course.ask(signal.SIGTERM)
    return course, member, first_s, time.time()


def ends(course, member, at_s, state=State.FAILED, code=143):
    member.state, member.code, member.ended_there_s = state, code, at_s
    course.on_change(member)


@given(st.floats(-1e4, 1e4), st.floats(0, 5), st.floats(0, 5), st.floats(1e-5, 2))
def test_one_that_ends_once_told_is_stopped_however_slow_the_exchange_that_tells_its_clock(
    ahead_s, there_s, back_s, later_s
):
    course, member, _, told_s = told(ahead_s, there_s, back_s)
    ends(course, member, told_s + later_s + ahead_s)
    assert member.state == State.STOPPED


@given(st.floats(-1e4, 1e4), st.floats(0, 5), st.floats(0, 5), st.floats(0.01, 9))
def test_one_that_ended_before_by_more_than_its_clock_may_be_off_has_failed(
    ahead_s, there_s, back_s, earlier_s
):
    course, member, told_s, _ = told(ahead_s, there_s, back_s)
    ends(course, member, told_s - there_s - back_s - earlier_s + ahead_s)
    assert (member.state, member.stopped) == (State.FAILED, False)


@pytest.mark.parametrize(("there_s", "back_s"), [(0.0, 0.0), (0.4, 0.0), (0.0, 0.4)])
def test_one_that_had_raised_before_and_ended_once_told_did_not_end_by_itself(there_s, back_s):
    course, member, _, told_s = told(0.0, there_s, back_s)
    member.traceback_there_s = told_s - 10
    ends(course, member, told_s + 0.01)
    assert (member.state, member.stopped) == (State.FAILED, True)
    assert member.ending == "raised an exception and did not end by itself"


def test_one_that_saves_when_told_is_done():
    course, member, _, told_s = told(0.0, 0.4, 0.0)
    ends(course, member, told_s + 0.01, code=ExitCode.PREEMPTED)
    assert member.state == State.DONE
