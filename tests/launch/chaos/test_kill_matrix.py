"""A job whose processes are killed, stopped, asked to stop or fail, at whatever moment, ends as if nothing had been.

Each schedule here is a few cells of the matrix one after the other; benchmarks/chaos.py runs all of it.
"""

from pathlib import Path

import pytest

from slicewise.config import load_config
from slicewise.launch.chaos import run
from slicewise.launch.chaos.schedule import Schedule
from slicewise.launch.targets.local import parse_shape
from slicewise.train.injection import Fault

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SMALL = str(Path(__file__).parents[3] / "examples" / "small.toml")
EVERY = 4  # steps between its checkpoints
SUPERVISOR = ()


MATRIX = {
    "2x1x1": [
        Fault(1, "exception", (0,), "compile"),
        Fault(2, "kill", (1,), "save", EVERY, delay_s=0.01),
        Fault(3, "stop", (1,), "step", 2 * EVERY + 1),
    ],
    "1x1x1": [
        Fault(1, "disk-full", (0,), "save", 2 * EVERY),
        Fault(2, "terminate", SUPERVISOR, "step", EVERY + 2),
        Fault(3, "corrupt", (0,), "step", EVERY + 3, seed=3),
        Fault(4, "kill", (0,), "restore", delay_s=0.05),
        Fault(5, "kill", SUPERVISOR, "finish"),
    ],
}


@pytest.mark.parametrize("shape", MATRIX)
def test_a_run_under_faults_is_the_run_that_nobody_disturbed(tmp_path, shape):
    faults = MATRIX[shape]
    loaded = load_config(SMALL, [f"output_directory={tmp_path}"])
    setup = run.prepare(loaded, parse_shape(shape))
    outcome = run.disturbed(setup, Schedule(0, tuple(faults)), *run.undisturbed(setup))
    assert outcome.violations == ()
    happened = [(f["attempt"], f["kind"], f["state"]) for f in outcome.fired]
    assert happened == [(f.attempt, f.kind, f.moment) for f in faults]
    assert outcome.attempts == len(faults) + 1
    assert outcome.account.wall_us == sum(outcome.account.parts_us.values())
