import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.costs.units import count, counted, duration, quantity


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (quantity(4.59e14, "FLOP/s"), "459 TFLOP/s"),
        (quantity(999.9, "B"), "1.00 kB"),
        (quantity(0, "B"), "0 B"),
        (quantity(float("inf"), "B"), "inf B"),
        (duration(1.2e-5), "12.0 us"),
        (duration(0.0101), "10.1 ms"),
        (duration(8.66e-8), "86.6 ns"),
        (duration(1e-12), "0.001 ns"),
        (duration(0), "0 s"),
        (duration(3.4), "3.40 s"),
        (duration(7560), "2.10 h"),
        (duration(44.3 * 86400), "44.3 days"),
        (count(73440), "73,440"),
        (count(11.24), "11.2"),
        (count(float("inf")), "inf"),
    ],
)
def test_numbers_read_well(said, expected):
    assert said == expected


@given(st.floats(1e-3, 1e20))
def test_a_quantity_keeps_its_value(value):
    number, unit = quantity(value, "B").split(" ")
    scale = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}[unit.removesuffix("B")]
    assert float(number) * scale == pytest.approx(value, rel=0.06 if value < 0.01 else 0.006)


def test_one_thing_is_no_plural():
    assert [counted(n, "worker") for n in (0, 1, 2, 1000)] == [
        "0 workers",
        "1 worker",
        "2 workers",
        "1,000 workers",
    ]
