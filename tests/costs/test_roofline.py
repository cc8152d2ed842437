import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.costs import roofline as roof

dims = st.integers(1, 1 << 16)


@given(dims, dims, dims)
def test_overlap_saves_at_most_half(B, D, F):
    here = roof.matmul(B, D, F, flops_per_s=1.97e14, bytes_per_s=8.2e11)
    assert here.lower_s <= here.upper_s <= 2 * here.lower_s
    intensity = roof.matmul_intensity(B, D, F)
    critical = roof.critical_intensity(1.97e14, 8.2e11)
    if not math.isclose(intensity, critical, rel_tol=1e-6):
        assert (here.bound == "compute") == (intensity > critical)


@given(st.integers(64, 1 << 16), st.integers(64, 1 << 16), st.sampled_from([4, 8, 16]))
def test_the_exact_critical_batch_is_where_both_times_meet(D, F, weight_bits):
    rates = {"flops_per_s": 1.97e14, "bytes_per_s": 8.2e11}
    B = roof.critical_batch_exact(D, F, *rates.values(), weight_bits=weight_bits)
    if math.isinf(B):
        assert roof.matmul(1e12, D, F, **rates, weight_bits=weight_bits).bound == "bandwidth"
    else:
        here = roof.matmul(B, D, F, **rates, weight_bits=weight_bits)
        assert here.math_s == pytest.approx(here.comms_s)
        assert roof.critical_batch(*rates.values(), weight_bits=weight_bits) < B


def test_small_dims_raise_the_critical_batch():
    """int8 weights, bf16 arithmetic on v5e."""

    def batch(d):
        return roof.critical_batch_exact(d, d, 1.97e14, 8.2e11, weight_bits=8)

    assert batch(4096) == pytest.approx(136, rel=0.01)
    assert batch(1024) == pytest.approx(226, rel=0.01)


def test_weights_held_on_the_chip_need_a_small_batch():
    assert roof.critical_batch_in_vmem(1.97e14, 8.2e11) == pytest.approx(10.9, rel=0.01)


def test_weights_of_each_item_never_let_a_matmul_compute():
    assert roof.matmul_intensity(1, 4096, 4096, weight_bits=8) == pytest.approx(2, rel=0.01)


def test_tiles_reuse_operands():
    assert roof.tile_intensity(512, 512) == pytest.approx(256)
    whole = roof.tile_bytes(1024, 1024, 1024, 1024, 1024, 1024)
    assert whole == roof.matmul_bytes(1024, 1024, 1024)
    assert roof.tile_bytes(1024, 1024, 1024, 128, 128, 128) > whole


def test_a_fp32_addition_has_a_twelfth_flop_a_byte():
    assert roof.elementwise_intensity() == pytest.approx(1 / 12)


def test_contractions_count_a_batch_dim_once_and_pure_products_singly():
    assert roof.contraction_flops("BIJ,BJK->BIK", {"B": 3, "I": 4, "J": 5, "K": 6}) == 2 * 3 * 4 * 5 * 6
    assert roof.contraction_flops("I,J->IJ", {"I": 4, "J": 5}) == 20


@given(st.lists(st.integers(1, 300), min_size=2, max_size=4), st.sampled_from([(8, 128), (2, 2), (256,)]))
def test_padding_covers_the_array_with_whole_tiles(shape, tile):
    padded = roof.padded_elements(shape, tile)
    assert padded >= math.prod(shape)
    assert padded % math.prod(tile) == 0
    assert roof.padding_expansion(shape, tile) >= 1
