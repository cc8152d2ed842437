"""Training under a runner that is killed at whatever moment: nothing goes on without it, and nothing is lost."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from slicewise.checkpoint.manifest import UNFINISHED_INFIX, complete_steps, read_manifest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

STEPS, EVERY = 24, 8
RUN = [
    "model=demo-tiny",
    "compute_dtype=float32",
    "sequence_length=32",
    "global_batch_size=4",
    "dataset=synthetic",
]
RUN += [f"steps={STEPS}", f"checkpoint_every={EVERY}", "eval_batches=0", "tensorboard=false"]


@pytest.fixture
def train(many, command, tmp_path, tmp_path_factory):
    """Starts the run ``name`` on one worker; the process of the runner."""
    target = many(1, 1)
    cache = tmp_path_factory.getbasetemp() / "compiled-on-workers"
    environment = {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    options = [word for item in environment.items() for word in ("--env", "=".join(item))]

    def start(name):
        overrides = [*RUN, f"output_directory={tmp_path}/runs", f"run_name={name}"]
        return target.popen(sys.executable, "-m", "slicewise", "train", *overrides, options=options)

    start.target, start.runs = target, tmp_path / "runs"
    return start


def trainers(folder):
    """The processes that train in ``folder``, by their command lines: not their runner, which has --on."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--on" not in words and f"output_directory={folder}".encode() in words:
                found.append(int(entry.name))
    return found


def outcome(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    manifest = read_manifest(str(run / "checkpoints"), STEPS)
    losses = [(r["step"], r["loss"], r["gradient_norm"]) for r in records]
    return losses, {name: leaf.digest for name, leaf in manifest.leaves.items()}, manifest.data_state.tolist()


def test_a_run_whose_runner_was_killed_at_start_up_in_a_step_and_in_a_save_resumes_bit_for_bit(train):
    run = train.runs / "killed"

    def steps():
        return (run / "metrics.jsonl").read_text().count("\n") if (run / "metrics.jsonl").exists() else 0

    def saves():
        folder = run / "checkpoints"
        return folder.exists() and any(UNFINISHED_INFIX in path.name for path in folder.iterdir())

    for moment in (lambda: trainers(train.runs), lambda: steps() > 1, saves):
        with train("killed") as runner:
            train.target.until(lambda moment=moment: runner.poll() is not None or moment(), 60)
            runner.kill()
            assert runner.wait() == -signal.SIGKILL, runner.communicate()[0]
        train.target.until(lambda: not trainers(train.runs), 15)
    for name in ("killed", "undisturbed"):
        with train(name) as runner:
            out = runner.communicate(timeout=120)[0]
            assert runner.returncode == 0, out
    assert complete_steps(str(run / "checkpoints"))[-1] == STEPS
    assert outcome(run) == outcome(train.runs / "undisturbed")
