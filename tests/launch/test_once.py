"""Agents whose gang the platform restarts, as real processes: what JobSet's pods run."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from slicewise.errors import ExitCode
from slicewise.launch.job_folder import JobFolder, JobSpec
from slicewise.launch.policy import Budgets, Fault, Tally, Watch

pytestmark = pytest.mark.multiprocess

SUBMISSION = "c" * 12
TRAINER = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["SLICEWISE_PROCESS_ID"]), int(os.environ["SLICEWISE_ATTEMPT"])
def emit(**event):
    os.write(int(os.environ["SLICEWISE_EVENTS_FD"]), (json.dumps(event) + "\\n").encode())
emit(event="step", step=attempt, steps=9)
"""


class Pods:
    def __init__(self, folder):
        self.folder, self.job, self.processes = folder, JobFolder(str(folder / "job")), []

    def submit(self, body, **more):
        trainer = self.folder / "trainer.py"
        trainer.write_text(TRAINER + textwrap.dedent(body))
        self.job.submit(
            JobSpec(
                name="demo",
                submission=SUBMISSION,
                target="jobset",
                command=(str(trainer),),
                config="",
                slices=2,
                hosts_per_slice=1,
                watch=Watch(failure_grace_s=0.4),
                **more,
            )
        )

    def start(self, slice_id, restart=0, **more):
        """As the manifest does."""
        environment = os.environ | {
            "JOB_COMPLETION_INDEX": "0",
            "SLICEWISE_SLICE": str(slice_id),
            "SLICEWISE_RESTART": str(restart),
            "SLICEWISE_JOBSET": "demo",
            "SLICEWISE_COORDINATOR": "demo-slice-0-0.demo:8482",
            **more,
        }
        command = ["-m", "slicewise.launch.agent", "--job", self.job.root, "--submission", SUBMISSION]
        process = subprocess.Popen(
            [sys.executable, *command, "--on", "jobset"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, restart=0):
        """Exit codes of all pods of one restart."""
        started = [self.start(slice_id, restart) for slice_id in range(2)]
        for process in started:
            process.communicate(timeout=180)
        return [process.returncode for process in started]


@pytest.fixture
def pods(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    made = Pods(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


def test_pods_end_with_the_code_that_the_platform_is_to_act_on(pods):
    pods.submit("""
        if attempt == 1:
            os._exit(75) if rank else time.sleep(600)
        print(os.environ["SLICEWISE_COORDINATOR"])
    """)
    assert pods.run() == [ExitCode.RESTART, ExitCode.RESTART]
    assert pods.job.result(SUBMISSION) is None
    assert pods.run(restart=1) == [0, 0]
    assert pods.job.result(SUBMISSION).state == "done"
    assert pods.job.current().tally == Tally(preemptions=1)
    assert b"demo-slice-0-0.demo:8482" in pods.job.log(2, "s1h0")


def test_a_pod_that_fails_because_of_wrong_input_elsewhere_says_so_whichever_the_platform_sees_first(pods):
    pods.submit("""
        if rank:
            emit(event="error", code=2, message="loss is nan")
        os.abort()
    """)
    assert pods.run() == [ExitCode.USER, ExitCode.USER]
    assert pods.job.result(SUBMISSION).fault == Fault.USER


def test_the_job_is_not_done_before_all_of_its_pods_are(pods):
    pods.submit("""
        while rank and not os.path.exists(os.path.join(os.path.dirname(sys.argv[0]), "go")):
            time.sleep(0.02)
    """)
    first, second = pods.start(0), pods.start(1)
    while not ((claim := pods.job.current()) and any(r.kind == "ended" for r in pods.job.reports(claim))):
        time.sleep(0.02)
    assert pods.job.result(SUBMISSION) is None
    (pods.folder / "go").write_text("")
    assert [first.wait(120), second.wait(120)] == [0, 0]
    assert pods.job.result(SUBMISSION).state == "done"


def test_a_pod_left_over_from_an_earlier_restart_stops_its_trainer(pods):
    pods.submit("time.sleep(600 if attempt == 1 else 0)", budgets=Budgets(failures=0))
    old = [pods.start(slice_id) for slice_id in range(2)]
    while not all(b"step" in pods.job.log(1, place) for place in ("s0h0", "s1h0")):
        time.sleep(0.02)
    assert pods.run(restart=1) == [0, 0]
    for process in old:
        assert "a later attempt has begun" in process.communicate(timeout=120)[0]
        assert process.returncode == ExitCode.DONE
    late = pods.start(1, restart=0)
    assert "restart 1 of the gang has begun, this is 0" in late.communicate(timeout=120)[0]


def test_a_cancelled_job_is_asked_to_save(pods):
    pods.submit("""
        signal.signal(signal.SIGTERM, lambda *_: os._exit(76))
        print("ready", flush=True)
        time.sleep(600)
    """)

    def cancel():
        while not all(b"ready" in pods.job.log(1, place) for place in ("s0h0", "s1h0")):
            time.sleep(0.02)
        pods.job.ask_to_cancel(SUBMISSION)

    thread = threading.Thread(target=cancel)
    thread.start()
    assert pods.run() == [ExitCode.PREEMPTED, ExitCode.PREEMPTED]
    thread.join()
    assert pods.job.result(SUBMISSION).state == "cancelled"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is '', expected a number"),
        ({"SLICEWISE_SLICE": "7"}, "this machine is host 0 of slice 7"),
        ({"SLICEWISE_RESTART": "x"}, "SLICEWISE_RESTART='x'"),
        ({"SLICEWISE_COORDINATOR": ""}, "SLICEWISE_COORDINATOR=''"),
    ],
)
def test_a_pod_without_its_labels_says_what_is_missing(pods, environment, said):
    pods.submit("")
    output, _ = (process := pods.start(0, **environment)).communicate(timeout=120)
    assert process.returncode == ExitCode.USER
    assert said in output


def test_a_damaged_job_is_refused_with_its_place(pods):
    pods.submit("")
    document = json.loads((pods.folder / "job" / "job.json").read_text())
    (pods.folder / "job" / "job.json").write_text(json.dumps(document | {"slices": 0}))
    output, _ = (process := pods.start(0)).communicate(timeout=120)
    assert process.returncode == ExitCode.USER
    assert "job.json: slices: Input should be greater than 0" in output
