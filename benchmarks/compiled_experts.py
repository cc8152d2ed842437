"""What the search with the compiler finds, against hand-tuned configurations compiled in the same way.

    python benchmarks/compiled_experts.py [--compile] [--only TEXT] [--top 12]

The expert's own layout, batch, remat, precision and flags are compiled to their schedule. The search begins with the
same work and flags in the default layout, and compiles the planner's best layouts; the fastest that fits is set against
the expert's. Results are kept in benchmarks/data/compiled_experts.json; --compile fills in what is not there.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import experts
import rows
from runs import config_of
from slicewise.compile.analysis import analyse
from slicewise.compile.compiler import Request, compile_request
from slicewise.compile.search import Trial, search_compiled
from slicewise.config import AXES, with_overrides
from slicewise.errors import UserError

KEPT = Path(__file__).parent / "data" / "compiled_experts.json"
# Of each generation: dense and mixtures of experts, one and several slices, bf16 and 8 bits.
CHOSEN = (
    "script-v4-22b",
    "pax-C4Spmd16BAdam32Replicas",
    "pax-C4Spmd22BAdam2xv4_128",
    "script-v5e-16b",
    "script-v5e-128b",
    "script-v5e-llama2_70b",
    "script-v5p-llama2_70b",
    "script-v5p-32b",
    "script-v5p-128b",
    "mlperf-mlperf-v4.0-gpt3-v5p-1024",
    "bench-v6e-llama3_1_8b_8192",
    "bench-v6e-llama3_1_70b_8192",
    "bench-v6e-mixtral_8x7b_dropless",
    "mlperf-mlperf-v4.1-gpt3-trillium-512",
    "ironwood-llama3.1-70b-8k-bf16-tpu7x-4x4x4-xpk",
    "ironwood-llama3.1-70b-8k-fp8-tpu7x-4x4x4-xpk",
)
DEFAULT_LAYOUT = [
    *(f"{network}_{axis}_parallelism=1" for network in ("ici", "dcn") for axis in AXES),
    *("ici_fsdp_parallelism=-1", "dcn_data_parallelism=-1"),
    *("remat_policy=full", "remat_tensors={}"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="compile those that are not kept yet")
    parser.add_argument("--only", default="", help="configurations whose id contains this")
    parser.add_argument("--top", type=int, default=12, help="layouts of the planner to compile for each")
    arguments = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    configs = {c["id"]: c for c in rows.load(experts.DEFAULT)}
    compared = no_slower = 0
    print(f"{'configuration':48s} {'expert':>9s} {'ours':>9s} {'ratio':>6s}  layout")
    for name in CHOSEN:
        if arguments.only not in name:
            continue
        if arguments.compile and name not in kept:
            kept[name] = compiled(configs[name], arguments.top)
            KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        if (ratio := show(name, kept.get(name))) is not None:
            compared += 1
            no_slower += ratio <= 1.001
    if compared:
        print(f"{no_slower} of {compared} no slower than the expert's ({no_slower / compared:.0%})")


def compiled(config: dict[str, Any], top: int) -> dict[str, Any]:
    """Seconds a step of the expert's configuration and of ours, or why there is none."""
    try:
        e = experts.expert(config)
        if isinstance(e, str):
            return {"refused": e}
        point = {**config, "model": experts.overridden(config["model"])}
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            run = config_of(point, e.layout, e.recipe, e.workload.seq, Path(directory))
            theirs = analyse(compile_request(Request(run, e.cluster)))
            print(f"{config['id']}: {theirs.estimate.step_time_s:.3f} s", file=sys.stderr, flush=True)
            found = search_compiled(
                with_overrides(run, DEFAULT_LAYOUT), e.cluster, top=top, seconds=1e6, progress=shown
            )
    except UserError as error:
        return {"refused": str(error).splitlines()[0]}
    best = found.best
    return {
        "theirs_s": theirs.estimate.step_time_s,
        "theirs_fits": theirs.fits,
        "ours_s": best.step.estimate.step_time_s if best and best.step else None,
        "ours": best.name if best else "",
        "tried": len(found.trials),
        "wall_s": round(time.monotonic() - began),
    }


def shown(done: int, of: int, trial: Trial) -> None:
    seconds = f"{trial.step.estimate.step_time_s:.3f} s" if trial.step else ""
    print(f"  {done} of {of}: {trial.name} {seconds} {trial.problem}", file=sys.stderr, flush=True)


def show(name: str, result: dict[str, Any] | None) -> float | None:
    """Prints a configuration; returns our time over the expert's, None without two that were compiled.

    An expert's step that does not fit is slower than any that does.
    """
    if result is None or "refused" in result:
        print(f"{name:48s} {(result or {}).get('refused', 'not compiled: --compile')}")
        return None
    theirs, ours = result["theirs_s"], result["ours_s"]
    if ours is None:
        print(f"{name:48s} {theirs:9.3f}           none of ours fits")
        return float("inf")
    note = "" if result["theirs_fits"] else " (the expert's does not fit)"
    print(f"{name:48s} {theirs:9.3f} {ours:9.3f} {ours / theirs:6.2f}  {result['ours']}{note}")
    return ours / theirs if result["theirs_fits"] else 0.0


if __name__ == "__main__":
    main()
