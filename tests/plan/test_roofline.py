import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import chips, model, slices
from slicewise.catalog.model import Experts
from slicewise.costs.collectives import Axis
from slicewise.errors import UserError
from slicewise.plan import model_report, roofline, sharded_matmul

V5E = chips.load("v5e")


def text(report):
    return "\n".join(report.explain())


@given(st.integers(1, 1 << 16))
def test_a_matmul_says_which_bound_it_meets(B):
    report = roofline.matmul(B, 8192, 8192, V5E)
    said = text(report)
    assert f"{report.time.bound} bound: intensity" in said
    assert (report.time.bound == "compute") == (report.critical_batch_exact < B)
    assert report.critical_batch < report.critical_batch_exact
    assert report.padding == 1
    assert "padding" not in said


def test_narrow_weights_halve_the_critical_batch_and_odd_dims_are_padded():
    report = roofline.matmul(64, 300, 8192, V5E, weights="int8")
    assert report.critical_batch == pytest.approx(120, rel=0.01)
    assert report.padding == pytest.approx(384 / 300)
    assert "do not fill the matrix unit" in text(report)
    assert "with these D and F never" in text(roofline.matmul(64, 128, 128, V5E))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: roofline.matmul(0, 8, 8, V5E), "B = 0: expected a number above 0"),
        (lambda: roofline.matmul(8, 8, 8, V5E, precision="fp8"), "v5e has no fp8 matrix unit"),
        (lambda: roofline.matmul(8, 8, 8, V5E, weights="int7"), "unknown precision 'int7'"),
    ],
)
def test_an_impossible_matmul_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_collective_over_some_axes_of_a_slice():
    report = roofline.collective("all_gather", 1e9, slices.cluster("v5p-512"), axes=[0, 1], sharded_ways=4)
    assert report.group == 32
    assert report.time_s == pytest.approx(0.25e9 / (4 * 9e10))
    assert "4 ring x 8 ring of v5p 4x8x8" in text(report)
    assert "bandwidth bound" in text(report)


def test_a_small_collective_names_latency():
    report = roofline.collective("all_to_all", 1e3, slices.cluster("v5e-256"))
    assert report.time_s == pytest.approx(16e-6)
    assert "latency bound: 16.0 us" in text(report)


def test_collectives_across_slices_and_between_gpus():
    across = roofline.collective("all_reduce", 1e9, slices.cluster("v5p-512", 4), across_slices=True)
    assert across.time_s == pytest.approx(2 * 0.75 * 1e9 / (256 * 6.25e9))
    assert "n = 4 slices" in text(across)
    gpus = roofline.collective("all_reduce", 1e9, slices.cluster("h100-8", 4))
    assert gpus.time_s == pytest.approx(2 * 7 / 8 * 1e9 / 450e9)
    assert "level 2: 4 units" in text(gpus)
    assert roofline.collective("all_to_all", 1e9, slices.cluster("h100-8")).time_s < gpus.time_s


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: roofline.collective("all_reduse", 1, c), "Did you mean 'all_reduce'"),
        (lambda c: roofline.collective("all_reduce", -1, c), "bytes = -1"),
        (lambda c: roofline.collective("all_reduce", 1, c, axes=[3]), "axis 3: 4x8x8 has axes 0 to 2"),
        (lambda c: roofline.copy(1, (0, 0, 9), (0, 0, 0), c.slice), "not in a 4x8x8 slice"),
        (lambda c: roofline.copy(1, (0,), (1,), slices.parse("h100-8")), "h100 has no torus"),
    ],
)
def test_an_impossible_transfer_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call(slices.cluster("v5p-512"))


def test_a_copy_shows_its_links_and_hops():
    report = roofline.copy(16.8e6, (0, 0), (3, 3), slices.parse("v5e:4x4"))
    assert "2 links" in text(report)
    assert report.copy.time_s == pytest.approx(193e-6, rel=0.01)


SLICE = slices.parse("v5e:16x16")


def sharded(layout, mesh="X=16,Y=16", B=1024, **options):
    parsed = sharded_matmul.parse_mesh(mesh, SLICE)
    return sharded_matmul.sharded_matmul(
        B, 8192, 32768, sharded_matmul.parse_layout(layout), parsed, SLICE, **options
    )


