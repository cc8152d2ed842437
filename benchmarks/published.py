"""Predicted against published step times: one line a row, then errors by chip, model kind, slices and
precision.

python benchmarks/published.py [--points FILE] [--breakdown]
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import rows
from slicewise.costs.step import StepEstimate, estimate
from slicewise.errors import UserError

DEFAULT = Path(__file__).parent / "data" / "published_points.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=Path, default=DEFAULT)
    parser.add_argument("--breakdown", action="store_true")
    args = parser.parse_args()
    results = []
    unpriced = 0
    for number, point in enumerate(rows.load(args.points), 1):
        if not rows.scorable(point):
            continue
        priced = price(point)
        if isinstance(priced, str):
            unpriced += 1
            print(f"{point.get('id') or f'row {number}':62s} not priced: {priced}")
            continue
        row, e = priced
        predicted = e.step_time_s * row.allowance
        off = predicted / row.step_time_s - 1
        results.append((row, off))
        print(f"{row.id:62s} {row.step_time_s:8.3f} {predicted:8.3f} {off:+7.1%}", end="")
        print("  " + parts(e) if args.breakdown else "")
    summary(results)
    if unpriced:
        print(f"{unpriced} scorable rows lack what a price needs")


def price(point: dict[str, Any]) -> tuple[rows.Row, StepEstimate] | str:
    """The row and its predicted step, or what it lacks."""
    try:
        row = rows.row(point)
        return row, estimate(row.shape, row.cluster, row.layout, row.recipe, row.seq)
    except UserError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        return f"{type(error).__name__} {error}"  # a row without a field that others state


def parts(e: StepEstimate) -> str:
    shown = {**e.compute_s, **{f"exposed {k}": v for k, v in e.exposed_s.items()}, **e.other_s}
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in shown.items() if seconds > 0.005)


def summary(results) -> None:
    groups = {
        "all": lambda r: "all",
        "chip": lambda r: r.chip,
        "kind": lambda r: "MoE" if r.shape.routed_parameters else "dense",
        "slices": lambda r: "multi-slice" if r.cluster.num_slices > 1 else "single-slice",
        "precision": lambda r: r.recipe.precision,
        "target": lambda r: r.kind,
        "newest": lambda r: "newest" if r.newest else "older",
    }
    if not results:
        print("no row can be scored")
        return
    print(f"\n{'group':14s} {'':14s} {'rows':>5s} {'median':>7s} {'p90':>7s} {'worst':>7s} {'bias':>7s}")
    for name, key in groups.items():
        for value in sorted({key(r) for r, _ in results}):
            e = np.array([x for r, x in results if key(r) == value])
            a = np.abs(e)
            print(
                f"{name:14s} {value[:14]:14s} {len(e):5d} {np.median(a):7.1%} {np.quantile(a, 0.9):7.1%}"
                f" {a.max():7.1%} {np.median(e):+7.1%}"
            )


if __name__ == "__main__":
    main()
