"""A schedule follows from its seed, and can happen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slicewise.errors import UserError
from slicewise.launch.chaos.schedule import KINDS, describe, make, parse_kinds
from slicewise.launch.targets.local import ClusterShape
from slicewise.train.faults import Fault

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


def test_names_of_faults_are_checked():
    assert parse_kinds("kill, stop,kill") == ("kill", "stop")
    with pytest.raises(UserError, match="Did you mean 'disk-full'"):
        parse_kinds("disk_full")
    with pytest.raises(UserError, match="names none"):
        parse_kinds(" , ")
