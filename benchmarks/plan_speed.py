"""How long pricing and searching take on this machine.

    python benchmarks/plan_speed.py

Targets: a priced configuration under 20 ms; 256 slices of 9,216 chips searched in under 2 s; the plan of 4
slices of 512 chips from shell to output in under 1 s. A free search, over every shape, has no target.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable

from slicewise.catalog import chips, model, slices
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import estimate
from slicewise.plan import training
from slicewise.plan.explain import explain
from slicewise.plan.offers import Goal
from slicewise.plan.search import Workload, search

SEARCHES = (
    ("llama3-70b", "v5p:8x8x8", 4, 8192, 2048),
    ("llama3.1-405b", "tpu7x:16x24x24", 256, 8192, 2**10 * 9 * 256),
    ("deepseek-v3", "tpu7x:16x24x24", 256, 4096, 2**11 * 9 * 256),
    ("mixtral-8x22b", "v6e:16x16", 16, 4096, 4096),
)
FREE = (("llama3-8b", "v5p"), ("llama3-70b", "v6e"), ("deepseek-v3", "tpu7x"))
SHELL = "plan --model llama3-70b --chip v5p --topology 8x8x8 --slices 4 --seq 8192 --batch-tokens 16M"


def timed(call: Callable[[], object], runs: int = 1) -> str:
    """Wall and CPU seconds of ``call``, the least of ``runs``; CPU counts child processes."""
    walls, cpus = [], []
    for _ in range(runs):
        wall, cpu = time.perf_counter(), cpu_s()
        call()
        walls.append(time.perf_counter() - wall)
        cpus.append(cpu_s() - cpu)
    return f"{min(walls):9.4f} s wall {min(cpus):9.4f} s CPU"


def cpu_s() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d')} python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    shape = model_shape(model.load("llama3-70b"))
    cluster = slices.cluster("v5p:8x8x8", 4)
    layout = Layout(Degrees(fsdp=512), Degrees(data=4), 2048)
    many = timed(lambda: [estimate(shape, cluster, layout, Recipe(), 8192) for _ in range(100)])
    print(f"{'100 priced configurations':58s}{many}")
    for name, place, count, seq, batch in SEARCHES:
        work = Workload(model_shape(model.load(name)), seq, batch)
        where = slices.cluster(place, count)
        results = []
        spent = timed(lambda: results.append(search(work, where)))  # noqa: B023
        explain(results[0])
        print(f"{name:14s} {count:3d} x {place:16s} {results[0].considered:8d} layouts      {spent}")
    for name, chip in FREE:
        work = Workload(model_shape(model.load(name)), 4096, 1024)
        among = training.clusters([chips.load(chip)], topology=None, num_slices=None, global_batch=1024)
        spent = timed(lambda: training.plan_free(work, among, Goal(1e12)))  # noqa: B023
        print(f"{name:14s} free search over {len(among)} clusters of {chip:13s}      {spent}")
    process = [sys.executable, "-m", "slicewise", *SHELL.split()]
    shell = timed(lambda: subprocess.run(process, check=True, capture_output=True), 3)
    print(f"{'from shell to output, 4 slices of 512 chips':58s}{shell}")


if __name__ == "__main__":
    main()
