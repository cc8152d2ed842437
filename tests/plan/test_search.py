import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.catalog import chips, model, slices
from slicewise.config import AXES
from slicewise.costs.device import device_of
from slicewise.costs.layout import Recipe
from slicewise.costs.memory import MARGIN, device_total, memory_bytes
from slicewise.costs.remat import POLICIES
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import estimate
from slicewise.errors import UserError
from slicewise.parallel import rules
from slicewise.plan.check import check_layout, check_recipe
from slicewise.plan.layouts import ICI_ORDER, combine, dcn_rows, ici_rows, limits_of, placements
from slicewise.plan.search import DEFAULT_RECIPE, SEARCHED_POLICIES, Workload, search

LLAMA8 = model_shape(model.load("llama3-8b"))
LLAMA70 = model_shape(model.load("llama3-70b"))
MIXTRAL = model_shape(model.load("mixtral-8x7b"))


@pytest.mark.parametrize(
    ("shape", "place", "count", "batch"),
    [(LLAMA70, "v5p:8x8x8", 4, 2048), (MIXTRAL, "v6e:16x16", 2, 2048), (LLAMA8, "h100-8", 4, 64)],
)
def test_recommended_layouts_fit_with_the_margin_and_come_fastest_first(shape, place, count, batch):
    result = search(Workload(shape, 4096, batch), slices.cluster(place, count))
    times = [c.estimate.step_time_s for c in result.ranked]
    assert times == sorted(times)
    for c in result.ranked:
        assert c.estimate.hbm_total_bytes <= (1 - MARGIN) * c.estimate.hbm_limit_bytes
        assert c.layout.ici.product == c.cluster.slice.devices
        assert c.layout.dcn.product == count
        shards = c.layout.data_shards * c.layout.accumulation_steps * c.layout.pipeline_microbatches
        assert batch * c.layout.ici.context % shards == 0


@pytest.mark.parametrize(("name", "place"), [("llama3-8b", "v5p:16x16x16"), ("deepseek-v3", "v5p:8x16x16")])
def test_recommended_layouts_divide_the_weights_as_training_does(name, place):
    spec, cluster = model.load(name), slices.cluster(place)
    result = search(Workload(model_shape(spec), 4096, 2 * cluster.devices), cluster, top=1000)
    assert len(result.ranked) > 5
    for c in result.ranked:
        degrees = {axis: int(c.layout.total(axis)) for axis in AXES}
        rules.check(spec, 2 * cluster.devices, degrees)
        assert math.prod(degrees[a] for a in ("pipeline", "fsdp", "expert", "context")) < spec.d_model


def test_a_layout_priced_in_the_search_costs_what_it_costs_alone():
    """The search prices arrays; each member must equal the scalar price."""
    result = search(Workload(LLAMA70, 8192, 512), slices.cluster("v5p:4x4x8", 2))
    for c in result.ranked:
        alone = estimate(LLAMA70, c.cluster, c.layout, c.recipe, 8192)
        assert alone.step_time_s == pytest.approx(c.estimate.step_time_s, rel=1e-9)


def test_the_first_choice_beats_every_legal_layout():
    """Against pricing each layout of a small cluster one by one."""
    work, cluster = Workload(LLAMA8, 4096, 64), slices.cluster("v5p:2x2x4")
    limits = limits_of(LLAMA8, 4096, 64)
    ici = ici_rows(cluster.slice.devices, limits)
    ids = np.flatnonzero(placements(ici, cluster.slice).legal)
    table = combine(ici[ids], ids, dcn_rows(1, limits, fsdp=False), limits)
    policies = (POLICIES["full"], POLICIES["minimal"])
    best = np.inf
    for k in range(len(table)):
        for policy in policies:
            e = estimate(
                LLAMA8, cluster, table.row(k, 64), dataclasses.replace(DEFAULT_RECIPE, remat=policy), 4096
            )
            if e.hbm_total_bytes <= (1 - MARGIN) * e.hbm_limit_bytes:
                best = min(best, e.step_time_s)
    found = search(work, cluster, policies=policies).ranked[0].estimate.step_time_s
    assert found == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(
    ("shape", "place", "count", "seq", "batch"),
    [
        (LLAMA8, "v5e:4x4", 4, 8192, 96),
        (LLAMA70, "v5p:4x4x8", 1, 8192, 256),
        (MIXTRAL, "v6e:8x8", 2, 4096, 512),
        (LLAMA70, "h100-8", 16, 4096, 256),
    ],
)
def test_recipes_left_unpriced_were_never_the_fastest(shape, place, count, seq, batch):
    """A search of one policy prices it everywhere; a search of all leaves out what another beats."""
    work, cluster = Workload(shape, seq, batch), slices.cluster(place, count)
    alone = {}
    for policy in SEARCHED_POLICIES:
        try:
            found = search(work, cluster, policies=(policy,), top=1000, families=False).ranked
        except UserError:
            continue
        for c in found:
            mesh = (c.layout.ici, c.layout.dcn)
            alone[mesh] = min(alone.get(mesh, np.inf), c.estimate.step_time_s)
    together = search(work, cluster, top=50, families=False).ranked
    for c, seconds in zip(together, sorted(alone.values()), strict=False):
        assert c.estimate.step_time_s == pytest.approx(seconds, rel=1e-9)
        assert alone[c.layout.ici, c.layout.dcn] == pytest.approx(seconds, rel=1e-9)


def _any_cluster(name):
    chip = chips.load(name)
    shapes = [s for s in slices.legal_shapes(chip) if 4 <= np.prod(s) <= 512]
    return st.builds(
        slices.Cluster,
        st.sampled_from(shapes).map(lambda shape: slices.Slice(chip, shape)),
        st.sampled_from([1, 2, 3, 4, 16]),
    )


