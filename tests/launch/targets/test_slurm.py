"""Jobs under Slurm: the batch script as text, and a real Slurm of this machine alone that runs it."""

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import textwrap
import time

import pytest

from slicewise.errors import ExitCode, UserError
from slicewise.launch import job
from slicewise.launch.job_folder import JobFolder, JobSpec
from slicewise.launch.once import conclude
from slicewise.launch.policy import Budgets, Fault, Tally, Watch
from slicewise.launch.targets import slurm

SCRIPT = r"""#!/bin/bash
#SBATCH --job-name=demo
#SBATCH --nodes=4
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@90
#SBATCH --output=/disk/runs/a run/job/slurm-%j.out
#SBATCH --partition=gpu
set -u
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# names of nodes need not resolve, so their addresses are taken
address=$(scontrol show node --oneliner "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
export SLICEWISE_COORDINATOR="${address:-$first}:$((61440 + SLURM_JOB_ID % 4096))"
for try in $(seq 0 999); do
  export SLICEWISE_RESTART=$((${SLURM_RESTART_COUNT:-0} * 1000 + try))
  srun --kill-on-bad-exit=0 --wait=120 AGENT
  read -r what code < <(AGENT --conclude)
  case "$what" in
    again) sleep "$code" ;;
    requeue) scontrol requeue "$SLURM_JOB_ID" && sleep 60; exit 1 ;;
    end) exit "$code" ;;
    *) exit 1 ;;
  esac
done
""".replace(
    "AGENT",
    "python3 -m slicewise.launch.agent --on slurm --job '/disk/runs/a run/job' --submission 000000000000",
)


def spec_of(**more):
    defaults = {
        "name": "demo",
        "submission": "0" * 12,
        "target": "slurm",
        "command": ("-m", "slicewise", "train", "{config}"),
        "config": "",
        "slices": 2,
        "hosts_per_slice": 2,
    }
    return JobSpec(**{**defaults, **more})


def test_the_batch_script_holds_one_agent_a_node_and_says_what_follows_from_each_end():
    allocation = slurm.Allocation(("partition=gpu",))
    made = slurm.script(spec_of(), "/disk/runs/a run/job", allocation, "/disk/runs/a run/job/slurm-%j.out")
    assert made == SCRIPT
    assert subprocess.run(["bash", "-n"], input=made, text=True, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("nodes=3", "nodes is decided by the job"),
        ("no-requeue", "no-requeue is decided by the job"),
        ("partition=a\n#SBATCH --wrap=x", "expected an option of sbatch"),
        ("-p gpu", "expected an option of sbatch"),
        ("", "expected an option of sbatch"),
    ],
)
def test_options_that_the_script_decides_or_that_are_none_are_refused(option, said):
    with pytest.raises(UserError, match=said):
        slurm.Allocation((option,))


def test_without_slurm_the_command_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UserError, match="sbatch is not installed here") as error:
        slurm.submit("#!/bin/bash\n")
    assert error.value.code == ExitCode.INTERNAL


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("fatal: Could not establish a configuration source", ExitCode.UNAVAILABLE),
        ("error: Batch job submission failed: Unable to contact slurm controller", ExitCode.UNAVAILABLE),
        ("error: Munge encode failed: Failed to access socket", ExitCode.UNAVAILABLE),
        ("error: Batch job submission failed: Socket timed out on send/recv operation", ExitCode.UNAVAILABLE),
        ("error: invalid partition specified: none", ExitCode.USER),
    ],
)
def test_a_controller_that_cannot_be_asked_is_told_from_a_wrong_request(tmp_path, monkeypatch, said, code):
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: {said}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(UserError, match=said.partition(": ")[2]) as error:
        slurm.submit("#!/bin/bash\n")
    assert error.value.code == code


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="needs slurm-wlm")
def test_the_real_command_without_a_controller_is_an_unavailable_service(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/munge\n"
        "AuthInfo=socket=/nonexistent\nMessageTimeout=2\n"
    )
    with pytest.raises(UserError) as error:
        slurm.submit("#!/bin/bash\n")
    assert error.value.code == ExitCode.UNAVAILABLE, error.value


