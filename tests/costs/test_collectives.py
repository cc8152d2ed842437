import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slicewise.catalog import slices
from slicewise.costs import collectives as ici

LINK = 4.5e10
axes = st.builds(ici.Axis, st.integers(2, 64), st.booleans())
torus = st.lists(axes, min_size=1, max_size=3)
sizes = st.floats(1, 1e13)
ops = st.sampled_from(ici.OPS)


@given(ops, sizes, st.floats(1, 100), torus, st.booleans())
def test_more_bytes_never_take_less_time(op, bytes_, factor, over, exact):
    less = ici.collective(op, bytes_, over, LINK, exact=exact)
    more = ici.collective(op, bytes_ * factor, over, LINK, exact=exact)
    assert more.time_s >= less.time_s > 0


@given(sizes, torus, st.booleans())
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(bytes_, over, exact):
    scatter = ici.reduce_scatter(bytes_, over, LINK, exact=exact)
    gather = ici.all_gather(bytes_, over, LINK, exact=exact)
    both = ici.all_reduce(bytes_, over, LINK, exact=exact)
    assert both.bandwidth_s == pytest.approx(scatter.bandwidth_s + gather.bandwidth_s)
    assert both.latency_s == pytest.approx(scatter.latency_s + gather.latency_s)


@given(ops, sizes, torus, axes)
def test_another_axis_never_lowers_the_bandwidth(op, bytes_, over, more):
    assume(op != "all_to_all" or len({a.wrap for a in (*over, more)}) == 1)
    fewer = ici.collective(op, bytes_, over, LINK).bandwidth_s
    assert ici.collective(op, bytes_, [*over, more], LINK).bandwidth_s <= fewer * (1 + 1e-9)


@given(ops, sizes, st.integers(2, 16), st.integers(2, 16))
def test_folding_a_ring_into_two_axes_is_never_slower(op, bytes_, a, b):
    ring = ici.collective(op, bytes_, [ici.Axis(a * b)], LINK)
    folded = ici.collective(op, bytes_, [ici.Axis(a), ici.Axis(b)], LINK)
    assert folded.time_s <= ring.time_s * (1 + 1e-9)


@given(ops, sizes, st.integers(2, 64))
def test_a_line_is_never_faster_than_a_ring_and_at_most_twice_as_slow(op, bytes_, size):
    ring = ici.collective(op, bytes_, [ici.Axis(size)], LINK, exact=True)
    line = ici.collective(op, bytes_, [ici.Axis(size, wrap=False)], LINK, exact=True)
    assert line.bandwidth_s == pytest.approx(2 * ring.bandwidth_s)
    assert line.latency_s >= ring.latency_s


@given(sizes, st.integers(2, 32), st.integers(2, 32))
def test_an_all_to_all_is_bound_by_the_middle_of_its_longest_axis(bytes_, a, b):
    """V / (4 W2) on a ring, twice that on a line, V max(A, B) / (4 A B W2) on two rings."""
    ring, line = ici.Axis(a), ici.Axis(a, wrap=False)
    assert ici.all_to_all(bytes_, [ring], LINK).bandwidth_s == pytest.approx(bytes_ / (4 * 2 * LINK))
    assert ici.all_to_all(bytes_, [line], LINK).bandwidth_s == pytest.approx(bytes_ / (4 * LINK))
    both = ici.all_to_all(bytes_, [ring, ici.Axis(b)], LINK)
    assert both.bandwidth_s == pytest.approx(bytes_ * max(a, b) / (4 * a * b * 2 * LINK))
    mixed = ici.all_to_all(bytes_, [ici.Axis(16), ici.Axis(8, wrap=False)], LINK)
    assert mixed.bandwidth_s == pytest.approx(bytes_ * 16 / (4 * 128 * 2 * LINK))


@given(ops, sizes)
def test_axes_of_one_chip_cost_nothing(op, bytes_):
    alone = ici.collective(op, bytes_, [ici.Axis(1), ici.Axis(1, wrap=False)], LINK)
    assert alone.time_s == 0
    with_ring = ici.collective(op, bytes_, [ici.Axis(1), ici.Axis(8)], LINK)
    assert with_ring.time_s == ici.collective(op, bytes_, [ici.Axis(8)], LINK).time_s


def test_a_small_array_waits_for_the_hops():
    tiny = ici.all_gather(256, [ici.Axis(4)], LINK)
    assert (tiny.bound, tiny.time_s) == ("latency", pytest.approx(2e-6))
    line = ici.all_gather(256, [ici.Axis(4, wrap=False)], LINK)
    assert line.time_s == pytest.approx(3e-6)
    assert ici.latency_bound_shard_bytes(LINK) == pytest.approx(45e3)


