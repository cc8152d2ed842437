import pytest

from slicewise.catalog import chips, model, slices
from slicewise.catalog.slices import Cluster, Slice
from slicewise.costs.layout import Degrees, Layout
from slicewise.costs.shapes import model_shape
from slicewise.plan import rules
from slicewise.plan.rules import IRONWOOD, Setting

LLAMA8 = model_shape(model.load("llama3-8b"))
LLAMA70 = model_shape(model.load("llama3-70b"))
LLAMA405 = model_shape(model.load("llama3.1-405b"))
QWEN = model_shape(model.load("qwen3-235b-a22b"))
DEEPSEEK = model_shape(model.load("deepseek-v3"))
V4 = chips.load("v4", prefer="multislice")  # 50 Gb/s a host of four chips


def v4(num_slices: int, tokens_per_slice: float, shape=LLAMA8) -> Setting:
    cluster = Cluster(Slice(V4, (4, 4, 8)), num_slices)
    return Setting(shape, cluster, 8192, int(tokens_per_slice * num_slices))


@pytest.mark.parametrize(
    ("num_slices", "bits", "need", "advised"), [(2, 32, 176e3, 352e3), (1024, 64, 352e3, 704e3)]
)
def test_multislice_thresholds_of_v4(num_slices, bits, need, advised):
    found = rules.dcn_data(v4(num_slices, 210e3))
    assert found.right == pytest.approx(need, rel=2e-3)
    assert "22k FLOP/bit" in found.text
    assert f"x {bits} bits" in found.text
    assert rules.number(advised)[:2] in found.text
    assert found.holds == (need <= 210e3)
    assert "you have 210k" in found.text


def test_experts_raise_the_dcn_threshold():
    assert rules.dcn_data(v4(2, 1e6, DEEPSEEK)).right == pytest.approx(32 * 176e3, rel=2e-3)


def test_fsdp_between_slices_gathers_bf16_weights_and_scatters_float32_gradients():
    found = rules.dcn_fsdp(v4(2, 120e3))
    assert found.right == pytest.approx(22e3 * 24 / 4, rel=2e-3)
    assert "22k FLOP/bit x 24 bits a parameter / 4" in found.text
    assert not found.holds
    assert rules.dcn_fsdp(v4(2, 120e3, DEEPSEEK)).right == pytest.approx(32 * found.right)


def test_experts_on_a_switch_need_width_and_not_few_ways():
    s = setting("h100-8", DEEPSEEK, 4096)
    assert rules.expert(s, 2).right == rules.expert(s, 8).right == pytest.approx(2200)
    assert rules.expert(s, 8).left == 2048
    assert not rules.expert(s, 8).holds


def test_data_goes_over_dcn_first_fsdp_when_memory_asks_and_pipeline_last():
    assert rules.multislice_order(v4(4, 1e6), replica_fits=True) == ("data",)
    assert rules.multislice_order(v4(4, 1e6), replica_fits=False) == ("fsdp",)
    assert rules.multislice_order(v4(4, 1e4), replica_fits=True) == ("data", "pipeline")
    assert rules.multislice_order(v4(4, 1e4), replica_fits=False) == ("fsdp", "pipeline")


def test_pipeline_depths_two_four_eight_against_replicas():
    assert rules.dcn_pipeline_depths(16, 32) == ((2, 8), (4, 4), (8, 2))
    assert rules.dcn_pipeline_depths(6, 80) == ((2, 3),)
    assert rules.dcn_pipeline_depths(4, 61) == ()


def setting(place: str, shape, tokens_per_chip: float, seq: int = 8192, count: int = 1) -> Setting:
    cluster = slices.cluster(place, count)
    return Setting(shape, cluster, seq, int(tokens_per_chip * cluster.chips))


