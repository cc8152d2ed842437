import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slicewise.catalog import chips, model, slices
from slicewise.catalog.model import Experts, LatentAttention, ModelSpec
from slicewise.costs.units import duration, quantity
from slicewise.errors import UserError
from slicewise.plan import serving
from slicewise.plan.serving_point import Quantization, Workload, point, touched_share, weight_bytes

LLAMA_70B = ModelSpec(
    name="llama3-70b",
    source="test",
    layers=80,
    d_model=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    d_ff=28672,
    vocab=128256,
    max_context=131072,
)
MOE = LLAMA_70B.model_copy(
    update={"name": "moe", "experts": Experts(experts=64, per_token=4, d_ff=4096), "layers": 32}
)
INT8 = Quantization("int8", "int8")
V5E, V5P = chips.load("v5e"), chips.load("v5p")
WORK = Workload(8192, 512)


def at(batch, slice_="v5e:4x4", quantization=INT8, spec=LLAMA_70B, work=WORK):
    return point(spec, slices.parse(slice_), batch, work, quantization)


def test_a_step_reads_weights_and_caches_once():
    here = at(32)
    assert here.weights_s == pytest.approx(weight_bytes(LLAMA_70B, 8) / (16 * 8.2e11))
    cache = 2 * 80 * 8 * 128 * (8192 + 256)
    assert here.cache_s == pytest.approx(32 * cache / (16 * 8.2e11))
    assert here.step_s == pytest.approx(here.cache_s + here.weights_s)
    assert here.bound == "weights"


def test_prefill_takes_the_forward_flops_at_the_utilization():
    """The book has 0.91 s for 8192 tokens on 16 v5e at 40%, attention products not counted."""
    assert 0.91 < at(1).prefill_s < 1.1


