import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import chips, slices
from slicewise.errors import UserError

ROWS = json.loads((Path(__file__).parents[1] / "fixtures" / "slices.json").read_text())
EVERY_SLICE = [
    slices.Slice(chips.load(name), shape)
    for name in chips.names()
    for shape in slices.legal_shapes(chips.load(name))
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["accelerator_type"])
def test_the_rules_give_every_published_slice(row):
    here = slices.parse(row["accelerator_type"])
    assert here.name == row["topology"]
    assert here.chips == row["chips"]
    assert here.devices == row["jax_devices"]
    assert list(here.wrap) == row["wrap"]
    assert here.twist_eligible == row["twist_eligible"]
    assert here.accelerator_type == row["accelerator_type"]
    assert here.hosts == (1 if row["topology"] == "2x4" else row["vms_4chip"])
    assert slices.parse(row["maxtext_name"]) == here
    assert slices.parse(f"{row['gen']}:{row['topology']}") == here


@given(st.sampled_from(EVERY_SLICE), st.randoms())
def test_every_legal_slice_is_found_by_its_shape_in_any_order(here, random):
    dims = list(here.topology)
    random.shuffle(dims)
    assert slices.parse("x".join(map(str, dims)), here.chip) == here
    assert slices.parse(f"{here.chip.name}:{here.name}") == here
    assert here.hosts * here.chips_per_host == here.chips
    assert slices.parse(here.accelerator_type, here.chip).chips == here.chips


@given(st.sampled_from(chips.names()), st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_any_other_shape_is_refused_with_shapes_that_can_be_had(name, dims):
    chip = chips.load(name)
    text = "x".join(map(str, dims))
    if sorted(dims) in map(sorted, slices.legal_shapes(chip)):
        assert sorted(slices.parse(text, chip).topology) == sorted(dims)
        return
    with pytest.raises(UserError) as caught:
        slices.parse(text, chip)
    assert text in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@given(st.sampled_from([None, *chips.names()]), st.text("0123456789xX:- v5pelith\u00b2\u0664", max_size=12))
def test_any_text_is_a_slice_or_refused(name, text):
    try:
        found = slices.parse(text, name and chips.load(name))
    except UserError:
        return
    assert found.topology in slices.legal_shapes(found.chip)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p-513", "there is no v5p-513 .*: 4x8x8 .v5p-512., 4x4x20 .v5p-640."),
        ("v5p:8x8x9", "v5p has no 8x8x9 slice; .*8x8x8 .v5p-1024."),
        ("v5e-24", "there is no v5e-24; .*4x4 .v5litepod-16., 4x8 .v5litepod-32."),
        ("v5p:8x8", "has 2 dims but v5p slices have 3, as 2x4x4"),
        ("8x8x8", "needs a chip: write v5p:8x8x8"),
        ("v5p:8xx8", "malformed"),
        ("v5pp-8", "unknown chip 'v5pp'. Did you mean 'v5p'"),
        ("lots", "'lots' is not a slice"),
        ("h100-9", "there is no h100-9; .*8"),
    ],
)
def test_a_slice_that_cannot_be_had_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        slices.parse(text)


def test_a_name_of_another_chip_than_the_one_given_is_refused():
    with pytest.raises(UserError, match="names chip 'v5p' but the chip given is v5e"):
        slices.parse("v5p-8", chips.load("v5e"))


def test_a_cluster_counts_over_its_slices():
    cluster = slices.cluster("tpu7x:4x4x4", num_slices=3)
    assert (cluster.chips, cluster.devices, cluster.hosts) == (192, 384, 48)
    with pytest.raises(UserError, match="num_slices = 0"):
        slices.cluster("v5p-8", num_slices=0)


def test_a_gpu_slice_is_an_nvlink_domain():
    domain = slices.parse("gb200-72")
    assert (domain.chips, domain.hosts, domain.wrap) == (72, 18, (False,))


def test_the_default_shape_of_a_size_is_the_most_cube_like():
    chip = chips.load("tpu7x")
    assert slices.default_shape(chip, 256) == (4, 8, 8)
    assert slices.default_shape(chip, 9216) == (16, 24, 24)
    assert slices.default_shape(chip, 3) is None
    assert all(math.prod(s) <= 9216 for s in slices.legal_shapes(chip))


def test_any_box_of_few_enough_cubes_can_be_had():
    v4 = set(slices.legal_shapes(chips.load("v4")))
    edge = range(4, 260, 4)
    boxes = {(a, b, c) for a in edge for b in edge for c in edge if a <= b <= c and a * b * c <= 4096}
    assert {s for s in v4 if all(d % 4 == 0 for d in s)} == boxes


def test_a_number_of_chips_is_the_most_cube_like_slice():
    assert slices.of_chips(chips.load("v5p"), 64).name == "4x4x4"
    assert slices.of_chips(chips.load("v5e"), 8).name == "2x4"
    with pytest.raises(UserError, match=r"v5p has no slice of 63 chips; the nearest .*, 4x4x4 \(v5p-128\)"):
        slices.of_chips(chips.load("v5p"), 63)