def test_fsdp_threshold_is_alpha_over_axes():
    assert rules.fsdp(setting("v5p:8x8x8", LLAMA70, 900)).right == pytest.approx(850)
    assert rules.fsdp(setting("v5p:8x8x8", LLAMA70, 900)).holds
    assert not rules.fsdp(setting("v5p:8x8x8", LLAMA70, 800)).holds
    assert rules.fsdp(setting("v5p:8x8x8", DEEPSEEK, 800)).right == pytest.approx(850 * 32)


def test_tensor_needs_width():
    found = rules.tensor(setting("v5p:8x8x8", LLAMA70, 900), 16)
    assert found.right == pytest.approx(16 * 2550)
    assert not found.holds
    assert (
        found.text == "tensor 16 over ICI needs d_ff > 40.8k (alpha 2.55k x 16 / 1 axis); the model has 28.7k"
    )
    assert rules.tensor(setting("v5p:8x8x8", LLAMA70, 900), 8).holds


def test_tensor_four_on_ironwood_needs_forty_six_to_fifty_one_thousand():
    assert 46e3 < rules.tensor(setting("tpu7x:4x4x4", LLAMA70, 900), 4).right < 52e3


def test_expert_axis_saturates():
    found = rules.expert(setting("v5p:8x8x8", DEEPSEEK, 900), 16)
    assert found.right == pytest.approx(4 * 2048 / 2550)
    assert not found.holds
    assert "saturates" in found.text


def test_context_intensity_grows_with_the_sequence():
    short = rules.context(setting("tpu7x:4x4x4", LLAMA70, 900, seq=8192), 16)
    long = rules.context(setting("tpu7x:4x4x4", LLAMA70, 900, seq=131072), 16)
    assert long.left == 16 * short.left
    assert long.holds
    assert not short.holds


def test_pipeline_bubble():
    found = rules.pipeline(setting("v5p:8x8x8", LLAMA70, 900), 4, 8)
    assert found.left == pytest.approx(3 / 11)
    assert not found.holds
    assert rules.pipeline(setting("v5p:8x8x8", LLAMA70, 900), 2, 16).holds


def test_whole_sequences_bound_the_data_shards():
    s = setting("v5p:8x8x8", LLAMA70, 4096, seq=8192)  # 256 sequences
    assert rules.whole_sequences(s, 256).holds
    assert not rules.whole_sequences(s, 512).holds


def test_every_axis_of_a_layout_has_its_inequality():
    s = setting("v5p:8x8x8", DEEPSEEK, 4096, count=4)
    layout = Layout(
        Degrees(fsdp=8, tensor=2, context=4, expert=4, pipeline=2),
        Degrees(data=4),
        1024,
        pipeline_microbatches=8,
    )
    names = [q.rule for q in rules.of_layout(s, layout)]
    assert names == ["fsdp+tensor", "tensor", "context", "expert", "dcn data", "pipeline"]


@pytest.mark.parametrize(
    ("shape", "place", "seq", "regime", "axes"),
    [
        (LLAMA8, "tpu7x:4x4x4", 8192, "short", ("fsdp",)),
        (LLAMA70, "tpu7x:4x4x4", 131072, "long", ("fsdp", "context")),
        (LLAMA405, "tpu7x:2x4x4", 8192, "ultra-large", ("fsdp", "pipeline")),
        (QWEN, "tpu7x:4x4x8", 4096, "short", ("fsdp", "expert")),
        (QWEN, "tpu7x:4x8x8", 262144, "long", ("fsdp", "context", "expert")),
        (DEEPSEEK, "tpu7x:2x4x4", 4096, "ultra-large", ("fsdp", "expert", "pipeline")),
    ],
)
def test_ironwood_decision_table(shape, place, seq, regime, axes):
    choice, found, why = rules.ironwood(setting(place, shape, 65536, seq))
    assert found == regime
    assert choice.axes == axes
    assert choice.bottleneck
    assert why.holds == (regime == "short")


def test_the_table_has_a_row_for_every_case():
    assert set(IRONWOOD) == {
        (sparse, r) for sparse in (False, True) for r in ("short", "long", "ultra-large")
    }
