"""Agents as real processes on this machine, with trainers that are small scripts, and faults that are real."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from processes import is_alive
from slicewise.errors import ExitCode
from slicewise.launch.job_folder import JobFolder, JobSpec
from slicewise.launch.leader import Ended, judge
from slicewise.launch.policy import Budgets, Fault, Tally, Watch

PREAMBLE = """
import faulthandler, json, os, signal, sys, time
rank, attempt = int(os.environ["SLICEWISE_PROCESS_ID"]), int(os.environ["SLICEWISE_ATTEMPT"])
def emit(**event):
    os.write(int(os.environ["SLICEWISE_EVENTS_FD"]), (json.dumps(event) + "\\n").encode())
emit(event="step", step=attempt, steps=9)
"""
SUBMISSION = "a" * 12


class GangOfAgents:
    def __init__(self, folder):
        self.folder = folder
        self.job = JobFolder(str(folder / "run" / "job"))
        self.processes = {}
        self.trainer = folder / "trainer.py"

    def submit(self, body, slices=2, **more):
        self.trainer.write_text(PREAMBLE + textwrap.dedent(body))
        spec = JobSpec(
            name="test",
            submission=SUBMISSION,
            target="queued-resource",
            command=(str(self.trainer),),
            config="",
            slices=slices,
            hosts_per_slice=1,
            **more,
        )
        watch = spec.watch.model_copy(update={"failure_grace_s": 0.4})
        spec = spec.model_copy(update={"watch": watch})
        self.job.submit(spec)
        return spec

    def start(self, slice_id, submission=SUBMISSION, **options):
        place = ("--slice", str(slice_id), "--host", "0", "--address", "127.0.0.1")
        command = [sys.executable, "-m", "slicewise.launch.agent", "--job", self.job.root, *place]
        log = (self.folder / f"agent-{slice_id}.log").open("a")
        with log:
            process = subprocess.Popen(
                [*command, "--submission", submission],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **options,
            )
        self.processes.setdefault(slice_id, []).append(process)
        return process

    def start_all(self, slices=2):
        return [self.start(slice_id) for slice_id in range(slices)]

    def codes(self, timeout_s=180):
        """Exit codes of all agents."""
        deadline_s = time.monotonic() + timeout_s
        every = [process for started in self.processes.values() for process in started]
        return [process.wait(max(0.1, deadline_s - time.monotonic())) for process in every]

    def log(self, slice_id):
        return (self.folder / f"agent-{slice_id}.log").read_text()

    def steps_seen(self, attempt):
        progress = self.job.progress(attempt)
        return progress is not None

    def close(self):
        for started in self.processes.values():
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()


@pytest.fixture
def gang(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    agents = GangOfAgents(tmp_path)
    yield agents
    agents.close()


def eventually(condition, timeout_s=120.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.05)


multiprocess = pytest.mark.multiprocess


@multiprocess
def test_agents_start_together_restart_by_code_and_end_with_the_code_of_the_job(gang):
    spec = gang.submit("""
        print("rank", rank, "of", os.environ["SLICEWISE_NUM_PROCESSES"], os.environ["SLICEWISE_COORDINATOR"])
        sys.stdout.flush()
        if attempt == 1:
            os._exit(1) if rank else time.sleep(600)
    """)
    gang.start_all()
    assert gang.codes() == [0, 0], gang.log(0)
    result = gang.job.result(SUBMISSION)
    assert (result.state, result.attempt, gang.job.current().tally) == ("done", 2, Tally(failures=1))
    assert gang.job.attempt_ending(1).why == "s1h0: exited with code 1"
    assert b"rank 1 of 2 127.0.0.1:" in gang.job.log(2, spec.place(1))
    assert b"step 2/9" in gang.job.log(2, spec.place(1))


@multiprocess
def test_wrong_input_is_not_tried_again(gang):
    gang.submit("""
        if rank:
            emit(event="error", code=2, message="loss is nan")
            os.abort()
        time.sleep(600)
    """)
    gang.start_all()
    assert gang.codes() == [ExitCode.USER, ExitCode.USER], gang.log(0)
    assert gang.job.result(SUBMISSION).why == "s1h0: loss is nan; the same input would fail again"
    assert gang.job.current().attempt == 1


@multiprocess
def test_a_lost_machine_costs_a_preemption_and_no_failure_and_the_gang_waits_for_its_successor(gang):
    gang.submit("if attempt == 1: time.sleep(600)", budgets=Budgets(failures=0))
    first = gang.start_all()
    eventually(lambda: gang.job.progress(1) and b"step" in gang.job.log(1, "s1h0"))
    os.killpg(first[1].pid, signal.SIGKILL)  # its trainer dies with it
    gang.start(1)
    assert gang.codes() == [0, -signal.SIGKILL, 0], gang.log(0)
    ending = gang.job.attempt_ending(1)
    assert (ending.fault, ending.why) == (Fault.PREEMPTION, "lost s1h0")
    assert gang.job.current().tally == Tally(preemptions=1)


@multiprocess
def test_a_lost_leader_is_followed_by_the_next_agent_of_its_place(gang):
    gang.submit("if attempt == 1: time.sleep(600)", budgets=Budgets(failures=0))
    first = gang.start_all()
    eventually(lambda: gang.job.progress(1) and b"step" in gang.job.log(1, "s1h0"))
    os.killpg(first[0].pid, signal.SIGKILL)
    gang.start(0)
    assert gang.codes() == [-signal.SIGKILL, 0, 0], gang.log(0)
    assert gang.job.attempt_ending(1).why == (
        "s0h0 was lost, or restarted as all machines are when a slice is replaced"
    )
    assert gang.job.result(SUBMISSION).attempt == 2


@multiprocess
@pytest.mark.parametrize("place", [0, 1])
def test_a_stale_agent_that_wakes_up_stops_its_trainer(gang, place):
    """As a machine does that was cut off, given up, replaced, and comes back."""
    gang.submit("""
        open(os.path.join(os.path.dirname(sys.argv[0]), f"pid-{attempt}-{rank}"), "w").write(str(os.getpid()))
        if attempt == 1:
            time.sleep(600)
        deadline = time.time() + 300
        while not os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "go")) and time.time() < deadline:
            time.sleep(0.05)
    """)
    first = gang.start_all()
    marker = gang.folder / f"pid-1-{place}"
    eventually(lambda: marker.exists() and marker.read_text() and b"step" in gang.job.log(1, "s1h0"))
    trainer = int(marker.read_text())
    for pid in (first[place].pid, trainer):
        os.kill(pid, signal.SIGSTOP)
    gang.start(place)
    eventually(lambda: gang.steps_seen(2))
    for pid in (trainer, first[place].pid):  # the agent last: awake, it ends the trainer
        os.kill(pid, signal.SIGCONT)
    assert first[place].wait(120) == ExitCode.DONE
    eventually(lambda: not is_alive(trainer))
    assert "another one has taken the place" in gang.log(place)
    (gang.folder / "go").write_text("")
    assert sorted(gang.codes()) == [0, 0, 0]
    assert gang.job.result(SUBMISSION).attempt == 2


@multiprocess
def test_a_stuck_trainer_shows_its_stacks_and_the_gang_is_started_again(gang):
    gang.submit(
        """
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        def waits_for_ever():
            time.sleep(600)
        if attempt == 1:
            waits_for_ever()
        """,
        watch=Watch(stall_timeout_s=2.0),
    )
    gang.start_all()
    assert gang.codes() == [0, 0], gang.log(0)
    assert "made no progress for 2 s, since step 1" in gang.job.attempt_ending(1).why
    assert b"in waits_for_ever" in gang.job.log(1, "s0h0") + gang.job.log(1, "s1h0")
    assert gang.job.current().tally == Tally(failures=1)


@multiprocess
def test_a_cancelled_job_saves_everywhere_and_agents_end(gang):
    gang.submit("""
        signal.signal(signal.SIGTERM, lambda *_: os._exit(76))
        time.sleep(600)
    """)
    gang.start_all()
    eventually(lambda: gang.job.progress(1) and b"step" in gang.job.log(1, "s1h0"))
    gang.job.ask_to_cancel(SUBMISSION)
    assert gang.codes() == [ExitCode.PREEMPTED] * 2, gang.log(0)
    assert gang.job.result(SUBMISSION).state == "cancelled"


@multiprocess
def test_a_trainer_that_the_platform_and_the_leader_ask_to_stop_is_asked_once(gang):
    """A second SIGTERM would end it before it has saved."""
    gang.submit("""
        def save(*_):
            signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
            time.sleep(2)
            print("saved", flush=True)
            os._exit(76)
        signal.signal(signal.SIGTERM, save)
        time.sleep(60 if attempt == 1 else 0)
    """)
    _, asked = gang.start_all()
    eventually(lambda: gang.job.progress(1) and b"step" in gang.job.log(1, "s1h0"))
    asked.terminate()
    assert asked.wait(20) == ExitCode.PREEMPTED
    assert b"saved" in gang.job.log(1, "s1h0")
    gang.start(1)
    assert gang.codes() == [0, ExitCode.PREEMPTED, 0], gang.log(0)
    assert b"saved" in gang.job.log(1, "s0h0")
    assert gang.job.current().tally == Tally(preemptions=1)


@multiprocess
def test_agents_stop_when_the_folder_of_the_job_is_deleted(gang):
    gang.submit("time.sleep(600)")
    gang.start_all()
    eventually(lambda: gang.job.progress(1) and b"step" in gang.job.log(1, "s1h0"))
    (gang.folder / "run").rename(gang.folder / "away")
    assert gang.codes() == [ExitCode.DONE] * 2
    assert "is gone" in gang.log(0)
    assert "is gone" in gang.log(1)


@multiprocess
def test_an_agent_of_an_earlier_submission_is_not_wanted(gang):
    gang.submit("")
    assert gang.start(0, submission="b" * 12).wait(120) == 0
    assert "submitted again since" in gang.log(0)
    assert gang.job.current() is None


@multiprocess
def test_an_agent_that_the_job_has_no_place_for_says_so(gang):
    gang.submit("", slices=1)
    assert gang.start(1).wait(120) == ExitCode.USER
    assert "this machine is host 0 of slice 1, but the job was submitted for 1 slices of 1 hosts" in gang.log(
        1
    )


# ---------------------------------------------------------------- elastic jobs

ELASTIC = {"elastic_sizes": (1,), "budgets": Budgets(failures=0)}
ENDS_WITH_TWO = """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(76))
    print("rank", rank, "of", os.environ["SLICEWISE_NUM_SLICES"], os.environ["SLICEWISE_ALL_SLICES"], flush=True)
    print("at", os.environ["SLICEWISE_PLACE"], flush=True)
    if attempt == 1 or os.environ["SLICEWISE_NUM_SLICES"] == "1":
        time.sleep(60)
