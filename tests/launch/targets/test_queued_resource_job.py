"""Jobs on queued resources of the emulator: real processes, real training, slices that are really taken away."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from slicewise.checkpoint.manifest import complete_steps
from slicewise.errors import ExitCode
from slicewise.launch import queued_resources as qr
from slicewise.launch.emulator import local as emulator
from slicewise.launch.job_folder import JobFolder, JobSpec, Superseded
from slicewise.launch.policy import Budgets, Fault, Tally, Watch
from slicewise.launch.targets import queued_resource

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

    def signal_supervisors(self, number):
        """How many of this cloud's jobs still have one. Signal 0 only asks."""
        found = 0
        for path in (self.folder / "state" / "slicewise" / "jobs").glob("*.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(path.read_text())["supervisor"], number)
                found += 1
        return found

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
        try:
            yield made
        finally:
            made.signal_supervisors(signal.SIGKILL)  # of jobs that a failed test has left


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


@contextlib.contextmanager
def few_chips(cloud, number):
    """Jobs that want more than so many chips wait, and what they lose is not replaced, for as long."""
    emulator.control(cloud.state, "capacity", family="v5litepod", chips=number)
    try:
        yield
    finally:
        emulator.control(cloud.state, "capacity", family="v5litepod", chips=64)


def eventually(condition, why=lambda: "", timeout_s=240.0):
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
    cloud.submit("calm")
    eventually(lambda: cloud.job("calm").progress(1), lambda: cloud.supervisor_log("calm"))
    undisturbed_s = time.time() - cloud.job("calm").current().started
    assert ended(cloud, "calm").state == "done"
    undisturbed = cloud.losses("calm")
    assert sorted(undisturbed) == list(range(1, STEPS + 1))

    cloud.submit("torn", "--spot", "--max-failures", "0")
    eventually(lambda: checkpoint_is_there(cloud, "torn"), lambda: cloud.supervisor_log("torn"))
    with few_chips(cloud, 1):
        emulator.control(cloud.state, "inject", fault="preempt", node="torn-1")
        eventually(
            lambda: "slice torn-1 lost" in cloud.supervisor_log("torn"), lambda: cloud.supervisor_log("torn")
        )
    capacity_back_s = time.monotonic()
    job = cloud.job("torn")
    eventually(lambda: (current := job.current()) and current.attempt == 2 and job.progress(2))
    training_again_s = time.monotonic() - capacity_back_s
    print(f"training again {training_again_s:.1f} s after the capacity, at first after {undisturbed_s:.1f} s")
    # of which most is the trainer's own start; a machine busy with other work is slower at that than 10 s
    assert training_again_s < 30 * max(1, undisturbed_s / 10)
    result = ended(cloud, "torn")
    assert (result.state, result.attempt) == ("done", 2)
    assert cloud.losses("torn") == undisturbed
    assert job.attempt_ending(1).fault == Fault.PREEMPTION
    # the leader, of the other slice, was restarted too and cannot know: the supervisor has seen it
    assert job.attempt_ending(1).why == "slice torn-1 lost (PREEMPTED)"
    assert cloud.status("torn")["preemptions"] == 1
    eventually(lambda: not cloud.queued_resources(), lambda: cloud.queued_resources())
    assert b"resumes after step" in job.log(2, "s0h0")
    assert f"step {STEPS}/{STEPS}" in cloud.slicewise("job", "logs", "torn")
    assert f"step {STEPS}/{STEPS}" not in cloud.slicewise("job", "logs", "torn", "--attempt", "1")


def test_a_job_that_waits_for_slices_can_be_cancelled_and_leaves_none(cloud):
    with few_chips(cloud, 0):
        cloud.submit("queued")
        eventually(lambda: "WAITING_FOR_RESOURCES" in str(cloud.queued_resources()))
        assert cloud.status("queued")["state"] == "waiting"
        cloud.slicewise("job", "cancel", "queued")
        assert ended(cloud, "queued").state == "cancelled"
        eventually(lambda: not cloud.queued_resources(), lambda: cloud.queued_resources())
        assert "is cancelled already" in cloud.slicewise("job", "cancel", "queued", code=ExitCode.CONFLICT)


def test_a_second_job_in_the_same_run_is_refused_while_the_first_goes_on(cloud):
    with few_chips(cloud, 0):
        cloud.submit("twice")
        more = ("--target", "queued-resource", "--type", "v5litepod-1", "--slices", 2, "--name", "other")
        said = cloud.slicewise("job", "submit", "run.toml", "run_name=twice", *more, code=ExitCode.CONFLICT)
        assert "job 'twice' goes on in" in said
        cloud.slicewise("job", "cancel", "twice")
        assert ended(cloud, "twice").state == "cancelled"


def test_what_the_api_refuses_is_said_at_once_with_its_exit_code(cloud):
    eventually(lambda: not cloud.signal_supervisors(0))  # else the error may be answered to one
    emulator.control(cloud.state, "error", code="PERMISSION_DENIED", times=1)
    more = ("--target", "queued-resource", "--type", "v5litepod-1", "--slices", 2)
    said = cloud.slicewise("job", "submit", "run.toml", "run_name=denied", *more, code=ExitCode.DENIED)
    assert "PERMISSION_DENIED" in said
    assert not (cloud.folder / "runs" / "denied").exists()


# ---------------------------------------------------------------- with trainers that are small scripts

TRAINER = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["SLICEWISE_PROCESS_ID"]), int(os.environ["SLICEWISE_ATTEMPT"])
def save(*_):
    os._exit(76)
