"""Rate of `slicewise bench shardings` on one device against the best plain jnp.matmul of the same run.

python benchmarks/shardings.py
"""

import datetime
import platform

import jax

from slicewise.config import RunConfig
from slicewise.measure.bench_shardings import measure, plain_flops_per_s
from slicewise.parallel.cluster import SliceDevices, by_slice
from slicewise.plan.stack import Stack

STACKS = (
    Stack(rows=1024, d_model=2048, layers=2, dtype="float32"),
    Stack(rows=1024, d_model=2048, layers=2, dtype="bfloat16"),
)


def main() -> None:
    device = jax.devices()[0]
    print(
        f"{datetime.date.today():%d %B %Y}, jax {jax.__version__}, {device.device_kind} of {platform.machine()}"
    )
    print("python benchmarks/shardings.py")
    print(
        f"{'dtype':10}{'D':>6}{'rows':>7}{'layers':>8}{'stack, GFLOP/s':>17}{'matmul, GFLOP/s':>17}{'share':>8}"
    )
    for stack in STACKS:
        rate, plain = rates(stack, by_slice([device]))
        print(
            f"{stack.dtype:10}{stack.d_model:>6}{stack.rows:>7}{stack.layers:>8}"
            f"{rate / 1e9:>17.1f}{plain / 1e9:>17.1f}{rate / plain:>8.1%}"
        )


def rates(stack: Stack, devices: SliceDevices, steps: int = 15) -> tuple[float, float]:
    """FLOP/s of the stack in its fastest step and of the plain product, which is timed before and after it.

    The first product's gradient by the input, which the guide counts and nothing computes, is left out."""
    before = plain_flops_per_s(stack, devices, repeats=15)
    times_s = measure(stack, RunConfig(), devices, steps).times_s
    flops = stack.flops - 2.0 * stack.rows * stack.d_model * stack.d_ff
    return flops / min(times_s), max(before, plain_flops_per_s(stack, devices, repeats=15))


if __name__ == "__main__":
    main()
