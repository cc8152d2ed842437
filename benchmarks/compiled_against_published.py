"""Compiled against published step times: the row's own step, compiled for its slices, its schedule replayed.

    python benchmarks/compiled_against_published.py [--points FILE] [--compile] [--only TEXT] [--depth schedule|full]

Prints one line a row and the errors. Results are kept in benchmarks/data/compiled_points.json, so that the table prints
again in seconds; --compile fills in what is not there (minutes a row on few cores). A row is compiled with its model's
dims, layout, batch, remat, precision and those of its compiler flags that the installed compiler knows; what this
project cannot run is said instead of compiled.
"""

import argparse
import dataclasses
import hashlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import published
import rows
from runs import config_of
from slicewise.compile.analysis import analyse
from slicewise.compile.compiler import Request, compile_request
from slicewise.errors import UserError

DATA = Path(__file__).parent / "data"
KEPT = DATA / "compiled_points.json"
# One row of each model and layout on each chip, of those whose own step this project builds.
CHOSEN = (
    "maxtext-v4-1b-v4-8-jul23",
    "maxtext-v4-22b-1xv4-128-may23",
    "maxtext-v4-22b-2xv4-128-may23",
    "maxtext-v4-22b-8xv4-128-may23",
    "maxtext-v4-22b-4xv4-128-may23",
    "maxtext-v5e-16b-1xv5e-256-oct23",
    "maxtext-v5e-16b-2xv5e-256-oct23",
    "maxtext-v5e-16b-4xv5e-256-oct23",
    "maxtext-v5e-16b-16xv5e-256-oct23",
    "maxtext-v5e-32b-1xv5e-256-oct23",
    "maxtext-v5e-32b-4xv5e-256-oct23",
    "maxtext-v5e-32b-2xv5e-256-oct23",
    "maxtext-v5e-32b-16xv5e-256-oct23",
    "maxtext-v5e-128b-1xv5e-256-oct23",
    "maxtext-v5e-128b-4xv5e-256-oct23",
    "maxtext-v5p-32b-1xv5p-128-dec23",
    "maxtext-v5p-32b-2xv5p-128-dec23",
    "maxtext-v5p-128b-1xv5p-256-dec23",
    "maxtext-v5p-128b-2xv5p-256-dec23",
    "maxtext-v5p-128b-1xv5p-512-mar24",
    "maxtext-v5p-1024b-1xv5p-2048-dec23",
    "maxtext-tier-v5p-llama2-70b-512c",
    "maxtext-tier-v5p-mixtral-8x7b",
    "tpurec-v5p_gpt3-175b-maxtext-0dfb6a6",
    "tpurec-trillium_llama3.1-8b-maxtext_v6e-8-d95a9dc",
    "tpurec-trillium_llama3.1-8b-maxtext_v6e-64-d95a9dc",
    "tpurec-trillium_llama3.1-8b-maxtext_v6e-16-d95a9dc",
    "tpurec-trillium_llama3.1-8b-maxtext_v6e-256-d95a9dc",
    "tpurec-trillium_llama3.1-70b-maxtext_v6e-32-d95a9dc",
    "tpurec-trillium_llama3.1-70b-maxtext_v6e-256-d95a9dc",
    "tpurec-trillium_llama3.1-70b-maxtext_v6e-64-d95a9dc",
    "tpurec-trillium_llama3.1-70b-maxtext_v6e-128-d95a9dc",
    "maxtext-v6e-32-llama2-7b-maxtest",
    "tpurec-trillium_mistral-7b-maxtext-44189f9",
    "tpurec-trillium_gpt3-175b-maxtext_bf16-44189f9",
    "tpurec-trillium_mixtral-8x7b-maxtext-a50d68e",
    "ironwood-llama3.1-70b-8k-bf16-64c-edf6fa7",
    "ironwood-llama3.1-70b-8k-bf16-256c-a29f0e4",
    "ironwood-llama3.1-70b-8k-fp8-64c-bdc1828",
    "ironwood-llama3.1-70b-8k-fp8-256c-4bd5703",
    "ironwood-qwen3-235b-a22b-4k-bf16-256c-1302a86",
)


