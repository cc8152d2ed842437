import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import chips
from slicewise.catalog.chips import Level
from slicewise.costs import switched
from slicewise.errors import UserError

H100 = chips.load("h100")
networks = st.lists(
    st.builds(Level, units=st.integers(1, 64), egress_bytes_per_s=st.floats(1e9, 1e13)),
    min_size=1,
    max_size=3,
)
sizes = st.floats(1, 1e13)


def test_effective_bandwidths_of_a_superpod():
    found = [switched.effective_bytes_per_s(level) for level in H100.levels]
    assert found == pytest.approx([514e9, 413e9, 17.07e12], rel=0.01)


def test_two_nodes_are_bound_inside_the_node():
    two = switched.levels_spanned(H100, 16)
    assert [v.units for v in two] == [8, 2]
    assert switched.all_gather_s(1e9, two) == pytest.approx(1e9 / 514e9, rel=0.01)


@given(sizes, st.floats(1, 10), networks)
def test_more_bytes_or_levels_never_take_less(bytes_, factor, levels):
    here = switched.all_gather_s(bytes_, levels)
    assert switched.all_gather_s(bytes_ * factor, levels) >= here
    assert switched.all_gather_s(bytes_, levels[:-1]) <= here
    assert here <= switched.all_gather_s(bytes_, levels, exact=False)
    assert switched.all_reduce_s(bytes_, levels) == pytest.approx(2 * here)


@given(sizes, networks, st.integers(1, 64))
def test_sharding_over_an_inner_axis_never_slows_a_gather(bytes_, levels, ways):
    alone = switched.all_gather_s(bytes_, levels)
    assert switched.all_gather_s(bytes_, levels, inner_ways=ways) <= alone
    assert switched.all_gather_s(bytes_, levels, inner_ways=1) == alone


def test_switches_that_reduce_save_up_to_half():
    node = H100.levels[:1]
    plain = switched.all_reduce_s(1e9, node)
    assert switched.all_reduce_s(1e9, node, in_network=True) == pytest.approx(1e9 / 450e9)
    assert switched.all_reduce_s(1e9, node, in_network=True, in_network_gain=1.3) == pytest.approx(
        plain / 1.3
    )


def test_an_all_to_all_across_nodes_is_bound_by_their_egress():
    four = switched.levels_spanned(H100, 32)
    assert switched.all_to_all_s(1e9, four) == pytest.approx(1e9 * 3 / 16 / 400e9)


@given(st.integers(1, 16), st.integers(1, 64))
def test_a_token_reaches_no_more_gpus_than_it_has_experts(k, gpus):
    share = switched.ragged_share(k, gpus)
    assert 0 <= share <= min(k / gpus, 1) + 1e-12


@given(st.integers(1, 8), st.integers(9, 512), st.integers(256, 65536))
def test_the_expert_width_is_where_both_times_meet(k, gpus, d_ff):
    width = switched.min_expert_d_ff(k, gpus, 9.9e14, 400e9)
    math_s, comms_s = switched.expert_parallel_s(1e5, 8192, d_ff, k, gpus, 9.9e14, 400e9)
    if abs(d_ff / width - 1) > 1e-6:
        assert (math_s > comms_s) == (d_ff > width)


def test_many_gpus_need_experts_eight_alpha_wide():
    assert switched.min_expert_d_ff(8, 100_000, 9.9e14, 400e9) == pytest.approx(19800, rel=0.001)


def test_two_nodes_need_half_the_tokens():
    assert switched.min_tokens_per_gpu(9.9e14, 400e9, units=2) == pytest.approx(1237.5)


@pytest.mark.parametrize(("gpus", "message"), [(12, "do not fill whole units of 8"), (4096, "joins 1024")])
def test_groups_that_do_not_fill_the_network_are_refused(gpus, message):
    with pytest.raises(UserError, match=message):
        switched.levels_spanned(H100, gpus)
