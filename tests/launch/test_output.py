import itertools
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from slicewise.launch.output import MAX_LINE_CHARS, TAIL_LINES, LineReader, Log, without_chatter, without_gloo


def read_all(chunks):
    reader = LineReader()
    return [line for chunk in [*chunks, b""] for line in reader.feed(chunk)]


@given(st.text(st.characters(exclude_categories=("C",))), st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_how_the_bytes_arrive(text, cuts):
    data = text.encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = [data[start:end] for start, end in itertools.pairwise(edges) if end > start]
    expected = text.split("\n")
    assert read_all(chunks) == (expected if expected[-1] else expected[:-1])


def test_an_unfinished_line_waits_for_its_end():
    reader = LineReader()
    assert reader.feed(b"half") == []
    assert reader.feed(b" and half\nnext") == ["half and half"]
    assert reader.feed(b"") == ["next"]


def test_invalid_utf8_becomes_a_replacement_and_loses_no_other_text():
    assert read_all([b"a\xff\xfeb\n", "\u00e4".encode()[:1]]) == ["a\ufffd\ufffdb", "\ufffd"]


def test_a_very_long_line_is_shown_in_bounded_pieces_without_loss():
    pieces = read_all([b"x" * 100_000] * 3 + [b"end\n"])
    assert "".join(pieces) == "x" * 300_000 + "end"
    assert max(map(len, pieces)) <= MAX_LINE_CHARS + 100_000


def test_cursor_controls_and_overwritten_text_do_not_reach_the_terminal():
    assert read_all([b"10%\r20%\r30%\r\n", b"\x1b[2J\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07x\n"]) == [
        "30%",
        "red x",
    ]


def test_the_tail_keeps_the_last_lines():
    reader = LineReader()
    reader.feed(b"".join(b"%d\n" % number for number in range(100)))
    assert list(reader.tail) == [str(number) for number in range(100 - TAIL_LINES, 100)]


def test_a_log_starts_empty_and_keeps_raw_bytes(tmp_path):
    path = tmp_path / "x.log"
    path.write_bytes(b"of an earlier attempt")
    log = Log(path)
    assert log.write(b"\xff\x1b[0m\r\n") is None
    log.close()
    assert path.read_bytes() == b"\xff\x1b[0m\r\n"


def test_a_full_disk_ends_the_log_with_one_reason():
    log = Log(Path("/dev/full"))
    assert "No space left" in (log.write(b"x") or "")
    assert log.write(b"x") is None


def gloo(rank):
    """The pieces in which it writes its sentence."""
    counts = (
        rank,
        " is connected to ",
        3,
        " peer ranks. ",
        "Expected number of connected peer ranks is : ",
        3,
    )
    return ["[Gloo] Rank ", *map(str, counts), "\n"]


@given(st.lists(st.integers(1, 300)))
def test_lines_of_gloo_are_left_out_however_the_bytes_arrive(cuts):
    data = f"one\n{''.join(gloo(0))}two \xe9\n\n{''.join(gloo(1))}th".encode("latin-1")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    chunks = (data[start:end] for start, end in itertools.pairwise(edges))
    assert b"".join(without_chatter(chunks)) == b"one\ntwo \xe9\n\nth"


@given(st.lists(st.booleans(), min_size=16, max_size=16), st.integers(0, 16))
def test_a_line_into_which_threads_cut_those_of_gloo_is_shown(turns, at):
    rest = [gloo(0), gloo(1)]
    pieces = [(rest[turn] or rest[not turn]).pop(0) for turn in turns]
    lines = "".join([*pieces[:at], "WARNING: loss is nan\n", *pieces[at:]]).splitlines()
    assert sum((without_gloo(line) or "").endswith("WARNING: loss is nan") for line in lines) == 1
