from hypothesis import given
from hypothesis import strategies as st

from slicewise.checkpoint.retention import Retention


def kept(steps, retention, losses=None):
    return sorted(set(steps) - set(retention.to_delete(steps, losses or {})))


def test_the_newest_stay():
    assert kept([1, 2, 10, 9], Retention(2)) == [9, 10]
    assert kept([], Retention(3)) == []


def test_the_first_at_or_after_each_multiple_stays():
    steps = [90, 105, 110, 199, 200, 201, 350]
    assert kept(steps, Retention(1, every=100)) == [105, 200, 350]


def test_those_with_the_lowest_loss_stay_and_one_without_a_loss_is_none_of_them():
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 5: 2.0, 77: 0.0}
    assert kept([1, 2, 3, 4, 5, 6], Retention(1, best=2), losses) == [2, 5, 6]


@given(
    st.lists(st.integers(0, 200), unique=True).map(sorted),
    st.integers(1, 4),
    st.integers(0, 50),
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 200), st.floats(0, 10)),
)
def test_what_stays_does_not_depend_on_when_the_others_were_deleted(steps, newest, every, best, losses):
    retention = Retention(newest, every, best)
    one_by_one: list[int] = []
    for step in steps:
        one_by_one = kept([*one_by_one, step], retention, losses)
    assert one_by_one == kept(steps, retention, losses)
    assert set(steps[-newest:]) <= set(one_by_one)
