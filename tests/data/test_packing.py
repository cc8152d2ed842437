"""Rows hold the stream of documents exactly, whatever their length, and continue from any state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.data.packing import FIELDS, NO_TARGET, RowPacker
from slicewise.errors import UserError

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def stream(lengths):
    """Endless documents whose tokens are all different: document k is [1000 k, 1000 k + 1, ...]."""
    return lambda k: 1000 * k + np.arange(lengths[k % len(lengths)], dtype=np.int32)


def rows(packer, count, length):
    out = []
    for _ in range(count):
        row = {field: np.full(length, 77, np.int32) for field in FIELDS}
        packer.fill(*row.values())
        out.append((row, packer.state))
    return out


@given(lengths, st.integers(1, 9), st.integers(1, 9))
def test_rows_joined_are_the_documents_joined(lengths, length, count):
    read = stream(lengths)
    got = np.concatenate([row["tokens"] for row, _ in rows(RowPacker(read), count, length)])
    expected = np.concatenate([read(k) for k in range(len(got))])[: len(got)]
    np.testing.assert_array_equal(got, expected)


@given(lengths, st.integers(1, 9), st.integers(1, 9))
def test_a_target_is_the_next_token_of_the_same_document(lengths, length, count):
    for row, _ in rows(RowPacker(stream(lengths)), count, length):
        for token, target in zip(row["tokens"], row["targets"], strict=True):
            last = token % 1000 == lengths[token // 1000 % len(lengths)] - 1
            assert target == (NO_TARGET if last else token + 1)


@given(lengths, st.integers(1, 9), st.integers(1, 9))
def test_segments_count_documents_and_positions_restart_with_each(lengths, length, count):
    for row, _ in rows(RowPacker(stream(lengths)), count, length):
        document = row["tokens"] // 1000
        np.testing.assert_array_equal(row["segment_ids"], document - document[0] + 1)
        for segment in np.unique(row["segment_ids"]):
            positions = row["positions"][row["segment_ids"] == segment]
            np.testing.assert_array_equal(positions, np.arange(len(positions)))


@given(lengths, st.integers(1, 9), st.integers(0, 8))
def test_a_packer_continues_identically_from_the_state_behind_any_row(lengths, length, stop):
    whole = rows(RowPacker(stream(lengths)), 9, length)
    state = whole[stop - 1][1] if stop else (0, 0)
    for (row, after), (expected, expected_after) in zip(
        rows(RowPacker(stream(lengths), state), 9 - stop, length), whole[stop:], strict=True
    ):
        assert after == expected_after
        for field in FIELDS:
            np.testing.assert_array_equal(row[field], expected[field])


def test_a_row_over_three_documents():
    row, state = rows(RowPacker(stream([2, 1, 9])), 1, 5)[0]
    assert row["tokens"].tolist() == [0, 1, 1000, 2000, 2001]
    assert row["targets"].tolist() == [1, -1, -1, 2001, 2002]
    assert row["segment_ids"].tolist() == [1, 1, 2, 3, 3]
    assert row["positions"].tolist() == [0, 1, 0, 0, 1]
    assert state == (2, 2)


def test_a_state_outside_its_document_is_refused():
    with pytest.raises(UserError, match=r"token 5 of a document that has only 4.*tokenizer"):
        rows(RowPacker(stream([4]), (3, 5)), 1, 2)
