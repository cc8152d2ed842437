"""What compiling costs, and what comes of it, beside MaxText's figures for the same shapes.

    python benchmarks/compile_speed.py [--full | --memory]

First Llama-3-8B to its schedule on 16 to 4,096 chips (target: under 20 CPU seconds and 2.5 GB). With --full also the
peer's rows to machine code (minutes each): CPU seconds, memory of the process, peak HBM of a device, and the sum of the
compiler's cycles over the schedule, loops counted, without kernels and collectives. With --memory alone the peer's rows
to their schedule, from the cache where they are there: peak HBM of a device. The peer is MaxText 0.2.5 with jax
0.11.1 and libtpu 0.0.46, sequences of 4096, full remat; measured once on two cores, November 2026.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version

from slicewise.catalog import slices
from slicewise.compile import cost, hlo
from slicewise.compile.analysis import CompiledStep, analyse
from slicewise.compile.compiler import Depth, Request, compile_request
from slicewise.config import load_config


@dataclass(frozen=True)
class Peer:
    model: str
    slice: str
    num_slices: int
    batch: int  # sequences of a device
    cpu_s: float
    rss_gb: float
    hbm_gb: float
    cycles: float


PEERS = (
    Peer("llama3-8b", "v5p:2x2x4", 1, 4, 113, 1.99, 20.75, 6.09e9),
    Peer("llama3-8b", "v5p:2x2x2", 2, 4, 187, 2.37, 29.77, 5.01e9),
    Peer("llama3-8b", "v6e:4x4", 1, 2, 229, 2.28, 14.90, 2.90e9),
    Peer("llama3-8b", "v6e:16x16", 1, 2, 433, 2.12, 5.89, 1.69e9),
    Peer("llama2-70b", "v5p:4x4x4", 2, 2, 396, 2.76, 41.18, 2.21e10),
)
TO_SCHEDULE = ("v5p:2x2x4", "v5p:4x4x4", "v5p:8x8x8", "v5p:16x16x16", "v5e:16x16", "v6e:16x16", "tpu7x:4x4x8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    print(f"python {sys.version.split()[0]} jax {version('jax')} libtpu {version('libtpu')}")
    if arguments.memory:
        print(f"{'peak HBM, GB a device':34s} {'ours':>7s} {'peer':>7s}")
        for peer in PEERS:
            step = compiled(peer.model, peer.slice, peer.num_slices, peer.batch, "schedule")
            ours, name = step.memory.total_bytes / 1e9, f"{peer.model} {peer.num_slices} x {peer.slice}"
            print(f"{name:34s} {ours:7.2f} {peer.hbm_gb:7.2f} {ours / peer.hbm_gb - 1:+7.1%}", flush=True)
        return
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        print(f"{'to the schedule':24s} {'chips':>6s} {'CPU s':>7s} {'RSS GB':>7s}")
        for where in TO_SCHEDULE:
            step = compiled("llama3-8b", where, 1, 1, "schedule")
            chips = step.request.cluster.chips
            print(f"llama3-8b {where:14s} {chips:6d} {step.cpu_s:7.1f} {step.peak_rss_bytes / 1e9:7.2f}")
        if arguments.full:
            print(f"{'ours / peer':34s} {'CPU s':>11s} {'RSS GB':>11s} {'HBM GB':>13s} {'cycles':>17s}")
            for peer in PEERS:
                show(peer, compiled(peer.model, peer.slice, peer.num_slices, peer.batch, "full"))


def compiled(model: str, where: str, num_slices: int, batch: int, depth: Depth) -> CompiledStep:
    cluster = slices.cluster(where, num_slices)
    rows = batch * cluster.devices
    overrides = [f"model={model}", "sequence_length=4096", f"global_batch_size={rows}", "remat_policy=full"]
    if cluster.slice.devices >= 4096:  # fully sharded, 8B would leave one column of a weight to a device
        overrides += ["ici_data_parallelism=2", "ici_fsdp_parallelism=-1"]
    return analyse(compile_request(Request(load_config(None, overrides).config, cluster, depth=depth)))


def show(peer: Peer, step: CompiledStep) -> None:
    hbm, rss = step.memory.total_bytes / 1e9, step.peak_rss_bytes / 1e9
    name = f"{peer.model} {peer.num_slices} x {peer.slice}"
    print(
        f"{name:34s} {step.cpu_s:5.0f} /{peer.cpu_s:4.0f} {rss:5.2f} /{peer.rss_gb:4.2f}"
        f" {hbm:6.2f} /{peer.hbm_gb:5.2f} {cycles(step):8.2e} /{peer.cycles:.2e}"
    )


def cycles(step: CompiledStep) -> float:
    """Of what the compiler estimates, over the whole program."""
    clock = cost.rates()[step.request.cluster.chip.name].clock_hz
    instructions = {i.name: i for c in step.module.computations.values() for i in c.instructions.values()}
    spent = step.replay.totals.seconds.items()
    return sum(s * clock for (_, name), s in spent if estimated(instructions[name]))


def estimated(instruction: hlo.Instruction) -> bool:
    return instruction.estimated_cycles is not None


if __name__ == "__main__":
    main()
