import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import ExitCode
from slicewise.launch.policy import Budgets, Fault, Restart, Stop, Tally, Watch, decide, fault_of
from slicewise.launch.watchdog import Watchdog

FAULTS = st.sampled_from([Fault.FAILURE, Fault.RESTART, Fault.PREEMPTION])


@given(st.integers(0, 6), st.integers(0, 6), st.lists(FAULTS, max_size=30))
def test_a_job_ends_after_exactly_as_many_restarts_of_each_kind_as_it_may_have(failures, preemptions, faults):
    budgets, tally = Budgets(failures=failures, preemptions=preemptions), Tally()
    for number, fault in enumerate(faults):
        before = faults[:number]
        decision = decide(fault, ExitCode.INTERNAL, tally, budgets)
        own = sum((f == Fault.FAILURE) == (fault == Fault.FAILURE) for f in before)
        assert isinstance(decision, Stop) == (own >= (failures if fault == Fault.FAILURE else preemptions))
        if isinstance(decision, Stop):
            assert decision.code == (ExitCode.INTERNAL if fault == Fault.FAILURE else ExitCode.PREEMPTED)
            assert "--max-" in decision.why
            return
        tally = decision.tally
    assert tally.failures == sum(f == Fault.FAILURE for f in faults)
    assert tally.failures + tally.preemptions == len(faults)


@given(st.integers(0, 100))
def test_tries_after_failures_wait_longer_up_to_a_minute_and_others_begin_at_once(used):
    tally, budgets = Tally(used, used), Budgets(failures=1000, preemptions=1000)
    failed = decide(Fault.FAILURE, 1, tally, budgets)
    assert isinstance(failed, Restart)
    assert failed.delay_s == min(60.0, 2.0**used)
    taken = decide(Fault.PREEMPTION, 76, tally, budgets)
    assert isinstance(taken, Restart)
    assert taken.delay_s == 0


@pytest.mark.parametrize(
    ("code", "fault"),
    [(0, Fault.NONE), (2, Fault.USER), (75, Fault.RESTART), (76, Fault.PREEMPTION), (1, Fault.FAILURE)],
)
def test_exit_codes_say_what_happened(code, fault):
    assert fault_of(code) == fault


@given(st.integers(-64, 255).filter(lambda code: code not in (0, 2, 75, 76)))
def test_every_other_end_is_a_failure_and_its_code_is_one_of_the_table(code):
    assert fault_of(code) == Fault.FAILURE
    stop = decide(Fault.FAILURE, code, Tally(), Budgets(failures=0))
    assert isinstance(stop, Stop)
    assert stop.code in list(ExitCode)
    assert stop.code != ExitCode.DONE


def test_wrong_input_and_cancellation_end_a_job_whatever_its_budgets():
    assert decide(Fault.USER, 2, Tally(), Budgets()) == Stop(ExitCode.USER, "the same input would fail again")
    assert decide(Fault.CANCELLED, 143, Tally(), Budgets()) == Stop(143, "")
    assert decide(Fault.NONE, 0, Tally(9, 9), Budgets()) == Stop(0, "")


# ---------------------------------------------------------------- watchdog


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_a_worker_has_the_time_to_start_and_then_the_time_from_step_to_step():
    clock = Clock()
    dog = Watchdog(Watch(start_timeout_s=100, stall_timeout_s=10), clock=clock)
    clock.now_s = 60
    dog.saw({"event": "phase", "name": "compile"})
    clock.now_s = 159
    assert dog.latest() == (0, 1)
    assert dog.reason() == "made no progress for 100 s, before its first step"
    dog.saw({"event": "step", "step": 1, "steps": 9})
    clock.now_s = 169
    assert dog.latest()[1] == 0
    assert dog.reason() == "made no progress for 10 s, since step 1"


def test_errors_and_foreign_events_are_no_progress():
    clock = Clock()
    dog = Watchdog(Watch(start_timeout_s=100), clock=clock)
    clock.now_s = 50
    for event in ({"event": "error"}, {"event": "other"}, {}):
        dog.saw(event)
    assert dog.latest()[1] == 50


def test_the_latest_worker_decides_and_finished_ones_do_not_count():
    clock = Clock()
    dog = Watchdog(Watch(start_timeout_s=100), 3, clock=clock)
    clock.now_s = 10
    dog.saw({"event": "phase"}, 0)
    dog.saw({"event": "phase"}, 2)
    assert dog.latest() == (1, 90)
    dog.finished(1)
    assert dog.latest()[1] == 100
    dog.finished(0)
    dog.finished(2)
    assert dog.latest()[1] == float("inf")
