import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from slicewise.catalog.model import Experts, ModelSpec, load
from slicewise.costs.params import parameter_count
from slicewise.interop.huggingface import spec_from_config

FIXTURES = sorted((Path(__file__).parents[1] / "fixtures" / "hf").iterdir())
# The vision encoder of Gemma 3, which its published totals include; a projector of 1152 (D + 1) comes on top.
GEMMA3_VISION = 416_866_032


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("gemma2-2b", 2_614_341_888),
        ("gemma2-9b", 9_241_705_984),
        ("gemma2-27b", 27_227_128_320),
        ("gemma3-1b", 999_885_952),
        ("gemma3-4b", 4_300_079_472 - GEMMA3_VISION - 1152 * (2560 + 1)),
        ("gemma3-12b", 12_187_325_040 - GEMMA3_VISION - 1152 * (3840 + 1)),
        ("gemma3-27b", 27_432_406_640 - GEMMA3_VISION - 1152 * (5376 + 1)),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_630_071_296),
        ("deepseek-v2-lite", 15_706_484_224),
        ("deepseek-v2", 235_741_434_880),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_total_is_that_of_the_published_weights(name, published):
    assert parameter_count(load(name)).total == published


def test_deepseek_v3_files_hold_main_model_prediction_layer_and_a_second_embedding_and_head():
    count = parameter_count(load("deepseek-v3"))
    assert count.total == pytest.approx(671.0e9, rel=1e-3)
    assert count.total + count.prediction + count.embedding + count.head == 684_489_845_504


def test_gpt3_has_about_the_published_175_billion():
    assert 174.5e9 < parameter_count(load("gpt3-175b")).total < 175.5e9


@pytest.mark.parametrize(
    ("name", "published_billion", "last_digit", "counts_embedding"),
    [
        ("mixtral-8x7b", 12.9, 0.1, True),
        ("mixtral-8x22b", 39, 1, True),
        ("qwen3-30b-a3b", 3.3, 0.1, True),
        ("qwen3-235b-a22b", 22, 1, True),
        ("deepseek-v2", 21, 1, True),
        ("deepseek-v3", 37, 1, False),
        ("gpt-oss-20b", 3.61, 0.01, False),
        ("gpt-oss-120b", 5.13, 0.01, False),
    ],
)
def test_active_parameters_are_the_published_ones(name, published_billion, last_digit, counts_embedding):
    count = parameter_count(load(name))
    active = count.active if counts_embedding else count.active - count.embedding
    assert active / 1e9 == pytest.approx(published_billion, abs=last_digit)


@pytest.mark.parametrize(
    ("name", "published_million"),
    [("qwen3-0.6b", 440), ("qwen3-8b", 6946), ("gemma3-1b", 698), ("gemma3-4b", 3209), ("gemma3-27b", 25600)],
)
def test_non_embedding_parameters_are_the_published_ones(name, published_million):
    assert round(parameter_count(load(name)).non_embedding / 1e6) == published_million


@pytest.mark.parametrize("folder", FIXTURES, ids=[f.name for f in FIXTURES])
def test_total_is_the_number_of_stored_weights_of_every_family(folder):
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        stored = sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    assert parameter_count(spec_from_config(folder)).total == stored


@st.composite
def specs(draw):
    size = st.integers(1, 64)
    kv_heads = draw(st.integers(1, 8))
    experts = None
    if draw(st.booleans()):
        groups = draw(st.integers(1, 3))
        count = groups * draw(st.integers(1, 4))
        experts = Experts(
            experts=count,
            per_token=draw(st.integers(1, count)),
            d_ff=draw(size),
            shared_d_ff=draw(st.integers(0, 8)),
            groups=groups,
            groups_per_token=groups,
            router_bias=draw(st.booleans()),
        )
    return ModelSpec(
        name="drawn",
        source="test",
        layers=draw(size),
        d_model=draw(size),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=2 * draw(size),
        d_ff=draw(size),
        vocab=draw(size),
        tied_embeddings=draw(st.booleans()),
        gated_mlp=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        norm=draw(st.sampled_from(["rms", "layer"])),
        position=draw(st.sampled_from(["rope", "learned"])),
        experts=experts,
    )


@given(specs())
def test_layers_add_up_and_active_never_exceeds_total(spec):
    one, all_ = parameter_count(spec.model_copy(update={"layers": 1})), parameter_count(spec)
    outside_layers = one.embedding + one.head + spec.d_model * (2 if spec.norm == "layer" else 1)
    assert all_.total == outside_layers + spec.layers * (one.total - outside_layers)
    assert all_.active <= all_.total
    idle_experts = spec.experts.experts - spec.experts.per_token if spec.experts else 0
    assert (all_.active < all_.total) == (idle_experts > 0)
    assert all_.non_embedding == all_.total - all_.embedding - all_.head


@given(specs())
def test_a_prediction_layer_is_a_layer_with_a_projection_and_norms_and_stays_out_of_the_total(spec):
    plain = parameter_count(spec)
    predicting = parameter_count(spec.model_copy(update={"prediction_layers": 2}))
    layer = (plain.non_embedding - spec.d_model * (2 if spec.norm == "layer" else 1)) // spec.layers
    norms = 3 * spec.d_model * (2 if spec.norm == "layer" else 1)
    assert predicting.total == plain.total
    assert predicting.prediction == 2 * (layer + 2 * spec.d_model**2 + norms)
