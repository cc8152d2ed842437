import math

import pytest

from slicewise.catalog import chips, model
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError
from slicewise.plan.offers import Goal, clusters_of, free_search, least_run_s, slice_counts
from slicewise.plan.search import Workload, search

LLAMA8 = model_shape(model.load("llama3-8b"))
WORK = Workload(LLAMA8, 8192, 256)
V5P = chips.load("v5p")
SMALL = clusters_of(V5P, topology=None, num_slices=None, max_chips=128)


def test_clusters_are_all_legal_shapes_within_the_limit():
    assert all(c.chips <= 128 for c in SMALL)
    assert {c.slice.name for c in SMALL} >= {"2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8"}
    fixed = clusters_of(V5P, topology=(4, 4, 4), num_slices=2, max_chips=1000)
    assert [(c.slice.name, c.num_slices) for c in fixed] == [("4x4x4", 2)]


def test_minimum_cost_is_the_cheapest_offer():
    offers = free_search(WORK, SMALL, Goal(tokens=1e12))
    costs = [o.cost for o in offers]
    assert costs == sorted(costs)
    first = offers[0]
    assert first.cost == pytest.approx(first.chips * 4.2 * first.run_s / 3600)


def test_a_deadline_buys_more_chips():
    cheapest = free_search(WORK, SMALL, Goal(tokens=1e12))[0]
    sooner = free_search(WORK, SMALL, Goal(tokens=1e12, deadline_s=cheapest.run_s / 1.5))[0]
    assert sooner.run_s <= cheapest.run_s / 1.5
    assert sooner.chips > cheapest.chips
    assert sooner.cost >= cheapest.cost


def test_a_budget_buys_the_fastest_it_can():
    cheapest = free_search(WORK, SMALL, Goal(tokens=1e12))[0]
    offers = free_search(WORK, SMALL, Goal(tokens=1e12, budget=1.1 * cheapest.cost))
    assert all(o.cost <= 1.1 * cheapest.cost for o in offers)
    assert offers[0].run_s == min(o.run_s for o in offers)


def test_chips_compete():
    both = SMALL + clusters_of(chips.load("v6e"), topology=None, num_slices=None, max_chips=64)
    offers = free_search(WORK, both, Goal(tokens=1e12))
    assert {o.candidate.cluster.chip.name for o in offers} == {"v5p", "v6e"}
    assert all(o.cost is None for o in offers if o.candidate.cluster.chip.name == "v6e")
    unpriced = [o.chips * o.run_s for o in offers if o.cost is None]
    assert unpriced == sorted(unpriced)
    assert math.isfinite(offers[0].cost)


def test_an_impossible_deadline_names_the_fastest():
    with pytest.raises(UserError, match=r"no cluster meets the goal; the fastest takes \d"):
        free_search(WORK, SMALL, Goal(tokens=1e15, deadline_s=60))


def test_a_budget_without_prices_asks_for_them():
    v6e = clusters_of(chips.load("v6e"), topology=(4, 4), num_slices=1, max_chips=64)
    with pytest.raises(UserError, match="give a price file"):
        free_search(WORK, v6e, Goal(tokens=1e12, budget=1e6))


def test_numbers_of_slices_share_the_batch_out_whole():
    assert slice_counts(1024) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert {3, 6, 12, 24, 48} <= set(slice_counts(768))
    for n in slice_counts(960):
        assert any(n % p == 0 and 960 % (n // p) == 0 for p in (1, 2, 4, 8))
    many = clusters_of(V5P, topology=(2, 2, 1), num_slices=None, max_chips=48, global_batch=96)
    assert [c.num_slices for c in many] == [1, 2, 3, 4, 6, 8, 12]


def test_a_deadline_prices_no_cluster_that_misses_it_at_peak(monkeypatch):
    everything = {o.candidate.cluster: o for o in free_search(WORK, SMALL, Goal(tokens=1e12))}
    deadline_s = sorted(o.run_s for o in everything.values())[len(everything) // 2]
    priced = []
    monkeypatch.setattr(
        "slicewise.plan.offers.search", lambda w, c, **more: priced.append(c) or search(w, c, **more)
    )
    met = free_search(WORK, SMALL, Goal(tokens=1e12, deadline_s=deadline_s))
    assert {o.candidate.cluster for o in met} == {c for c, o in everything.items() if o.run_s <= deadline_s}
    assert len(priced) < len(SMALL)
    for c, o in everything.items():
        assert least_run_s(WORK, c, 1e12, ("bf16",)) < o.run_s


def test_a_model_that_fits_nowhere_is_refused_with_what_the_largest_lacks():
    large = Workload(model_shape(model.load("llama3.1-405b")), 8192, 256)
    tiny = clusters_of(V5P, topology=(2, 2, 1), num_slices=1, max_chips=4)
    with pytest.raises(UserError, match="no cluster among 1 .* does not fit on 1 x 2x2x1 v5p"):
        free_search(large, tiny, Goal(tokens=1e12))
