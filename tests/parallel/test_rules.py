import pytest

from slicewise.catalog.model import load
from slicewise.errors import UserError
from slicewise.parallel import rules


@pytest.mark.parametrize(
    ("degrees", "batch", "message"),
    [
        (
            {"data": 1, "fsdp": 1, "expert": 1, "tensor": 3},
            8,
            "tensor parallelism 3 does not divide heads = 32",
        ),
        (
            {"data": 1, "fsdp": 1, "expert": 1, "tensor": 16},
            8,
            "does not divide kv_heads = 8 of llama3-8b; choose one of 1, 2, 4, 8",
        ),
        (
            {"data": 1, "fsdp": 3, "expert": 1, "tensor": 1},
            6,
            "fsdp parallelism 3 does not divide d_model = 4096",
        ),
        ({"data": 4, "fsdp": 2, "expert": 1, "tensor": 1}, 12, "global_batch_size = 12 .* = 8; use 8 or 16"),
        ({"data": 4, "fsdp": 4, "expert": 1, "tensor": 1}, 8, "use 16"),
    ],
)
def test_what_does_not_divide_is_named_with_what_would(degrees, batch, message):
    with pytest.raises(UserError, match=message):
        rules.check(load("llama3-8b"), batch, degrees)


def test_a_fitting_layout_passes():
    rules.check(load("llama3-8b"), 16, {"data": 2, "fsdp": 4, "expert": 1, "tensor": 8})


@pytest.mark.parametrize(
    ("model", "degrees", "message"),
    [
        (
            "llama3-8b",
            {"expert": 2},
            "expert = 2 needs a mixture of experts, which llama3-8b is not",
        ),
        (
            "mixtral-8x7b",
            {"expert": 16},
            "does not divide the 8 experts of mixtral-8x7b; choose one of 1, 2, 4, 8",
        ),
        ("qwen3-30b-a3b", {"tensor": 4, "expert": 3}, "expert parallelism 3 does not divide the 128 experts"),
        ("deepseek-v2-lite", {"tensor": 11}, "tensor parallelism 11 does not divide heads = 16"),
        ("deepseek-v3", {"fsdp": 512, "expert": 2}, r"kv_lora_rank = 512 of deepseek-v3"),
        ("mixtral-8x7b", {"fsdp": 2, "expert": 4}, "data x fsdp x expert parallelism = 8; use 8 or 16"),
    ],
)
def test_what_experts_do_not_allow_is_one_sentence(model, degrees, message):
    with pytest.raises(UserError, match=message):
        rules.check(load(model), 12, {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1} | degrees)