signal.signal(signal.SIGTERM, save)
os.write(int(os.environ["SLICEWISE_EVENTS_FD"]), (json.dumps(dict(event="step", step=1, steps=9)) + "\\n").encode())
print("started", flush=True)
"""


class Supervised:
    """A job that is supervised in a thread of this process."""

    def __init__(self, cloud, name, body, tier="spot", **more):
        self.name, self.lines, self.outcome = name, [], None
        self.on_line = lambda line: None  # called in the supervisor's thread
        script = cloud.folder / f"{name}.py"
        script.write_text(TRAINER + textwrap.dedent(body))
        self.job = cloud.job(name)
        self.spec = JobSpec(
            name=name,
            submission="d" * 12,
            target="queued-resource",
            command=(str(script),),
            config="",
            slices=2,
            hosts_per_slice=1,
            **more,
        )
        self.job.submit(self.spec)
        text = queued_resource.startup_script(self.job.root, self.spec.submission, python=sys.executable)
        request = qr.Request(name, "v5litepod-1", 2, tier=tier, startup_script=text)
        slices = queued_resource.Slices(request, emulator=str(cloud.emulator))
        queued_resource.write_slices(self.job, slices)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        try:
            self.outcome = queued_resource.supervise_slices(self.job, self.spec, self._say)
        except Superseded as newer:
            self.outcome = newer

    def _say(self, line):
        self.lines.append(line)
        self.on_line(line)

    def until_started(self, attempt=1):
        def started():
            return all(b"started" in self.job.log(attempt, place) for place in ("s0h0", "s1h0"))

        eventually(started, lambda: self.lines)

    def ended(self):
        self.thread.join(150)
        assert self.outcome, self.lines
        return self.outcome


LONG = "time.sleep(600 if attempt == 1 else 0)"


def test_maintenance_lets_trainers_save_and_costs_a_preemption(cloud):
    job = Supervised(cloud, "kept", LONG, tier="on-demand", budgets=Budgets(failures=0))
    job.until_started()
    emulator.control(cloud.state, "inject", fault="maintain", node="kept-1")
    result = job.ended()
    assert (result.state, result.attempt) == ("done", 2), job.lines
    assert job.job.attempt_ending(1).fault == Fault.PREEMPTION
    assert job.job.current().tally == Tally(preemptions=1)


IN_STEP = """
here, mine, other = os.path.dirname(sys.argv[0]), f"{os.path.basename(sys.argv[0])}-{rank}", 1 - rank
step = 1
while attempt == 1:  # as collectives do: a step ends once the other has come to it
    step += 1
    open(os.path.join(here, mine), "w").write(str(step))
    while True:
        try:
            if int(open(os.path.join(here, f"{os.path.basename(sys.argv[0])}-{other}")).read() or 0) >= step:
                break
        except OSError:
            pass
        time.sleep(0.1)
    os.write(int(os.environ["SLICEWISE_EVENTS_FD"]), (json.dumps(dict(event="step", step=step)) + "\\n").encode())
