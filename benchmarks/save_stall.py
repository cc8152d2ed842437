"""How long a checkpoint holds training up: the seconds that the main thread spends in it, on the demo model.

    python benchmarks/save_stall.py [--interval 30] [--saves 6] [key=value ...] > benchmarks/results/save_stall.txt

One process with one device trains and saves by the clock. The main thread stands still for the digests on the device
and the copy off it; writing goes on in the background. The first save also compiles the digests, and is shown apart.
Target: under 2 % of the time between two checkpoints that are 30 s apart.
"""

import argparse
import contextlib
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from slicewise.config import RunConfig, load_config
from slicewise.train import loop
from slicewise.train.saving import Saver

DEMO = Path(__file__).parent.parent / "examples" / "demo.toml"
ALONE = [
    "ici_fsdp_parallelism=-1",
    "dcn_data_parallelism=1",
    "steps=1000000",
    "eval_batches=0",
    "tensorboard=false",
]


class Enough(Exception):
    """The run has been long enough."""


def stalls_s(config: RunConfig, saves: int) -> list[float]:
    """The seconds of the main thread in each of the first ``saves`` checkpoints of a run."""
    spent: list[float] = []
    save = Saver.save

    def timed(self: Saver, *arguments: Any, **named: Any) -> None:
        began_s = time.perf_counter()
        save(self, *arguments, **named)
        spent.append(time.perf_counter() - began_s)
        print(f"checkpoint {len(spent)}: {spent[-1]:.4f} s", file=sys.stderr)
        if len(spent) == saves:
            raise Enough

    Saver.save = timed  # type: ignore[method-assign]
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Enough):
            loop.train(config)
    finally:
        Saver.save = save  # type: ignore[method-assign]
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between checkpoints")
    parser.add_argument("--saves", type=int, default=6, help="how many to time")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        more = [f"output_directory={folder}", f"checkpoint_interval_s={options.interval}", *options.overrides]
        config = load_config(str(DEMO), [*ALONE, *more]).config
        first, *others = stalls_s(config, options.saves)
    median = statistics.median(others)
    print(f"$ python benchmarks/save_stall.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"{time.strftime('%Y-%m-%d')}, python {platform.python_version()}, jax {jax.__version__}")
    print(f"{os.cpu_count()} cores under a load of {os.getloadavg()[0]:.1f}")
    print(f"{config.model.model}: {len(others)} checkpoints, one every {options.interval:g} s")
    print(f"the main thread stands still for {1000 * median:.1f} ms (most {1000 * max(others):.1f} ms)")
    print(f"the first one compiles the digests, and takes {first:.2f} s")
    print(f"{100 * median / options.interval:.2f} % of the time between two (target: under 2 %)")


if __name__ == "__main__":
    main()
