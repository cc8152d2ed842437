import pytest

from slicewise.catalog import slices
from slicewise.config import RunConfig, resolve_degrees, with_overrides
from slicewise.errors import UserError
from slicewise.plan.stack import Stack, predict

GUIDE = Stack(rows=131072, d_model=2048, layers=4)


def degrees_of(cluster, *overrides):
    config = with_overrides(RunConfig(), overrides)
    return resolve_degrees(config, num_slices=cluster.num_slices, devices_per_slice=cluster.slice.devices)


def rate(stack, name, num_slices=1, *overrides):
    cluster = slices.cluster(name, num_slices)
    return stack.flops / predict(stack, cluster, degrees_of(cluster, *overrides)).step_s


def test_one_slice_of_the_guide_is_as_fast_as_published():
    assert rate(GUIDE, "v4:2x2x1") == pytest.approx(260e12, rel=0.05)  # "about 260"


def test_a_second_slice_costs_something_and_less_than_published():
    two = rate(GUIDE, "v4:2x2x2", 2)
    assert 230e12 < two < rate(GUIDE, "v4:2x2x2")  # "about 230"


def test_sizes_are_those_of_the_guide():
    assert GUIDE.parameter_bytes == 2 * 4 * 2 * 2048 * 8192
    assert GUIDE.activation_bytes(4) == 2 * 4 * 131072 * 4 * (2048 + 8192)
    assert GUIDE.flops == 6 * 131072 * 4 * 2 * 2048 * 8192


def test_short_batches_show_the_communication():
    short = Stack(rows=256, d_model=2048, layers=4)
    cluster = slices.cluster("v4:2x2x2", 2)
    exposed = predict(short, cluster, degrees_of(cluster)).exposed_s
    assert exposed["fsdp"] > 0
    assert exposed["dcn data"] > 0


@pytest.mark.parametrize(
    ("stack", "overrides", "message"),
    [
        (Stack(256, 2048, 4, "float32"), [], "only bfloat16 can be priced"),
        (Stack(256, 6, 4), [], "fsdp parallelism 8 does not divide --embedding-dimension 6"),
        (
            Stack(256, 3, 4),
            ["ici_fsdp_parallelism=1", "ici_tensor_parallelism=8"],
            "does not divide the width 12",
        ),
        (
            Stack(256, 2048, 4),
            ["dcn_tensor_parallelism=2", "dcn_data_parallelism=1"],
            "measured but not priced",
        ),
        (
            Stack(256, 2048, 4),
            ["ici_expert_parallelism=8", "ici_fsdp_parallelism=1"],
            "no use for the expert axis",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(stack, overrides, message):
    cluster = slices.cluster("v4:2x2x2", 2)
    with pytest.raises(UserError, match=message):
        predict(stack, cluster, degrees_of(cluster, *overrides))
