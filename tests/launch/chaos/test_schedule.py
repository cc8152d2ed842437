"""A schedule follows from its seed, and can happen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import UserError
from slicewise.launch.chaos.schedule import KINDS, MOMENTS, describe, make, matrix, parse_kinds
from slicewise.launch.targets.local import ClusterShape
from slicewise.train.injection import Fault

shapes = st.builds(ClusterShape, st.integers(1, 3), st.integers(1, 3), st.just(1))


@given(st.integers(0, 10**9), shapes, st.integers(1, 40), st.integers(1, 10))
def test_a_schedule_is_the_same_for_the_same_seed_and_each_fault_has_an_attempt_of_its_own(
    seed, shape, steps, every
):
    made = make(seed, KINDS, shape, steps=steps, every=every)
    assert made == make(seed, KINDS, shape, steps=steps, every=every)
    assert [fault.attempt for fault in made.faults] == list(range(1, len(made.faults) + 1))
    assert made.faults[0].moment != "restore"
    for fault in made.faults:
        assert set(fault.ranks) <= set(range(shape.processes))
        assert 0 <= fault.step <= steps
        assert fault.ranks or fault.kind in ("kill", "stop", "terminate")
        assert Fault.from_json(fault.to_json()) == fault
        assert describe(fault).startswith(fault.kind)


def test_a_schedule_has_only_the_faults_that_were_asked_for_and_what_makes_them_possible():
    shape = ClusterShape(2, 1, 1)
    kinds = {f.kind for n in range(50) for f in make(n, ("stop",), shape, steps=9, every=3).faults}
    assert kinds == {"stop", "kill"}


def test_the_matrix_has_every_kind_victim_and_moment_that_go_together():
    cells = matrix(ClusterShape(2, 2, 1), steps=12, every=3, seed=7)
    last = [cell.faults[-1] for cell in cells]
    assert [cell.seed for cell in cells] == list(range(7, 7 + len(cells)))
    for kind in ("kill", "stop", "terminate"):
        assert {(f.ranks, f.moment) for f in last if f.kind == kind} == {
            (ranks, moment) for ranks in ((0,), (3,), (2, 3), ()) for moment in MOMENTS
        }
    assert {f.ranks for f in last if f.kind == "exception"} == {(0,), (3,), (2, 3)}
    assert len({(f.kind, f.ranks, f.moment) for f in last}) == len(cells)
    assert all(len(cell.faults) == 1 + (cell.faults[-1].moment == "restore") for cell in cells)


def test_names_of_faults_are_checked():
    assert parse_kinds("kill, stop,kill") == ("kill", "stop")
    with pytest.raises(UserError, match="Did you mean 'disk-full'"):
        parse_kinds("disk_full")
    with pytest.raises(UserError, match="names none"):
        parse_kinds(" , ")
