"""How long pricing and searching take on this machine.

    python benchmarks/plan_speed.py

Targets: a priced configuration under 20 ms; 256 slices of 9,216 chips searched in under 2 s; the plan of 4
slices of 512 chips from shell to output in under 1 s.
"""

import platform
import subprocess
import sys
import time
from collections.abc import Callable

from slicewise.catalog import model, slices
from slicewise.costs.layout import Degrees, Layout, Recipe
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import estimate
from slicewise.plan.explain import explain
from slicewise.plan.search import Workload, search

SEARCHES = (
    ("llama3-70b", "v5p:8x8x8", 4, 8192, 2048),
    ("llama3.1-405b", "tpu7x:16x24x24", 256, 8192, 2**10 * 9 * 256),
    ("deepseek-v3", "tpu7x:16x24x24", 256, 4096, 2**11 * 9 * 256),
    ("mixtral-8x22b", "v6e:16x16", 16, 4096, 4096),
)


def best_of(runs: int, call: Callable[[], object]) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    print(f"{time.strftime('%Y-%m-%d')} python {platform.python_version()} {platform.processor()}")
    shape = model_shape(model.load("llama3-70b"))
    cluster = slices.cluster("v5p:8x8x8", 4)
    layout = Layout(Degrees(fsdp=512), Degrees(data=4), 2048)
    price = best_of(20, lambda: estimate(shape, cluster, layout, Recipe(), 8192))
    print(f"one priced configuration                                  {price * 1e3:8.2f} ms")
    for name, place, count, seq, batch in SEARCHES:
        work = Workload(model_shape(model.load(name)), seq, batch)
        where = slices.cluster(place, count)
        started = time.perf_counter()
        result = search(work, where)
        explain(result)
        taken = time.perf_counter() - started
        print(f"{name:14s} {count:3d} x {place:16s} {result.considered:8d} layouts  {taken:8.2f} s")
    code = (
        "from slicewise.catalog import model, slices\n"
        "from slicewise.costs.shapes import model_shape\n"
        "from slicewise.plan.search import Workload, search\n"
        "from slicewise.plan.explain import explain\n"
        "w = Workload(model_shape(model.load('llama3-70b')), 8192, 2048)\n"
        "print(explain(search(w, slices.cluster('v5p:8x8x8', 4))).winner_text)\n"
    )
    shell = best_of(3, lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True))
    print(f"a new process that plans 4 slices of 512 chips            {shell:8.2f} s")


if __name__ == "__main__":
    main()
