import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import model
from slicewise.costs.flops import causal_logits, computed_logits, model_flops, step_flops
from slicewise.costs.layout import AttentionKernel, Recipe
from slicewise.costs.remat import POLICIES
from slicewise.costs.shapes import Attention, model_shape

LLAMA = model_shape(model.load("llama3-8b"))
MIXTRAL = model_shape(model.load("mixtral-8x7b"))


def test_useful_flops_are_six_per_parameter_and_attention():
    tokens, seq = 8192, 8192
    matmuls = LLAMA.parameters - LLAMA.vocab * 4096 - 65 * 4096  # without the lookup and the norms
    attention = 6 * 32 * tokens * 2 * (seq + 1) / 2 * 32 * 128
    assert model_flops(LLAMA, tokens, seq) == pytest.approx(6 * matmuls * tokens + attention, rel=1e-12)


def test_full_remat_adds_the_forward_pass_without_the_last_matrix():
    parts = step_flops(LLAMA, 1000, 4096, Recipe(remat=POLICIES["full"]))
    one_matrix = 2 * 4096 * 14336 * 32 * 1000
    assert parts["mlp"].useful == 3 * 3 * one_matrix
    assert parts["mlp"].extra == 2 * one_matrix
    assert step_flops(LLAMA, 1000, 4096, Recipe(remat=POLICIES["minimal"]))["mlp"].extra == 0


def test_capacity_pads_experts_and_adds_the_dispatch():
    dropless = step_flops(MIXTRAL, 4096, 4096, Recipe())["experts"]
    fixed = step_flops(MIXTRAL, 4096, 4096, Recipe(expert_capacity_factor=1.25))["experts"]
    assert fixed.useful == dropless.useful
    padding = 0.25 * (dropless.useful + dropless.extra)
    assert fixed.extra - dropless.extra > padding * 0.99


def test_a_window_bounds_the_logits():
    full, local = Attention(8, 8, 128, 128), Attention(8, 8, 128, 128, window=1024)
    assert causal_logits(full, 4096) == 4096 * 4097 / 2
    assert causal_logits(local, 4096) == 1024 * 1025 / 2 + 3072 * 1024
    kernel = AttentionKernel(block_q=512, block_kv=512)
    assert computed_logits(local, 4096, kernel) < computed_logits(full, 4096, kernel)


@given(st.integers(1, 64), st.sampled_from([128, 512, 2048]), st.sampled_from([None, 256, 4096]))
def test_a_kernel_computes_at_least_what_the_mask_keeps(blocks, block, window):
    seq = blocks * 128
    attention = Attention(1, 1, 128, 128, window)
    kernel = AttentionKernel(block_q=block, block_kv=block)
    assert computed_logits(attention, seq, kernel) >= causal_logits(attention, seq) * (1 - 1e-9) - seq


def test_one_hot_lookup_and_tiled_loss_cost_output_products():
    plain = step_flops(LLAMA, 1000, 4096, Recipe())["output"]
    more = step_flops(LLAMA, 1000, 4096, Recipe(one_hot_embedding=True, vocab_tiles=4))["output"]
    assert plain.extra == 0
    assert more.extra == plain.useful
