"""What ml-goodput-measurement computes from our entries is what our own accounting says."""

import sys
from datetime import UTC, datetime

import pytest
from ml_goodput_measurement import goodput as theirs

from slicewise.config import load_config
from slicewise.errors import ExitCode, UserError
from slicewise.train.goodput import account, read
from slicewise.train.goodput_export import Exporter, exporter
from slicewise.train.goodput_log import Ledger

S = 1_000_000
CONFIG = load_config(None, ["goodput_logger=goodput-demo"]).config


class Log:
    """In place of Cloud Logging."""

    def __init__(self):
        self.entries, self.flushed = [], 0

    def write_cloud_logging_entry(self, entry):
        self.entries.append(entry)

    def read_cloud_logging_entries(self, *_, **__):
        return self.entries, (datetime.now(UTC), "id")

    def flush(self):
        self.flushed += 1


def train(directory, log, clock, *, steps):
    """A start that takes ``steps`` of 10 s each, with a save of 20 s after the fifth."""
    recorder = theirs.GoodputRecorder("demo", "goodput-demo", True, log)
    with Ledger(
        directory, {"SLICEWISE_PROCESS_ID": "0"}, clock=lambda: clock[0], began_us=clock[0]
    ) as ledger:
        for state, seconds in (("join", 5), ("compile", 40)):
            clock[0] += 10 * S if state == "join" else 5 * S
            ledger.now(state)
            clock[0] += (seconds - 5) * S
        ledger.attach(Exporter(recorder))
        ledger.joined(True)
        ledger.now("step", from_step=0)
        for step in range(1, steps + 1):
            since = clock[0]
            clock[0] += 1 * S if step == 3 else 0
            ledger.waited(since)
            ledger.begins(step)
            clock[0] += 10 * S
            ledger.stepped(step)
            if step == 5:
                ledger.now("save")
                clock[0] += 20 * S
                ledger.now("step")
        ledger.now("finish")
        ledger.is_complete = True


def test_both_say_the_same_of_a_run(tmp_path):
    log, clock = Log(), [int(1e6 * datetime(2026, 1, 1, tzinfo=UTC).timestamp())]
    train(tmp_path, log, clock, steps=40)
    ours = account(read(tmp_path))
    calculator = theirs.GoodputCalculator("demo", "goodput-demo", log, cache_dir=str(tmp_path))
    share, badput, last = calculator.get_job_goodput(include_badput_breakdown=True)
    assert ours.goodput == pytest.approx(400 / (10 + 40 + 400 + 20 + 1), abs=0.02)
    assert share / 100 == pytest.approx(ours.goodput, abs=0.03)
    assert last in (39, 40)
    compiling = 100 * ours.parts_us["compile"] / ours.wall_us
    assert badput[theirs.BadputType.TRAINING_PREP] == pytest.approx(compiling, abs=0.1)  # per cent
    assert log.flushed == 1


def test_what_is_absent_or_out_of_reach_is_said_before_training(monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("no credentials\nat all")

    monkeypatch.setattr(theirs, "GoodputRecorder", refuses)
    with pytest.raises(UserError, match=r"cannot be reached \(no credentials\)") as caught:
        exporter(CONFIG)
    assert caught.value.code == ExitCode.INTERNAL
    monkeypatch.setitem(sys.modules, "ml_goodput_measurement", None)
    with pytest.raises(UserError, match=r"slicewise\[goodput\]"):
        exporter(CONFIG)
