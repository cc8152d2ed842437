"""The cost model against published steps: the figures that the benchmark prints, held to their targets."""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from slicewise.costs.memory import MARGIN
from slicewise.costs.step import estimate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def priced():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import rows
    finally:
        sys.path.remove(str(BENCHMARKS))
    points = [p for p in rows.load(BENCHMARKS / "data" / "published_points.jsonl") if rows.scorable(p)]
    found = []
    for row in map(rows.row, points):
        e = estimate(row.shape, row.cluster, row.layout, row.recipe, row.seq)
        found.append((row, e, e.step_time_s * row.allowance / row.step_time_s - 1))
    return found


@pytest.fixture(scope="module")
def published():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import published
    finally:
        sys.path.remove(str(BENCHMARKS))
    return published


def errors(priced, keep=lambda row: True):
    return np.abs([error for row, _, error in priced if keep(row)])


def test_the_median_error_is_within_ten_percent_and_nine_in_ten_within_a_quarter(priced):
    found = errors(priced)
    assert len(found) > 100
    assert np.median(found) <= 0.06
    assert np.quantile(found, 0.9) <= 0.15


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_chip_is_within_the_target(priced, chip):
    found = errors(priced, lambda row: row.chip == chip)
    assert np.median(found) <= 0.10
    assert np.quantile(found, 0.9) <= 0.25


@pytest.mark.parametrize("sparse", [False, True])
def test_dense_and_sparse_models_are_within_the_target(priced, sparse):
    found = errors(priced, lambda row: bool(row.shape.routed_parameters) == sparse)
    assert np.median(found) <= 0.10
    assert np.quantile(found, 0.9) <= 0.25


def test_every_measured_configuration_is_found_to_fit(priced):
    crowded = [
        row.id for row, e, _ in priced if e.hbm_total_bytes > (1 - MARGIN) * e.hbm_limit_bytes
    ]  # fmt: skip
    assert crowded == []


def test_adding_slices_slows_the_step_about_as_published(priced):
    """16B on v5e: 1 to 32 slices, all else equal."""
    series = {
        row.cluster.num_slices: (row.step_time_s, e.step_time_s)
        for row, e, _ in priced
        if row.id.startswith("maxtext-v5e-16b-") and row.id.endswith("oct23")
    }
    published = series[32][0] / series[1][0]
    assert series[32][1] / series[1][1] == pytest.approx(published, abs=0.04)


def _paths(record, above=()):
    for key, value in record.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _paths(value, (*above, key))


def test_rows_that_lack_fields_are_priced_or_say_what_they_lack(published):
    """Each field of a few rows in turn is null, then missing."""
    rows = published.rows
    points = rows.load(BENCHMARKS / "data" / "published_points.jsonl")
    chosen = {(p["chip"], bool(p["model"].get("moe"))): p for p in points}.values()
    refused = priced = 0
    for point in chosen:
        for path in _paths(point):
            for missing in (False, True):
                changed = copy.deepcopy(point)
                at = changed
                for key in path[:-1]:
                    at = at[key]
                if missing:
                    del at[path[-1]]
                else:
                    at[path[-1]] = None
                if not rows.scorable(changed):
                    continue
                found = published.price(changed)
                if isinstance(found, str):
                    refused += 1
                    assert found
                else:
                    priced += 1
                    assert found[1].step_time_s > 0
    assert priced > 3 * refused > 0


def test_a_file_of_any_rows_is_scored(published, tmp_path, monkeypatch, capsys):
    points = published.rows.load(BENCHMARKS / "data" / "published_points.jsonl")
    some = points[::7]
    lacking = copy.deepcopy(some[0]) | {"parallelism": None}
    unscorable = copy.deepcopy(some[1])
    unscorable["target"] |= {"scorable": False, "step_time_s": None}
    file = tmp_path / "points.jsonl"
    file.write_text("\n".join(map(json.dumps, [*reversed(some), unscorable, lacking])))
    monkeypatch.setattr(sys, "argv", ["published.py", "--points", str(file)])
    published.main()
    said = capsys.readouterr().out
    assert f"all            all            {len(some):5d} " in said
    assert "not priced: its mesh is not stated." in said
    assert "1 scorable rows lack" in said
    file.write_text("")
    published.main()
    assert capsys.readouterr().out == "no row can be scored\n"