def test_a_line_moves_three_quarters_one_way():
    """[E_Y, F] bf16 of 2048 x 8192 over four unwrapped chips of v5e."""
    done = ici.all_gather(2 * 2048 * 8192, [ici.Axis(4, wrap=False)], LINK)
    assert done.time_s == pytest.approx(3 / 4 * 2 * 2048 * 8192 / LINK)
    assert done.bound == "bandwidth"


def test_a_copy_across_an_unwrapped_square_uses_two_links_and_six_hops():
    """The book's 16.8 MB from corner to corner of a v5e 4x4."""
    copy = ici.point_to_point(2 * 8 * 128 * 8192, (0, 0), (3, 3), ici.axes_of(slices.parse("v5e:4x4")), LINK)
    assert (copy.ports, copy.hops) == (2, 6)
    assert copy.time_s == pytest.approx(194e-6, rel=0.02)


@given(st.data(), torus)
def test_a_copy_is_symmetric_and_never_longer_than_half_a_ring(data, over):
    at = [data.draw(st.integers(0, a.size - 1)) for a in over]
    to = [data.draw(st.integers(0, a.size - 1)) for a in over]
    there = ici.point_to_point(1e6, at, to, over, LINK)
    assert there == ici.point_to_point(1e6, to, at, over, LINK)
    assert there.hops <= sum(a.size // 2 if a.wrap else a.size - 1 for a in over)
    assert (there.time_s == 0) == (at == to)


def test_a_chip_has_as_many_links_as_neighbours():
    def links(at, *over):
        return ici.links(at, over)

    assert links((0, 0), ici.Axis(4, False), ici.Axis(4, False)) == 2
    assert links((1, 0), ici.Axis(4, False), ici.Axis(4, False)) == 3
    assert links((0, 0, 0), ici.Axis(4), ici.Axis(4), ici.Axis(4)) == 6
    assert links((0, 1), ici.Axis(2), ici.Axis(1)) == 1
    assert ici.gather_to_one(1e9, (0, 0), [ici.Axis(4, False)] * 2, LINK, hop_s=1e-6).hops == 6


@given(st.data(), torus)
def test_gathering_to_a_corner_is_slowest(data, over):
    at = [data.draw(st.integers(0, a.size - 1)) for a in over]
    corner = ici.gather_to_one(1e9, [0] * len(over), over, LINK)
    here = ici.gather_to_one(1e9, at, over, LINK)
    assert here.ports >= corner.ports
    assert here.time_s <= corner.time_s * (1 + 1e-9)


@given(st.sampled_from(["all_gather", "all_to_all", "all_reduce"]), st.integers(2, 1000))
def test_a_ring_used_both_ways_is_faster_by_the_known_factor(op, devices):
    one = ici.ring_link_elements(op, 1.0, devices, bidirectional=False)
    both = ici.ring_link_elements(op, 1.0, devices)
    if op == "all_to_all":
        assert 2 <= one / both <= 4
    else:
        assert one / both == pytest.approx(2)


@given(sizes, st.integers(2, 64), st.sampled_from([4, 256]))
def test_reducing_across_slices_approaches_twice_the_array_through_all_egress(bytes_, num_slices, chips):
    reduced = ici.dcn_s("all_reduce", bytes_, num_slices, chips, 6.25e9)
    limit = 2 * bytes_ / (chips * 6.25e9)
    assert limit / 2 * (1 - 1e-9) <= reduced < limit
    assert ici.dcn_s("all_gather", bytes_, num_slices, chips, 6.25e9) == pytest.approx(reduced / 2)
    exchanged = ici.dcn_s("all_to_all", bytes_, num_slices, chips, 6.25e9)
    assert exchanged == pytest.approx(reduced / 2 / num_slices)


def test_a_hierarchical_all_reduce_adds_both_networks():
    over = ici.axes_of(slices.parse("v5p-512"))
    done = ici.hierarchical_all_reduce(1e9, over, 9e10, 2, 6.25e9)
    assert done.ici_s == ici.all_reduce(1e9, over, 9e10).time_s
    assert done.dcn_s == pytest.approx(1e9 / (256 * 6.25e9))
    assert done.time_s == done.ici_s + done.dcn_s


def test_axes_come_from_the_slice_with_their_wrap():
    assert ici.axes_of(slices.parse("v5e:8x16")) == (ici.Axis(8, wrap=False), ici.Axis(16))
    assert ici.axes_of(slices.parse("v5e:8x16"), [1]) == (ici.Axis(16),)
    assert ici.axes_of(slices.parse("v5p:2x2x1")) == (ici.Axis(2, False), ici.Axis(2, False))
    assert math.isclose(ici.Axis(16).hops, 8)
