import pytest

from slicewise.catalog import slices
from slicewise.errors import UserError
from slicewise.plan import goodput_plan
from slicewise.plan.goodput import Offer
from slicewise.plan.goodput_plan import Faults, plan_goodput

PLACE = slices.cluster("v5p:8x8x8", 4)
FAULTS = Faults(host_mtbf_s=2 * 365.25 * 86400, checkpoint_s=30, restart_s=300)
RESERVED, SPOT = Offer("reserved", 2.9), Offer("spot", 1.9, preemptions_per_day=3)


def test_hosts_of_the_whole_cluster_fail():
    plan = plan_goodput(PLACE, FAULTS)
    assert plan.chosen.mtbf_s == pytest.approx(FAULTS.host_mtbf_s / 512)
    assert plan.offers == ()
    assert plan.checkpoint_every is None


def test_the_interval_is_that_of_the_cheapest_offer():
    plan = plan_goodput(PLACE, FAULTS, training_s=42 * 86400, offers=(RESERVED, SPOT), step_time_s=11.6)
    assert [r.offer.name for r in plan.offers] == ["spot", "reserved"]
    assert plan.chosen == plan.offers[0].goodput
    assert plan.checkpoint_every == round(plan.chosen.interval_s / 11.6) == 100
    assert plan.explain()[-1] == "checkpoint_every = 100 steps of 11.6 s"


def test_a_step_longer_than_the_interval_checkpoints_after_each():
    assert plan_goodput(PLACE, FAULTS, step_time_s=1e6).checkpoint_every == 1


def test_the_chosen_interval_is_the_top_of_the_curve():
    plan = plan_goodput(PLACE, FAULTS)
    curve = goodput_plan.curve(plan)
    best = max(curve, key=lambda g: g.goodput)
    assert best.interval_s == pytest.approx(plan.chosen.interval_s)
    assert curve[0].interval_s == pytest.approx(plan.chosen.interval_s / 10)
    for g in curve:
        assert g.goodput + g.checkpointing + g.lost + g.restarting == pytest.approx(1)


def test_hosts_that_fail_all_the_time_are_refused():
    with pytest.raises(UserError, match="leaves no time to train: 512 hosts"):
        plan_goodput(PLACE, Faults(1.0, 30, 300))


def test_a_time_of_zero_between_failures_is_refused():
    with pytest.raises(UserError, match="host MTBF 0"):
        plan_goodput(PLACE, Faults(0.0, 30, 300))
