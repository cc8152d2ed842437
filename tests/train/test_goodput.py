"""Every second of a run has a place: stamps of trainers and launchers, whatever cut them short."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import ExitCode, UserError
from slicewise.train import goodput
from slicewise.train.goodput import CATEGORIES, STATES, Restart, Stamp, account, parse, read
from slicewise.train.goodput_log import FILE, START, LaunchLog, Ledger, append, process_began_us

S = 1_000_000


class Clock:
    def __init__(self):
        self.us = 0

    def __call__(self):
        return self.us


class Run:
    """Stamps at whole seconds."""

    def __init__(self):
        self.stamps = []

    def launcher(self, at_s, start, state):
        self.stamps.append(Stamp(at_s * S, "launcher", start, state))
        return self

    def trainer(self, at_s, start, state, step=None, data_s=0, from_step=None):
        self.stamps.append(Stamp(at_s * S, "trainer", start, state, step, data_s * S, from_step))
        return self


def killed_and_restarted():
    """Steps 1 to 10 of 1 s, a save after 6, killed in step 11; resumed from 6 and done after 12."""
    run = Run().launcher(0, "a", "start").trainer(1, "a", "imports").trainer(4, "a", "join")
    run.trainer(5, "a", "compile").trainer(15, "a", "prepare").trainer(16, "a", "step", from_step=0)
    run.trainer(17, "a", "step", 1).trainer(23, "a", "save", 6, data_s=1).trainer(24, "a", "step")
    run.trainer(28, "a", "step", 10).launcher(29, "a", "stop").trainer(30, "a", "wait").launcher(
        32, "a", "delay"
    )
    run.launcher(33, "b", "start").trainer(34, "b", "imports").trainer(37, "b", "join")
    run.trainer(38, "b", "restore").trainer(40, "b", "compile").trainer(42, "b", "prepare")
    run.trainer(43, "b", "step", from_step=6).trainer(45, "b", "step", 7).trainer(50, "b", "finish", 12)
    return run.trainer(52, "b", "done").launcher(53, "b", "done")


def test_a_killed_run_has_lost_the_steps_that_were_taken_again():
    found = account(killed_and_restarted().stamps)
    seconds = {name: us // S for name, us in found.parts_us.items() if us}
    assert seconds == {
        "step": 1 + 5 + 7,  # 1 to 6 but for the wait, and 7 to 12
        "data": 1,
        "checkpoint": 1,
        "init": 1 + 3 + 1 + 1,
        "compile": 10 + 2,
        "restore": 2,
        "lost": 4 + 1,  # steps 7 to 10, and the one that nobody saw end
        "restart": 3 + 1 + 1 + 3 + 1 + 1,
        "end": 3,
    }
    assert sum(seconds.values()) * S == found.wall_us == 53 * S
    assert (found.starts, found.steps, found.lost_steps) == (2, 12, 4)
    assert found.goodput == 13 / 53


def test_a_restart_is_broken_down_from_the_end_of_training_to_the_end_of_its_first_step():
    phases = {"stop": 3, "delay": 1, "start": 1, "imports": 3, "join": 1, "restore": 2, "compile": 2, "prepare": 1,
              "first step": 2}  # fmt: skip
    expected = Restart(1, 1, 6, {name: seconds * S for name, seconds in phases.items()})
    assert account(killed_and_restarted().stamps).restarts == (expected,)
    assert expected.total_us == 16 * S


def test_a_run_that_goes_back_by_itself_has_lost_the_steps_after():
    run = Run().trainer(0, "a", "step", from_step=0).trainer(1, "a", "step", 1).trainer(9, "a", "restore", 9)
    run.trainer(10, "a", "step", from_step=5).trainer(11, "a", "step", 6).trainer(20, "a", "done", 15)
    found = account(run.stamps)
    assert found.lost_steps == 4
    assert (found.parts_us["lost"], found.parts_us["step"], found.parts_us["restore"]) == (
        4 * S,
        15 * S,
        1 * S,
    )
    assert found.restarts == ()


def test_starts_that_fail_before_their_first_step_belong_to_one_restart():
    run = killed_and_restarted()
    run.stamps[13:13] = (
        Run().launcher(33, "x", "start").trainer(33, "x", "imports").launcher(33, "x", "stop").stamps
    )
    (restart,) = account(run.stamps).restarts
    assert (restart.starts, restart.from_step) == (2, 6)


def test_what_a_stuck_trainer_did_not_do_is_the_time_until_somebody_noticed():
    run = Run().launcher(0, "a", "start").trainer(0, "a", "step", from_step=0).trainer(2, "a", "step", 1)
    found = account(run.launcher(60, "a", "stop").launcher(61, "a", "delay").stamps)
    assert found.parts_us["lost"] == 2 * S + 1 * S  # a step of 2 s, begun up to a second after the last stamp
    assert [(s.phase, s.duration_us) for s in found.segments if s.category == "restart"] == [
        ("detect", 55 * S),
        ("stop", 1 * S),
    ]


def test_without_a_launcher_the_time_after_a_kill_is_waiting_for_somebody():
    run = Run().trainer(0, "a", "step", from_step=0).trainer(1, "a", "step", 1)
    found = account(run.trainer(100, "b", "imports").trainer(101, "b", "step", from_step=0).stamps)
    assert found.parts_us["waiting"] == (100 - 1 - 2) * S
    assert found.parts_us["lost"] == (1 + 2) * S


def test_time_after_the_end_is_not_the_runs():
    run = Run().trainer(0, "a", "step", from_step=0).trainer(5, "a", "finish", 5).trainer(6, "a", "done")
    found = account(run.trainer(1000, "b", "imports").trainer(1002, "b", "done").stamps)
    assert found.wall_us == 8 * S


def test_a_trainer_that_goes_on_after_its_gang_has_failed_is_not_heard():
    run = Run().launcher(0, "a", "start").launcher(5, "a", "stop").trainer(6, "a", "save", 3)
    found = account(run.launcher(8, "a", "delay").trainer(9, "a", "step", 4).launcher(9, "b", "start").stamps)
    assert found.parts_us["checkpoint"] == 0
    assert found.parts_us["restart"] == (3 + 1) * S


times = st.integers(0, 10**13)
steps = st.none() | st.integers(0, 10**6)
stamps = st.builds(
    Stamp, times, st.sampled_from(["launcher", "trainer"]), st.sampled_from("abc"), st.sampled_from(sorted(STATES)),
    steps, st.integers(0, 10**9), steps,
)  # fmt: skip


@pytest.mark.parametrize(
    "damage",
    [
        {"at": float("inf")},
        {"at": -(10**23)},
        {"at": 10**23},
        {"step": 10**20},
        {"from": -3},
        {"data_us": float("inf")},
        {"step": float("nan")},
        {"at": None},
    ],
)
def test_stamps_with_numbers_that_cannot_be_are_passed_over(damage):
    good = {"at": 5, "by": "trainer", "start": "a", "state": "step"}
    lines = [json.dumps(line) for line in (good, good | damage, good | {"at": 9})]
    assert [stamp.at_us for stamp in parse(lines)] == [5, 9]


def test_the_log_itself_instead_of_its_folder_is_not_found(tmp_path):
    append(tmp_path, {"at": 5, "by": "trainer", "start": "a", "state": "step"})
    with pytest.raises(UserError, match="expected the folder of a run") as found:
        read(tmp_path / "goodput.jsonl")
    assert found.value.code == ExitCode.NOT_FOUND


@given(st.lists(stamps, max_size=30), st.booleans())
def test_parts_add_up_to_the_wall_time_whatever_the_stamps(made, in_order):
    made = sorted(made, key=lambda s: s.at_us) if in_order else made
    found = account(made)
    assert found.parts_us.keys() == CATEGORIES.keys()
    assert sum(found.parts_us.values()) == found.wall_us
    assert all(us >= 0 for us in found.parts_us.values())
    heard = list(goodput._in_order(made))
    launched = {s.start for s in heard if s.by == "launcher"}
    after_end = sum(
        then.at_us - one.at_us
        for one, then in itertools.pairwise(heard)
        if one.state == "done" and (one.by == "launcher" or one.start not in launched)
    )
    assert found.wall_us == (heard[-1].at_us - heard[0].at_us if heard else 0) - after_end
    for one, then in itertools.pairwise(found.segments):
        assert one.end_us <= then.begin_us
    assert all(sum(r.phases_us.values()) == r.total_us <= found.wall_us for r in found.restarts)


# ---------------------------------------------------------------- the file


@pytest.fixture
def clock():
    return Clock()


def test_a_trainer_and_its_launcher_share_one_file(tmp_path, clock):
    launch = LaunchLog(tmp_path / "run")
    environment = launch.begin() | {"SLICEWISE_PROCESS_ID": "0"}
    with Ledger(tmp_path / "run", environment, clock=clock, began_us=0) as ledger:
        ledger.now("step", from_step=4)
        clock.us = 100
        ledger.waited(60)
        ledger.stepped(5)
        clock.us = 2 * S
        ledger.stepped(6)
        ledger.stepped(7)
        ledger.now("save")
        ledger.is_complete = True
    launch.stamp("done")
    found = read(tmp_path / "run")
    assert {stamp.start for stamp in found} == {environment[START]}
    shown = [(s.by, s.state, s.step, s.data_us, s.from_step) for s in found]
    assert shown == [
        ("launcher", "start", None, 0, None),
        ("trainer", "imports", None, 0, None),
        ("trainer", "step", None, 0, 4),
        ("trainer", "step", 6, 40, None),
        ("trainer", "save", 7, 0, None),
        ("trainer", "done", None, 0, None),
        ("launcher", "done", None, 0, None),
    ]


def test_only_the_first_process_writes_and_it_may_learn_late_that_it_is_the_first(tmp_path, clock):
    for number, is_first in enumerate((False, True)):
        with Ledger(tmp_path / str(number), {}, clock=clock) as ledger:
            ledger.now("join")
            assert not (tmp_path / str(number)).exists()
            ledger.joined(is_first)
            ledger.is_complete = True
    assert not (tmp_path / "0").exists()
    assert [s.state for s in read(tmp_path / "1")] == ["imports", "join", "done"]


def test_a_trainer_that_fails_says_that_it_waits(tmp_path, clock):
    with pytest.raises(KeyError), Ledger(tmp_path, {"SLICEWISE_PROCESS_ID": "0"}, clock=clock):
        raise KeyError
    assert read(tmp_path)[-1].state == "wait"


def test_what_a_full_disk_or_a_kill_cut_off_costs_one_stamp(tmp_path):
    stamp = {"at": 1, "by": "trainer", "start": "a", "state": "join"}
    append(tmp_path, stamp)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"at": 2, "by": "tra')
    append(tmp_path, {**stamp, "at": 3})
    assert [s.at_us for s in read(tmp_path)] == [1, 3]
    line = json.dumps(stamp)
    torn = [
        line[:9] + line,
        "[]",
        "null",
        '{"at": null}',
        '{"at": 5, "by": "x", "start": "y", "state": "dance"}',
    ]
    assert [s.at_us for s in parse(torn)] == [1]


def test_a_file_that_cannot_be_written_is_said_once_and_training_goes_on(tmp_path, clock):
    (tmp_path / "run").write_text("in the way")
    said = []
    with Ledger(tmp_path / "run", {"SLICEWISE_PROCESS_ID": "0"}, clock=clock) as ledger:
        ledger.warn = said.append
        ledger.now("join")
    assert len(said) == 1
    assert "has a gap from here on" in said[0]
    LaunchLog(tmp_path / "run").begin()
    assert LaunchLog(None).begin().keys() == {START}


def test_a_folder_without_stamps_is_refused(tmp_path):
    with pytest.raises(UserError, match="expected the folder of a run") as caught:
        read(tmp_path)
    assert caught.value.code == ExitCode.NOT_FOUND
    (tmp_path / FILE).write_text("\n")
    with pytest.raises(UserError, match="holds no stamp"):
        read(tmp_path)


def test_a_process_knows_when_it_began():
    assert process_began_us(lambda: 10**18) < 10**18
