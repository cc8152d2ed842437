"""The whole preflight over SSH, with JAX on CPU devices."""

import json
import sys

import pytest

from slicewise.errors import ExitCode
from slicewise.launch.preflight import Expectations

pytestmark = pytest.mark.multiprocess
CPU = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}


@pytest.mark.slow
def test_workers_are_checked_and_an_all_reduce_is_timed_before_the_command(many, tmp_path):
    target = many(2, 1)
    expected = Expectations(
        devices=2, checkpoint=str(tmp_path / "ckpt"), min_free_bytes=1, python=sys.executable
    )
    options = {"environment": CPU, "preflight": expected, "timing": {"silence_s": 60.0}}
    code, text = target.run("echo", "the command", **options)
    assert code == 0, text
    assert "devices    2 workers: 2 x cpu" in text
    assert "all-reduce ICI, 2 devices, 1 MiB each: " in text
    assert "all-reduce DCN, 2 devices, 1 MiB each: " in text
    assert text.index("all-reduce") < text.index("the command")
    (kept,) = (target.folder / "logs").glob("*/preflight.json")
    assert [w["devices"]["count"] for w in json.loads(kept.read_text())["workers"]] == [2, 2]


def test_a_worker_that_is_not_as_expected_stops_the_run_before_the_command(many):
    target = many(1, 2)
    expected = Expectations(min_free_bytes=1, python="/usr/bin/false")
    code, text = target.run("echo", "the command", preflight=expected)
    assert code == ExitCode.INTERNAL
    assert text.endswith("slice 0 workers 0, 1 (127.0.0.1): preflight exited with code 1\n")
    assert "the command" not in text
