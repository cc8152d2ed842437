"""Jobs as their user sees them, through the command line; supervisors are real processes in the background."""

import contextlib
import json
import os
import signal
import tarfile
import textwrap
import time
import tomllib

import pytest

from slicewise.cli import main
from slicewise.config import load_config
from slicewise.errors import ExitCode, UserError
from slicewise.launch import elastic, job
from slicewise.launch.job_folder import PIECE_BYTES, Claim, JobFolder, JobSpec
from slicewise.launch.policy import Tally
from slicewise.launch.worker_files import WorkerFiles, pack_code, unpack_code

TRAINER = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["SLICEWISE_PROCESS_ID"]), int(os.environ["SLICEWISE_ATTEMPT"])
def emit(**event):
    os.write(int(os.environ["SLICEWISE_EVENTS_FD"]), (json.dumps(event) + "\\n").encode())
emit(event="step", step=attempt, steps=9, loss=1.25)
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def start(tmp_path):
    """Starts a local job whose trainer is a small script; its record."""
    started = []

    def submit(body, name="demo"):
        script = tmp_path / f"{name}.py"
        script.write_text(TRAINER + textwrap.dedent(body))
        root = str(tmp_path / "runs" / name / "job")
        spec = JobSpec(
            name=name,
            submission=job.new_submission(),
            target="local",
            command=(str(script),),
            config="",
            slices=1,
            hosts_per_slice=1,
            cpu_devices=1,
            working_directory=str(tmp_path),
        )
        JobFolder(root).submit(spec)
        started.append(job.start_supervisor(job.new_record(name, "local", root, spec, {})))
        return started[-1]

    yield submit
    for record in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.find(record.name).supervisor, signal.SIGKILL)


def eventually(condition, timeout_s=120.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.02)


