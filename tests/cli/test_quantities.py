import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.cli import quantities
from slicewise.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"), [("8192", 8192), ("8k", 8192), ("16M", 2**24), ("0.5k", 512), ("1_024", 1024)]
)
def test_sizes_use_powers_of_two(text, value):
    assert quantities.size(text, "--seq") == value


@pytest.mark.parametrize(
    ("text", "value"), [("15T", 15e12), ("1.5M", 1.5e6), ("2e6", 2e6), ("2,000,000", 2e6), ("70b", 70e9)]
)
def test_amounts_use_powers_of_ten(text, value):
    assert quantities.amount(text, "--tokens") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("34MB", 34e6), ("2GiB", 2**31), ("1e9", 1e9), ("5B", 5), ("7k", 7000), ("1mib", 2**20)],
)
def test_bytes_tell_decimal_from_binary_prefixes(text, value):
    assert quantities.byte_count(text, "BYTES") == value


@pytest.mark.parametrize(
    ("text", "value"), [("20", 1200), ("0.5", 30), ("2h", 7200), ("90s", 90), ("5M", 300)]
)
def test_a_bare_time_in_minutes_is_minutes(text, value):
    assert quantities.minutes(text, "--minutes") == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("30d", 30 * 86400), ("12h", 43200), ("5min", 300), ("5m", 300), ("11.6s", 11.6), ("30 ms", 0.03),
     ("90", 90), ("2y", 2 * 365.25 * 86400)],
)  # fmt: skip
def test_times_have_units(text, value):
    assert quantities.seconds(text, "--deadline") == pytest.approx(value)


def test_a_time_may_be_zero_only_where_that_makes_sense():
    assert quantities.seconds("0", "--wait", zero=True) == 0
    with pytest.raises(UserError, match=r"--deadline 0: expected 30d, 12h"):
        quantities.seconds("0", "--deadline")


def test_coordinates_are_numbers_separated_by_commas():
    assert quantities.coordinates("0, 3,1", "--from") == (0, 3, 1)
    with pytest.raises(UserError, match=r"--from 0,-1: expected numbers such as"):
        quantities.coordinates("0,-1", "--from")


@pytest.mark.parametrize("text", ["", "many", "-8", "8q", "1.2.3", "0", "nan", "inf", "1e999", "8k8", "k"])
@pytest.mark.parametrize(
    "read",
    [quantities.size, quantities.whole, quantities.amount, quantities.byte_count, quantities.seconds],
)
def test_other_text_is_refused_with_examples(read, text):
    with pytest.raises(UserError, match=r"^--option .*: expected "):
        read(text, "--option")


@given(st.text("0123456789.,_-+eEkKmMgGtTpPbBsdhiny x\u00b2\u0664\n", max_size=12))
def test_any_text_is_read_or_refused(text):
    readers = (
        quantities.size,
        quantities.whole,
        quantities.amount,
        quantities.byte_count,
        quantities.seconds,
    )
    for read in readers:
        try:
            value = read(text, "--option")
        except UserError:
            continue
        assert value > 0
    with contextlib.suppress(UserError):
        assert all(c >= 0 for c in quantities.coordinates(text, "--option"))


def test_numbers_beyond_what_floats_count_are_refused():
    assert quantities.size("1e15", "--seq") == 10**15
    for text in ("1e30", "1e16", "1e308"):
        with pytest.raises(UserError, match=f"--seq {text}: expected at most"):
            quantities.size(text, "--seq")


def test_a_size_must_be_whole():
    with pytest.raises(UserError, match=r"--seq 1\.5: expected a whole number"):
        quantities.size("1.5", "--seq")


def test_a_count_is_said_to_be_a_whole_number_which_may_be_zero_where_that_makes_sense():
    assert quantities.whole("0", "--failures", zero=True) == 0
    with pytest.raises(UserError, match=r"--slices 0: expected a whole number above 0, such as 4 or 2k\."):
        quantities.whole("0", "--slices")
    for text in ("1.5", "few", "-1"):
        with pytest.raises(UserError, match=r": expected a whole number, such as 0, 4 or 2k\."):
            quantities.whole(text, "--failures", zero=True)


def test_bytes_are_no_billions():
    with pytest.raises(UserError, match="expected 34MB"):
        quantities.byte_count("3bb", "BYTES")


@given(st.integers(1, 10**9), st.sampled_from(["", "k", "M", "G", "T"]))
def test_prefixes_multiply(number, prefix):
    power = ["", "k", "M", "G", "T"].index(prefix)
    if number * 1024**power <= quantities.MOST:
        assert quantities.size(f"{number}{prefix}", "x") == number * 1024**power
    assert quantities.amount(f"{number}{prefix}", "x") == float(number) * 1000**power
