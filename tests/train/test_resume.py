"""A run that is killed, at whatever moment, and started again is the same as one that never was: real processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from processes import is_alive
from slicewise.checkpoint.manifest import UNFINISHED_INFIX, complete_steps, read_manifest
from slicewise.checkpoint.store import CheckpointStore
from slicewise.errors import ExitCode

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS, EVERY = 60, 15
CLUSTER_STEPS, CLUSTER_EVERY = 24, 6  # a step of a cluster takes ten times as long
CONFIG = """
[run]
steps = {steps}
[model]
model = "demo-tiny"
compute_dtype = "float32"
[data]
dataset = "text"
dataset_path = "{corpus}"
sequence_length = 32
global_batch_size = 4
[checkpoint]
checkpoint_every = {every}
checkpoint_keep = 2
[evaluation]
eval_batches = 0
[metrics]
tensorboard = false
"""
CLUSTER = ["--local", "2x1x2"]


class Place:
    """A folder in which one run is started, killed and started again."""

    def __init__(self, folder, command, corpus, steps=STEPS, every=EVERY):
        self.folder, self.command, self.steps, self.every = folder, command, steps, every
        folder.mkdir()
        (folder / "run.toml").write_text(CONFIG.format(corpus=corpus, steps=steps, every=every))
        self.metrics = folder / "runs" / "run" / "metrics.jsonl"
        self.checkpoints = folder / "runs" / "run" / "checkpoints"

    @contextlib.contextmanager
    def started(self, *arguments, **options):
        """The process; at the end neither it nor a process below it is left."""
        train = ("train", "run.toml", *arguments)
        log = self.folder / "output"
        with (
            log.open("w") as output,
            self.command.popen(*train, cwd=self.folder, stdout=output, stderr=output, **options) as process,
        ):
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def run(self, *arguments, **options):
        """What a start that nobody disturbs prints."""
        result = self.command.run("train", "run.toml", *arguments, cwd=self.folder, **options)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def kill_when(self, condition, *arguments, **options):
        """Starts the run and, once ``condition()``, kills the process, and with it what it runs."""
        with self.started(*arguments, **options) as process:
            wait_for(condition, process)
            below = ranks(process.pid)
            process.kill()
            code = process.wait(60)
        assert code == -signal.SIGKILL, self.output()
        wait_for(lambda: not any(map(is_alive, below.values())))

    def preempt_when(self, condition, *arguments, victim=None, **options):
        """As ``kill_when``, with one SIGTERM, at rank ``victim`` of a cluster if one is given; what it then prints.

        It ends by itself, having saved.
        """
        with self.started(*arguments, **options) as process:
            wait_for(condition, process)
            below = ranks(process.pid)
            os.kill(process.pid if victim is None else below[victim], signal.SIGTERM)
            code = process.wait(60)
        assert code == ExitCode.PREEMPTED, self.output()
        assert not any(map(is_alive, below.values()))
        return self.output()

    def kill_in_a_save(self, *arguments, attempts=3):
        """Kills while a save is under way: it leaves an unfinished step that was not there before."""
        before = self.unfinished()
        for _ in range(attempts):
            self.kill_when(lambda: self.unfinished() - before, *arguments)
            if self.unfinished() - before:
                return
        pytest.fail("every save was done before the kill arrived")

    def output(self):
        """Of the last start that was to be killed."""
        return (self.folder / "output").read_text()

    def has_taken(self, steps):
        """Whether this start is stepping, and the run is beyond so many steps."""
        is_stepping = " starts: " in self.output() or " resumes after step " in self.output()
        return is_stepping and self.metrics.read_text().count("\n") > steps

    def completed(self):
        return complete_steps(str(self.checkpoints))

    def unfinished(self):
        """The steps of saves that are under way or were cut short."""
        with contextlib.suppress(FileNotFoundError):
            names = (path.name for path in self.checkpoints.iterdir())
            return {int(name.partition(".")[0]) for name in names if UNFINISHED_INFIX in name}
        return set()

    def records(self):
        """(step, loss, gradient norm, learning rate) of every record."""
        names = ("step", "loss", "gradient_norm", "learning_rate")
        records = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        return [tuple(record[name] for name in names) for record in records]

    def state(self):
        """Every array of the last checkpoint, and the place in the data."""
        leaves = read_manifest(str(self.checkpoints), self.steps).leaves
        here = SingleDeviceSharding(jax.devices()[0])
        wanted = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=here) for k, v in leaves.items()}
        with CheckpointStore(str(self.checkpoints), keep=2) as store:
            restored = store.restore(self.steps, wanted)
        return {**jax.tree.map(np.asarray, restored.state), "data": restored.data_state}


def ranks(pid):
    """{process id in the cluster: pid} of the processes below ``pid``."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        for entry in environment:
            if entry.startswith(b"SLICEWISE_PROCESS_ID="):
                found[int(entry.partition(b"=")[2])] = int(child)
    return found


