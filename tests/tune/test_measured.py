"""The clock as judge: what several processes remember. Times are taken in tests/cli/test_tune.py."""

import jax
import pytest

from slicewise.config import load_config
from slicewise.parallel import cluster
from slicewise.tune import measured


@pytest.mark.parametrize(
    ("here", "first", "known"),
    [
        (None, (0.5, ""), (0.5, "")),
        ((0.25, ""), None, None),
        ((0.25, ""), (None, "does not fit"), (None, "does not fit")),
        ((None, "no"), (None, "not there"), (None, "no")),
        (None, None, None),
    ],
)
def test_all_processes_try_what_the_first_one_does_not_know(here, first, known, monkeypatch):
    said = []
    monkeypatch.setattr(measured, "_agreed", lambda value: said.append(value) or value)
    measured._remembered(first)
    monkeypatch.setattr(measured, "_agreed", lambda value: said[0])
    assert measured._remembered(here) == known


def test_the_time_of_a_step_depends_on_devices_versions_flags_and_config(monkeypatch):
    def parts(*overrides, devices=1):
        return measured._parts(load_config(None, overrides).config, cluster.by_slice(jax.devices()[:devices]))

    same = parts()
    assert parts("run_name=other", "checkpoint_every=7") == same
    others = [parts("remat_policy=full"), parts("model=demo-tiny"), parts(devices=2)]
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a=b")
    others.append(parts())
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    monkeypatch.setattr(measured.identity, "versions", lambda: {"jax": "0.1"})
    assert same not in [*others, parts()]
