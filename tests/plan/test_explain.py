import re

import pytest

from slicewise.catalog import model, slices
from slicewise.costs.shapes import model_shape
from slicewise.plan.explain import PARTS, explain, parts
from slicewise.plan.search import Workload, search


@pytest.fixture(scope="module")
def llama():
    shape = model_shape(model.load("llama3-70b"))
    return explain(search(Workload(shape, 8192, 2048), slices.cluster("v5p:8x8x8", 4)), families=60)


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


def test_a_broken_threshold_is_the_reason_where_it_costs_most(llama):
    workload = Workload(model_shape(model.load("gpt3-175b")), 2048, 2048)
    gpt3 = explain(search(workload, slices.cluster("v5e:16x16", 4)), families=60)
    tensor = next(v for v in gpt3.rejected if v.decided.rule == "tensor")
    assert re.search(r"tensor 32 over ICI needs d_ff > 70k .*: exposed tensor, .* s against .*s", tensor.text)
    pipelines = [
        v.text for v in llama.rejected if any("pipeline" in axis for axis in v.axes) and v.step_time_s
    ]
    idle = "against 0 s: a pipeline of 2 stages with 2 microbatches in 4 rounds idles 11%"
    assert any(f"most by pipeline bubble, 1.55 s {idle}" in text for text in pipelines)


@pytest.mark.parametrize(
    ("name", "place", "count", "seq", "batch"),
    [
        ("llama3-70b", "v5p:8x8x8", 4, 8192, 2048),
        ("gpt-oss-120b", "h100-8", 32, 4096, 2048),
        ("deepseek-v3", "tpu7x:8x8x8", 4, 4096, 8192),
        ("llama3.1-405b", "v5e:16x16", 4, 8192, 1024),
        ("demo-tiny", "tpu7x:2x2x1", 1, 256, 64),
    ],
)
def test_a_deciding_threshold_costs_at_least_half_of_what_the_family_loses(name, place, count, seq, batch):
    workload = Workload(model_shape(model.load(name)), seq, batch)
    result = search(workload, slices.cluster(place, count))
    best = result.ranked[0]
    families = {f.axes: f.best.estimate for f in result.families}
    for v in explain(result, families=100).rejected:
        if v.step_time_s is None:
            continue
        assert not re.search(r"e-\d", v.text), v.text  # no noise of floats, no seconds that want a unit
        if v.decided.rule == "trade":
            continue
        mine, theirs = parts(families[v.axes]), parts(best.estimate)
        extra = sum(mine.get(p, 0.0) - theirs.get(p, 0.0) for p in PARTS[v.decided.rule])
        lost = sum(max(0.0, mine.get(p, 0.0) - theirs.get(p, 0.0)) for p in {*mine, *theirs})
        assert extra >= lost / 2, v.text


@pytest.mark.parametrize(
    ("name", "place", "count", "seq", "batch"),
    [("gpt-oss-120b", "h100-8", 32, 4096, 2048), ("llama3.1-405b", "v5e:16x16", 4, 8192, 1024)],
)
def test_where_no_replica_fits_a_slice_the_rules_say_so(name, place, count, seq, batch):
    result = search(Workload(model_shape(model.load(name)), seq, batch), slices.cluster(place, count))
    found = explain(result)
    d = result.ranked[0].layout.dcn
    assert d.fsdp * d.pipeline > 1
    said = " ".join(found.multislice)
    assert "No replica fits a slice" in said
    assert "only when memory asks" not in said
    if d.fsdp > 1:
        text = next(q.text for q in found.winner if q.rule == "dcn fsdp")
        assert text.startswith("FSDP over DCN needs ")


def test_the_words_of_a_switched_network_are_its_own():
    workload = Workload(model_shape(model.load("gpt-oss-120b")), 4096, 2048)
    found = explain(search(workload, slices.cluster("h100-8", 32)))
    said = " ".join([*(q.text for q in found.winner), *(v.text for v in found.rejected)])
    assert "over NVLink" in said
    assert "ICI" not in said


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
