"""CPU seconds a step and seconds to the first step, beside MaxText on the same tiny model, paired in one run.

    python benchmarks/peer_step.py --peer PYTHON [--pairs 3]

PYTHON is the interpreter of an environment with MaxText 0.2.5. Both train 4.46 million parameters (4 layers, d_model
256, 4 heads of 64, SwiGLU of 1024, vocabulary 512) in float32 with AdamW on 2,048 synthetic tokens a step; remat is
each side's own choice. Runs alternate. CPU seconds a step are (CPU of 30 steps - CPU of 10) / 20, over all threads, of
runs that find their programs compiled. The first step is timed from starting the command to its line for step 1, on
both sides: as after installation, with neither bytecode nor compiled programs; with bytecode and no compiled programs;
and as a second run of a config.
Targets: at most 0.75 of the peer's CPU seconds a step, a quarter of its time to the first step.
"""

import argparse
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHORT, LONG = 10, 30  # steps
BYTECODE = "-installed"  # ends the name of a cache that starts without bytecode


@dataclass(frozen=True)
class Run:
    cpu_s: float
    first_step_s: float


def measure(command: list[str], first_step: str, cache: str) -> Run:
    """Runs ``command`` to its end; ``first_step`` is a pattern of the output line that ends its first step.

    Compiled programs are kept in ``cache``; bytecode as well when it is named so, else where it is installed.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": f"{cache}/cache"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if cache.endswith(BYTECODE):
        environment["PYTHONPYCACHEPREFIX"] = f"{cache}/bytecode"
    before, start_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout
    first_step_s, lines = None, []
    for line in process.stdout:
        lines.append(line)
        if first_step_s is None and re.search(first_step, line):
            first_step_s = time.perf_counter() - start_s
    if process.wait() or first_step_s is None:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(lines[-20:])}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, first_step_s)


def ours(steps: int, cache: str) -> Run:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "slicewise", "train", "examples/peer-tiny.toml"]
        return measure([*command, f"steps={steps}", f"output_directory={directory}"], r"step 1/", cache)


def peer(python: str, steps: int, cache: str) -> Run:
    with tempfile.TemporaryDirectory() as directory:
        options = dict(
            run_name="tiny", base_output_directory=directory, jax_cache_dir=f"{cache}/cache", hardware="cpu",
            skip_jax_distributed_system="true", dataset_type="synthetic", base_num_decoder_layers=4,
            base_emb_dim=256, base_num_query_heads=4, base_num_kv_heads=4, head_dim=64, base_mlp_dim=1024,
            vocab_size=512, max_target_length=256, per_device_batch_size=8, dtype="float32",
            weight_dtype="float32", remat_policy="full", attention="dot_product", enable_checkpointing="false",
            steps=steps,
        )  # fmt: skip
        command = [
            python,
            "-m",
            "maxtext.trainers.pre_train.train",
            *(f"{k}={v}" for k, v in options.items()),
        ]
        return measure(command, r"completed step: 0", cache)


def pair(python: str) -> dict[str, tuple[float, float]]:
    """Figure -> (ours, peer's), from eight runs in turn."""
    with (
        tempfile.TemporaryDirectory(suffix=BYTECODE) as mine,
        tempfile.TemporaryDirectory(suffix=BYTECODE) as other,
    ):
        g, h = ours(SHORT, mine), peer(python, SHORT, other)
    with tempfile.TemporaryDirectory() as mine, tempfile.TemporaryDirectory() as other:
        a, b = ours(SHORT, mine), peer(python, SHORT, other)
        c, d = ours(LONG, mine), peer(python, LONG, other)
        e, f = ours(SHORT, mine), peer(python, SHORT, other)
    per_step = 1 / (LONG - SHORT)
    return {
        "CPU s/step": ((c.cpu_s - e.cpu_s) * per_step, (d.cpu_s - f.cpu_s) * per_step),
        "first step s, just installed": (g.first_step_s, h.first_step_s),
        "first step s, nothing compiled before": (a.first_step_s, b.first_step_s),
        "first step s, second run of a config": (e.first_step_s, f.first_step_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="python of an environment with MaxText")
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    query = "from importlib.metadata import version as v; print('MaxText', v('maxtext'), 'jax', v('jax'))"
    theirs = subprocess.run(
        [arguments.peer, "-c", query], capture_output=True, text=True, check=True
    ).stdout.strip()
    print(
        f"{time.strftime('%Y-%m-%d')} python {platform.python_version()} jax {version('jax')}; peer: {theirs}"
    )
    ratios: dict[str, list[float]] = {}
    for number in range(1, arguments.pairs + 1):
        for figure, (mine, other) in pair(arguments.peer).items():
            ratios.setdefault(figure, []).append(mine / other)
            print(
                f"pair {number}  {figure:38s}  ours {mine:6.2f}  peer {other:6.2f}  ratio {mine / other:.2f}"
            )
    for figure, values in ratios.items():
        print(f"median ratio  {figure:38s}  {statistics.median(values):.2f}")


if __name__ == "__main__":
    main()