def printed(capsys, *words, code=0):
    capsys.readouterr()
    assert main(["job", *words]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


# ---------------------------------------------------------------- looking, cancelling, supervising


@pytest.mark.multiprocess
def test_a_job_can_be_looked_into_from_its_start_to_its_end(start, capsys):
    record = start("""
        print("hello", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.02)
    """)
    eventually(lambda: b"hello" in record.folder.log(1, "s0h0"))
    eventually(lambda: record.folder.progress(1))
    shown = printed(capsys, "status", "demo")
    assert "state      running" in shown
    assert "step       1/9" in shown
    assert "loss       1.2500 nats/token" in shown
    assert "demo" in printed(capsys, "list")
    assert "hello" in printed(capsys, "logs", "demo")
    with open("go", "w"):
        pass
    eventually(lambda: job.status(record).state == "done")
    document = json.loads(printed(capsys, "status", "demo", "--json"))
    assert (document["state"], document["code"], document["attempt"]) == ("done", 0, 1)
    assert [entry["state"] for entry in json.loads(printed(capsys, "list", "--json"))] == ["done"]
    assert "hello" in printed(capsys, "logs", "demo", "--follow")
    assert "is done already" in printed(capsys, "cancel", "demo", code=ExitCode.CONFLICT)
    assert "is done already" in printed(capsys, "supervise", "demo", code=ExitCode.CONFLICT)


@pytest.mark.multiprocess
def test_a_job_whose_supervisor_was_killed_says_so_and_can_be_taken_up_again(start, capsys):
    record = start("if attempt == 1: time.sleep(600)")
    eventually(lambda: record.folder.progress(1))
    assert "has a supervisor" in printed(capsys, "supervise", "demo", code=ExitCode.CONFLICT)
    os.kill(record.supervisor, signal.SIGKILL)
    eventually(lambda: not job.is_supervised(record))
    shown = printed(capsys, "status", "demo")
    assert "state      stalled" in shown
    assert "'slicewise job supervise demo' looks after it again" in shown
    printed(capsys, "supervise", "demo")
    eventually(lambda: job.status(job.find("demo")).state == "done")
    assert record.folder.current().reason == "the supervisor was started again"


@pytest.mark.multiprocess
def test_a_cancelled_job_ends_also_when_nobody_supervises_it(start, capsys):
    record = start("time.sleep(600)")
    eventually(lambda: record.folder.progress(1))
    assert "asked to save and end" in printed(capsys, "cancel", "demo")
    eventually(lambda: job.status(record).state == "cancelled")
    record = start("time.sleep(600)", "other")
    eventually(lambda: record.folder.progress(1))
    os.kill(record.supervisor, signal.SIGKILL)
    eventually(lambda: not job.is_supervised(record))
    assert "its supervisor was not running" in printed(capsys, "cancel", "other")
    assert job.status(record).state == "cancelled"


def test_what_is_not_there_is_said_with_what_is(start, capsys):
    said = printed(capsys, "status", "demo", code=ExitCode.NOT_FOUND)
    assert "there is no job 'demo'. None was submitted from here." in said
    assert "no job was submitted from this machine" in printed(capsys, "list")
    record = start("")
    eventually(lambda: job.status(record).state == "done")
    said = printed(capsys, "status", "domo", code=ExitCode.NOT_FOUND)
    assert "Did you mean 'demo'? Known: demo." in said
    said = printed(capsys, "logs", "demo", "--attempt", "7", code=ExitCode.NOT_FOUND)
    assert "attempt 7 has no log of s0h0; nobody wrote one, and there are attempts 1." in said
    said = printed(capsys, "logs", "demo", "--worker", "s9h9", code=ExitCode.NOT_FOUND)
    assert "attempt 1 has no log of s9h9; s0h0 wrote one" in said
    assert "expected a place such as s0h1" in printed(capsys, "logs", "demo", "--worker", "../x", code=2)


@pytest.mark.parametrize("name", ["../demo", "a/b", "", "Demo", "a" * 41, "demo\n"])
def test_names_that_could_lead_elsewhere_are_refused(name, capsys):
    assert "expected at most 40 lower-case letters" in printed(capsys, "status", name, code=ExitCode.USER)


def test_a_reused_process_id_is_no_supervisor(start):
    record = start("")
    fields = {**vars(record), "supervisor": os.getpid()}
    assert not job.is_supervised(job.Record(**fields))
    assert job.is_supervised(job.Record(**{**fields, "supervisor_started": job._start_of(os.getpid())}))


# ---------------------------------------------------------------- submitting


LOCAL = ("--target", "local", "--local", "1x1x1")


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nrun_name = "demo"\nsteps = 7\n')
    return str(path)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_local_job_trains_to_its_last_step_and_ends_with_its_code(run_toml, capsys):
    keys = ("model=demo-tiny", "dataset=synthetic", "sequence_length=32", "global_batch_size=2", "steps=3")
    more = ("checkpoint_every=0", "eval_batches=0", "tensorboard=false", "--wait")
    shown = printed(capsys, "submit", run_toml, *keys, *LOCAL, *more)
    assert "step 3/3" in shown
    assert "job demo: done" in shown
    said = printed(capsys, "submit", run_toml, *keys, "learning_rate=1e30", *LOCAL, *more, code=ExitCode.USER)
    assert "job demo: failed: slice 0 host 0: " in said
    assert "the same input would fail again" in said


def test_slices_of_an_emulated_job_can_be_taken_away_and_given_back(start, capsys):
    record = start("")
    eventually(lambda: job.status(record).state == "done")
    assert "slice 0 not there from now on" in printed(capsys, "absent", "demo", "0")
    assert elastic.present(record.folder, record.folder.spec())[0] == frozenset()
    assert "expected one of 0 to 0" in printed(capsys, "absent", "demo", "1", code=ExitCode.USER)
    assert "expected numbers" in printed(capsys, "absent", "demo", "one", code=ExitCode.USER)
    assert "all slices are there" in printed(capsys, "absent", "demo")
    assert elastic.present(record.folder, record.folder.spec())[0] == {0}
    fields = {**vars(record), "target": "slurm"}
    job.save(job.Record(**fields))
    assert "only slices of an emulated cluster" in printed(capsys, "absent", "demo", code=ExitCode.USER)


def test_the_config_of_a_job_is_resolved_and_says_where_the_run_is(run_toml, capsys, tmp_path):
    shown = printed(capsys, "submit", run_toml, "learning_rate=0.5", *LOCAL, "--dry-run")
    config = tomllib.loads(shown)
    assert config["run"] == {
        "run_name": "demo",
        "output_directory": str(tmp_path / "runs"),
        "steps": 7,
        "seed": 0,
    }
    assert config["optimizer"]["learning_rate"] == 0.5
    (tmp_path / "again.toml").write_text(shown)
    assert load_config(str(tmp_path / "again.toml")).config.directory == str(tmp_path / "runs" / "demo")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--target", "local"], "--local SxHxD is missing"),
        (["--target", "local", "--local", "2x2"], "is not a cluster"),
        ([*LOCAL, "stepz=1"], "unknown key 'stepz'"),
        ([*LOCAL, "run_name=1"], "makes no name for a job: give one with --name"),
        ([*LOCAL, "--max-failures", "-1"], "--max-failures"),
        ([*LOCAL, "--stall-timeout", "soon"], "--stall-timeout"),
        ([*LOCAL, "--code", "nowhere"], "--code nowhere: no such directory"),
        ([*LOCAL, "--zone", "us-east5-a"], "--zone goes with --target queued-resource, not with local"),
        (["--target", "jobset", "--type", "v6e-16", "output_directory=/disk"], "--image is missing"),
        (["--target", "jobset", "--image", "x", "output_directory=/disk"], "--type is missing"),
        (["--target", "queued-resource", "--type", "v6e-16"], "no emulator is running"),
        (["--target", "queued-resource", "--type", "v6e-16", "--slices", "257"], "--slices 257: a queued resource"),
        (["--target", "queued-resource", "--type", "v6e-16", "--project", "my-project", "--zone", "us-east5-a"],
         "is a path of this machine, and the workers of a queued-resource job are elsewhere"),
        ([*LOCAL, "--replacement-wait", "-1"], "--replacement-wait"),
        ([*LOCAL, "context_strategy=ring"], "context_strategy = ring has no effect without context parallelism"),
        ([*LOCAL, "elastic=accumulate", "min_slices=2"], "min_slices = 2 is more than the 1 slice of the run"),
        (["--target", "slurm", "elastic=batch"], "elastic = batch goes with --target local or queued-resource"),
        (["--target", "slurm", "--sbatch", "nodes=2"], "nodes is decided by the job"),
        (["--target", "slurm", "--cpu-devices", "2", "ici_fsdp_parallelism=3"], "does not divide|is not the 2 devices"),
    ],
)  # fmt: skip
def test_what_a_target_cannot_take_is_refused_before_anything_is_written(
    run_toml, more, said, capsys, tmp_path
):
    capsys.readouterr()
    assert main(["job", "submit", run_toml, *more]) == ExitCode.USER
    error = capsys.readouterr().err
    assert any(part in error for part in said.split("|")), error
    assert not (tmp_path / "state" / "slicewise" / "jobs").exists()