# ---------------------------------------------------------------- what follows from an end


@pytest.mark.parametrize(
    ("codes", "budgets", "said", "fault"),
    [
        ({"s0h0": 0, "s1h0": 0}, Budgets(), "end 0", Fault.NONE),
        ({"s0h0": 1, "s1h0": 0}, Budgets(failures=1), "again 1", Fault.FAILURE),
        ({"s0h0": 1, "s1h0": 0}, Budgets(failures=0), "end 1", Fault.FAILURE),
        ({"s0h0": 2, "s1h0": 1}, Budgets(), "end 2", Fault.USER),
        ({"s0h0": 75, "s1h0": 75}, Budgets(), "again 0", Fault.RESTART),
        ({"s0h0": 76, "s1h0": 76}, Budgets(), "requeue 0", Fault.PREEMPTION),
        ({"s0h0": 1}, Budgets(failures=0), "requeue 0", Fault.PREEMPTION),
        ({"s0h0": 76, "s1h0": 76}, Budgets(preemptions=0), "end 76", Fault.PREEMPTION),
    ],
)
def test_a_failure_starts_again_here_and_the_end_of_the_allocation_is_requeued(
    tmp_path, codes, budgets, said, fault
):
    folder = JobFolder(str(tmp_path / "job"))
    spec = spec_of(slices=2, hosts_per_slice=1, budgets=budgets)
    folder.submit(spec)
    claim = folder.claim(spec.submission, f"{spec.submission}/0", Tally(), "", after=None)
    for place, code in codes.items():
        report = {"code": int(code), "ended": 1.0 + code, "message": "said"}
        folder.folder.write(f"attempts/0001/workers/{place}.ended.once.json", json.dumps(report).encode())
    assert conclude(folder, spec, 0) == said
    assert folder.attempt_ending(claim.attempt).fault == fault
    result = folder.result(spec.submission)
    assert (result.code if result else None) == (int(said.split()[1]) if said.startswith("end") else None)
    assert conclude(folder, spec, 1) == "end 1"  # its gang has not even begun


