"""Jobs on the emulated cluster, under the supervisor: trainers are small scripts that end as they are told."""

import io
import json
import os
import textwrap
import threading
import time

import pytest
from rich.console import Console

from slicewise.errors import ExitCode
from slicewise.launch.job_folder import JobFolder, JobSpec, Superseded
from slicewise.launch.policy import Budgets, Fault, Tally, Watch
from slicewise.launch.supervisor import supervise
from slicewise.launch.targets.local import run_attempt
from slicewise.launch.worker_files import pack_code

pytestmark = pytest.mark.multiprocess

PREAMBLE = """
import faulthandler, json, os, signal, sys, time
rank, attempt = int(os.environ["SLICEWISE_PROCESS_ID"]), int(os.environ["SLICEWISE_ATTEMPT"])
def emit(**event):
    os.write(int(os.environ["SLICEWISE_EVENTS_FD"]), (json.dumps(event) + "\\n").encode())
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return Place(tmp_path)


class Place:
    def __init__(self, folder):
        self.folder = folder
        self.job = JobFolder(str(folder / "run" / "job"))
        self.console = Console(file=io.StringIO(), width=200)

    def spec(self, body, submission="0" * 12, **more):
        script = self.folder / "trainer.py"
        script.write_text(PREAMBLE + textwrap.dedent(body))
        spec = JobSpec(
            name="test",
            submission=submission,
            target="local",
            command=(str(script), "{config}"),
            config="[run]\nsteps = 3\n",
            slices=more.pop("slices", 2),
            hosts_per_slice=1,
            cpu_devices=1,
            **more,
        )
        watch = spec.watch.model_copy(update={"failure_grace_s": 0.4})
        spec = spec.model_copy(update={"watch": watch})
        self.job.submit(spec)
        return spec

    def supervise(self, spec):
        run = lambda claim: run_attempt(self.job, spec, claim, self.console)  # noqa: E731
        return supervise(self.job, spec, run, self.console.print)

    @property
    def output(self):
        return self.console.file.getvalue()


def test_a_gang_is_started_again_by_the_code_of_its_first_failure_and_logs_of_all_attempts_stay(place):
    spec = place.spec("""
        print("config", open(sys.argv[1]).read().split()[1], "attempt", attempt)
        sys.stdout.flush()
        if attempt < 4 and (rank == 1 or attempt == 3):
            os._exit({1: 75, 2: 1, 3: 76}[attempt])
        if attempt < 4:
            time.sleep(600)
    """)
    result = place.supervise(spec)
    assert (result.fault, result.code, result.attempt) == (Fault.NONE, 0, 4)
    assert place.job.result(spec.submission).to_json() | {"ended": 0} == result.to_json() | {"ended": 0}
    assert place.job.current().tally == Tally(failures=1, preemptions=2)
    assert [place.job.attempt_ending(n).code for n in (1, 2, 3, 4)] == [75, 1, 76, 0]
    assert "slice 1 host 0 exited with code 1" in place.job.attempt_ending(2).why
    assert place.job.log_attempts() == [1, 2, 3, 4]
    for attempt in (1, 2, 3, 4):
        assert place.job.log(attempt, "s1h0") == f"config steps attempt {attempt}\n".encode()


@pytest.mark.parametrize(
    ("body", "budgets", "fault", "code", "attempts"),
    [
        ("sys.exit(2)", Budgets(), Fault.USER, ExitCode.USER, 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", Budgets(failures=1), Fault.FAILURE, ExitCode.INTERNAL, 2),
        ("sys.exit(76)", Budgets(preemptions=2), Fault.PREEMPTION, ExitCode.PREEMPTED, 3),
        ("sys.exit(75)", Budgets(preemptions=0), Fault.RESTART, ExitCode.PREEMPTED, 1),
    ],
)
def test_a_job_stops_when_its_input_is_wrong_or_a_budget_is_used_up(
    place, body, budgets, fault, code, attempts
):
    result = place.supervise(place.spec(body, budgets=budgets, slices=1))
    assert (result.fault, result.code, result.attempt) == (fault, code, attempts)
    assert result.state == "failed"
    assert place.output.count("attempt ") >= attempts


def test_a_stuck_gang_leaves_the_stacks_of_all_its_processes_and_is_started_again(place):
    spec = place.spec(
        """
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        def waits_for_ever():
            time.sleep(600)
        if attempt == 1:
            emit(event="step", step=7, steps=9)
            waits_for_ever()
        """,
        watch=Watch(stall_timeout_s=0.8),
    )
    assert place.supervise(spec).state == "done"
    ending = place.job.attempt_ending(1)
    assert ending.fault == Fault.FAILURE
    assert "made no progress for 0.8 s, since step 7" in ending.why
    for worker in ("s0h0", "s1h0"):
        assert b"in waits_for_ever" in place.job.log(1, worker)
    assert place.job.progress(1)["step"] == 7


def test_a_process_that_does_not_answer_at_all_is_killed_with_its_gang(place):
    spec = place.spec(
        """
        if attempt == 1:
            emit(event="step", step=1, steps=9)
            os.kill(os.getpid(), signal.SIGSTOP) if rank else time.sleep(600)
        """,
        watch=Watch(stall_timeout_s=0.5),
    )
    assert place.supervise(spec).attempt == 2


def test_a_supervisor_whose_attempt_was_taken_over_stops_its_gang_and_writes_nothing(place):
    spec = place.spec("emit(event='step', step=attempt, steps=9); time.sleep(600)")
    taken = threading.Thread(target=take_over, args=(place, spec))
    taken.start()
    with pytest.raises(Superseded):
        place.supervise(spec)
    taken.join()
    assert place.job.attempt_ending(1) is None
    assert place.job.result(spec.submission) is None
    assert place.job.current().holder == "another"


def take_over(place, spec):
    while place.job.progress(1) is None:
        time.sleep(0.01)
    place.job.claim(spec.submission, "another", Tally(), "test", after=place.job.current())


def test_a_cancelled_job_is_asked_to_save_and_its_result_says_so(place):
    spec = place.spec("""
        def save(*_):
            print("saved", flush=True)
            os._exit(76)
        signal.signal(signal.SIGTERM, save)
        emit(event="step", step=1, steps=9)
        time.sleep(600)
    """)

    def cancel():
        while b"step" not in place.job.log(1, "s0h0") or b"step" not in place.job.log(1, "s1h0"):
            time.sleep(0.01)
        place.job.ask_to_cancel(spec.submission)

    canceller = threading.Thread(target=cancel)
    canceller.start()
    result = place.supervise(spec)
    canceller.join()
    assert (result.state, result.code) == ("cancelled", ExitCode.PREEMPTED)
    assert place.job.log(1, "s1h0").endswith(b"saved\n")


def test_another_submission_goes_on_counting_attempts_and_has_budgets_of_its_own(place):
    first = place.supervise(place.spec("sys.exit(1)", budgets=Budgets(failures=0), slices=1))
    again = place.spec("sys.exit(1 if attempt < 3 else 0)", "1" * 12, budgets=Budgets(failures=1), slices=1)
    second = place.supervise(again)
    assert (first.attempt, second.attempt, second.state) == (1, 3, "done")
    assert place.job.result("0" * 12) is None


def test_what_a_job_writes_is_for_its_owner_only(place):
    place.supervise(place.spec("", slices=1))
    documents = [path for path in (place.folder / "run" / "job").rglob("*.json") if path.is_file()]
    assert len(documents) >= 4
    logs = list((place.folder / "run" / "job").rglob("*.log"))
    assert {path.stat().st_mode & 0o777 for path in [*documents, *logs]} == {0o600}
    assert all(json.loads(path.read_text()) for path in documents)


def test_a_trainer_knows_its_attempt_and_the_environment_of_the_job(place):
    spec = place.spec("print(os.environ['COLOUR'], attempt)", environment={"COLOUR": "blue"}, slices=1)
    place.supervise(spec)
    assert place.job.log(1, "s0h0") == b"blue 1\n"
    assert "COLOUR" not in os.environ


def test_a_stuck_trainer_that_cannot_show_its_stacks_is_started_again_all_the_same(place):
    spec = place.spec(
        "if attempt == 1:\n    emit(event='step', step=1, steps=2)\n    time.sleep(600)",
        watch=Watch(stall_timeout_s=0.5),
        slices=1,
    )
    assert place.supervise(spec).attempt == 2


def test_what_cannot_be_started_is_a_failure_of_the_attempt_with_its_reason(place):
    spec = place.spec("", environment={"XLA_FLAGS": "flags.txt"}, slices=1)
    result = place.supervise(spec)
    assert (result.fault, result.code) == (Fault.USER, ExitCode.USER)
    assert "names a file" in result.why


def test_shipped_code_is_what_the_trainers_import_and_where_they_start(place):
    code = place.folder / "tree"
    (code / "src").mkdir(parents=True)
    (code / "src" / "mine.py").write_text("colour = 'red'")
    (code / "data.txt").write_text("data")
    name = pack_code(place.job, code)
    assert name == pack_code(place.job, code)
    body = "sys.path.pop(0); import mine; print(mine.colour, open('data.txt').read())"
    place.supervise(place.spec(body, code=name))
    assert place.job.log(1, "s0h0") == place.job.log(1, "s1h0") == b"red data\n"


def test_damaged_code_is_not_run(place):
    (place.folder / "tree").mkdir()
    name = pack_code(place.job, place.folder / "tree")
    place.job.folder.write(name, b"something else")
    result = place.supervise(place.spec("", code=name, slices=1, budgets=Budgets(failures=0)))
    assert (result.code, result.fault) == (ExitCode.INTERNAL, Fault.FAILURE)
    assert "is damaged" in result.why
