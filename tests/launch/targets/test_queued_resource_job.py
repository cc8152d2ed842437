"""Jobs on queued resources of the emulator: real processes, real training, slices that are really taken away."""

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from slicewise.checkpoint.manifest import complete_steps
from slicewise.errors import ExitCode
from slicewise.launch.emulator import local as emulator
from slicewise.launch.job_folder import JobFolder
from slicewise.launch.policy import Fault

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS, EVERY = 40, 8
CONFIG = f"""
[run]
steps = {STEPS}
[model]
model = "demo-tiny"
compute_dtype = "float32"
[data]
dataset = "synthetic"
sequence_length = 32
global_batch_size = 4
[checkpoint]
checkpoint_every = {EVERY}
[evaluation]
eval_batches = 0
[metrics]
tensorboard = false
"""


class Cloud:
    """An emulator, a state directory, and the command in processes of its own."""

    def __init__(self, folder, cache):
        self.folder, self.emulator = folder, folder / "emulator"
        self.environment = os.environ | {
            "XDG_STATE_HOME": str(folder / "state"),
            "SLICEWISE_EMULATOR": str(self.emulator),
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "COLUMNS": "200",
        }
        (folder / "run.toml").write_text(CONFIG)
        self.state = None

    def slicewise(self, *words, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "slicewise", *map(str, words)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def submit(self, name, *more):
        kind = ("--target", "queued-resource", "--type", "v5litepod-1", "--slices", 2)
        overrides = (f"run_name={name}",)
        return self.slicewise("job", "submit", "run.toml", *overrides, *kind, *more)

    def job(self, name):
        return JobFolder(str(self.folder / "runs" / name / "job"))

    def status(self, name):
        return json.loads(self.slicewise("job", "status", name, "--json"))

    def losses(self, name):
        """{step: loss}; of steps done twice the last counts."""
        lines = (self.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
        records = map(json.loads, lines)
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    def queued_resources(self):
        return emulator.control(self.state, "status")["queued_resources"]

    def supervisor_log(self, name):
        return (self.folder / "state" / "slicewise" / "jobs" / f"{name}.log").read_text()


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cloud")
    cache = tmp_path_factory.mktemp("compiled")
    made = Cloud(folder, cache)
    with emulator_environment(made.environment), emulator.started(made.emulator) as state:
        made.state = state
        yield made


@contextlib.contextmanager
def emulator_environment(environment):
    """VMs inherit the cache of compiled programs from the emulator, and the emulator from here."""
    before = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = environment["JAX_COMPILATION_CACHE_DIR"]
    yield
    if before is None:
        del os.environ["JAX_COMPILATION_CACHE_DIR"]
    else:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = before


def eventually(condition, why=lambda: "", timeout_s=90.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"did not happen in time: {why()}"
        time.sleep(0.02)


def ended(cloud, name):
    job = cloud.job(name)
    submission = job.spec().submission
    eventually(lambda: job.result(submission), lambda: cloud.supervisor_log(name))
    return job.result(submission)


def checkpoint_is_there(cloud, name):
    return bool(complete_steps(str(cloud.folder / "runs" / name / "checkpoints")))


def test_training_goes_on_by_itself_and_exactly_when_a_slice_is_preempted(cloud):
    hold_s = 2.0
    cloud.submit("calm")
    assert ended(cloud, "calm").state == "done"
    undisturbed = cloud.losses("calm")
    assert sorted(undisturbed) == list(range(1, STEPS + 1))

    cloud.submit("torn", "--spot", "--max-failures", "0")
    eventually(lambda: checkpoint_is_there(cloud, "torn"), lambda: cloud.supervisor_log("torn"))
    emulator.control(cloud.state, "inject", fault="preempt", node="torn-1", hold_s=hold_s)
    capacity_back_s = time.monotonic() + hold_s
    job = cloud.job("torn")
    eventually(lambda: (current := job.current()) and current.attempt == 2 and job.progress(2))
    assert time.monotonic() - capacity_back_s < 30
    result = ended(cloud, "torn")
    assert (result.state, result.attempt) == ("done", 2)
    assert cloud.losses("torn") == undisturbed
    assert job.attempt_ending(1).fault == Fault.PREEMPTION
    assert cloud.status("torn")["preemptions"] == 1
    eventually(lambda: not cloud.queued_resources(), lambda: cloud.queued_resources())
    assert b"resumes after step" in job.log(2, "s0h0")
    assert f"step {STEPS}/{STEPS}" in cloud.slicewise("job", "logs", "torn")
    assert f"step {STEPS}/{STEPS}" not in cloud.slicewise("job", "logs", "torn", "--attempt", "1")


def test_a_suspended_queued_resource_is_asked_for_anew_and_the_job_resumes(cloud):
    cloud.submit("spot", "--spot")
    eventually(lambda: checkpoint_is_there(cloud, "spot"), lambda: cloud.supervisor_log("spot"))
    emulator.control(cloud.state, "inject", fault="preempt", node="spot-0", suspend=True)
    result = ended(cloud, "spot")
    assert (result.state, result.attempt) == ("done", 2)
    log = cloud.supervisor_log("spot")
    assert "spot is SUSPENDED by the service" in log or "spot is SUSPENDING by the service" in log
    assert log.count("asked for 2 x v5litepod-1") == 2


def test_a_job_that_waits_for_slices_can_be_cancelled_and_leaves_none(cloud):
    emulator.control(cloud.state, "capacity", family="v5litepod", chips=0)
    try:
        cloud.submit("queued")
        eventually(lambda: "WAITING_FOR_RESOURCES" in str(cloud.queued_resources()))
        assert cloud.status("queued")["state"] == "waiting"
        cloud.slicewise("job", "cancel", "queued")
        assert ended(cloud, "queued").state == "cancelled"
        eventually(lambda: not cloud.queued_resources(), lambda: cloud.queued_resources())
        assert "is cancelled already" in cloud.slicewise("job", "cancel", "queued", code=ExitCode.CONFLICT)
    finally:
        emulator.control(cloud.state, "capacity", family="v5litepod", chips=64)


def test_a_second_job_in_the_same_run_is_refused_while_the_first_goes_on(cloud):
    emulator.control(cloud.state, "capacity", family="v5litepod", chips=0)
    try:
        cloud.submit("twice")
        more = ("--target", "queued-resource", "--type", "v5litepod-1", "--slices", 2, "--name", "other")
        said = cloud.slicewise("job", "submit", "run.toml", "run_name=twice", *more, code=ExitCode.CONFLICT)
        assert "job 'twice' goes on in" in said
        cloud.slicewise("job", "cancel", "twice")
        assert ended(cloud, "twice").state == "cancelled"
    finally:
        emulator.control(cloud.state, "capacity", family="v5litepod", chips=64)


def test_what_the_api_refuses_is_said_at_once_with_its_exit_code(cloud):
    emulator.control(cloud.state, "error", code="PERMISSION_DENIED", times=1)
    more = ("--target", "queued-resource", "--type", "v5litepod-1", "--slices", 2)
    said = cloud.slicewise("job", "submit", "run.toml", "run_name=denied", *more, code=ExitCode.DENIED)
    assert "PERMISSION_DENIED" in said
    assert not (cloud.folder / "runs" / "denied").exists()
