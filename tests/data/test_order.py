"""The split is by identity, and every epoch is a permutation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.data import order
from slicewise.errors import UserError

files = st.lists(st.tuples(st.text("abc/", max_size=4), st.integers(0, 40)), min_size=1, max_size=6)
several = files.filter(lambda files: sum(count for _, count in files) >= 2)


@given(several, st.floats(0.001, 0.999))
def test_the_sides_are_disjoint_complete_sorted_and_never_empty(files, fraction):
    train, held_out = (list(map(side.__getitem__, range(len(side)))) for side in order.split(files, fraction))
    assert train
    assert held_out
    assert train == sorted(train)
    assert held_out == sorted(held_out)
    assert sorted(train + held_out) == list(range(sum(count for _, count in files)))


@given(files)
def test_nothing_is_held_out_at_fraction_zero(files):
    train, held_out = order.split(files, 0.0)
    assert [train[i] for i in range(len(train))] == list(range(sum(count for _, count in files)))
    assert len(held_out) == 0


def test_about_the_fraction_is_held_out_over_blocks_of_hashing(monkeypatch):
    whole = order.split([("a", 3000), ("b", 4000)], 0.05)[1].held_out
    assert 250 < len(whole) < 450  # 350 expected, standard deviation 18
    monkeypatch.setattr(order, "HASH_BLOCK", 1000)
    np.testing.assert_array_equal(order.split([("a", 3000), ("b", 4000)], 0.05)[1].held_out, whole)


def test_a_new_file_moves_no_document_of_the_others():
    before = set(order.split([("b", 500)], 0.1)[1].held_out.tolist())
    after = order.split([("a", 300), ("b", 500)], 0.1)[1].held_out
    assert before == {int(i) - 300 for i in after if i >= 300}


def test_a_single_document_cannot_be_split():
    with pytest.raises(UserError, match=r"held_out_fraction = 0.05 needs at least 2 documents, .* has 1"):
        order.split([("a", 1)], 0.05)


def test_a_place_outside_a_side_is_an_index_error():
    with pytest.raises(IndexError):
        order.split([("a", 10)], 0.5)[0][10]


@pytest.mark.parametrize("documents", [1, 2, 17, 689, order.SMALL - 1, order.SMALL])
def test_every_epoch_is_another_permutation(documents):
    document = order.shuffled(documents, seed=3)
    epochs = [[document(e * documents + i) for i in range(documents)] for e in range(2)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(documents))
    if documents > 2:
        assert epochs[0] != epochs[1]


def test_the_seed_decides_the_order():
    def first(seed):
        document = order.shuffled(100, seed)
        return [document(i) for i in range(100)]

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert first(2**40) != first(0)  # also beyond 32 bits
