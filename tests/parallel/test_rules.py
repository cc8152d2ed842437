import pytest

from slicewise.catalog.model import load
from slicewise.errors import UserError
from slicewise.parallel import rules


@pytest.mark.parametrize(
    ("degrees", "batch", "message"),
    [
        ({"data": 1, "fsdp": 1, "tensor": 3}, 8, "tensor parallelism 3 does not divide heads = 32"),
        (
            {"data": 1, "fsdp": 1, "tensor": 16},
            8,
            "does not divide kv_heads = 8 of llama3-8b; choose one of 1, 2, 4, 8",
        ),
        ({"data": 1, "fsdp": 3, "tensor": 1}, 6, "fsdp parallelism 3 does not divide d_model = 4096"),
        ({"data": 4, "fsdp": 2, "tensor": 1}, 12, "global_batch_size = 12 .* = 8; use 8 or 16"),
        ({"data": 4, "fsdp": 4, "tensor": 1}, 8, "use 16"),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(degrees, batch, message):
    with pytest.raises(UserError, match=message):
        rules.check(load("llama3-8b"), batch, degrees)


def test_a_fitting_layout_passes():
    rules.check(load("llama3-8b"), 16, {"data": 2, "fsdp": 4, "tensor": 8})