def wait_for(condition, process=None, timeout_s=120):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None, "it ended before the moment to kill it"
        assert time.monotonic() < end_s, "the moment to kill it never came"
        time.sleep(0.0005)


def assert_same(place, reference):
    assert place.records() == reference.records()
    ours, theirs = place.state(), reference.state()
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name, strict=True)
    assert place.unfinished() == set(), "what was left of a save cut short is gone"
    assert place.completed()[-2:] == [place.steps - place.every, place.steps]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, command, corpus):
    place = Place(tmp_path_factory.mktemp("undisturbed") / "alone", command, corpus)
    place.run()
    assert [record[0] for record in place.records()] == list(range(1, STEPS + 1))
    return place


@pytest.fixture(scope="module")
def undisturbed_cluster(tmp_path_factory, command, corpus):
    place = Place(
        tmp_path_factory.mktemp("undisturbed") / "cluster", command, corpus, CLUSTER_STEPS, CLUSTER_EVERY
    )
    place.run(*CLUSTER)
    return place


@pytest.fixture
def place(tmp_path, command, corpus):
    return Place(tmp_path / "place", command, corpus)


@pytest.fixture
def cluster_place(tmp_path, command, corpus):
    return Place(tmp_path / "place", command, corpus, CLUSTER_STEPS, CLUSTER_EVERY)


def test_killed_before_the_first_checkpoint_a_run_starts_over(place, undisturbed, tmp_path):
    """At start-up, while it compiles, while it fills the cache of compiled programs, and in a step."""
    cache = tmp_path / "cache"
    env = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    begun_s = time.monotonic()
    place.kill_when(lambda: time.monotonic() - begun_s > 0.5)
    place.kill_when(lambda: "compile ..." in place.output(), env=env)
    place.kill_when(lambda: cache.exists() and any(cache.iterdir()), env=env)
    place.kill_when(lambda: place.has_taken(2), env=env)
    assert place.completed() == []
    place.run(env=env)
    assert_same(place, undisturbed)


def stopped_after(output):
    return int(re.search(r"stops after step (\d+): checkpoint", output)[1])


def test_asked_to_stop_and_killed_in_a_save_in_a_restore_and_in_a_step_a_run_resumes(place, undisturbed):
    stopped = stopped_after(place.preempt_when(lambda: place.has_taken(2)))
    assert 2 < stopped < EVERY
    assert place.completed() == [stopped]
    place.kill_in_a_save()
    assert f"resumes after step {stopped}:" in place.output()
    place.kill_when(lambda: place.completed()[-1] >= EVERY and place.has_taken(EVERY))
    done = place.completed()[-1]
    place.kill_when(lambda: "restore ..." in place.output())
    assert place.completed()[-1] == done
    place.kill_in_a_save()
    done = place.completed()[-1]
    assert f"resumes after step {done}" in place.run()
    assert place.completed() == [STEPS - EVERY, STEPS]
    assert_same(place, undisturbed)


