import pytest

from slicewise.catalog import model, slices
from slicewise.costs.shapes import model_shape
from slicewise.plan.explain import explain
from slicewise.plan.search import Workload, search


@pytest.fixture(scope="module")
def llama():
    shape = model_shape(model.load("llama3-70b"))
    return explain(search(Workload(shape, 8192, 2048), slices.cluster("v5p:8x8x8", 4)))


def test_the_winner_states_the_inequalities_of_its_axes_and_its_memory(llama):
    rules = {q.rule: q for q in llama.winner}
    assert {"dcn data", "memory"} < set(rules)
    assert any(name.startswith("fsdp") and "tokens a chip" in q.text for name, q in rules.items())
    assert rules["dcn data"].holds
    assert rules["memory"].holds
    assert "of peak" in llama.winner_text


def test_rejected_families_say_how_far_behind_and_why(llama):
    traded = [v for v in llama.rejected if v.decided.rule == "trade"]
    assert traded
    for v in traded:
        assert v.behind > 0
        assert not v.decided.holds
        assert "most by" in v.decided.text
        assert f"{v.behind:+.1%}" in v.text


def test_a_broken_threshold_is_the_reason_where_there_is_one(llama):
    pipelines = [v for v in llama.rejected if any("pipeline" in axis for axis in v.axes) and v.step_time_s]
    broken = [v for v in pipelines if v.decided.rule == "pipeline"]
    assert broken
    assert "a pipeline of 2 stages with 8 microbatches idles 11%" in broken[0].text


def test_families_that_do_not_fit_say_what_they_lack(llama):
    none_fits = [v for v in llama.rejected if v.step_time_s is None]
    assert none_fits
    for v in none_fits:
        assert v.decided.rule == "memory"
        assert "GiB a device" in v.text


def test_every_slower_family_has_a_reason(llama):
    assert all(v.text.endswith(".") and ";" in v.text for v in llama.rejected if v.step_time_s)


def test_multislice_rules_are_shown(llama):
    text = " ".join(llama.multislice)
    assert "FLOP/bit x 48 bits a parameter" in text
    assert "only when memory asks" in text
    assert "2 stages x 2 replicas, 4 stages x 1 replicas" in text
    assert "Order: data." in text


def test_one_slice_has_no_rules_between_slices():
    shape = model_shape(model.load("llama3-8b"))
    found = explain(search(Workload(shape, 8192, 256), slices.cluster("v6e:4x8")))
    assert found.multislice == ()
    assert found.table is None


def test_ironwood_plans_name_their_row():
    shape = model_shape(model.load("deepseek-v3"))
    found = explain(search(Workload(shape, 4096, 4096), slices.cluster("tpu7x:4x8x8")))
    assert found.table is not None
    assert found.table.startswith("TPU7x table, mixture of experts, short: start with fsdp + expert")
    fsdp = next(q for q in found.winner if q.rule.startswith("fsdp"))
    assert not fsdp.holds
    assert "x E/k 32" in fsdp.text or "best split" in fsdp.text
