import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog.model import load
from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.parallel import context
from slicewise.parallel.cluster import by_slice
from slicewise.parallel.mesh import build_mesh


@given(ways=st.integers(2, 9), chunk=st.integers(1, 7), strategy=st.sampled_from(["all_gather", "ring"]))
def test_every_device_sees_as_many_keys_under_a_causal_mask(ways, chunk, strategy):
    order = context.order(2 * ways * chunk, ways, strategy)
    assert sorted(order) == list(range(len(order)))
    seen = (order + 1).reshape(ways, -1).sum(1)
    assert len(set(seen.tolist())) == 1


def test_rows_stay_in_order_where_each_device_attends_to_whole_ones():
    assert context.order(16, 4, "ulysses") is None
    assert context.order(16, 1, "ring") is None


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("by", [1, 2])
def test_tokens_ahead_come_from_the_device_that_has_them(strategy, by):
    config = load_config(
        None, ["ici_context_parallelism=4", "ici_data_parallelism=2", "ici_fsdp_parallelism=1"]
    )
    x = np.random.default_rng(0).normal(size=(2, 16, 3)).astype(np.float32)
    order = context.order(16, 4, strategy)
    order = np.arange(16) if order is None else order
    with jax.set_mesh(build_mesh(config.config, by_slice(jax.devices()))):
        found = np.asarray(jax.jit(lambda x: context.ahead(x, by, -1, strategy))(jnp.asarray(x[:, order])))
    expected = np.concatenate([x[:, by:], np.full((2, by, 3), -1)], axis=1)
    np.testing.assert_array_equal(found, expected[:, order])


@pytest.mark.parametrize(
    ("model", "length", "strategy", "dispatch", "degrees", "message"),
    [
        ("llama3-8b", 100, "ring", "dropless", {"context": 8}, "length = 100 .* 16 equal chunks .*; use 96 or 112"),
        ("llama3-8b", 6, "ulysses", "dropless", {"context": 8}, "6 does not fall into the 8 equal chunks.*; use 8"),
        (
            "llama3-8b", 4096, "ulysses", "dropless", {"context": 8, "tensor": 2},
            "context parallelism 8 does not divide kv_heads / tensor parallelism = 4 of llama3-8b; use 4 ways",
        ),
        ("qwen3-30b-a3b", 4096, "ulysses", "dropless", {"context": 8}, "kv_heads = 4 of qwen3-30b-a3b; use 4 ways"),
        ("mixtral-8x7b", 4096, "ring", "capacity", {"context": 2}, "moe_dispatch = capacity .* use dropless"),
        ("far", 4, "ring", "dropless", {"context": 2}, "chunks of 1 tokens .* the 3 prediction layers look ahead"),
    ],
)  # fmt: skip
def test_what_a_context_axis_does_not_allow_is_one_sentence(
    model, length, strategy, dispatch, degrees, message
):
    far = load("deepseek-v3").model_copy(update={"prediction_layers": 3})
    with pytest.raises(UserError, match=message) as raised:
        context.check(
            far if model == "far" else load(model), length, strategy, dispatch, {"tensor": 1} | degrees
        )
    assert "\n" not in str(raised.value)


def test_a_lone_device_has_no_such_limits():
    context.check(load("mixtral-8x7b"), 101, "ulysses", "capacity", {"context": 1, "tensor": 1})
