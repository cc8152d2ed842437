import dataclasses

import numpy as np
import pytest

from slicewise.catalog import model, slices
from slicewise.costs.communication import priced_collectives
from slicewise.costs.device import device_of
from slicewise.costs.layout import AttentionKernel, Degrees, Layout, Recipe
from slicewise.costs.remat import POLICIES, custom
from slicewise.costs.shapes import model_shape
from slicewise.costs.step import estimate
from slicewise.errors import UserError

LLAMA8 = model_shape(model.load("llama3-8b"))
LLAMA70 = model_shape(model.load("llama3-70b"))
MIXTRAL = model_shape(model.load("mixtral-8x7b"))


def step(shape, place, num_slices=1, batch=1024, recipe=None, seq=8192, dcn=None, **ici):
    cluster = slices.cluster(place, num_slices)
    layout = Layout(Degrees(**ici), Degrees(**(dcn or {})), batch)
    return estimate(shape, cluster, layout, recipe or Recipe(), seq)


def test_the_parts_add_up_to_the_step():
    e = step(LLAMA70, "v5p:8x8x8", 2, 2048, fsdp=128, tensor=4, dcn={"data": 2})
    parts = [*e.compute_s.values(), *e.exposed_s.values(), *e.other_s.values()]
    assert e.step_time_s == pytest.approx(sum(parts), rel=1e-9)
    assert e.tokens == 2048 * 8192
    assert 0 < e.mfu < 1


def test_exposed_communication_is_part_of_all_of_it():
    e = step(LLAMA70, "v5p:8x8x8", fsdp=64, tensor=8)
    assert set(e.exposed_s) == {"fsdp", "tensor"}
    assert all(e.exposed_s[axis] < e.communication_s[axis] for axis in e.exposed_s)


def test_synchronous_collectives_are_all_exposed():
    e = step(LLAMA70, "v6e:16x16", recipe=Recipe(async_collectives=False), fsdp=256)
    assert e.exposed_s == pytest.approx(e.communication_s)


def test_saving_activations_removes_recomputation():
    full = step(LLAMA8, "v5p:4x4x4", fsdp=64)
    minimal = step(LLAMA8, "v5p:4x4x4", recipe=Recipe(remat=POLICIES["minimal_with_context"]), fsdp=64)
    assert minimal.step_time_s < full.step_time_s
    assert minimal.compute_s["matmul"] / full.compute_s["matmul"] == pytest.approx(3 / 3.8, rel=0.03)


def test_offloading_waits_for_the_host_link_when_it_is_slow():
    recipe = Recipe(remat=custom(dict.fromkeys(("decoder_layer_input", "mlpwi_0", "mlpwi_1"), "offload")))
    cluster = slices.cluster("v6e:2x4")
    device = dataclasses.replace(device_of(cluster.chip), host_bytes_per_s=1e9)
    layout = Layout(Degrees(fsdp=8), global_batch=8)
    slow = estimate(LLAMA8, cluster, layout, recipe, 8192, device=device)
    assert slow.other_s["host copies"] > 0
    assert slow.decided_by == "host copies"


def test_eight_bit_matmuls_pay_for_quantisation():
    bf16 = step(LLAMA70, "tpu7x:4x4x4", batch=256, fsdp=128)
    fp8 = step(LLAMA70, "tpu7x:4x4x4", batch=256, recipe=Recipe(precision="fp8"), fsdp=128)
    fixed = step(
        LLAMA70, "tpu7x:4x4x4", batch=256, recipe=Recipe(precision="fp8", static_scales=True), fsdp=128
    )  # fmt: skip
    assert 0.5 * bf16.step_time_s < fixed.step_time_s < fp8.step_time_s < bf16.step_time_s


def test_a_chip_without_the_unit_gains_nothing_from_eight_bits():
    assert device_of(slices.cluster("v5p:4x4x4").chip).peak_flops_per_s("fp8") == 4.59e14
    assert device_of(slices.cluster("v5p:4x4x4").chip).peak_flops_per_s("int8") == 9.18e14


def test_unbalanced_context_waits_for_the_shard_that_sees_everything():
    balanced = step(LLAMA8, "v5p:4x4x4", batch=4, seq=131072, fsdp=4, context=16)
    uneven = step(
        LLAMA8, "v5p:4x4x4", batch=4, seq=131072, recipe=Recipe(context_balanced=False), fsdp=4, context=16
    )  # fmt: skip
    ratio = uneven.compute_s["attention"] / balanced.compute_s["attention"]
    assert ratio == pytest.approx(32 / 17, rel=0.02)


def test_ring_exchange_is_slower_than_a_gather_over_the_torus():
    def exposed(exchange):
        recipe = Recipe(context_exchange=exchange)
        return step(LLAMA8, "v5p:4x4x4", batch=4, seq=65536, recipe=recipe, fsdp=4, context=16).exposed_s[
            "context"
        ]

    assert exposed("ring") > exposed("all_gather")
    assert exposed("ulysses") < exposed("all_gather") * 3