def test_the_startup_script_of_a_cloud_job_is_valid_and_names_no_secret(run_toml, capsys, tmp_path):
    where = ("--project", "my-project", "--zone", "us-east5-a", "output_directory=gs://bucket/a b")
    pytest.importorskip("gcsfs")
    more = ("--target", "queued-resource", "--type", "v6e-16", "--slices", "2")
    shown = printed(capsys, "submit", run_toml, *more, *where, "--dry-run")
    (tmp_path / "script").write_text(shown)
    assert os.system(f"bash -n {tmp_path}/script") == 0
    assert "--job 'gs://bucket/a b/demo/job' --submission" in shown
    assert "slicewise[tpu,job]==" in shown


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"])
def test_secrets_are_not_taken_into_what_lies_beside_the_run(name):
    with pytest.raises(UserError, match="looks like a secret"):
        job.environment_of([f"{name}=x"])


def test_plain_variables_are_taken():
    assert job.environment_of(["A=b=c", "EMPTY="]) == {"A": "b=c", "EMPTY": ""}


# ---------------------------------------------------------------- code and logs


def test_code_is_packed_without_what_is_not_code(tmp_path):
    tree = tmp_path / "tree"
    for name in (
        "src/a.py",
        ".git/config",
        "src/__pycache__/a.pyc",
        "runs/x/metrics.jsonl",
        ".venv/bin/python",
    ):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(name)
    (tree / "link").symlink_to("/etc/passwd")
    folder = JobFolder(str(tmp_path / "job"))
    name = pack_code(folder, tree)
    with tarfile.open(tmp_path / "job" / name) as archive:
        assert archive.getnames() == ["src/a.py"]
    os.utime(tree / "src" / "a.py")
    where = unpack_code(folder, name, tmp_path / "code")
    assert (where / "src" / "a.py").read_text() == "src/a.py"
    assert unpack_code(folder, name, tmp_path / "code") == where


def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path):
    import hashlib
    import io

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("../../escaped")
        archive.addfile(info, io.BytesIO())
    data = buffer.getvalue()
    folder = JobFolder(str(tmp_path / "job"))
    name = f"code-{hashlib.sha256(data).hexdigest()[:16]}.tar.gz"
    folder.folder.write(name, data)
    with pytest.raises(UserError, match="outside"):
        unpack_code(folder, name, tmp_path / "deep" / "code")
    assert not (tmp_path / "escaped").exists()


def test_logs_in_a_bucket_are_pieces_that_read_as_one_from_anywhere(tmp_path):
    pytest.importorskip("fsspec")
    folder = JobFolder(f"memory://{tmp_path.name}/job")
    spec = JobSpec(
        name="demo",
        submission="0" * 12,
        target="slurm",
        command=("x",),
        config="steps",
        slices=1,
        hosts_per_slice=2,
    )
    content = os.urandom(2 * PIECE_BYTES + 100)
    with WorkerFiles(folder, spec, 3) as files:
        path = files.log("s0h1")
        with path.open("wb") as file:
            for begin in range(0, len(content), PIECE_BYTES // 2):
                file.write(content[begin : begin + PIECE_BYTES // 2])
                file.flush()
                files._copy("s0h1")
        config = files._own
    assert not config.exists()
    assert folder.log_attempts() == [3]
    assert folder.log_places(3) == ["s0h1"]
    assert folder.log(3, "s0h1") == content
    for start in (1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 99, len(content)):
        assert folder.log(3, "s0h1", start) == content[start:]
    assert folder.log(3, "s0h0") == b""


def test_a_claim_survives_its_file_and_a_damaged_one_is_refused(tmp_path):
    folder = JobFolder(str(tmp_path / "job"))
    claim = folder.claim("0" * 12, "me", Tally(1, 2), "failure: x", after=None)
    assert folder.current() == claim
    assert isinstance(claim, Claim)
    folder.folder.write("attempts/0002/claim.json", b'{"attempt": 2}')
    with pytest.raises(UserError, match=r"attempts/0002/claim\.json is damaged"):
        folder.current()