def test_the_batch_limit_is_what_the_weights_leave():
    here = at(1)
    free = 0.95 * 16 * V5E.usable_hbm_bytes - here.weight_bytes
    assert here.max_batch == int(free // here.cache_bytes)
    assert at(here.max_batch).used_bytes <= 0.95 * 16 * V5E.usable_hbm_bytes
    assert at(1, quantization=Quantization()).max_batch < here.max_batch


@settings(max_examples=50)
@given(st.integers(1, 4096), st.sampled_from(["v5e:2x4", "v5e:16x16", "v5p:4x4x4", "h100-8"]))
def test_larger_batches_take_longer_and_give_more(batch, slice_):
    a, b = at(batch, slice_), at(batch + 1, slice_)
    assert b.step_s >= a.step_s
    assert b.tokens_per_s >= a.tokens_per_s * (1 - 1e-9)


@settings(max_examples=50)
@given(st.integers(1, 512), st.sampled_from(["bf16", "int8", "int4"]), st.sampled_from(["bf16", "int8"]))
def test_narrower_formats_are_never_slower(batch, weights, cache):
    wide, narrow = (
        at(batch, quantization=Quantization()),
        at(batch, quantization=Quantization(weights, cache)),
    )
    assert narrow.step_s <= wide.step_s
    assert narrow.used_bytes <= wide.used_bytes
    assert narrow.max_batch >= wide.max_batch


def test_more_chips_than_heads_and_sequences_read_copies_of_the_cache():
    wide, narrow = at(1, "v5e:16x16"), at(1, "v5e:2x4")
    assert wide.cache_s == narrow.cache_s  # eight KV heads, one sequence
    assert at(32, "v5e:16x16").cache_s == pytest.approx(32 * narrow.cache_s * 8 / 256)


def test_small_batches_of_a_large_slice_wait_for_the_network():
    here = at(1, "v5p:8x8x8")
    assert here.bound == "network"
    assert here.network_s == pytest.approx(80 * (4 + 2) * 12e-6)  # caches split over the batch too
    assert at(1, "v5p:2x2x2").network_s == pytest.approx(80 * 4 * 3e-6)
    assert at(1, "v5e:1x1").network_s == 0


def test_a_batch_touches_most_experts_but_computes_with_few():
    assert touched_share(64, 4, 1) == pytest.approx(4 / 64)
    assert touched_share(64, 4, 1000) == pytest.approx(1)
    one, many = at(1, spec=MOE), at(256, spec=MOE)
    assert one.weights_s < many.weights_s
    assert many.weights_s == pytest.approx(weight_bytes(MOE, 8) / (16 * 8.2e11), rel=0.01)
    assert many.math_s < 256 * 2 * weight_bytes(MOE, 8) / (16 * 1.97e14) / 4


def test_latent_caches_split_over_sequences_only():
    latent = LatentAttention(kv_lora_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)
    spec = LLAMA_70B.model_copy(update={"latent_attention": latent, "head_dim": 192})
    assert at(1, spec=spec).cache_s == pytest.approx(80 * 576 * (8192 + 256) / 8.2e11)


def test_the_plan_meets_the_latency_and_nothing_within_it_gives_more():
    plan = serving.serve(LLAMA_70B, V5P, Workload(8192, 512, latency_s=0.02))
    assert plan.best.meets_latency
    assert plan.best.batch <= plan.best.max_batch
    for p in plan.frontier:
        if p.step_s <= 0.02:
            assert 0.99 * p.tokens_per_s_per_chip <= plan.best.tokens_per_s_per_chip
    latencies = [p.step_s for p in plan.frontier]
    gains = [p.tokens_per_s_per_chip for p in plan.frontier]
    assert latencies == sorted(latencies)
    assert gains == sorted(gains)
    assert plan.fastest.step_s == latencies[0]


def test_a_tighter_latency_never_gives_more():
    loose = serving.serve(LLAMA_70B, V5E, Workload(1024, 1024))
    tight = serving.serve(LLAMA_70B, V5E, Workload(1024, 1024, latency_s=1.1 * loose.fastest.step_s))
    assert tight.best.tokens_per_s_per_chip <= loose.best.tokens_per_s_per_chip / 0.99
    assert tight.best.step_s <= 1.1 * loose.fastest.step_s


def test_cost_counts_prefill_and_needs_a_price():
    plan = serving.serve(LLAMA_70B, V5E, WORK, quantizations=[INT8])
    best = plan.best
    per_chip = best.tokens_per_s / (best.slice.chips * (1 + best.prefill_per_decode))
    assert best.price_per_million_tokens == pytest.approx(1.2 / 3600 / per_chip * 1e6)
    assert serving.serve(LLAMA_70B, chips.load("v6e"), WORK).best.price_per_million_tokens is None
    # interleaved on one slice, a batch costs its prefills and its steps
    interleaved = best.batch * 512 / (512 * best.step_s + best.batch * best.prefill_s) / best.slice.chips
    assert best.tokens_per_s_per_chip == pytest.approx(interleaved)


@given(st.floats(0.01, 100))
def test_the_ratio_of_slices_is_near_and_small(ratio):
    a, b = serving.whole_ratio(ratio)
    assert a >= 1
    assert b >= 1
    assert min(a, b) == 1 or max(a, b) <= 8
    assert 0.7 < a / b / ratio < 1.5


def test_a_cache_moves_through_the_egress_of_every_chip():
    plan = serving.serve(LLAMA_70B, V5E, WORK, quantizations=[INT8])
    bytes_ = 2 * 80 * 8 * 128 * 8192
    assert plan.cache_transfer_s == pytest.approx(bytes_ / (plan.best.slice.chips * 3.125e9))


def test_a_plan_explains_its_bounds():
    plan = serving.serve(LLAMA_70B, V5E, WORK, quantizations=[Quantization(), INT8])
    said = "\n".join(plan.explain())
    for words in (
        "memory: weights",
        "decode floor",
        "prefill:",
        "tensor ways: <",
        "a chip-hour",
        "no other beats",
    ):
        assert words in said
    small = serving.serve(LLAMA_70B, V5E, WORK, quantizations=[Quantization(), INT8], max_chips=8)
    assert "not possible: bf16 weights, bf16 cache need 9 chips" in "\n".join(small.explain())
    assert "give a price file" in "\n".join(serving.serve(LLAMA_70B, chips.load("tpu7x"), WORK).explain())
    assert "tensor ways" not in "\n".join(serving.serve(LLAMA_70B, chips.load("h100"), WORK).explain())


def test_the_decode_floor_of_experts_reads_the_weights_that_a_token_touches():
    plan = serving.serve(model.load("deepseek-v3"), chips.load("tpu7x"), WORK)
    floor = next(line for line in plan.reasons() if line.startswith("decode floor"))
    n, stored = plan.best.slice.chips, plan.best.weight_bytes
    alone = point(plan.model, plan.best.slice, 1, WORK, plan.best.quantization)
    assert alone.weights_s < 0.2 * stored / (n * 7.4e12)
    assert f"of the {quantity(stored, 'B')} / ({n} x 7.40 TB/s) = {duration(alone.weights_s)}" in floor
    assert floor.endswith(f"-> {duration(alone.step_s)}")
    dense = serving.serve(LLAMA_70B, V5E, WORK).reasons()
    assert "of the" not in next(line for line in dense if line.startswith("decode floor"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: serving.serve(LLAMA_70B, chips.load("v5p"), WORK, max_chips=2),
            "v5p has no slice of up to 2 chips; the smallest has 4",
        ),
        (lambda: Workload(1, 1, latency_s=float("inf")), "latency = inf"),
        (
            lambda: serving.serve(LLAMA_70B, V5E, WORK, max_chips=2),
            "does not fit v5e slices of up to 2 chips",
        ),
        (
            lambda: serving.serve(LLAMA_70B, V5E, Workload(8192, 512, latency_s=1e-4)),
            "gives a token .* every 100 us; the least is",
        ),
        (lambda: serving.serve(LLAMA_70B, V5E, Workload(131072, 1)), "has a context of 131072"),
        (lambda: serving.serve(LLAMA_70B, V5E, WORK, prefill_utilization=0), "prefill utilization = 0"),
        (lambda: Workload(0, 1), "prompt = 0"),
        (lambda: Workload(1, 1, latency_s=-1), "latency = -1"),
        (lambda: Quantization("int5"), "weights = 'int5'"),
        (lambda: at(1, quantization=Quantization(compute="fp8")), "v5e has no fp8 matrix unit"),
    ],
)
def test_what_cannot_be_served_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()
