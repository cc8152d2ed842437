import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import chips, slices
from slicewise.costs.layout import Degrees, place
from slicewise.costs.torus import ORDER


def links(text: str, **degrees: int) -> dict[str, float]:
    placed = place(slices.parse(text), Degrees(**degrees))
    assert placed is not None
    return {axis: a.links for axis, a in zip(ORDER, placed, strict=True)}


def test_a_whole_torus_gives_every_link():
    assert links("v5p:8x8x8", fsdp=512)["fsdp"] == 6
    assert links("v6e:16x16", fsdp=256)["fsdp"] == 4


def test_axes_without_wrap_have_one_direction():
    assert links("v6e:4x8", fsdp=32)["fsdp"] == 2
    assert links("v6e:8x16", fsdp=128)["fsdp"] == 3  # only the 16 closes


def test_each_axis_takes_whole_rings_that_fit():
    found = links("v5p:8x8x16", fsdp=64, tensor=16)
    assert found["tensor"] == 2
    assert found["fsdp"] == 4


def test_a_ring_cut_in_two_serves_neighbours_first():
    found = links("v6e:16x16", tensor=4, fsdp=64)
    assert found["tensor"] == 1  # a line of four neighbours
    assert found["fsdp"] == 2 + 2 / 4  # a whole ring, and rings of stride four that share their links


def test_devices_of_a_chip_are_an_axis():
    placed = place(slices.parse("tpu7x:4x4x4"), Degrees(tensor=2, fsdp=64))
    assert placed is not None
    named = dict(zip(ORDER, placed, strict=True))
    assert named["tensor"].crosses_core
    assert named["fsdp"].links == 6
    assert not named["fsdp"].crosses_core


def test_a_switched_domain_has_no_torus():
    assert links("h100-8", fsdp=4, tensor=2) == dict.fromkeys(ORDER, 1.0)


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "tpu7x"])
@given(data=st.data())
def test_axes_never_share_more_links_than_the_slice_has(name, data):
    chip = chips.load(name)
    shape = data.draw(st.sampled_from([s for s in slices.legal_shapes(chip) if math.prod(s) <= 4096]))
    one = slices.Slice(chip, shape)
    rest, degrees = one.devices, {}
    for axis in ("tensor", "context", "data"):
        options = [d for d in range(1, 65) if rest % d == 0]
        degrees[axis] = data.draw(st.sampled_from(options))
        rest //= degrees[axis]
    placed = place(one, Degrees(fsdp=rest, **degrees))
    if placed is None:
        return
    total = 2 * len(shape)
    assert sum(a.links for a in placed) <= total + len(shape)  # a cut ring gives a line and strided rings
    for axis, a in zip(ORDER, placed, strict=True):
        degree = {**degrees, "fsdp": rest}.get(axis, 1)
        assert (a.links > 0) == (degree > 1 and not (a.crosses_core and degree == 2))
