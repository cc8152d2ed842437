"""An elastic job on the emulated cluster, with real training: it loses a slice, goes on with one, and grows back."""

import json
import os
import shutil
import sys
import threading
import time

import numpy as np
import pytest
from rich.console import Console

from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.launch import elastic
from slicewise.launch.job_folder import JobFolder, JobSpec
from slicewise.launch.policy import Fault, Watch
from slicewise.launch.supervisor import supervise
from slicewise.launch.targets.local import run_attempt

STEPS = 40
CONFIG = f"""
[run]
run_name = "run"
output_directory = "{{folder}}"
steps = {STEPS}
[model]
model = "demo-tiny"
compute_dtype = "float32"
[data]
dataset = "synthetic"
sequence_length = 32
global_batch_size = 4
[parallelism]
elastic = "accumulate"
[checkpoint]
checkpoint_every = 1000
local_checkpoint_directory = "{{folder}}/disks"
local_checkpoint_every = 2
replica_check_every = 5
[evaluation]
eval_batches = 0
[metrics]
tensorboard = false
"""
# The real trainer with steps that take a while, as those on slices do.
TRAINER = """
import sys, time
from slicewise.train.turns import Turns
read = Turns.__next__
Turns.__next__ = lambda turns: time.sleep(0.15) or read(turns)
from slicewise.cli import main
sys.argv[1:] = ["train", sys.argv[1]]
sys.exit(main())
"""


class Job:
    def __init__(self, folder, cache):
        self.folder, self.run = folder, folder / "run"
        self.job = JobFolder(str(self.run / "job"))
        (folder / "trainer.py").write_text(TRAINER)
        self.spec = JobSpec(
            name="test",
            submission="0" * 12,
            target="local",
            command=(str(folder / "trainer.py"), "{config}"),
            config=CONFIG.format(folder=folder),
            slices=2,
            hosts_per_slice=1,
            cpu_devices=1,
            elastic_sizes=(1,),
            watch=Watch(replacement_wait_s=0.0, failure_grace_s=0.2),
            environment={"JAX_COMPILATION_CACHE_DIR": str(cache)},
        )
        self.job.submit(self.spec)
        self.ending = None
        self.output = (folder / "output").open("w")
        self.console = Console(file=self.output, width=200)

    def supervise(self):
        run = lambda claim: run_attempt(self.job, self.spec, claim, self.console)  # noqa: E731
        self.ending = supervise(self.job, self.spec, run, self.console.print)

    def eventually(self, condition, timeout_s=120.0):
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            late = self.ending is not None or time.monotonic() > deadline_s
            assert not late, (self.folder / "output").read_text()
            time.sleep(0.05)

    def log(self, attempt, place="s0h0"):
        return self.job.log(attempt, place).decode()

    def local_steps(self, place):
        return [int(path.parent.name) for path in self.folder.glob(f"disks/run-*/{place}/*/index.json")]

    def wipe(self, place):
        (disks,) = (self.folder / "disks").glob("run-*")
        shutil.rmtree(disks / place)

    def losses(self):
        records = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return [(record["step"], record["loss"]) for record in records]


@pytest.fixture
def job(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    made = Job(tmp_path, tmp_path_factory.mktemp("compiled"))
    yield made
    made.output.close()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_job_shrinks_restores_from_its_hosts_and_grows_and_trains_as_if_nothing_had_happened(job):
    """The shared storage is out of reach all the while, and the slice comes back with an empty disk."""
    supervisor = threading.Thread(target=job.supervise)
    supervisor.start()
    try:
        job.eventually(lambda: job.local_steps("s0h0") and job.local_steps("s1h0"))
        (job.run / "checkpoints").symlink_to("checkpoints")  # not even root can follow it
        elastic.set_absent(job.job, job.spec, [1])
        job.eventually(
            lambda: "resumes after step" in job.log(2) and "step " in job.log(2).split("resumes")[1]
        )
        assert "warning: " in job.log(2)
        assert "The local checkpoint of step" in job.log(2)
        assert job.log(2, "s1h0") == ""
        job.wipe("s1h0")
        elastic.set_absent(job.job, job.spec, [])
        job.eventually(lambda: "resumes after step" in job.log(3))
        (job.run / "checkpoints").unlink()
    finally:
        job.job.ask_to_cancel(job.spec.submission) if sys.exc_info()[0] else None
        supervisor.join(120)
    assert job.ending.state == "done", (job.folder / "output").read_text()
    assert [job.job.attempt_ending(n).fault for n in (1, 2, 3)] == [
        Fault.PREEMPTION,
        Fault.RESTART,
        Fault.NONE,
    ]
    assert job.job.attempt_ending(1).why == "slice 1 lost"
    assert job.job.current().tally.failures == 0
    ours = job.losses()
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([loss for _, loss in ours], undisturbed(job), rtol=2e-6)


def undisturbed(job):
    """Losses of the same run in this process, on two devices of two slices."""
    import jax

    from slicewise.parallel import cluster
    from slicewise.train.loop import train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "initialize", lambda: None)
        patch.setenv("JAX_COMPILATION_CACHE_DIR", "as JAX is configured already")
        patch.setattr(cluster, "found", lambda: cluster.by_slice(jax.devices()[:2], emulated=1))
        (job.folder / "alone.toml").write_text(job.spec.config)
        keys = (
            "run_name=alone",
            "local_checkpoint_every=0",
            "local_checkpoint_directory=",
            "checkpoint_every=0",
            "replica_check_every=0",
        )
        train(load_config(str(job.folder / "alone.toml"), keys).config)
    lines = (job.folder / "alone" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_as_many_slices_take_part_as_the_job_can_use(job):
    spec = job.spec.model_copy(update={"slices": 4, "elastic_sizes": (2, 1)})
    assert elastic.chosen(spec, {0, 1, 2, 3}) == (0, 1, 2, 3)
    assert elastic.chosen(spec, {3, 0, 2}) == (0, 2)
    assert elastic.chosen(spec, {3}) == (3,)
    assert elastic.chosen(spec, ()) == ()
    rigid = spec.model_copy(update={"elastic_sizes": ()})
    assert elastic.chosen(rigid, {0, 1, 2}) == ()
    with pytest.raises(UserError, match="slice 4: expected one of 0 to 3"):
        elastic.set_absent(job.job, spec, [1, 4])


@pytest.mark.multiprocess
def test_a_job_that_is_not_elastic_waits_for_a_slice_and_can_be_cancelled_meanwhile(job):
    job.spec = job.spec.model_copy(update={"elastic_sizes": (), "command": (os.devnull,)})
    elastic.set_absent(job.job, job.spec, [0])
    supervisor = threading.Thread(target=job.supervise)
    supervisor.start()
    job.eventually(lambda: "slice 0 lost: waits" in (job.folder / "output").read_text())
    job.job.ask_to_cancel(job.spec.submission)
    supervisor.join(30)
    assert job.ending.state == "cancelled"
    assert job.ending.why == "cancelled while it waited for slices"
