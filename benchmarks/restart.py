"""Seconds from SIGKILL of a slice to the next step of the restarted run, and what they go into.

    python benchmarks/restart.py [--restarts 3] [--local 2x1x1]

A local job on an emulated cluster loses its last slice in the middle of a step, again and again, with programs compiled
before. Waits are those of a job by default: three seconds for the others to end by themselves, and 1, 2, 4, ... s
before each try ("delay"), which the total of "without delay" leaves out. Target: under 15 s on two idle cores.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from slicewise.config import load_config
from slicewise.launch.chaos import run
from slicewise.launch.chaos.schedule import Schedule
from slicewise.launch.targets.local import parse_shape
from slicewise.report import run_goodput
from slicewise.train.injection import Fault

TARGET_S = 15.0
SMALL = str(Path(__file__).parents[1] / "examples" / "small.toml")
EVERY = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--restarts", type=int, default=3, help="how many (default 3)")
    parser.add_argument(
        "--local", default="2x1x1", metavar="SxHxD", help="the emulated cluster (default 2x1x1)"
    )
    asked = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    shape, folder = parse_shape(asked.local), Path(tempfile.mkdtemp(prefix="restart-"))
    steps = f"steps={EVERY * (asked.restarts + 2)}"
    keys = [steps, f"checkpoint_every={EVERY}", f"output_directory={folder}"]
    setup = run.prepare(load_config(SMALL, keys), shape)
    run.undisturbed(setup)
    ranks = tuple(range(shape.processes - shape.hosts_per_slice, shape.processes))
    faults = (Fault(k + 1, "kill", ranks, "step", EVERY * (k + 1) + 5) for k in range(asked.restarts))
    outcome = run.start(setup, "killed", Schedule(0, tuple(faults)), starts=1)
    if outcome.violations or outcome.account is None:
        sys.exit(f"{'; '.join(outcome.violations)}; see {folder}")
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("slicewise", "jax"))
    print(
        f"{datetime.date.today()} {versions} python {platform.python_version()}, {os.cpu_count()} cores,",
        end=" ",
    )
    print(f"load {os.getloadavg()[0]:.1f}")
    run_goodput.text(Console(width=140, color_system=None), f"{asked.local}, {steps}", outcome.account)
    own_s = [(r.total_us - r.phases_us.get("delay", 0)) / 1e6 for r in outcome.account.restarts]
    print(f"without delay: {', '.join(f'{s:.2f}' for s in own_s)} s; target {TARGET_S:g} s")
    shutil.rmtree(folder)
    return 0 if max(own_s) < TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