def test_a_job_goes_on_when_who_waits_for_it_is_killed(place, undisturbed):
    state = {"XDG_STATE_HOME": str(place.folder / "state")}
    submit = ("job", "submit", "run.toml", "--target", "local", "--local", "1x1x1", "--wait")
    with place.command.popen(*submit, cwd=place.folder, env=state) as waiter:
        wait_for(lambda: place.metrics.exists() and place.metrics.read_text().count("\n") > 2, waiter)
        waiter.kill()
        waiter.wait()
    wait_for(lambda: (place.folder / "runs/run/job/result.json").exists())
    shown = place.command.run("job", "status", "run", cwd=place.folder, env=state).stdout
    assert re.search(r"state +done\n(.*\n)*attempt +1, after 0 failures", shown), shown
    assert_same(place, undisturbed)


def test_killed_after_the_end_a_run_says_that_it_is_complete(place, undisturbed):
    place.kill_when(lambda: place.completed()[-1:] == [STEPS])
    before = place.records()
    assert f"runs/run is complete: {STEPS} steps are done, steps = {STEPS}." in place.run()
    assert place.records() == before
    assert_same(place, undisturbed)


def test_a_cluster_that_is_killed_or_of_which_a_part_is_asked_to_stop_resumes(
    cluster_place, undisturbed_cluster
):
    """What started it is killed at start-up, compiling, in a step, in a save, in a restore and at the end.

    Parts that are killed: tests/launch/chaos."""
    begun_s = time.monotonic()
    cluster_place.kill_when(lambda: time.monotonic() - begun_s > 0.5, *CLUSTER)
    cluster_place.kill_when(lambda: "compile ..." in cluster_place.output(), *CLUSTER)
    cluster_place.kill_when(lambda: cluster_place.has_taken(2), *CLUSTER)
    cluster_place.kill_in_a_save(*CLUSTER)
    output = cluster_place.preempt_when(
        lambda: cluster_place.has_taken(CLUSTER_EVERY + 2), *CLUSTER, victim=1, env={"JAX_LOG_COMPILES": "1"}
    )
    found = re.findall(r"(s\dh0) \|.* cache hit for 'jit_", output)
    assert set(found) == {"s0h0", "s1h0"}, output  # each finds programs that the first one compiled before
    assert "SIGTERM: saves and stops, within 50 s" in output
    assert CLUSTER_EVERY + 2 < stopped_after(output) == cluster_place.completed()[-1] < CLUSTER_STEPS
    cluster_place.kill_when(lambda: "restore ..." in cluster_place.output(), *CLUSTER)
    cluster_place.kill_when(lambda: cluster_place.completed()[-1] == CLUSTER_STEPS, *CLUSTER)
    cluster_place.run(*CLUSTER)
    assert_same(cluster_place, undisturbed_cluster)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_killed_cluster_resumes_on_another_number_of_hosts(cluster_place, undisturbed_cluster, devices):
    """One process with as many devices, and one with a single device: equal but for the order of float sums."""
    shutil.copytree(undisturbed_cluster.folder / "runs", cluster_place.folder / "runs")
    shutil.rmtree(cluster_place.checkpoints / str(CLUSTER_STEPS))
    layout = ["ici_data_parallelism=2", "ici_fsdp_parallelism=2"] if devices == 4 else []
    assert f"resumes after step {CLUSTER_STEPS - CLUSTER_EVERY}" in cluster_place.run(
        *layout, devices=devices
    )
    ours, theirs = np.array(cluster_place.records()), np.array(undisturbed_cluster.records())
    assert (ours[: CLUSTER_STEPS - CLUSTER_EVERY] == theirs[: CLUSTER_STEPS - CLUSTER_EVERY]).all()
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_array_equal(cluster_place.state()["data"], undisturbed_cluster.state()["data"])
