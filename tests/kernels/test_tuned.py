"""Tables of tuned settings: which entry counts, and what becomes of a damaged file."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.catalog import chips
from slicewise.errors import ExitCode, UserError
from slicewise.kernels import tuned
from slicewise.kernels.attention import chunked, tiles
from slicewise.kernels.grouped_matmul import tiles as matmul_tiles
from slicewise.kernels.tuned import Entry, Key


@pytest.fixture(autouse=True)
def own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tuned.own_path()


def key(**changes):
    given = {"kernel": "splash", "chip": "v6e", "dtype": "bfloat16"}
    shape = {"tokens": 7936, "qk": 128, "v": 128, "window": 0}
    return Key(**given | {"shape": shape} | changes)


def entry(k=None, block=512, **changes):
    values = {"block": block}
    given = {"versions": dict(tuned.versions()), "judge": "compiled", "seconds": 1e-3, "tried": 3}
    return Entry(key=k or key(), values=values, **given | changes)


def test_an_entry_counts_for_its_own_key_only():
    tuned.keep(entry())
    assert tuned.find(key(), ("block",)) == {"block": 512}
    for other in (
        {"chip": "v5p"},
        {"dtype": "float32"},
        {"vmem_limit_kib": 65536},
        {"shape": {"tokens": 4096}},
    ):
        assert tuned.find(key(**other), ("block",)) is None


def test_an_entry_of_other_versions_does_not_count():
    tuned.keep(entry(versions={"jax": "0.1"}))
    assert tuned.find(key(), ("block",)) is None


def test_measured_comes_before_compiled_and_newer_before_older():
    tuned.keep(entry(block=1))
    tuned.keep(entry(block=2, judge="measured"))
    tuned.keep(entry(block=3))
    assert tuned.find(key(), ("block",)) == {"block": 2}
    assert [e.values["block"] for e in tuned.own()] == [2, 3]


@given(
    sizes=st.dictionaries(st.text("abc_", min_size=1, max_size=5), st.integers(0, 10**6), min_size=1),
    seconds=st.floats(1e-9, 1e3),
)
def test_a_table_reads_as_it_was_written(sizes, seconds):
    made = entry(key(shape=sizes), seconds=float(f"{seconds:.6g}"), untuned_seconds=0.5)
    assert tuned._parsed(tuned.text_of([made]), "here") == (made,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("format = [", "is no TOML"),
        ("format = 7", "has format 7, this version reads 1"),
        ("format = 1\n[[tuned]]\nvalues = {block = 1}", "key 'key' is missing"),
        ("format = 1\ntuned = 3", "is not iterable"),
        ("\xff", "is no TOML"),
        ("format = 1\n[[tuned]]\nblok = 1", "unknown key 'blok'|is missing"),
    ],
)
def test_a_damaged_table_is_refused_with_what_to_do(text, message, own_table):
    own_table.parent.mkdir(parents=True)
    own_table.write_text(text)
    with pytest.raises(UserError, match=f"({message}).*run 'slicewise tune' again") as refused:
        tuned.find(key(), ("block",))
    assert ".;" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "message"), [({"block": 0}, "greater than 0"), ({"blok": 4}, "block are wanted")]
)
def test_values_that_the_kernel_cannot_have_are_refused(values, message, own_table):
    own_table.parent.mkdir(parents=True)
    own_table.write_text(tuned.text_of([entry().model_copy(update={"values": values})]))
    with pytest.raises(UserError, match=f"{message}.*run 'slicewise tune' again"):
        tuned.find(key(), ("block",))


def test_tiles_that_do_not_divide_the_sequence_are_refused():
    k = tiles.key("v6e", 8192, 128, 128)
    wrong = tiles.values(tiles.chosen(k)) | {"kv": 384}
    tuned.keep(entry(k).model_copy(update={"values": wrong}))
    with pytest.raises(UserError, match="kv = 384.*multiples of 128 that divide 8192"):
        tiles.chosen(k)


def test_a_folder_in_place_of_the_table_is_said(own_table):
    own_table.mkdir(parents=True)
    for use in (lambda: tuned.keep(entry()), tuned.own):
        with pytest.raises(UserError, match="Is a directory; ") as caught:
            use()
        assert caught.value.code == ExitCode.INTERNAL


def test_two_that_tune_at_once_lose_nothing_of_each_other(own_table):
    """Two threads have files of their own as two processes have."""

    def keep_all(first):
        for block in range(first, 61, 2):
            tuned.keep(entry(key(shape={"tokens": block}), block=block))

    with ThreadPoolExecutor() as both:
        list(both.map(keep_all, (1, 2)))
    assert sorted(e.values["block"] for e in tuned.own()) == list(range(1, 61))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_table_that_cannot_be_written_is_said(own_table):
    own_table.parent.parent.chmod(0o500)
    with pytest.raises(UserError, match="cannot be written") as caught:
        tuned.keep(entry())
    assert caught.value.code == ExitCode.INTERNAL


def test_programs_depend_on_the_entries_of_their_chip():
    nothing = tuned.digest("v6e")
    tuned.keep(entry())
    assert nothing == ""
    assert tuned.digest("v6e") != ""
    assert tuned.digest("v5p") == ""


def test_the_shipped_table_reads_and_its_tiles_fit():
    for e in tuned.shipped():
        if e.key.kernel == tiles.KERNEL:
            length = e.key.shape["tokens"]
            assert all(length % size == 0 for size in tiles.Tiles(**e.values).__dict__.values())
        else:
            tile = tuple(e.values[name] for name in matmul_tiles.NAMES)
            rows, summed, columns = tile
            assert matmul_tiles.padded(e.key.shape["rows"]) % rows == 0
            assert rows % matmul_tiles.SUBLANES == 0
            for name, size in (("summed", summed), ("columns", columns)):
                assert size % matmul_tiles.LANES == 0 or size == e.key.shape[name]
            vmem_bytes = matmul_tiles.vmem_bytes(e.key.kernel, tile, 2)
            assert vmem_bytes < chips.load(e.key.chip).vmem_bytes / 2
        assert e.untuned_seconds is None or e.seconds <= e.untuned_seconds


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_common_experts_have_tiles_of_their_own_that_are_used_by_default(chip, monkeypatch):
    for e in tuned.shipped():
        if e.key.kernel == "gmm" and e.key.chip == chip:
            monkeypatch.setattr(tuned, "versions", lambda e=e: e.versions)
            k = matmul_tiles.key("gmm", chip, *e.key.shape.values(), e.key.dtype, e.key.vmem_limit_kib)
            rows = matmul_tiles.padded(e.key.shape["rows"])
            assert matmul_tiles.chosen(k, rows) == tuple(e.values[name] for name in matmul_tiles.NAMES)
            assert e.seconds < 0.99 * e.untuned_seconds
            return
    pytest.fail(f"no tiles of a grouped product for {chip}")


def test_kernels_take_tuned_settings_and_else_those_of_the_rule():
    k = tiles.key("v6e", 8192, 128, 128, vmem_limit_kib=98304, dtype="float32")
    assert tiles.chosen(k) == tiles.tiles("v6e", 8192, 128, 98304)
    best = tiles.candidates(k, "forward")[3]
    tuned.keep(entry(k).model_copy(update={"values": tiles.values(best)}))
    assert tiles.chosen(k) == best

    k = chunked.key("cpu", 2048, 64, 64, None, "float32")
    assert chunked.chosen(k) == chunked.BLOCK
    tuned.keep(entry(k, block=256))
    assert chunked.chosen(k) == 256

    k = matmul_tiles.key("gmm", "v6e", 5000, 512, 384, 8, "bfloat16", 0)
    assert matmul_tiles.chosen(k, matmul_tiles.padded(5000)) == (512, 512, 384)
    tile = {"rows": 256, "summed": 512, "columns": 128}
    tuned.keep(entry(k).model_copy(update={"values": tile}))
    assert matmul_tiles.chosen(k, matmul_tiles.padded(5000)) == (256, 512, 128)
    for rows, tuned_too in ((20000, True), (1100, True), (1020, False), (40000, False)):
        near = matmul_tiles.key("gmm", "v6e", rows, 512, 384, 8, "bfloat16", 0)
        found = matmul_tiles.chosen(near, matmul_tiles.padded(rows))
        assert (found == (256, 512, 128)) == tuned_too
    assert matmul_tiles.chosen(k, 272) == (272, 512, 384)  # rows that such tiles do not divide


@given(st.integers(1, 100_000))
def test_tiles_divide_padded_rows(rows):
    padded = matmul_tiles.padded(rows)
    assert rows <= padded < rows + matmul_tiles.LARGEST
    k = matmul_tiles.key("gmm", "nowhere", padded, 512, 512, 8, "bfloat16", 0)
    assert padded % matmul_tiles.chosen(k, padded)[0] == 0


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_tiles_for_gpt_oss_come_with_the_package_and_beat_the_rule(chip):
    found = [e for e in tuned.shipped() if e.key.chip == chip and e.key.shape.get("summed") == 2880]
    assert {(e.key.kernel, e.key.shape["groups"]) for e in found} == {
        (kernel, experts) for kernel in ("gmm", "gmm_t", "tgmm") for experts in (32, 128)
    }
    assert all(e.seconds < e.untuned_seconds for e in found)