@given(
    name=st.sampled_from(model.names()),
    cluster=st.sampled_from(chips.names()).flatmap(_any_cluster),
    seq=st.sampled_from([1000, 2048, 4096, 32768]),
    batch=st.sampled_from([64, 96, 384, 1024, 3072]),
)
@settings(max_examples=60, deadline=None)
def test_no_recommendation_exceeds_memory_on_any_chip(name, cluster, seq, batch):
    shape = model_shape(model.load(name))
    try:
        result = search(Workload(shape, seq, batch), cluster, families=False)
    except UserError:
        return  # nothing legal, or nothing fits
    for c in result.ranked:
        alone = memory_bytes(shape, c.layout, c.recipe, seq)
        assert float(device_total(alone)) <= (1 - MARGIN) * cluster.chip.usable_hbm_bytes_per_device
        assert float(alone["host"]) <= device_of(cluster.chip).host_memory_bytes


def test_the_search_is_deterministic():
    work, cluster = Workload(MIXTRAL, 4096, 512), slices.cluster("v5p:4x4x8")
    assert search(work, cluster) == search(work, cluster)


def test_weights_are_sharded_over_dcn_only_where_no_replica_fits():
    small = search(Workload(LLAMA8, 4096, 256), slices.cluster("v5e:4x4", 4))
    assert all(c.layout.dcn.fsdp == 1 for c in small.ranked)
    crowded = search(Workload(LLAMA70, 4096, 256), slices.cluster("v5e:8x8", 4))
    assert crowded.ranked[0].layout.dcn.fsdp > 1
    assert all(c.layout.dcn.fsdp > 1 or c.layout.dcn.pipeline > 1 for c in crowded.ranked)


def test_eight_bit_is_searched_where_the_chip_has_it():
    work, cluster = Workload(LLAMA70, 8192, 256), slices.cluster("tpu7x:4x4x4")
    best = search(work, cluster, precisions=("bf16", "fp8"), recipe=Recipe(static_scales=True)).ranked[0]
    assert best.recipe.precision == "fp8"
    with pytest.raises(UserError, match="no int8 matrix unit"):
        search(work, cluster, precisions=("int8",))


def test_a_model_that_cannot_fit_says_how_many_chips_would_hold_it():
    with pytest.raises(UserError, match=r"llama3-70b does not fit on 1 x 2x4 v5e .* about \d+ chips"):
        search(Workload(LLAMA70, 4096, 64), slices.cluster("v5e:2x4"))


def test_a_batch_that_cannot_be_divided_names_one_that_can():
    with pytest.raises(UserError, match=r"7 sequences cannot be divided .* these can: 192"):
        search(Workload(LLAMA8, 2048, 7), slices.cluster("v5p:4x4x12"))


def test_a_batch_below_one_sequence_is_refused():
    with pytest.raises(UserError, match="below one sequence of 8192 tokens"):
        search(Workload(LLAMA8, 8192, 0), slices.cluster("v5p:4x4x4"))


@given(batch=st.sampled_from([16, 24, 32, 64, 96]), seq=st.sampled_from([2048, 8192, 32768]))
@settings(max_examples=15, deadline=None)
def test_whatever_is_recommended_is_legal(batch, seq):
    try:
        result = search(Workload(LLAMA8, seq, batch), slices.cluster("v5p:2x2x4"), families=False)
    except UserError:
        return
    for c in result.ranked:
        i = c.layout.ici
        assert LLAMA8.layers[0].attention.heads % i.tensor == 0
        assert 32 % i.pipeline == 0
        assert seq % i.context == 0
        check_layout(LLAMA8, c.cluster, c.layout, seq)
        check_recipe(LLAMA8, c.layout, c.recipe, seq)


def test_no_pipeline_is_recommended_with_activations_on_the_host():
    policies = [policy for policy in SEARCHED_POLICIES if policy.offloaded]
    result = search(Workload(LLAMA70, 4096, 256), slices.cluster("v5e:16x16"), policies=policies, top=200)
    assert all(c.recipe.remat.offloaded and c.layout.total("pipeline") == 1 for c in result.ranked)


def test_families_cover_every_layout_once():
    result = search(Workload(LLAMA8, 4096, 64), slices.cluster("v5p:4x4x4"))
    assert sum(f.layouts for f in result.families) == result.considered
    assert sum(f.fitting > 0 for f in result.families) > 5
    assert len({f.axes for f in result.families}) == len(result.families)


def test_a_pod_of_pods_is_searched_in_two_seconds():
    """256 slices of 9,216 chips; the limit leaves room for a busy machine."""
    cluster = slices.cluster("tpu7x:16x24x24", 256)
    started = time.process_time()
    result = search(Workload(LLAMA70, 8192, 2**11 * 9 * 256), cluster)
    assert time.process_time() - started < 2.0
    assert result.considered > 10_000


def test_pricing_one_layout_takes_under_twenty_milliseconds():
    result = search(Workload(LLAMA70, 8192, 512), slices.cluster("v5p:4x4x8"), top=1, families=False)
    c = result.ranked[0]
    started = time.process_time()
    for _ in range(10):
        estimate(LLAMA70, c.cluster, c.layout, c.recipe, 8192)
    assert (time.process_time() - started) / 10 < 0.02


def test_axis_order_of_the_table_is_that_of_the_layout():
    result = search(Workload(MIXTRAL, 4096, 512), slices.cluster("v5p:4x4x4"), top=3)
    for c in result.ranked:
        assert {f.name for f in dataclasses.fields(c.layout.ici)} == set(ICI_ORDER)
