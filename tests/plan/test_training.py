"""Total time: about three seconds."""

import pytest

from slicewise.catalog import chips, model, slices
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError
from slicewise.plan import training
from slicewise.plan.offers import Goal
from slicewise.plan.operations import operations
from slicewise.plan.training import Choices

LLAMA = model_shape(model.load("llama3-8b"))
WORK = training.workload(LLAMA, 8192, 2**22)


@pytest.fixture(scope="module")
def plan():
    return training.plan_cluster(WORK, slices.cluster("v5p:4x4x4", 2), run_tokens=1e12)


def test_a_batch_is_whole_sequences():
    assert WORK.global_batch == 512
    with pytest.raises(UserError, match=r"is below one sequence of 8,192; expected 8,192 tokens or more"):
        training.workload(LLAMA, 8192, 8191)
    with pytest.raises(UserError, match=r"the nearest is 16,384, 2 sequences"):
        training.workload(LLAMA, 8192, 16000)


def test_the_run_takes_its_tokens_at_the_rate_of_the_layout(plan):
    best = plan.best
    assert plan.run_s(best) == pytest.approx(1e12 / best.estimate.tokens_per_s)
    assert plan.cost(best) == pytest.approx(plan.run_s(best) / 3600 * 128 * 4.2)


def test_without_a_token_budget_or_a_price_there_is_no_length_or_cost():
    plan = training.plan_cluster(WORK, slices.cluster("v6e:8x8"), choices=Choices(top=1))
    assert plan.run_s(plan.best) is None
    assert plan.cost(plan.best) is None
    priced = training.plan_cluster(WORK, slices.cluster("v6e:8x8"), run_tokens=1e9, choices=Choices(top=1))
    assert priced.run_s(priced.best) is not None
    assert priced.cost(priced.best) is None


def test_unknown_precisions_are_refused():
    with pytest.raises(UserError, match=r"precision 'fp9': expected bf16, int8, fp8\. Did you mean 'fp8'"):
        Choices(precisions=("fp9",))


def test_clusters_keep_what_is_given():
    v5p = chips.load("v5p")
    every = training.clusters([v5p], topology="4x4x4", num_slices=None, max_chips=256)
    assert {(c.slice.name, c.num_slices) for c in every} == {("4x4x4", 1), ("4x4x4", 2), ("4x4x4", 4)}
    with pytest.raises(UserError, match="no slice shape within 32 chips"):
        training.clusters([v5p], topology="4x4x4", num_slices=1, max_chips=32)


def test_a_free_search_plans_its_first_offer():
    clusters = training.clusters([chips.load("v5p")], topology=None, num_slices=1, max_chips=64)
    plan = training.plan_free(WORK, clusters, Goal(1e12))
    assert plan.offers[0].candidate.cluster == plan.result.cluster
    assert plan.best.estimate.step_time_s == pytest.approx(plan.offers[0].candidate.estimate.step_time_s)
    assert plan.offers[0].run_s == pytest.approx(plan.run_s(plan.best))


def test_more_slices_are_never_slower(plan):
    points = training.scaling(plan)
    assert [p.num_slices for p in points] == [1, 2, 4, 8]
    rates = [p.candidate.estimate.tokens_per_s for p in points]
    assert rates == sorted(rates)
    ideal = [rates[0] * p.num_slices for p in points]
    assert all(rate <= 1.02 * best for rate, best in zip(rates, ideal, strict=True))


def test_scaling_leaves_out_counts_that_cannot_be(plan):
    assert [p.num_slices for p in training.scaling(plan, counts=(1, 2, 513))] == [1, 2]


def test_the_configs_own_recipe_is_among_the_choices_and_wins_ties(plan):
    now = plan.best
    beside = training.plan_beside(now, WORK, run_tokens=1e12)
    assert beside.best.estimate.step_time_s <= now.estimate.step_time_s


def test_operations_stay_under_the_roof(plan):
    chip = plan.best.cluster.chip
    every = operations(WORK, plan.best)
    assert {o.name for o in every} >= {"query_proj", "mlpwi_0", "attention", "output matrix"}
    assert sum(o.share for o in every) == pytest.approx(1)
    for o in every:
        roof = min(chip.bf16_flops_per_s, o.intensity * chip.hbm_bytes_per_s)
        assert 0 < o.flops_per_s <= 1.01 * roof


def test_operations_of_experts_count_their_weights_and_slots():
    shape = model_shape(model.load("mixtral-8x7b"))
    work = training.workload(shape, 4096, 2**22)
    plan = training.plan_cluster(work, slices.cluster("v5p:4x4x4"), choices=Choices(top=1))
    found = {o.name: o for o in operations(work, plan.best)}
    layout = plan.best.layout
    tokens = work.tokens / (layout.data_shards * layout.accumulation_steps * layout.pipeline_microbatches)
    expected = 2 * tokens * 2 * 4096 * 14336 / layout.ici.tensor
    assert found["moe_mlpwi_0"].flops == pytest.approx(expected)
