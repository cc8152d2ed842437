import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.costs import parallelism as par

V5P = {"flops_per_s": 4.59e14, "axis_bytes_per_s": 1.8e11}
ALPHA = par.alpha(*V5P.values())
F, D = 32768, 8192
tokens = st.floats(1e4, 1e8)


def margin(value, threshold):
    return abs(value / threshold - 1) > 1e-6


@given(st.floats(10, 1e5), st.integers(1, 3))
def test_data_parallelism_and_fsdp_share_one_threshold(tokens_a_chip, axes):
    threshold = par.min_tokens_per_chip(ALPHA, axes)
    if margin(tokens_a_chip, threshold):
        for scheme in ("data", "fsdp"):
            layer = par.layer_time(scheme, 64 * tokens_a_chip, D, F, **V5P, data_ways=64, data_axes=axes)
            assert (layer.backward.bound == "compute") == (tokens_a_chip > threshold)


@given(st.integers(1, 64), st.integers(1, 3), st.integers(1000, 100_000))
def test_tensor_parallelism_stops_at_its_ways(ways, axes, d_ff):
    limit = par.max_tensor_ways(d_ff, ALPHA, axes)
    if margin(ways, limit):
        layer = par.layer_time("tensor", 1e6, D, d_ff, **V5P, tensor_ways=ways, tensor_axes=axes)
        assert (layer.forward.bound == "compute") == (ways < limit)
    assert par.min_d_ff(limit, ALPHA, axes) == pytest.approx(d_ff)


@given(tokens, st.sampled_from([16, 64, 256, 1024]), st.integers(1, 2), st.integers(1, 2))
def test_the_best_split_balances_and_no_split_beats_it(batch, chips, fsdp_axes, tensor_axes):
    def layer(x):
        return par.layer_time(
            "fsdp+tensor", batch, D, F, **V5P, data_ways=x, tensor_ways=chips / x,
            data_axes=fsdp_axes, tensor_axes=tensor_axes,
        )  # fmt: skip

    best_x = par.optimal_fsdp_ways(batch, F, chips, fsdp_axes, tensor_axes)
    best = layer(best_x)
    assert best.fsdp_forward_s == pytest.approx(best.tensor_forward_s)
    for x in (best_x / 2, best_x * 2, 1, chips):
        assert best.forward.comms_s <= layer(x).forward.comms_s * (1 + 1e-9)
    ratio = par.math_over_comms_at_optimum(batch, F, chips, ALPHA, fsdp_axes, tensor_axes)
    assert best.forward.math_s / best.forward.comms_s == pytest.approx(ratio)
    least = par.min_tokens_per_chip_mixed(ALPHA, F, fsdp_axes * tensor_axes)
    if margin(ratio, 1):
        assert (ratio > 1) == (batch / chips > least)
    assert par.max_chips_mixed(batch, ALPHA, F, fsdp_axes * tensor_axes) == pytest.approx(batch / least)


@given(tokens, st.integers(1, 4096))
def test_a_split_uses_every_chip(batch, chips):
    split = par.optimal_split(batch, F, chips, 2, 1)
    assert split.fsdp_ways * split.tensor_ways == chips


def test_experts_raise_the_threshold_and_model_parallelism_divides_it():
    assert par.min_tokens_per_chip(ALPHA, experts=256, experts_per_token=8) == pytest.approx(32 * ALPHA)
    assert par.min_tokens_per_chip(ALPHA, model_parallel=4) == pytest.approx(ALPHA / 4)


@given(st.integers(2, 64), st.integers(1, 8), st.integers(100, 100_000))
def test_expert_parallelism_stops_at_its_ways(ways, per_token, d_ff):
    layer = par.expert_layer(1e5, D, d_ff, per_token, ways, **V5P)
    limit = par.max_expert_ways(d_ff, ALPHA)
    if margin(ways, limit):
        assert (layer.bound == "compute") == (ways < limit)
    assert par.min_expert_d_ff(limit, ALPHA) == pytest.approx(d_ff)


@given(st.integers(1, 32), st.integers(1, 256), st.integers(1, 8))
def test_a_pipeline_idles_less_with_more_microbatches_or_repeats(stages, microbatches, repeats):
    here = par.pipeline_bubble(stages, microbatches, repeats)
    assert 0 <= here < 1
    assert par.pipeline_bubble(stages, microbatches + 1, repeats) <= here
    assert par.pipeline_bubble(stages, microbatches, repeats + 1) <= here
    assert par.pipeline_bubble(1, microbatches, repeats) == 0


def test_pipeline_traffic_is_small_and_its_intensity_large():
    assert par.pipeline_hops_s(1e6, D, 4, 8, 1.8e11) == pytest.approx(10 * 2 * 1e6 / 8 * D / 1.8e11)
    assert par.pipeline_intensity(8, F) == 1.5 * 8 * F


@given(st.integers(2, 1000))
def test_slices_need_more_tokens_the_more_there_are(num_slices):
    few = par.min_tokens_per_slice(4.59e14, 6.25e9, num_slices=num_slices)
    assert few < par.min_tokens_per_slice(4.59e14, 6.25e9, num_slices=num_slices + 1)
    assert few < par.min_tokens_per_slice(4.59e14, 6.25e9) == pytest.approx(73440)


@given(st.integers(2, 100), st.sampled_from([16, 32]))
def test_both_ways_to_state_the_dcn_threshold_agree(num_slices, bits):
    """v4: 22,000 FLOPs a bit; 50 Gb/s a host of four chips."""
    per_bit = par.dcn_flops_per_bit(2.75e14, 4, 50e9)
    by_bit = par.min_tokens_per_slice_by_bit(per_bit, num_slices=num_slices, gradient_bits=bits)
    per_chip = 50e9 / 8 / 4
    direct = par.min_tokens_per_slice(2.75e14, per_chip, num_slices=num_slices, gradient_bits=bits)
    assert by_bit == pytest.approx(direct)


def test_gathering_keys_and_values_pays_off_for_long_sequences():
    assert par.context_attention_intensity(32768, 32, 8, 4) == 32768
    assert par.tensor_latency_bound_ways(8, 8192, 45e3) == pytest.approx(8 * 8192 / 45e3)


@given(st.floats(0.5, 500), st.integers(1, 512))
def test_the_nearest_divisor_divides(value, number):
    chosen = par.nearest(value, par.divisors(number))
    assert number % chosen == 0
    assert all(
        abs(math.log(chosen / value)) <= abs(math.log(d / value)) + 1e-12 for d in par.divisors(number)
    )
