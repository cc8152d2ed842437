"""Faults on purpose happen to whom they are meant for, when they are meant to, and once."""

import json
import random
import subprocess
import sys

import pytest

from slicewise.train.faults import (
    DAMAGES,
    FAULTS,
    FIRED,
    Armed,
    Fault,
    InjectedError,
    armed,
    damage,
    damage_newest,
)


def test_nothing_happens_unless_the_environment_says_so(tmp_path):
    assert armed(tmp_path, {}) is None


def test_an_exception_comes_in_its_attempt_at_its_rank_and_step_and_once(tmp_path):
    fault = Fault(2, "exception", (1,), "step", 5)
    environment = {FAULTS: json.dumps([fault.to_json()])}
    for attempt, rank in (("1", "1"), ("2", "0")):
        spared = armed(tmp_path, environment | {"SLICEWISE_ATTEMPT": attempt, "SLICEWISE_PROCESS_ID": rank})
        spared("step", 9)
    reached = armed(tmp_path, environment | {"SLICEWISE_ATTEMPT": "2", "SLICEWISE_PROCESS_ID": "1"})
    reached("compile", 9)
    reached("step", 4)
    with pytest.raises(InjectedError, match="at step 6"):
        reached("step", 6)
    reached("step", 7)
    fired = [json.loads(line) for line in (tmp_path / FIRED).read_text().splitlines()]
    assert [(f["kind"], f["rank"], f["state"], f["step"]) for f in fired] == [("exception", 1, "step", 6)]


@pytest.mark.parametrize(("kind", "code"), [("kill", -9), ("terminate", -15), ("disk-full", 27)])
def test_a_process_does_it_to_itself(tmp_path, kind, code):
    program = f"""
import time
from pathlib import Path
from slicewise.train.faults import Armed, Fault
reached = Armed((Fault(1, {kind!r}, (0,), "save", delay_s=0.01),), 0, Path({str(tmp_path)!r})).reached
reached("save", 3)
try:
    for _ in range(500):
        time.sleep(0.02)
        Path({str(tmp_path / "file")!r}).write_bytes(bytes(4096))
except OSError as error:
    raise SystemExit(error.errno)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == code
    assert json.loads((tmp_path / FIRED).read_text())["kind"] == kind


def test_without_ranks_it_is_done_to_the_parent(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((pid, int(number))))
    monkeypatch.setattr("os.getppid", lambda: 4711)
    fault = Fault(1, "stop", (), "finish")
    Armed((fault,), 1, tmp_path).reached("finish", 1)
    assert sent == []
    Armed((fault,), 0, tmp_path).reached("finish", 1)
    assert sent == [(4711, 19)]


@pytest.mark.parametrize("how", DAMAGES[:-1])
def test_damage_changes_the_file(tmp_path, how):
    path = tmp_path / "file"
    for seed in range(20):
        path.write_bytes(bytes(range(1, 100)))
        damage(path, how, random.Random(seed))
        assert not path.exists() if how == "remove" else path.read_bytes() != bytes(range(1, 100))


def test_without_a_complete_checkpoint_there_is_nothing_to_damage(tmp_path):
    assert damage_newest(tmp_path / "checkpoints", 0) is None
    Armed((Fault(1, "corrupt", (0,), "step"),), 0, tmp_path).reached("step", 1)
    assert not (tmp_path / FIRED).exists()