"""


@pytest.mark.parametrize("name", ["cold", "colder"])
def test_machines_that_show_no_sign_of_life_are_restarted(cloud, name, monkeypatch):
    """Their patience is over once they are frozen, and there again once they are restarted: no matter how slow."""
    watch = Watch(start_timeout_s=600, stall_timeout_s=600)
    job = Supervised(cloud, name, IN_STEP, tier="on-demand", watch=watch)
    job.until_started()
    frozen = f"{name}-0" if name == "cold" else f"{name}-1"  # the leader, or a worker that it waits for
    emulator.control(cloud.state, "inject", fault="freeze", node=frozen)
    job.on_line = lambda line: "are restarted" in line and monkeypatch.undo()
    monkeypatch.setattr(queued_resource, "IDLE_MARGIN_S", 2.0 - watch.stall_timeout_s)
    result = job.ended()
    assert result.state == "done", job.lines
    assert f"{name}: no sign of life, so all its machines are restarted" in job.lines
    assert job.job.attempt_ending(1).why == "no sign of life, so all its machines are restarted"


def test_an_elastic_job_goes_on_without_a_preempted_slice_until_its_replacement_comes(cloud):
    lost = cloud.folder / "lost"
    body = f"""
        slices = os.environ["SLICEWISE_NUM_SLICES"]
        print("of", slices, flush=True)
        while attempt == 1:
            time.sleep(0.1)
            if os.path.exists({str(lost)!r}):
                os._exit(1)  # as a trainer does whose peers are gone
        time.sleep(600 if slices == "1" else 0)
    """
    watch = Watch(replacement_wait_s=0.5, failure_grace_s=0.5)
    job = Supervised(cloud, "shrinks", body, elastic_sizes=(1,), watch=watch, budgets=Budgets(failures=0))
    job.until_started()
    with few_chips(cloud, 1):
        emulator.control(cloud.state, "inject", fault="preempt", node="shrinks-1")
        lost.touch()
        eventually(lambda: b"of 1" in job.job.log(2, "s0h0"), lambda: job.lines)
    result = job.ended()
    assert (result.state, result.attempt) == ("done", 3), job.lines
    assert job.job.log(3, "s0h0").count(b"of 2") == job.job.log(3, "s1h0").count(b"of 2") == 1
    assert job.job.current().tally == Tally(preemptions=2)


def test_a_running_job_is_cancelled_and_gives_its_slices_back(cloud):
    job = Supervised(cloud, "stop", "time.sleep(600)")
    job.until_started()
    job.job.ask_to_cancel(job.spec.submission)
    result = job.ended()
    assert (result.state, result.code) == ("cancelled", ExitCode.PREEMPTED)
    assert not [name for name in cloud.queued_resources() if name.endswith("/stop")]
    assert job.job.slices()["state"] == "deleted"


def test_a_job_whose_emulator_has_ended_ends_at_once_and_shows_no_slices_any_more(tmp_path, monkeypatch):
    client = qr.connect(qr.Target("p", "z", "me", endpoint="127.0.0.1:1"), say=print)
    monkeypatch.setattr(queued_resource.Slices, "connect", lambda self, say: client)
    job = JobFolder(str(tmp_path))
    spec = JobSpec(
        name="orphan", submission="d" * 12, target="queued-resource", command=("x",), config="", slices=2,
        hosts_per_slice=1,
    )  # fmt: skip
    job.submit(spec)
    queued_resource.write_slices(
        job, queued_resource.Slices(qr.Request("orphan", "v5litepod-1", 2), emulator="x")
    )
    job.note_slices(state="ACTIVE")
    result = queued_resource.supervise_slices(job, spec, print)
    assert (result.state, result.code) == ("failed", ExitCode.UNAVAILABLE)
    assert "has ended, and its slices with it" in result.why
    assert job.slices()["state"] == "deleted"


def test_a_supervisor_that_was_replaced_leaves_the_slices_alone(cloud):
    job = Supervised(cloud, "mine", "time.sleep(600)")
    job.until_started()
    job.job.take_place(queued_resource.SUPERVISOR, {"token": "another"})
    assert isinstance(job.ended(), Superseded)
    assert [name for name in cloud.queued_resources() if name.endswith("/mine")]
    client = qr.connect(qr.emulator_target(cloud.emulator))
    qr.delete(client, "mine", force=True)


def test_slices_that_somebody_deleted_are_not_asked_for_again(cloud):
    job = Supervised(cloud, "gone", "time.sleep(600)")
    job.until_started()
    client = qr.connect(qr.emulator_target(cloud.emulator))
    qr.delete(client, "gone", force=True)
    result = job.ended()
    assert (result.state, result.why) == ("cancelled", "somebody deleted gone")


def test_a_suspended_queued_resource_is_asked_for_anew_and_the_job_goes_on(cloud):
    job = Supervised(cloud, "spot", LONG, budgets=Budgets(failures=0))
    job.until_started()
    emulator.control(cloud.state, "inject", fault="preempt", node="spot-0", suspend=True)
    result = job.ended()
    assert (result.state, result.attempt) == ("done", 2), job.lines
    assert job.job.current().tally == Tally(preemptions=1)
    assert job.lines.count("spot: asked for 2 x v5litepod-1") == 2
    assert any("by the service: its slices were preempted" in line for line in job.lines)


def test_requests_for_new_slices_end_with_the_budget_of_preemptions(cloud):
    job = Supervised(cloud, "poor", "time.sleep(600)", budgets=Budgets(preemptions=0))
    job.until_started()
    emulator.control(cloud.state, "inject", fault="preempt", node="poor-0", suspend=True)
    result = job.ended()
    assert (result.state, result.code) == ("failed", ExitCode.PREEMPTED)
    assert "0 requests for new slices are used up (--max-preemptions)" in result.why
