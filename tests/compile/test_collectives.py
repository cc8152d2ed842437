"""Replica groups as mesh axes, links and seconds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import slices
from slicewise.compile import collectives
from slicewise.compile.collectives import Layout, of_group, replica_groups
from slicewise.compile.hlo import Instruction
from slicewise.compile.work import Describer
from slicewise.costs.device import device_of


def layout(text: str = "v5p:4x4x4", num_slices: int = 1, **mesh: int) -> Layout:
    """Devices in the order of their coordinates, the last dim fastest."""
    cluster = slices.cluster(text, num_slices)
    shape = (num_slices, *cluster.slice.topology, cluster.chip.jax_devices)
    places = np.array(list(np.ndindex(shape)))
    return Layout(cluster, mesh or {"fsdp": cluster.devices}, places)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['data'=2,'fsdp'=2] {'fsdp'}, channel_id=3", [[0, 1], [2, 3]]),
        ("mesh['data'=2,'fsdp'=2] {'data'}", [[0, 2], [1, 3]]),
        ("mesh['data'=2,'fsdp'=2] {'data','fsdp'}", [[0, 1, 2, 3]]),
        ("mesh['fsdp'=4] {'fsdp':(1)2}", [[0, 2], [1, 3]]),
        ("mesh['fsdp'=4] {'fsdp':(2)2}", [[0, 1], [2, 3]]),
    ],
)
def test_every_way_of_writing_groups(text, groups):
    assert sorted(map(sorted, replica_groups(text).tolist())) == sorted(groups)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_groups_of_a_mesh_divide_its_partitions(sizes, data):
    names = [f"a{k}" for k in range(len(sizes))]
    chosen = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    mesh = ",".join(f"'{n}'={s}" for n, s in zip(names, sizes, strict=True))
    groups = replica_groups(f"mesh[{mesh}] {{{','.join(repr(c) for c in chosen)}}}")
    assert sorted(groups.reshape(-1).tolist()) == list(range(int(np.prod(sizes))))


def test_unknown_groups_are_refused():
    with pytest.raises(ValueError, match="unknown form"):
        replica_groups("{0}")


def test_axes_are_those_along_which_a_group_differs():
    where = layout(data=4, fsdp=16)
    assert where.axes([0, 1, 2]) == ("fsdp",)
    assert where.axes([0, 16]) == ("data",)
    assert where.axes(range(64)) == ("data", "fsdp")


def test_a_gather_over_a_whole_torus_has_all_its_links():
    device = device_of(slices.cluster("v5p:4x4x4").chip)
    link = device.link_bytes_per_s * device.calibration.ici_efficiency
    whole = of_group("all-gather", np.arange(64), 1e9, layout(), device)
    assert whole.seconds == pytest.approx(63 * 1e9 / (6 * link))
    assert whole.resources == ("x+", "x-", "y+", "y-", "z+", "z-")
    row = of_group("all-gather", np.arange(4), 1e9, layout(), device)
    assert row.seconds == pytest.approx(3 * 1e9 / (2 * link))
    assert row.resources == ("z+", "z-")


def test_an_all_reduce_takes_as_long_as_a_scatter_and_a_gather():
    device = device_of(slices.cluster("v5p:4x4x4").chip)
    group, where = np.arange(64), layout()
    reduce = of_group("all-reduce", group, 64e6, where, device)
    scatter = of_group("reduce-scatter", group, 64e6, where, device)
    gather = of_group("all-gather", group, 1e6, where, device)
    assert reduce.seconds == pytest.approx(scatter.seconds + gather.seconds)


def test_devices_of_one_chip_share_its_links_unless_both_take_part():
    where = layout("tpu7x:4x4x4")
    device = device_of(where.cluster.chip)
    link = device.link_bytes_per_s * device.calibration.ici_efficiency
    alone = of_group("all-gather", np.arange(0, 8, 2), 1e9, where, device)  # one device of each chip of a row
    assert alone.seconds == pytest.approx(3e9 / (2 * link / 2))
    both = of_group("all-gather", np.arange(8), 1e9, where, device)
    assert both.seconds == pytest.approx(7e9 / (2 * link))


def test_a_group_across_slices_is_paid_at_the_rate_of_the_data_centre_network():
    where = layout("v5p:4x4x4", 2, data=2, fsdp=64)
    device = device_of(where.cluster.chip)
    pair = of_group("all-reduce", np.array([0, 64]), 1e9, where, device)
    assert pair.seconds == pytest.approx(2 * 1e9 / 2 / device.dcn_bytes_per_s)
    assert pair.label == "dcn data"


def test_a_permute_is_of_the_axis_along_which_it_sends_and_not_of_devices_that_send_to_themselves():
    where = layout("v5p:4x4x4", 2, data=2, pipeline=4, fsdp=16)
    device = device_of(where.cluster.chip)
    pairs = "source_target_pairs={{0,0},{16,32},{32,16},{48,48}}"
    dealt = collectives.collective(Instruction("p", "collective-permute", "", "", pairs), 1e9, where, device)
    assert dealt.label == "pipeline"
    across = "source_target_pairs={{0,0},{64,0},{0,64}}"
    sent = collectives.collective(Instruction("p", "collective-permute", "", "", across), 1e9, where, device)
    assert sent.label == "dcn data"
    assert sent.seconds == pytest.approx(1e9 / device.dcn_bytes_per_s)


def test_a_transfer_between_two_slices_is_of_the_axis_that_joins_them():
    where = layout("v5p:4x4x4", 4, data=2, pipeline=2, fsdp=64)
    describe = Describer(where, device_of(where.cluster.chip))
    labels = {}
    for source, target in (("1", "2"), ("1", "3")):
        kind = f'_xla_megascale_target={{{{{source}00000->{target}00000}}}},_xla_megascale_transfer_type="ONE_TO_ONE"'
        sent = describe(None, None, Instruction("s", "send", "(bf16[1024]{0}, u32[], token[])", "", kind))
        labels[target] = sent.label
        assert sent.bytes_ == 2048
    assert labels == {"2": "dcn pipeline", "3": "dcn data"}


def test_a_permute_to_a_neighbour_uses_one_direction_and_wraps_the_short_way():
    where = layout()
    device = device_of(where.cluster.chip)
    ring = Instruction("p", "collective-permute", "", "", "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}")
    found = collectives.collective(ring, 1e9, where, device)
    assert found.resources == ("z+",)
    assert found.seconds == pytest.approx(1e9 / (device.link_bytes_per_s * 0.9), rel=1e-3)