# ---------------------------------------------------------------- a real Slurm

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
ReturnToService=2
SlurmdTimeout=30
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
{nodes}
PartitionName=all Nodes=n[0-1] Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Slurm:
    def __init__(self, folder):
        self.folder, self.processes = folder, []
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(stat.S_IRUSR)
        names = {
            f"--{what}": self.folder / f"munge.{what}"
            for what in ("socket", "pid-file", "log-file", "seed-file")
        }
        options = [f"{option}={path}" for option, path in names.items()]
        self.run("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self.until(lambda: (self.folder / "munge.socket").exists(), "munged")
        nodes = "\n".join(
            f"NodeName=n{i} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
            for i in range(2)
        )
        user = "root" if os.getuid() == 0 else os.environ["USER"]
        text = CONF.format(
            host=socket.gethostname(), controller=free_port(), user=user, folder=self.folder, nodes=nodes
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        self.run("slurmctld", "-D")
        for node in ("n0", "n1"):
            (self.folder / f"spool-{node}").mkdir()
            self.run("slurmd", "-D", "-N", node)
        self.until(lambda: self.ask("sinfo", "--noheader", "--format=%T").split() == ["idle"], "slurmd")

    def run(self, program, *arguments):
        output = (self.folder / f"{program}.out").open("a")
        with output:
            self.processes.append(
                subprocess.Popen(
                    [shutil.which(program) or f"/usr/sbin/{program}", *arguments],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def ask(self, *command):
        return subprocess.run(command, env=self.environment, capture_output=True, text=True).stdout

    def until(self, condition, what, timeout_s=30):
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
            assert time.monotonic() < deadline_s, f"{what} did not come up:\n{logs}"
            time.sleep(0.2)

    def stop(self):
        self.ask("scancel", "--signal=KILL", "--state=RUNNING", f"--user={os.environ.get('USER', 'root')}")
        for process in reversed(self.processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if not all(
        shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("slurmctld", "munged")
    ):
        pytest.skip("Slurm is not installed: apt-get install slurm-wlm munge")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


TRAINER = """
import json, os, signal, sys, time
rank, attempt = int(os.environ["SLICEWISE_PROCESS_ID"]), int(os.environ["SLICEWISE_ATTEMPT"])
event = json.dumps({"event": "step", "step": attempt, "steps": 9}) + "\\n"
os.write(int(os.environ["SLICEWISE_EVENTS_FD"]), event.encode())
print("coordinator", os.environ["SLICEWISE_COORDINATOR"], "node", os.environ["SLURMD_NODENAME"], flush=True)
"""


@pytest.fixture
def submit(cluster, tmp_path, monkeypatch):
    """Submits a job whose trainer is a small script; its record."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def start(body, **more):
        trainer = tmp_path / "trainer.py"
        trainer.write_text(TRAINER + textwrap.dedent(body))
        more.setdefault("watch", Watch(failure_grace_s=0.4))
        spec = spec_of(command=(str(trainer),), slices=2, hosts_per_slice=1, **more)
        root = str(tmp_path / "run" / "job")
        JobFolder(root).submit(spec)
        allocation = slurm.Allocation((), sys.executable)
        text = slurm.script(spec, root, allocation, str(tmp_path / "slurm.out"))
        record = job.new_record("demo", "slurm", root, spec, {"id": slurm.submit(text)})
        job.save(record)
        return record

    return start


def ended(record, timeout_s=90):
    deadline_s = time.monotonic() + timeout_s
    while (now := job.status(record)).code is None:
        assert time.monotonic() < deadline_s, now
        time.sleep(0.2)
    return now


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_real_slurm_runs_the_gang_and_starts_it_again_in_the_same_allocation(submit):
    record = submit("""
        if attempt == 1:
            os._exit(75) if rank else time.sleep(600)
    """)
    now = ended(record)
    assert (now.state, now.attempt, now.preemptions) == ("done", 2, 1)
    logs = [record.folder.log(2, place).decode() for place in ("s0h0", "s1h0")]
    assert "coordinator 127.0.0.1:" in logs[0]
    assert {text.split()[-1] for text in logs} == {"n0", "n1"}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_slurm_requeues_a_job_whose_allocation_is_taken_and_it_resumes(submit, cluster):
    record = submit(
        """
        signal.signal(signal.SIGTERM, lambda *_: os._exit(76))
        if attempt == 1:
            time.sleep(600)
        """,
        budgets=Budgets(failures=0),
        watch=Watch(stop_grace_s=5),
    )
    cluster.until(lambda: record.folder.progress(1) is not None, "the job")
    cluster.ask("scancel", "--signal=TERM", record.platform["id"])  # as at the end of its time
    cluster.until(lambda: "requeue" in job.status(record).slices, "the requeue")
    now = ended(record)
    assert (now.state, now.attempt, now.failures, now.preemptions) == ("done", 2, 0, 1)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_job_under_slurm_ends_with_the_code_of_wrong_input_or_when_it_is_cancelled(submit, cluster):
    record = submit("os._exit(2) if rank else time.sleep(600)")
    assert ended(record).code == ExitCode.USER
    cluster.until(lambda: job.status(record).slices in ("failed", "gone"), "the end of the job")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_cancelled_job_under_slurm_is_gone(submit, cluster):
    record = submit("time.sleep(600)", watch=Watch(stop_grace_s=2))
    cluster.until(lambda: record.folder.progress(1) is not None, "the job")
    job.cancel(record)
    assert ended(record).state == "cancelled"
