"""slicewise chaos refuses what it cannot do before anything is started, and says what it found."""

import json

import pytest

from slicewise.cli import main
from slicewise.errors import ExitCode
from slicewise.launch.chaos import check, run
from slicewise.launch.chaos.run import Outcome
from slicewise.train.goodput import Stamp, account


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed", "-1"], "--seed -1: expected a whole number"),
        (["--faults", "explode"], "--faults 'explode': expected some of kill, stop"),
        (["--faults", ""], "names none"),
        (["--schedules", "0"], "--schedules"),
        (["--local", "2x2"], "is not a cluster"),
        (["--stall-timeout", "soon"], "--stall-timeout"),
        (["checkpoint_every=0"], "nothing to resume from"),
    ],
)
def test_bad_input_is_refused(words, said, capsys):
    assert main(["chaos", *words]) == ExitCode.USER
    assert said in capsys.readouterr().err


@pytest.fixture
def outcomes(monkeypatch, tmp_path):
    """What each schedule came to, without running it: the second violates something."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "undisturbed", lambda setup: (check.Result((), {}, []), 8.0))

    def disturbed(setup, schedule, expected, usual_s):
        bad = ("2 processes were left",) if schedule.seed % 2 else ()
        fired = [{"attempt": f.attempt, "kind": f.kind, "state": f.moment} for f in schedule.faults]
        stamps = [Stamp(0, "launcher", "a", "stop"), Stamp(7_000_000, "launcher", "b", "start")]
        steps = [
            Stamp(7_000_000, "trainer", "b", "step", from_step=0),
            Stamp(9_000_000, "trainer", "b", "step", 1),
        ]
        folder = setup.run_directory(f"seed-{schedule.seed}")
        return Outcome(schedule, 12.0, 2, (*fired, *fired), bad, account(stamps + steps), folder)

    monkeypatch.setattr(run, "disturbed", disturbed)


def test_without_a_violation_it_says_so(outcomes, capsys):
    assert main(["chaos", "--faults", "kill", "--seed", "2"]) == 0
    shown = capsys.readouterr()
    assert "seed 2: kill" in shown.err
    assert "12.0 s: as undisturbed" in shown.err
    assert "1 restart: 9.00 s in the middle, 9.00 s at most" in shown.out
    assert "1 schedule, no violation: each ended bit for bit as the undisturbed run" in shown.out


def test_a_violation_is_an_error_and_its_seed_is_told(outcomes, capsys):
    assert main(["chaos", "--seed", "2", "--schedules", "2"]) == ExitCode.INTERNAL
    shown = capsys.readouterr().out
    assert "violation: 2 processes were left" in shown
    assert "--seed 3 --schedules 1 repeats it" in shown
    assert "no violation" not in shown


def test_json_has_every_schedule(outcomes, capsys):
    assert main(["chaos", "--schedules", "2", "--json"]) == ExitCode.INTERNAL
    found = json.loads(capsys.readouterr().out)
    assert [(one["seed"], one["violations"]) for one in found["schedules"]] == [
        (0, []),
        (1, ["2 processes were left"]),
    ]
    assert found["violations"] == 1