"""


@multiprocess
def test_an_elastic_gang_goes_on_without_a_lost_slice_and_grows_when_it_is_back(gang):
    gang.submit(ENDS_WITH_TWO, watch=Watch(replacement_wait_s=1.0), **ELASTIC)
    first = gang.start_all()
    eventually(lambda: b"rank 1 of 2 2" in gang.job.log(1, "s1h0") and gang.job.progress(1))
    os.killpg(first[1].pid, signal.SIGKILL)
    kill_trainer(first[0])
    eventually(lambda: b"rank 0 of 1 2" in gang.job.log(2, "s0h0"), 60)
    gang.start(1)
    assert gang.codes() == [0, -signal.SIGKILL, 0], gang.log(0)
    endings = [gang.job.attempt_ending(n) for n in (1, 2, 3)]
    assert [ending.fault for ending in endings] == [Fault.PREEMPTION, Fault.RESTART, Fault.NONE]
    assert b"rank 1 of 2 2\nat s1h0" in gang.job.log(3, "s1h0")


@multiprocess
def test_when_the_leader_of_an_elastic_gang_is_lost_a_deputy_leads_until_it_is_back(gang):
    gang.submit(ENDS_WITH_TWO, watch=Watch(replacement_wait_s=1.0), **ELASTIC)
    first = gang.start_all()
    eventually(lambda: b"rank 1 of 2 2" in gang.job.log(1, "s1h0") and gang.job.progress(1))
    os.killpg(first[0].pid, signal.SIGKILL)
    kill_trainer(first[1])
    eventually(lambda: b"rank 0 of 1 2\nat s1h0" in gang.job.log(2, "s1h0"), 60)
    assert "nobody leads: s1h0 does from now on" in gang.log(1)
    assert gang.job.attempt_ending(1).why.startswith("the leader was lost, or restarted")
    gang.start(0)
    assert gang.codes() == [-signal.SIGKILL, 0, 0], gang.log(0) + gang.log(1)
    result = gang.job.result(SUBMISSION)
    assert (result.state, result.attempt) == ("done", 3)
    assert b"rank 0 of 2 2\nat s0h0" in gang.job.log(3, "s0h0")


def kill_trainer(agent):
    """It dies, as one does whose peer is gone."""
    for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
        if b"trainer.py" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)


# ---------------------------------------------------------------- judging


def ended(code, at=1.0, **more):
    return Ended(code, at, "what it said", **more)


@pytest.mark.parametrize(
    ("reports", "lost", "fault", "why"),
    [
        ({"s0h0": ended(0), "s1h0": ended(0)}, [], Fault.NONE, ""),
        ({"s0h0": ended(1, 9.0), "s1h0": ended(1, 8.0)}, [], Fault.FAILURE, "s1h0: what it said"),
        ({"s0h0": ended(1)}, ["s1h0"], Fault.PREEMPTION, "lost s1h0"),
        ({"s0h0": ended(2)}, ["s1h0"], Fault.USER, "s0h0: what it said"),
        (
            {"s0h0": ended(1, 8.0), "s1h0": ended(76, 9.0, asked=True)},
            [],
            Fault.PREEMPTION,
            "the platform stopped s1h0",
        ),
        ({"s0h0": ended(75), "s1h0": ended(1, 2.0)}, [], Fault.RESTART, "s0h0: what it said"),
        (
            {"s0h0": ended(1, 1.0, stopped=True), "s1h0": ended(1, 2.0)},
            [],
            Fault.FAILURE,
            "s1h0: what it said",
        ),
        ({"s0h0": ended(0), "s1h0": ended(1, stopped=True)}, [], Fault.FAILURE, "some trainers did not end"),
        ({}, [f"s{n}h0" for n in range(6)], Fault.PREEMPTION, "lost s0h0, s1h0, s2h0, s3h0 and 2 more"),
    ],
)
def test_the_cause_is_wrong_input_else_a_lost_machine_else_the_first_failure(reports, lost, fault, why):
    verdict = judge(reports, lost)
    assert verdict.fault == fault
    assert verdict.why.startswith(why)
