import pytest

from slicewise.catalog import chips
from slicewise.errors import UserError


@pytest.fixture(params=chips.names())
def chip(request):
    return chips.load(request.param)


def write(tmp_path, text):
    path = tmp_path / "file.toml"
    path.write_text(text)
    return str(path)


def test_every_number_names_a_known_source(chip):
    assert len(chip.provenance) > 8
    numbers = {f for f, v in chip if isinstance(v, float) and f != "ici_link_bytes_per_s" and f != "hop_s"}
    assert numbers <= {p.field for p in chip.provenance}
    for p in chip.provenance:
        assert {p.source, *(s for _, s in p.also)} <= {*chips.sources(), "catalog"}, p


def test_units_are_plausible(chip):
    """Catches a slip of a thousand or a GiB read as GB."""
    assert 1e14 < chip.bf16_flops_per_s < 1e16
    assert 1.5e10 < chip.hbm_bytes < 4e11
    assert 0.9 * chip.hbm_bytes < chip.usable_hbm_bytes < chip.hbm_bytes
    assert 5e11 < chip.hbm_bytes_per_s < 1e13
    assert 1e9 < chip.dcn_bytes_per_s < chip.pcie_bytes_per_s * 2
    assert (chip.ici_dims == 0) == (chip.ici_link_bytes_per_s == 0) == bool(chip.levels)


def test_conflicting_sources_are_both_kept_and_can_be_preferred():
    assert chips.load("v5p").hbm_bytes_per_s == 2.8e12
    assert chips.load("v5p", prefer="docs").hbm_bytes_per_s == 2.765e12
    preferred = chips.load("v5p", prefer="docs").source("hbm_bytes_per_s")
    assert preferred.source == "docs"
    assert (2.8e12, "book") in preferred.also
    assert chips.load("v5p", prefer="book").hbm_bytes == 96e9


def test_the_compiler_s_memory_limit_is_what_a_program_can_have():
    gib = {"v5e": 15.75, "v6e": 31.24, "v5p": 95.73, "tpu7x": 2 * 94.74}
    for name, expected in gib.items():
        assert chips.load(name).usable_hbm_bytes / 2**30 == pytest.approx(expected, rel=1e-6)


def test_aliases_name_the_same_chip():
    assert chips.load("Ironwood") == chips.load("tpu7x")
    assert chips.load("v5litepod") == chips.load("v5e")


def test_tpu7x_has_no_int8_unit():
    with pytest.raises(UserError, match="tpu7x has no int8 matrix unit; it computes in bf16, fp8"):
        chips.load("tpu7x").peak_flops_per_s("int8")


def test_unknown_precision_lists_the_known_ones():
    with pytest.raises(UserError, match=r"unknown precision 'bf61'\. Did you mean 'bf16'"):
        chips.load("v5e").peak_flops_per_s("bf61")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chips.load("v5q"), "unknown chip 'v5q'. Did you mean 'v5p'"),
        (lambda: chips.load("v5p", prefer="bok"), "unknown source 'bok'. Did you mean 'book'"),
        (lambda: chips.load("v5p", chip_file="/no/such.toml"), "chip file /no/such.toml: No such file"),
    ],
)
def test_unknown_names_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_user_file_adds_a_chip_on_a_base(tmp_path):
    path = write(
        tmp_path,
        '[mine]\nbase = "v5e"\ntype_prefix = "mine"\nhbm_bytes_per_s = 9e11\n'
        'bf16_flops_per_s = { value = 3e14, source = "my bench" }\n',
    )
    mine = chips.load("mine", chip_file=path)
    assert (mine.name, mine.hbm_bytes_per_s, mine.bf16_flops_per_s) == ("mine", 9e11, 3e14)
    assert mine.ici_dims == 2
    assert mine.source("bf16_flops_per_s").source == "my bench"
    assert mine.source("hbm_bytes_per_s").source == path
    assert chips.load("v5e").bf16_flops_per_s == 1.97e14


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mine]\nbase = 'v5x'\n", "base = 'v5x' is not another chip"),
        ("[mine]\nbase = 'mine'\n", "base = 'mine' is not another chip"),
        ("[mine]\nbase = 'v5e'\nhbm_byte = 3.0\n", "unknown key 'hbm_byte'. Did you mean 'hbm_bytes'"),
        ("[mine]\nbase = 'v5e'\nhbm_bytes = -3.0\n", "hbm_bytes = -3.0: input should be greater than 0"),
        ("[mine]\nbase = 'v5e'\nhbm_bytes = {value = 1.0, sauce = 'x'}\n", "unknown key 'sauce'"),
        ("[mine]\nname = 'x'\n", "key .* is missing"),
        ("mine = 3\n", "'mine' stands outside a table"),
        ("[mine\n", "is not TOML"),
    ],
)
def test_a_bad_user_file_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        chips.load("mine", chip_file=write(tmp_path, text))


def test_a_price_file_overlays_prices(tmp_path):
    path = write(tmp_path, "[v5p]\non_demand = 3.5\nspot = 1.5\nreserved = 2\n")
    chip = chips.load("v5p", price_file=path)
    prices = (chip.price_per_chip_hour, chip.spot_price_per_chip_hour, chip.reserved_price_per_chip_hour)
    assert prices == (3.5, 1.5, 2.0)
    assert chip.source("price_per_chip_hour").source == path
    assert chips.load("v5e", price_file=path) == chips.load("v5e")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[v5p]\nspto = 1\n", "unknown key 'spto'"),
        ("[v5p]\nspot = 0\n", "expected a price above 0"),
        ("[v5p]\nspot = 'cheap'\n", "expected a price above 0"),
        ("[v5p]\nspot = nan\n", "expected a price above 0"),
        ("[v5p]\nspot = inf\n", "expected a price above 0"),
        ("[v5q]\nspot = 1\n", r"\[v5q\] is no chip. Did you mean 'v5p'\?"),
    ],
)
def test_a_bad_price_file_is_refused(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        chips.load("v5p", price_file=write(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "chip", "is_slower"),
    [
        ("fp8", "tpu7x", False),
        ("fp8", "v6e", True),
        ("fp8", "v4", True),
        ("int8", "v6e", False),
        ("int8", "tpu7x", True),
    ],
)
def test_says_where_8_bits_save_no_time(name, chip, is_slower):
    assert bool(chips.saves_bytes_only(chips.load(chip), name)) == is_slower