@dataclasses.dataclass(frozen=True)
class Result:
    """What the table prints of one row."""

    step_time_s: float
    hbm_bytes: float
    fits: bool
    depth: str
    parts: dict[str, float]
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=Path)
    parser.add_argument("--compile", action="store_true", help="compile the rows that are not kept yet")
    parser.add_argument(
        "--again", action="store_true", help="also those that are kept (compiled programs are cached)"
    )
    parser.add_argument("--only", default="", help="rows whose id contains this")
    parser.add_argument("--depth", default="schedule", choices=("schedule", "full"))
    arguments = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    errors: list[float] = []
    apart: list[float] = []  # planner and compiler
    for point in chosen(arguments.points):
        if arguments.only not in point["id"]:
            continue
        key = digest(point, arguments.depth)
        if arguments.compile and (key not in kept or arguments.again):
            kept[key] = {"id": point["id"], **compiled(point, arguments.depth)}
            KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        errors += show(point, kept.get(key))
        apart += planner_apart(point, kept.get(key))
    if errors:
        worst = sorted(abs(e) for e in errors)
        p90 = worst[min(len(worst) - 1, round(0.9 * (len(worst) - 1)))]
        print(f"{len(errors)} rows: median error {statistics.median(worst):.1%}, p90 {p90:.1%}", end="")
        print(f", bias {statistics.median(errors):+.1%}")
        print(f"planner and compiler differ by {statistics.median(apart):.1%} in median")


def chosen(path: Path | None) -> Iterator[dict[str, Any]]:
    """The rows of ``path`` that can be scored, or the chosen ones of the published points."""
    points = rows.load(path or DATA / "published_points.jsonl")
    if path:
        yield from (p for p in points if rows.scorable(p))
    else:
        by_id = {p["id"]: p for p in points}
        yield from (by_id[i] for i in CHOSEN)


def digest(point: dict[str, Any], depth: str) -> str:
    said = {
        k: v
        for k, v in point.items()
        if k not in ("measured", "derived", "target", "notes", "checks", "source")
    }
    return hashlib.sha256(json.dumps([said, depth], sort_keys=True).encode()).hexdigest()[:16]


def show(point: dict[str, Any], result: dict[str, Any] | None) -> list[float]:
    """Prints a row; returns its relative error, if it has one."""
    published = point["target"]["step_time_s"]
    if result is None or "refused" in result:
        print(
            f"{point['id']:58s} {published:8.3f}  {(result or {}).get('refused', 'not compiled: --compile')}"
        )
        return []
    off = result["step_time_s"] / published - 1
    parts = ", ".join(
        f"{name} {s:.2f}" for name, s in result["parts"].items() if s > 0.01 * result["step_time_s"]
    )
    fit = "" if result["fits"] else "  DOES NOT FIT"
    print(f"{point['id']:58s} {published:8.3f} {result['step_time_s']:8.3f} {off:+7.1%}  {parts}{fit}")
    return [off]


def planner_apart(point: dict[str, Any], result: dict[str, Any] | None) -> list[float]:
    """How far the planner's step is from the compiled one, as a share of it."""
    priced = published.price(point)
    if result is None or "refused" in result or isinstance(priced, str):
        return []
    return [abs(priced[1].step_time_s / result["step_time_s"] - 1)]


def compiled(point: dict[str, Any], depth: str) -> dict[str, Any]:
    """A Result as a dict, or why there is none."""
    try:
        row = rows.row(point)
        with tempfile.TemporaryDirectory() as directory:
            config = config_of(point, row.layout, row.recipe, row.seq, Path(directory))
            step = analyse(compile_request(Request(config, row.cluster, depth=depth)))  # type: ignore[arg-type]
    except UserError as e:
        return {"refused": str(e).splitlines()[0]}
    e = step.estimate
    parts = {**e.compute_s, **{f"exposed {k}": v for k, v in e.exposed_s.items()}, **e.other_s}
    print(f"{point['id']}: compiled in {step.cpu_s:.0f} CPU s", file=sys.stderr)
    return dataclasses.asdict(
        Result(
            e.step_time_s,
            e.hbm_total_bytes,
            step.fits,
            depth,
            {k: round(v, 4) for k, v in parts.items()},
            step.cpu_s,
        )
    )


if __name__ == "__main__":
    main()
