import tomllib
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import chips
from slicewise.errors import UserError
from slicewise.kernels.attention.tiles import Tiles, fitted, table, tiles


@given(
    chip=st.sampled_from(["v4", "v5e", "v5p", "v6e", "tpu7x", "another"]),
    rows=st.integers(1, 1024),
    head_dim=st.sampled_from([64, 128, 192, 256]),
    limit=st.sampled_from([0, 16384, 65536, 98304]),
)
def test_tiles_divide_what_they_tile(chip, rows, head_dim, limit):
    t = tiles(chip, 128 * rows, head_dim, limit)
    for size, whole in (
        (t.q, 128 * rows),
        (t.kv, 128 * rows),
        (t.kv_compute, t.kv),
        (t.q_backward, 128 * rows),
        (t.kv_backward, 128 * rows),
        (t.kv_compute_backward, t.kv_backward),
    ):
        assert size % 128 == 0
        assert whole % size == 0


@given(
    sizes=st.tuples(*[st.integers(1, 32)] * 6),
    parts=st.tuples(st.integers(1, 64), st.integers(1, 64)),
)
def test_tuned_tiles_are_cut_to_the_part_of_a_row_that_a_device_has(sizes, parts):
    asked, (queries, keys) = Tiles(*(128 * n for n in sizes)), (128 * n for n in parts)
    t = fitted(asked, queries, keys)
    assert queries % t.q == queries % t.q_backward == keys % t.kv == keys % t.kv_backward == 0
    assert t.kv % t.kv_compute == t.kv_backward % t.kv_compute_backward == 0
    assert t.q <= asked.q
    assert t.kv <= asked.kv
    assert fitted(t, queries, keys) == t


def test_more_vmem_gives_larger_tiles():
    assert tiles("v6e", 8192, 128).q == 1024
    assert tiles("v6e", 8192, 128, 98304).q == 2048


def test_the_table_names_chips_and_sources():
    sources = tomllib.loads((resources.files("slicewise.kernels.attention") / "tiles.toml").read_text())[
        "sources"
    ]
    for entry in table():
        assert set(entry.chips) <= set(chips.names())
        assert entry.source in sources


def test_a_head_too_large_is_refused():
    with pytest.raises(UserError, match="head_dim = 1024 is too large"):
        tiles("v6e", 256, 1024)
