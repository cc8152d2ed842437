"""What a violation is, and that it is seen."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from slicewise.checkpoint import manifest as layout
from slicewise.checkpoint.manifest import Leaf, Manifest
from slicewise.config import load_config
from slicewise.errors import UserError
from slicewise.launch.chaos import check, run
from slicewise.launch.policy import Watch
from slicewise.launch.targets.local import parse_shape
from slicewise.train.goodput import Stamp, account

S = 1_000_000


def made(folder, *, losses=(3.0, 2.0), digest="00000001", place=1):
    """The folder of a run of two steps, as far as it is looked at."""
    step = folder / "checkpoints" / "2"
    (step / layout.MANIFEST).mkdir(parents=True)
    (step / layout.STATE).mkdir()
    (step / layout.STATE / "data").write_text("x")
    leaves = {"w": Leaf((2,), "float32", digest)}
    body = Manifest(leaves, np.array([[0, place]]), {}).to_json()
    (step / layout.MANIFEST / "data.json").write_text(json.dumps(body))
    for mark in (layout.WRITTEN_MARK, layout.COMMIT_MARK):
        (step / mark).write_text("{}")
    lines = [json.dumps({"step": k + 1, "loss": x, "step_time_s": k}) for k, x in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def expected(tmp_path):
    return check.result(made(tmp_path / "undisturbed"), 2)


def test_times_may_differ_and_nothing_else(tmp_path, expected):
    assert check.differences(made(tmp_path / "same"), 2, expected) == []
    bad = {
        "records differ from step 2 on (2 of 2)": {"losses": (3.0, 2.0000000000000004)},
        "records differ from step 2 on (1 of 2)": {"losses": (3.0,)},
        "final state differs in 1 arrays, the first w": {"digest": "00000002"},
        "the place in the data differs": {"place": 2},
    }
    for number, (said, change) in enumerate(bad.items()):
        assert check.differences(made(tmp_path / str(number), **change), 2, expected) == [said]


def test_a_run_without_its_last_checkpoint_or_its_records_is_not_done(tmp_path, expected):
    folder = made(tmp_path / "a")
    (folder / "checkpoints" / "2" / layout.COMMIT_MARK).unlink()
    (said,) = check.differences(folder, 2, expected)
    assert "no complete checkpoint of step 2" in said
    (folder / "metrics.jsonl").write_text("{")
    assert "cannot be read" in check.differences(folder, 2, expected)[0]


def test_what_a_save_left_behind_is_seen(tmp_path):
    folder = made(tmp_path / "a")
    assert check.unfinished(folder) == []
    (folder / "checkpoints" / f"4{layout.UNFINISHED_INFIX}-1").mkdir()
    assert check.unfinished(folder) == [f"left in checkpoints: 4{layout.UNFINISHED_INFIX}-1"]


def test_only_what_was_saved_may_be_restored():
    def stamps(from_step):
        return [
            Stamp(1, "trainer", "a", "step", 6),
            Stamp(2, "trainer", "a", "save"),
            Stamp(3, "trainer", "b", "step", None, 0, from_step),
        ]

    assert check.unsaved_restores(stamps(6)) == check.unsaved_restores(stamps(0)) == []
    assert check.unsaved_restores(stamps(5)) == ["resumed from step 5, which was never saved"]


def test_a_wait_beyond_its_bound_is_seen():
    def lasting(seconds):
        stamps = [Stamp(0, "launcher", "a", "stop"), Stamp(seconds * S, "launcher", "a", "delay")]
        return check.overlong(account(stamps), Watch())

    assert lasting(20) == []
    assert lasting(24) == ["stop took 24.0 s, at most 23 expected"]


def test_a_process_that_is_left_is_found_by_its_mark_and_killed(monkeypatch):
    monkeypatch.setattr(run, "LEAVE_S", 0.2)
    environment = os.environ | {run.MARK: "there"}
    with subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE) as left:
        while not run._marked("there"):  # until it has begun the program
            pass
        assert run._left("elsewhere") == []
        assert run._left("there") == ["1 processes were left"]
        assert left.wait(10) == -9


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("checkpoint_every=0", "nothing to resume from"),
        ("resume=never", "use resume=auto"),
        ("output_directory=gs://bucket", "on this machine's disks"),
        ("ici_fsdp_parallelism=7", "7"),
    ],
)
def test_a_config_that_cannot_be_judged_is_refused(override, said):
    with pytest.raises(UserError, match=said):
        run.prepare(load_config(None, [override]), parse_shape("2x1x1"), Watch())