def test_small_attention_blocks_cost_grid_steps():
    small = Recipe(attention=AttentionKernel(block_q=512, block_kv=512))
    assert (
        step(LLAMA8, "v6e:16x16", recipe=small, fsdp=256).compute_s["attention"]
        > 1.2 * step(LLAMA8, "v6e:16x16", fsdp=256).compute_s["attention"]
    )


def test_capacity_experts_cost_more_than_dropless_ones_compute():
    dropless = step(MIXTRAL, "v6e:16x16", seq=4096, fsdp=256)
    fixed = step(MIXTRAL, "v6e:16x16", seq=4096, recipe=Recipe(expert_capacity_factor=2.0), fsdp=256)
    assert fixed.compute_s["matmul"] > dropless.compute_s["matmul"]


def test_expert_parallelism_trades_weight_gathers_for_token_exchange():
    spread = step(MIXTRAL, "v5p:4x4x4", seq=4096, batch=512, fsdp=64)
    experts = step(MIXTRAL, "v5p:4x4x4", seq=4096, batch=512, fsdp=16, expert=4)
    assert experts.communication_s["fsdp"] < spread.communication_s["fsdp"]
    assert experts.communication_s["expert"] > 0


def test_pipeline_bubble_follows_the_schedule():
    cluster = slices.cluster("v5p:4x4x4")
    layout = Layout(Degrees(fsdp=16, pipeline=4), global_batch=512, pipeline_microbatches=8)
    e = estimate(LLAMA8, cluster, layout, Recipe(), 4096)
    body = e.step_time_s - e.compute_s["output"] - e.compute_s["optimizer"] - sum(e.exposed_s.values())
    assert e.other_s["pipeline bubble"] / body == pytest.approx(3 / 11, rel=1e-6)
    repeated = dataclasses.replace(layout, pipeline_repeats=4)
    shorter = estimate(LLAMA8, cluster, repeated, Recipe(), 4096).other_s["pipeline bubble"]
    assert shorter == pytest.approx(e.other_s["pipeline bubble"] / 4)


def test_a_stage_that_keeps_its_weights_gathers_them_once_and_holds_them():
    cluster = slices.cluster("v5p:4x4x4")
    once = Layout(Degrees(fsdp=16, pipeline=4), global_batch=512, pipeline_microbatches=8)
    each = dataclasses.replace(once, pipeline_gathers_once=False)
    kept, dropped = (estimate(LLAMA8, cluster, layout, Recipe(), 4096) for layout in (once, each))
    # A gather and a scatter, instead of two gathers and a scatter for each microbatch.
    over_fsdp = [
        sum(p.sent_bytes for p in priced_collectives(LLAMA8, layout, Recipe(), 4096) if p.axes == {"fsdp"})
        for layout in (once, each)
    ]
    assert over_fsdp[1] == pytest.approx(8 * 3 / 2 * over_fsdp[0])
    stage = LLAMA8.parameters - LLAMA8.embedding_parameters - LLAMA8.other_parameters
    assert kept.hbm_bytes["weights"] - dropped.hbm_bytes["weights"] == pytest.approx(2 * stage / 4)


def test_hops_are_those_of_every_tick_and_half_of_them_lie_beside_compute():
    layout = Layout(Degrees(pipeline=4, tensor=16), global_batch=64, pipeline_microbatches=8)
    e = estimate(LLAMA8, slices.cluster("v5p:4x4x4"), layout, Recipe(), 4096)
    twice = dataclasses.replace(layout, pipeline_microbatches=16)
    longer = estimate(LLAMA8, slices.cluster("v5p:4x4x4"), twice, Recipe(), 4096)
    assert e.communication_s["pipeline"] == pytest.approx(2 * e.exposed_s["pipeline"], rel=0.02)
    assert longer.exposed_s["pipeline"] / e.exposed_s["pipeline"] == pytest.approx(19 / 11 / 2, rel=0.02)


def test_more_slices_cost_dcn_and_waiting():
    one = step(LLAMA8, "v5e:16x16", batch=256, fsdp=256)
    many = step(LLAMA8, "v5e:16x16", 8, batch=2048, fsdp=256, dcn={"data": 8})
    assert many.step_time_s > one.step_time_s
    assert many.exposed_s["dcn data"] > 0
    assert many.other_s["slowest slice"] > 0


def test_gpus_have_one_egress_for_all_axes():
    e = step(LLAMA8, "h100-8", batch=32, fsdp=8)
    gathered = 3 * 2 * LLAMA8.parameters * 7 / 8
    assert e.communication_s["fsdp"] == pytest.approx(gathered / (450e9 * 0.8), rel=0.15)


def test_a_mesh_that_does_not_fit_the_slice_is_refused():
    with pytest.raises(UserError, match="multiply to 60; expected the 64 devices"):
        step(LLAMA8, "v5p:4x4x4", fsdp=60)


def test_decimal_shares_survive_numpy():
    e = step(LLAMA8, "v5p:4x4x4", fsdp=64)
    assert all(type(v) is float for v in {**e.compute_s, **e.exposed_s, **e.hbm_bytes}.values())
    assert not isinstance(e.step_time_s, np.ndarray)
