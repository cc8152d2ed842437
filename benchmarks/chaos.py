"""A run of two emulated slices under every fault at every moment, then under seeded schedules; nothing may be lost.

    python benchmarks/chaos.py [--schedules 200] [--first SEED] [--no-matrix] [--only TEXT]
        [--local 2x1x1]

The matrix is kind of fault x victim (rank 0, another rank or slice, supervisor) x moment, a schedule for each cell that
can be: a restore is made possible by a kill before it. Prints a line for each schedule and the table of slicewise chaos
at the end; both also go to benchmarks/results/chaos.txt. Ends with 1 when anything did not hold. Target: none of 200
schedules, and no cell, violates an invariant (docs/goodput.md).
"""

import argparse
import datetime
import importlib.metadata
import io
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from slicewise.config import load_config
from slicewise.launch.chaos import run, schedule, table
from slicewise.launch.chaos.schedule import Schedule
from slicewise.launch.targets.local import parse_shape

RESULT = Path(__file__).parent / "results" / "chaos.txt"
SMALL = str(Path(__file__).parents[1] / "examples" / "small.toml")
STEPS, EVERY = 12, 3
MATRIX_SEEDS = 1_000_000  # of the cells, apart from those of seeded schedules


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--schedules", type=int, default=200, help="seeded schedules (default 200)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the first (default 0)")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="of the matrix, cells with this in their line"
    )
    parser.add_argument("--no-matrix", action="store_true", help="only the seeded schedules")
    parser.add_argument(
        "--local", default="2x1x1", metavar="SxHxD", help="the emulated cluster (default 2x1x1)"
    )
    asked = parser.parse_args()
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # compiles three times as fast
    shape = parse_shape(asked.local)
    cells = [] if asked.no_matrix else schedule.matrix(shape, steps=STEPS, every=EVERY, seed=MATRIX_SEEDS)
    cells = [cell for cell in cells if asked.only in str(cell)]
    seeds = range(asked.first, asked.first + asked.schedules)
    seeded = [schedule.make(n, schedule.KINDS, shape, steps=STEPS, every=EVERY) for n in seeds]
    RESULT.parent.mkdir(exist_ok=True)
    with RESULT.open("w") as file:
        return _run_all([*cells, *seeded], shape, file)


def _run_all(schedules: list[Schedule], shape, file: io.TextIOBase) -> int:
    def say(text: str) -> None:
        for out in (sys.stdout, file):
            print(text, file=out, flush=True)

    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("slicewise", "jax"))
    say(f"$ python benchmarks/chaos.py {' '.join(sys.argv[1:])}".rstrip())
    say(f"{datetime.date.today()} {versions} python {platform.python_version()}, {os.cpu_count()} cores")
    folder, begun_s, outcomes = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic(), []
    keys = [f"steps={STEPS}", f"checkpoint_every={EVERY}", f"output_directory={folder}"]
    setup = run.prepare(load_config(SMALL, keys), shape)
    expected, usual_s = run.undisturbed(setup)
    say(f"undisturbed: {STEPS} steps in {usual_s:.1f} s, checkpoints every {EVERY}")
    for one in schedules:
        outcomes.append(run.disturbed(setup, one, expected, usual_s))
        say(table.line(outcomes[-1]))
    buffer = io.StringIO()
    table.text(Console(file=buffer, width=140, color_system=None), outcomes)
    say(buffer.getvalue().rstrip())
    spent_s = time.monotonic() - begun_s
    say(f"{len(outcomes)} schedules in {spent_s / 60:.1f} min, {spent_s / len(outcomes):.1f} s each")
    if any(outcome.violations for outcome in outcomes):
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
