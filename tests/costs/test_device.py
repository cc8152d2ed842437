import pytest

from slicewise.catalog import chips
from slicewise.costs.device import calibrations, device_of


@pytest.mark.parametrize("name", chips.names())
def test_every_chip_has_a_device(name):
    chip = chips.load(name)
    device = device_of(chip)
    assert device.flops_per_s * device.per_chip == chip.bf16_flops_per_s
    assert device.hbm_bytes == chip.usable_hbm_bytes_per_device
    assert device.host_bytes_per_s > 0
    assert 0 < device.calibration.matmul_efficiency < 1


def test_constants_are_shares():
    known, kernels = calibrations()
    for c in known.values():
        assert 0 < c.overlap < 1
        assert 0.5 < c.matmul_efficiency < 1
        assert 0.5 < c.hbm_efficiency <= 1
        assert 0.5 < c.ici_efficiency <= 1
    assert 0 < kernels.gather_efficiency < 1
    assert kernels.attention_mxu_overhead >= 1


def test_a_chip_that_was_never_fitted_takes_the_default():
    known, _ = calibrations()
    assert device_of(chips.load("h100")).calibration == known["default"]
    assert device_of(chips.load("v6e")).calibration == known["v6e"]


def test_clocks_follow_from_peaks():
    """Peak over FLOPs per cycle gives the clocks that compilers log; TPU7x's peak is quoted at 2.2 GHz."""
    expected = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9, "tpu7x": 2.2e9}
    for name, clock in expected.items():
        assert device_of(chips.load(name)).clock_hz == pytest.approx(clock, rel=0.01)


def test_devices_of_one_chip_share_its_host_and_network():
    chip = chips.load("tpu7x")
    assert device_of(chip).dcn_bytes_per_s == chip.dcn_bytes_per_s / 2
    assert device_of(chips.load("v6e")).host_bytes_per_s == pytest.approx(24e9)
