import pytest

from slicewise.catalog import model, slices
from slicewise.costs.layout import Degrees, Layout
from slicewise.costs.shapes import model_shape
from slicewise.errors import UserError
from slicewise.plan.check import check_layout

LLAMA = model_shape(model.load("llama3-8b"))
MIXTRAL = model_shape(model.load("mixtral-8x7b"))
CLUSTER = slices.cluster("v5p:4x4x12")


@pytest.mark.parametrize(
    ("shape", "degrees", "message"),
    [
        (
            LLAMA,
            {"tensor": 12, "fsdp": 16},
            r"tensor = 12 does not divide .*; the nearest degree that does is 8",
        ),
        (MIXTRAL, {"expert": 16, "fsdp": 12}, "16 does not divide the 8 experts of mixtral-8x7b; .* is 8"),
        (LLAMA, {"pipeline": 3, "fsdp": 64}, "3 does not divide the 32 layers of llama3-8b; .* is 4"),
        (LLAMA, {"context": 192}, "context parallelism = 192 does not divide d_model = 4096 of llama3-8b"),
        (LLAMA, {"fsdp": 192}, "fsdp parallelism 192 does not divide d_model = 4096 of llama3-8b"),
        (LLAMA, {"data": 192}, "global batch of 256 sequences cannot be divided over 192 .* is 192"),
    ],
)
def test_an_axis_that_does_not_divide_is_refused_with_the_nearest_that_does(shape, degrees, message):
    with pytest.raises(UserError, match=message):
        check_layout(shape, CLUSTER, Layout(Degrees(**degrees), global_batch=256), 8192)


def test_less_than_a_sequence_is_refused():
    with pytest.raises(UserError, match="below one sequence of 8192 tokens"):
        check_layout(LLAMA, CLUSTER, Layout(Degrees(data=192), global_batch=0), 8192)


def test_a_legal_layout_passes():
    check_layout(LLAMA, CLUSTER, Layout(Degrees(tensor=4, fsdp=16, data=3), global_batch=96), 8192)
