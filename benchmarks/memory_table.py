"""What each remat policy holds, as compiled and as planned: layers of Llama-3-8B's shape on v5p and v6e.

    python benchmarks/memory_table.py [--layers 32] [--depth schedule|full]

Temporary memory is all that a step holds beside weights, optimiser state and batch: saved activations, gradients and
the buffers of its operations. Each policy is compiled for 16 chips of each generation, fully sharded, one sequence a
chip. Programs are cached, so that a second run takes seconds.
"""

import argparse
import json
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from slicewise.catalog import chips, slices
from slicewise.catalog.model import load
from slicewise.catalog.slices import Cluster
from slicewise.compile.analysis import analyse
from slicewise.compile.beside import beside_plan
from slicewise.compile.compiler import Request, compile_request
from slicewise.config import load_config

SLICES = {"v5p": "2x2x4", "v6e": "4x4"}
# From what holds least to what holds most in device memory.
POLICIES = (
    "full", "qkv_proj_offloaded", "save_out_proj", "save_qkv_proj", "save_dot_with_context_except_mlp", "minimal",
    "minimal_with_context",
)  # fmt: skip
ARGUMENTS = ("weights", "optimizer", "batch")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--depth", choices=("schedule", "full"), default="schedule")
    arguments = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d')} jax {version('jax')} libtpu {version('libtpu')}, GiB a device")
    print(
        f"{'chip':5s} {'policy':34s} {'compiled':>9s} {'planned':>9s} {'':>7s} {'saved':>9s} {'planned':>9s}"
    )
    errors = []
    for chip in SLICES:
        held = []
        for policy in POLICIES:
            compiled, planned, *saved = temporaries(
                chip, policy, arguments.layers, arguments.sequence_length, arguments.depth
            )
            held.append(compiled)
            errors.append(abs(planned / compiled - 1))
            print(
                f"{chip:5s} {policy:34s} {compiled / 2**30:9.2f} {planned / 2**30:9.2f} {planned / compiled - 1:+7.1%}"
                f" {saved[0] / 2**30:9.2f} {saved[1] / 2**30:9.2f}",
                flush=True,
            )
        print(f"{chip:5s} {'in order' if held == sorted(held) else 'NOT IN ORDER'}")
    print(f"planned against compiled: median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


def temporaries(
    chip: str, policy: str, layers: int, seq: int, depth: str
) -> tuple[float, float, float, float]:
    """Bytes a device holds beside its arguments, as compiled and as planned; saved activations likewise."""
    cluster = Cluster(slices.parse(SLICES[chip], chips.load(chip)), 1)
    with tempfile.TemporaryDirectory() as directory:
        config = load_config(
            None,
            [
                f"model={model_file(layers, Path(directory))}",
                f"sequence_length={seq}",
                f"global_batch_size={cluster.devices}",
                "ici_fsdp_parallelism=-1",
                f"remat_policy={policy}",
            ],
        ).config
        request = Request(config, cluster, depth=depth)  # type: ignore[arg-type]
        estimate = analyse(compile_request(request)).estimate
        planned = beside_plan(request, estimate).planned
    assert planned is not None
    held = [sum(b for name, b in e.hbm_bytes.items() if name not in ARGUMENTS) for e in (estimate, planned)]
    saved = (estimate.hbm_bytes.get("saved activations", 0.0), planned.hbm_bytes.get("activations", 0.0))
    return held[0], held[1], *saved


def model_file(layers: int, directory: Path) -> str:
    """Llama-3-8B with another number of layers."""
    path = directory / "model.toml"
    said = load("llama3-8b").model_dump(exclude_none=True) | {"layers": layers}
    path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in said.items()))
    return str(path)


if __name__ == "__main__":
    main()
