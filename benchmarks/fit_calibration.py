"""Fits the constants of costs/calibration.toml to published step times, and cross-validates by leaving out
models.

    python benchmarks/fit_calibration.py [--points FILE]

Each constant is pulled towards a prior (a compiled kernel's cycle count, a microbenchmark, or 'unknown')
with the width given beside it, so that a chip with few rows stays near what is known otherwise. Loss: soft
L1 of the log ratio of predicted to published time.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

import rows
from published import DEFAULT, summary
from slicewise.costs.device import Device, device_of
from slicewise.costs.step import network, price

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
# name -> (prior, width); per chip where the prior is a dict
PER_CHIP = {
    "matmul_efficiency": ({"v4": 0.89, "v5e": 0.89, "v5p": 0.89, "v6e": 0.70, "tpu7x": 0.83}, 0.05),
    "overlap": (dict.fromkeys(CHIPS, 0.6), 0.2),
}
SHARED = {
    "attention_mxu_overhead": (1.5, 1.0),
    "grid_step_us": (0.35, 0.5),
    "gather_efficiency": (0.3, 0.15),
    "grouped_efficiency": (0.8, 0.1),
    "tensor_overlap": (0.6, 0.2),
    "straggler": (0.02, 0.01),
}
NAMES = [(chip, name) for name in PER_CHIP for chip in CHIPS] + [("", name) for name in SHARED]


def priors() -> tuple[np.ndarray, np.ndarray]:
    values = [PER_CHIP[name][0][chip] if chip else SHARED[name][0] for chip, name in NAMES]
    widths = [PER_CHIP[name][1] if chip else SHARED[name][1] for chip, name in NAMES]
    return np.array(values), np.array(widths)


def tuned(device: Device, x: np.ndarray) -> Device:
    """``device`` with the constants ``x``."""
    own = {name: float(v) for (chip, name), v in zip(NAMES, x, strict=True) if chip == device.name}
    shared = {name: float(v) for (chip, name), v in zip(NAMES, x, strict=True) if not chip}
    return dataclasses.replace(
        device,
        calibration=dataclasses.replace(device.calibration, **own),
        kernels=dataclasses.replace(device.kernels, **shared),
    )


def predict(row: rows.Row, x: np.ndarray) -> float:
    device = tuned(device_of(row.cluster.chip), x)
    net = dataclasses.replace(network(row.cluster, row.layout), device=device)
    return float(price(row.shape, device, row.layout, net, row.recipe, row.seq).total_s) * row.allowance


def fit(train: Sequence[rows.Row]) -> np.ndarray:
    prior, width = priors()
    target = np.log([row.step_time_s for row in train])

    def residuals(x: np.ndarray) -> np.ndarray:
        error = np.log([predict(row, x) for row in train]) - target
        soft = np.sign(error) * np.sqrt(2 * 0.05 * (np.sqrt(1 + (error / 0.05) ** 2) - 1) * 0.05) / 0.05
        return np.concatenate([soft, (x - prior) / width])

    low = np.where(
        [name in ("overlap", "tensor_overlap", "straggler", "grid_step_us") for _, name in NAMES], 0.0, 0.05
    )
    high = np.where([name in ("attention_mxu_overhead", "grid_step_us") for _, name in NAMES], 3.0, 1.0)
    return least_squares(residuals, prior, bounds=(low, high), diff_step=1e-3, max_nfev=25).x


def left_out(
    data: Sequence[rows.Row], key: Callable[[rows.Row], object], folds: int
) -> list[tuple[rows.Row, float]]:
    """Errors on rows whose group (``key``) had no part in the fit; groups are dealt to ``folds`` in order."""
    groups = sorted({key(row) for row in data}, key=str)
    fold_of = {group: k % folds for k, group in enumerate(groups)}
    errors = []
    for fold in range(min(folds, len(groups))):
        x = fit([row for row in data if fold_of[key(row)] != fold])
        held = [row for row in data if fold_of[key(row)] == fold]
        errors += [(row, predict(row, x) / row.step_time_s - 1) for row in held]
    return errors


def workload(row: rows.Row) -> object:
    return (row.family, row.cluster.slice.name, row.chip, row.seq, row.recipe.precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=Path, default=DEFAULT)
    parser.add_argument("--cross-validate", action="store_true", help="takes some minutes")
    args = parser.parse_args()
    data = [rows.row(p) for p in rows.load(args.points) if rows.scorable(p)]
    x = fit(data)
    for (chip, name), value in zip(NAMES, x, strict=True):
        print(f"{chip:8s}{name:26s}{value:8.4f}")
    print("\nfitted on all rows")
    summary([(row, predict(row, x) / row.step_time_s - 1) for row in data])
    if args.cross_validate:
        print("\neach tenth of the workloads left out in turn")
        summary(left_out(data, workload, 10))
        print("\neach model left out in turn")
        summary(left_out(data, lambda row: row.family, len(data)))


if __name__ == "__main__":
    main()
