"""The goodput of a run that is killed at random, measured, beside what slicewise plan goodput expects of it.

    python benchmarks/goodput_prediction.py [--failures 12] [--restarts-per-failure 4] [--seed 0]

An emulated cluster of two slices trains. One start and one restart show how long a restart takes; then the whole
cluster, with its supervisor, is killed again and again. The times from a start to its kill are quantiles of an
exponential distribution in random order, so that the sample has its mean: so many restart times. The run ends when it
trains again after the last kill. Measured is the share of training that was not lost; expected is what the planner
makes of the rate of failures, the restart time, and the stall and interval of checkpoints of the same run.
Target: within 5 points.
"""

import argparse
import datetime
import importlib.metadata
import math
import os
import platform
import random
import shutil
import sys
import tempfile
from pathlib import Path

from slicewise.config import load_config
from slicewise.costs.units import duration
from slicewise.launch.chaos import run
from slicewise.launch.chaos.schedule import Schedule
from slicewise.launch.policy import Watch
from slicewise.launch.targets.local import parse_shape
from slicewise.train.goodput import Account, account, read
from slicewise.train.goodput_expected import expectation, measured
from slicewise.train.injection import Fault

TOLERANCE = 0.05
KEYS = (
    "steps=1000000",
    "checkpoint_every=200",
    "model=demo-tiny",
    "compute_dtype=float32",
    "dataset=synthetic",
    "sequence_length=32",
    "global_batch_size=4",
    "eval_batches=0",
    "log_every=100",
    "tensorboard=false",
)
TRAINS = Fault(0, "kill", (), "step")  # of the last start: at its first step everything has been seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--failures", type=int, default=12, help="kills (default 12)")
    times = "mean time to a kill, in restart times (default 4)"
    parser.add_argument("--restarts-per-failure", type=float, default=4.0, metavar="X", help=times)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the kills (default 0)")
    asked = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    folder = Path(tempfile.mkdtemp(prefix="goodput-"))
    setup = run.prepare(
        load_config(None, [*KEYS, f"output_directory={folder}"]), parse_shape("2x1x1"), Watch()
    )
    first = _start(setup, "calibration", [Fault(1, "kill", (), "step", 500), _last(2)])
    restart_s = first.restarts[-1].total_us / 1e6
    mean_s = asked.restarts_per_failure * restart_s
    kills_s = [-mean_s * math.log(1 - (k + 0.5) / asked.failures) for k in range(asked.failures)]
    random.Random(asked.seed).shuffle(kills_s)
    faults = [Fault(k + 1, "kill", (), "imports", delay_s=s) for k, s in enumerate(kills_s)]
    found = _start(setup, "killed", [*faults, _last(asked.failures + 1)])
    shutil.rmtree(folder)
    return _report(found, restart_s, mean_s, asked.failures)


def _last(attempt: int) -> Fault:
    return Fault(attempt, TRAINS.kind, TRAINS.ranks, TRAINS.moment, step=1)


def _start(setup: run.Setup, name: str, faults: list[Fault]) -> Account:
    """The account up to the moment at which the last start trains. Raises SystemExit when it went otherwise."""
    outcome = run.start(setup, name, Schedule(0, tuple(faults)), starts=len(faults))
    if len(outcome.fired) != len(faults):
        sys.exit(f"{len(faults)} kills were to happen, and {len(outcome.fired)} did; see {setup.folder}")
    stamps = read(setup.run_directory(name))
    end = max(k for k, stamp in enumerate(stamps) if stamp.from_step is not None)
    return account(stamps[: end + 1])


def _report(found: Account, restart_s: float, mean_s: float, failures: int) -> int:
    plan, share = expectation(found), measured(found)
    assert plan is not None
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("slicewise", "jax"))
    print(f"{datetime.date.today()} {versions} python {platform.python_version()}, {os.cpu_count()} cores")
    print(
        f"a restart took {duration(restart_s)} at first; killed {failures} times, {duration(mean_s)} after a start"
    )
    print(
        f"wall time {duration(found.wall_us / 1e6)}, {found.lost_steps:,} of {found.steps:,} steps taken again"
    )
    for line in plan.explain():
        print(f"  {line}")
    off = plan.goodput - share
    print(f"goodput measured {share:.1%}, expected {plan.goodput:.1%}: off by {100 * off:+.1f} points")
    return 0 if abs(off) <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