def test_a_sharded_contraction_offers_gathering_and_reducing():
    report = sharded("B,D_X * D,F_Y")
    assert [s.name for s in report.strategies[:2]] == ["all-reduce y over X", "all-gather x over X"]
    said = text(report)
    assert "'all-reduce y over X' is 2x as fast as 'all-gather x over X'" in said
    assert "bandwidth bound" in said


def test_fsdp_gathers_the_weights_of_its_tensor_shard():
    report = sharded("B_X,D * D_X,F_Y -> B_X,F_Y", B=1 << 16)
    assert report.best.name == "all-gather w over X"
    assert report.best.steps[0].bytes_ == 2 * 8192 * 32768 / 16
    assert report.best.time.bound == "compute"


def test_all_to_all_is_tried_only_when_asked_for():
    plain = sharded("B_X,D * D_X,F -> B_X,F", mesh="X=16")
    wider = sharded("B_X,D * D_X,F -> B_X,F", mesh="X=16", all_to_all=True)
    assert len(wider.strategies) > len(plain.strategies)
    assert wider.best.time.lower_s <= plain.best.time.lower_s


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("B,D", "not a sharded matmul"),
        ("B,D * D,G", "'G' in .*: expected D or F"),
        ("B,D * D", "expected the two dims D,F"),
        ("B_1,D * D,F", "'B_1' in"),
        ("B_Q,D * D,F", "sharded over 'Q', which is no axis"),
        ("B_X,D_X * D,F", "sharded twice over 'X'"),
    ],
)
def test_a_malformed_layout_is_refused(layout, message):
    with pytest.raises(UserError, match=message):
        sharded(layout)


def test_a_dim_that_does_not_split_is_refused():
    with pytest.raises(UserError, match="B = 1000 does not split into 16 parts over X"):
        sharded("B_X,D * D,F", B=1000)


def test_a_mesh_is_laid_on_whole_axes_or_on_a_line():
    v5p = slices.parse("v5p:4x8x16")
    assert sharded_matmul.parse_mesh("X=64,Y=8", v5p) == {"X": (Axis(4), Axis(16)), "Y": (Axis(8),)}
    assert sharded_matmul.parse_mesh("X=2", v5p) == {"X": (Axis(2, wrap=False),)}
    assert sharded_matmul.parse_mesh("X=1,Y=512", v5p)["X"] == ()


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("X=3", "mesh axis X=3 does not fit 16x16: the free physical axes are 16 x 16"),
        ("X=16,Y=16,Z=2", "the free physical axes are none"),
        ("X", "expected one letter and its ways"),
        ("X=0", "expected one letter and its ways"),
        ("X=2,X=2", "each once"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(mesh, message):
    with pytest.raises(UserError, match=message):
        sharded_matmul.parse_mesh(mesh, SLICE)


def test_a_model_reports_its_thresholds():
    report = model_report.model(model.load("llama3-8b"), chips.load("v5p"))
    assert report.params.total == 8_030_261_248
    assert report.min_tokens_per_chip == pytest.approx((2550, 1275, 850))
    assert report.max_tensor_ways[0] == pytest.approx(14336 / 2550)
    assert report.min_tokens_per_chip_mixed == pytest.approx(2550**2 / (2 * 14336))
    assert report.min_tokens_per_slice == pytest.approx(73440)
    assert report.min_chips == 1
    assert "one chip of 103 GB" in text(report)
    assert "alpha = C/W = 459 TFLOP/s / 180 GB/s = 2,550 FLOP/B" in text(report)


def test_experts_scale_the_thresholds_by_total_over_active():
    dense = model.load("llama3-8b")
    sparse = dense.model_copy(update={"experts": Experts(experts=64, per_token=8, d_ff=14336 // 8)})
    a, b = (model_report.model(m, chips.load("v6e")) for m in (dense, sparse))
    assert b.min_tokens_per_chip[0] == pytest.approx(8 * a.min_tokens_per_chip[0])
    assert b.max_tensor_ways == a.max_tensor_ways
    assert b.min_tokens_per_chip_mixed == pytest.approx(8 * a.min_tokens_per_chip_mixed)
    assert "x E/k (64/8)" in text(b)


def test_a_gpu_has_no_torus_to_mix_over():
    report = model_report.model(model.load("llama3-8b"), chips.load("h100"), context=4096)
    assert report.min_tokens_per_chip == pytest.approx((2200,))
    assert report.min_tokens_per_chip_mixed is None
    assert "FSDP with tensor" not in text(report)
    with pytest.raises(UserError, match="context = -1"):
        model_report.model(model.load("llama3-8b"), V5E, context=-1)
