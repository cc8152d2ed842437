import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import model
from slicewise.catalog.model import Experts, LatentAttention, ModelSpec
from slicewise.costs import transformer as tf
from slicewise.costs.params import parameter_count


def spec(**changes):
    shape = dict(
        name="t",
        source="test",
        layers=4,
        d_model=512,
        heads=8,
        kv_heads=2,
        head_dim=64,
        d_ff=1024,
        vocab=1000,
    )
    return ModelSpec(**{**shape, **changes})


DEEPSEEK_V3 = spec(
    layers=61,
    d_model=7168,
    heads=128,
    kv_heads=128,
    head_dim=192,
    d_ff=18432,
    vocab=129280,
    experts=Experts(
        experts=256,
        per_token=8,
        d_ff=2048,
        shared_d_ff=2048,
        first_dense_layers=3,
        score="sigmoid",
        balancing_bias=True,
    ),
    latent_attention=LatentAttention(
        kv_lora_rank=512, q_lora_rank=1536, nope_head_dim=128, rope_head_dim=64, v_head_dim=128
    ),
)


def test_training_flops_are_six_a_parameter_for_short_contexts():
    here = model.load("llama3-8b")
    flops = tf.train_flops(here, 1e6, 64).total
    weights = parameter_count(here).total - parameter_count(here).embedding
    assert flops == pytest.approx(tf.rule_of_thumb_flops(weights, 1e6), rel=0.01)
    assert tf.forward_flops(here, 1e6, 64).total == pytest.approx(flops / 3)


def test_the_book_s_parts_of_a_layer():
    """18BDF, 12BD(N+K)H, 12BTNH, 6BDV."""
    here, B, T = spec(layers=1), 4096, 2048
    flops = tf.train_flops(here, B, T, causal=False)
    assert flops.mlp == 18 * B * 512 * 1024
    assert flops.projections == 12 * B * 512 * (8 + 2) * 64
    assert flops.attention == 12 * B * T * 8 * 64
    assert flops.unembedding == 6 * B * 512 * 1000
    assert tf.train_flops(here, B, T).attention == flops.attention / 2


@given(st.integers(1, 1 << 17), st.integers(1, 1 << 17))
def test_local_layers_never_cost_more_than_global_ones(context, window):
    everywhere, local = spec(), spec(sliding_window=window, global_every=4)
    for causal in (True, False):
        assert (
            tf.forward_flops(local, 1000, context, causal=causal).attention
            <= tf.forward_flops(everywhere, 1000, context, causal=causal).attention
        )
    assert tf.kv_cache_bytes(local, context) <= tf.kv_cache_bytes(everywhere, context)


@given(st.integers(1, 2000), st.integers(1, 2000))
def test_causal_windows_count_the_keys_that_each_query_sees(context, window):
    local = spec(layers=1, sliding_window=window)
    seen = sum(min(q + 1, window) for q in range(context))
    flops = tf.forward_flops(local, context, context).attention
    diagonal = min(context, window) / 2  # each of the first queries counts its own key as half
    assert flops == pytest.approx(4 * 8 * 64 * (seen - diagonal))


def test_a_token_computes_with_its_own_experts_only():
    flops, p = tf.forward_flops(DEEPSEEK_V3, 1, 1), parameter_count(DEEPSEEK_V3)
    assert flops.mlp == 2 * (p.active - p.attention - p.norms - p.embedding - p.head)
    assert flops.projections == 2 * p.attention


def test_a_cache_is_two_vectors_a_head_or_one_latent():
    here = model.load("llama3-8b")
    assert tf.kv_cache_bytes(here, 8192) == 8192 * tf.kv_cache_bytes_per_token(32, 8, 128)
    assert tf.kv_cache_bytes(DEEPSEEK_V3, 1) == 61 * (512 + 64) * 2
    assert tf.kv_cache_bytes(here, 8192, bits=8) == tf.kv_cache_bytes(here, 8192) / 2


@given(st.floats(1e9, 1e12), st.floats(1e9, 1e13), st.integers(1, 10000), st.floats(0.1, 1))
def test_utilization_undoes_the_training_time(params, tokens, chips, utilization):
    seconds = tf.training_s(params, tokens, 4.59e14, chips=chips, utilization=utilization)
    found = tf.model_flops_utilization(params, tokens, seconds, 4.59e14, chips=chips)
    assert found == pytest.approx(utilization)


def test_memory_of_training():
    assert tf.training_state_bytes(1e9) == 10e9
    assert tf.training_state_bytes(1e9, param_bits=16, gradient_bits=32, master_bits=32) == 18e9
    assert tf.max_data_parallel_params(96e9) == 9.6e9
    assert tf.saved_widths_bytes(10, 3, 2) == 120
    assert tf.attention_share_of_mlp(8192, 1024) == 1
    assert tf.attention_equals_projections_context(4096, heads=32, kv_heads=8) == 4096 * 40 / 32
