import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import chips
from slicewise.errors import UserError
from slicewise.plan import goodput
from slicewise.plan.goodput import Offer

mtbfs = st.floats(600, 1e8)
checkpoints = st.floats(0.1, 600)
restarts = st.floats(0, 3600)


@given(mtbfs, checkpoints, restarts, st.floats(1, 1e6))
def test_shares_add_up_and_no_interval_beats_the_best(mtbf, checkpoint, restart, interval):
    best = goodput.expected(mtbf, checkpoint, restart)
    other = goodput.expected(mtbf, checkpoint, restart, interval_s=interval)
    assert other.goodput <= best.goodput * (1 + 1e-9)
    for g in (best, other):
        assert min(g.goodput, g.checkpointing, g.lost, g.restarting) >= 0
        assert g.goodput + g.checkpointing + g.lost + g.restarting == pytest.approx(1, abs=1e-6)


@given(st.floats(1e4, 1e8), st.floats(0.1, 60))
def test_young_and_daly_approach_the_best_interval_when_failures_are_rare(mtbf, checkpoint):
    best = goodput.optimal_interval_s(checkpoint, mtbf)
    assert goodput.daly_interval_s(checkpoint, mtbf) == pytest.approx(best, rel=0.01)
    assert goodput.young_interval_s(checkpoint, mtbf) >= best
    assert goodput.young_interval_s(checkpoint, mtbf) == pytest.approx(best, rel=0.06)


@given(mtbfs, checkpoints, restarts, st.floats(1.01, 10))
def test_goodput_falls_with_every_cost(mtbf, checkpoint, restart, factor):
    here = goodput.expected(mtbf, checkpoint, restart).goodput
    assert goodput.expected(mtbf / factor, checkpoint, restart).goodput <= here
    assert goodput.expected(mtbf, checkpoint * factor, restart).goodput <= here
    assert goodput.expected(mtbf, checkpoint, restart + factor).goodput <= here
    assert goodput.expected(mtbf, checkpoint, restart, save_latency_s=factor).goodput <= here


@pytest.mark.parametrize(
    ("mtbf", "checkpoint", "restart"), [(3600, 30, 300), (7200, 10, 60), (1800, 60, 900)]
)
def test_the_closed_form_agrees_with_a_simulation(mtbf, checkpoint, restart):
    expected = goodput.expected(mtbf, checkpoint, restart)
    rng, wall, restarting, segments = random.Random(0), 0.0, 0.0, 40000
    needed = expected.interval_s + checkpoint
    for _ in range(segments):
        down = 0.0
        while True:
            failure = rng.expovariate(1 / mtbf)
            wall += min(failure, down + needed)
            restarting += min(failure, down)
            if failure >= down + needed:
                break
            down = restart
    assert restarting / wall == pytest.approx(expected.restarting, rel=0.03)
    assert segments * expected.interval_s / wall == pytest.approx(expected.goodput, rel=0.02)


def test_a_job_that_never_fails_only_pays_for_its_checkpoints():
    assert goodput.expected(math.inf, 10, 60).goodput == 1
    assert goodput.expected(math.inf, 10, 60, interval_s=90).goodput == pytest.approx(0.9)
    assert goodput.job_mtbf_s(math.inf, 100) == math.inf


def test_rates_of_hosts_and_preemptions_add():
    assert goodput.job_mtbf_s(1e6, 100) == pytest.approx(1e4)
    assert goodput.job_mtbf_s(1e6, 100, 1e-4) == pytest.approx(5e3)


def test_long_checkpoints_are_taken_once_a_failure_time():
    assert goodput.daly_interval_s(300, 100) == 100
    assert goodput.optimal_interval_s(300, 100) < 100


@given(st.floats(1, 1e4), st.floats(1, 1e6))
def test_an_interval_that_never_ends_has_no_goodput(mtbf, factor):
    g = goodput.expected(mtbf, 1, 0, interval_s=1000 * mtbf * factor)
    assert g.goodput == 0
    assert g.wall_s(1) == math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mtbf_s": 0, "checkpoint_s": 1, "restart_s": 1}, "mtbf_s = 0"),
        ({"mtbf_s": 9, "checkpoint_s": -1, "restart_s": 1}, "checkpoint_s = -1"),
        ({"mtbf_s": 9, "checkpoint_s": 1, "restart_s": math.inf}, "restart_s = inf"),
        ({"mtbf_s": 9, "checkpoint_s": 1, "restart_s": 1, "interval_s": 0}, "interval_s = 0"),
        ({"mtbf_s": 9, "checkpoint_s": 0, "restart_s": 1}, "has no best interval"),
        ({"mtbf_s": math.nan, "checkpoint_s": 0, "restart_s": 1}, "mtbf_s = nan"),
    ],
)
def test_impossible_times_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        goodput.expected(**arguments)


RUN = {
    "chips": 512,
    "hosts": 128,
    "training_s": 864000,
    "host_mtbf_s": 3e7,
    "checkpoint_s": 5,
    "restart_s": 300,
}


def test_cheap_spot_wins_until_it_is_taken_away_too_often():
    reserved = Offer("reserved", 4.2)
    rare, often = Offer("spot", 1.7, 4, 1800), Offer("spot", 1.7, 400, 1800)
    assert goodput.compare([reserved, rare], **RUN)[0].offer == rare
    assert goodput.compare([reserved, often], **RUN)[0].offer == reserved


@given(st.floats(0, 40), st.floats(0, 7200), st.floats(0.5, 5))
def test_an_offer_costs_its_price_over_its_goodput(preemptions, wait, price):
    (result,) = goodput.compare([Offer("spot", price, preemptions, wait)], **RUN)
    assert result.price_per_useful_chip_hour == pytest.approx(price / result.goodput.goodput)
    assert result.price == pytest.approx(result.price_per_useful_chip_hour * 512 * 240)
    waits = preemptions / 86400 * wait
    assert result.wall_s == pytest.approx(864000 / result.goodput.goodput * (1 + waits))


def test_results_explain_themselves():
    (result,) = goodput.compare([Offer("spot", 1.7, 4, 1800)], **RUN)
    said = "\n".join(result.explain())
    assert "4.37 interruptions a day" in said
    assert "Young sqrt(2 delta M)" in said
    assert "a useful chip-hour" in said


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: goodput.compare([], **RUN), "no offers"),
        (lambda: Offer("spot", 0), "price 0"),
        (lambda: Offer("spot", 1, -1), "preemptions a day -1: expected 0 or more"),
        (lambda: Offer("spot", 1, float("nan")), "preemptions a day nan: expected 0 or more"),
        (lambda: Offer("spot", float("inf")), "price inf"),
        (lambda: goodput.compare([Offer("spot", 1, 1e9)], **RUN | {"interval_s": 3600}), "no time to train"),
        (
            lambda: goodput.offers(chips.load("v6e"), preemptions_per_day=1, wait_s=0),
            "no price of v6e is known",
        ),
    ],
)
def test_impossible_offers_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_price_file_makes_offers(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text("[v5p]\non_demand = 4.2\nspot = 1.7\nreserved = 3\n")
    found = goodput.offers(chips.load("v5p", price_file=str(path)), preemptions_per_day=4, wait_s=60)
    assert found == (Offer("reserved", 3), Offer("on demand", 4.2), Offer("spot", 1.7, 4, 60))
