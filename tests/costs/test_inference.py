import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.costs import inference as inf

V5E = {"flops_per_s": 1.97e14, "hbm_bytes_per_s": 8.2e11}
batches = st.integers(1, 4096)


@given(batches, st.floats(1e6, 1e10), st.integers(1, 256))
def test_a_decode_step_grows_with_the_batch_and_throughput_does_too(batch, cache, chips):
    def step(b):
        return inf.decode_step_s(b, cache, 8e9, chips=chips, active_params=8e9, **V5E)

    assert step(batch + 1) > step(batch)
    assert inf.tokens_per_s(batch + 1, step(batch + 1)) >= inf.tokens_per_s(batch, step(batch)) * (1 - 1e-9)
    bandwidth_only = inf.decode_step_s(batch, cache, 8e9, chips=chips, hbm_bytes_per_s=8.2e11)
    assert bandwidth_only <= step(batch)
    assert bandwidth_only == pytest.approx((batch * cache + 8e9) / (chips * 8.2e11))


@given(st.integers(1, 1 << 15), st.integers(1, 1 << 15), st.integers(1, 16))
def test_attention_of_one_query_never_exceeds_the_group(queries, keys, group):
    assert inf.attention_intensity(1, keys, group) < group
    assert inf.attention_intensity(queries, keys, group) <= min(queries * group, keys)


@given(st.floats(1e6, 1e12), st.floats(0, 1e12), st.integers(1, 64))
def test_the_largest_batch_fits_and_one_more_does_not(cache, weights, chips):
    batch = inf.max_batch(chips, 16e9, weights, cache)
    free = inf.free_bytes(chips, 16e9, weights)
    if free >= 0:
        assert batch * cache <= free * (1 + 1e-9)
        assert (batch + 1) * cache > free * (1 - 1e-9)
    else:
        assert batch == 0


@given(st.integers(1, 1024), st.integers(1024, 65536), st.integers(1, 64))
def test_the_tensor_limit_is_where_ici_overtakes_hbm(batch, d_ff, ways):
    beta = 8.2e11 / 9e10
    limit = inf.max_decode_tensor_ways(batch, d_ff, beta)
    _, hbm_s, ici_s = inf.decode_matmul(batch, 8192, d_ff, ways, axis_bytes_per_s=9e10, **V5E)
    if abs(ways / limit - 1) > 1e-6:
        assert (ici_s < hbm_s) == (ways < limit)


@given(st.integers(1, 4096), st.sampled_from([1.0, 2.0, 3.5, 4.0]))
def test_the_best_weight_stationary_split_is_the_least(chips, ratio):
    d_model, d_ff = 8192, ratio * 8192
    x, yz = inf.weight_stationary_ways(chips, d_model, d_ff)
    assert x * yz == pytest.approx(chips)

    def time(ways):
        return inf.weight_stationary_s(64, d_model, d_ff, ways, chips / ways, 9e10)

    assert time(x) <= min(time(x / 1.5), time(x * 1.5)) * (1 + 1e-9)
    coefficient = inf.weight_stationary_coefficient(ratio)
    assert time(x) == pytest.approx(coefficient * 64 * d_model / (math.sqrt(chips) * 9e10))
    crossover = inf.min_chips_weight_stationary(ratio)
    if abs(chips / crossover - 1) > 1e-6:
        faster = time(x) < inf.tensor_parallel_s(64, d_model, 9e10, axes=3)
        assert faster == (chips > crossover)


def test_the_crossover_is_72_chips_at_four_d():
    assert inf.min_chips_weight_stationary(4) == pytest.approx(72)


@given(batches, st.integers(1, 2000))
def test_speculation_is_free_below_the_critical_batch(batch, critical):
    free = inf.free_speculative_tokens(batch, critical)
    assert free == 0 or batch * (free + 1) < critical
    assert batch * (free + 2) >= critical


def test_capacity_and_cost():
    assert inf.prefill_to_decode_ratio(32, 0.91, 0.019, 512) == pytest.approx(3, rel=0.01)
    assert inf.price_per_million_tokens(8, 1.2, 1000) == pytest.approx(8 * 1.2 / 3.6)
    assert inf.tokens_evicted_per_step(32, 8192, 4096) == 96
