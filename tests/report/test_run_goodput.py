"""A run's accounting as text, JSON and a page."""

import json

import pytest

from slicewise.cli import main
from slicewise.errors import ExitCode
from slicewise.report import run_goodput
from slicewise.train.goodput import CATEGORIES, Stamp, account
from slicewise.train.goodput_expected import expectation, measured
from slicewise.train.goodput_log import append

S = 1_000_000


def stamps(restarts=1):
    """Starts of 60 steps of 1 s with a save of 1 s at half of them, killed at the end, restarted in 9 s."""
    made, at = [], 0
    for k in range(restarts + 1):
        name, done = f"start-{k}", 30 * k
        made.append(Stamp(at, "launcher", name, "start"))
        made.append(Stamp(at + 2 * S, "trainer", name, "restore" if k else "compile"))
        made.append(Stamp(at + 5 * S, "trainer", name, "step", from_step=done))
        made.append(Stamp(at + 6 * S, "trainer", name, "step", done + 1))
        made.append(Stamp(at + 35 * S, "trainer", name, "save", done + 30))
        made.append(Stamp(at + 36 * S, "trainer", name, "step"))
        made.append(Stamp(at + 66 * S, "trainer", name, "step", done + 60))
        made.append(Stamp(at + 66 * S, "launcher", name, "stop"))
        at += 69 * S
    return made


@pytest.fixture
def folder(tmp_path):
    for s in stamps():
        raw = {
            "at": s.at_us,
            "by": s.by,
            "start": s.start,
            "state": s.state,
            "step": s.step,
            "from": s.from_step,
        }
        append(tmp_path / "demo", {key: value for key, value in raw.items() if value is not None})
    return tmp_path / "demo"


def test_the_command_shows_where_the_time_went_and_what_a_restart_took(folder, capsys):
    assert main(["goodput", f"{folder}/"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{folder}: goodput 66.7% of 2.25 min" in shown
    assert "step 90, 2 starts, 30 steps taken again" in shown
    assert "training 90.0 s 66.7%" in shown
    assert "lost work 30.0 s 22.2%" in shown
    assert "wall time 2.25 min 100.0%" in shown
    assert "restart stop start restore first step total" in shown
    assert "from step 30 3.00 s 2.00 s 3.00 s 1.00 s 9.00 s" in shown
    assert "plan goodput expects" in shown


def test_json_adds_up_to_the_microsecond(folder, capsys):
    assert main(["goodput", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(found["parts_us"].values()) == found["wall_us"] == 135 * S
    assert found["restarts"][0]["total_us"] == sum(found["restarts"][0]["phases_us"].values()) == 9 * S
    assert found["goodput"] == 90 / 135


def test_a_page_has_a_timeline_of_every_part(folder, capsys):
    page = folder / "page.html"
    assert main(["goodput", str(folder), "--html", str(page)]) == 0
    text = page.read_text()
    assert all(word in text for word in ("Timeline", "lost work", "Restarts", "135"))


def test_a_long_timeline_is_drawn_with_few_bars():
    found = account(stamps(restarts=1500))
    bars = run_goodput.timeline(found.segments)["data"]
    drawn = sum(len(trace["x"]) for trace in bars)
    assert drawn <= run_goodput.MOST_BARS
    assert sum(sum(trace["x"]) for trace in bars) == pytest.approx(found.wall_us / S)
    assert {trace["name"] for trace in bars} <= set(CATEGORIES.values())


def test_of_many_restarts_the_last_are_shown(capsys):
    from slicewise.report.console import console

    run_goodput.text(console(), "demo", account(stamps(restarts=30)))
    shown = capsys.readouterr().out
    assert shown.count("from step") == run_goodput.SHOWN_RESTARTS
    assert "the last 20 of 30" in shown


def test_the_planner_is_asked_with_the_runs_own_numbers():
    found = account(stamps(restarts=20))
    plan = expectation(found)
    assert plan.restart_s == 8  # the first step is training already
    assert plan.checkpoint_s == 1
    assert plan.interval_s == pytest.approx(60, rel=0.01)  # of a start: one save
    assert plan.mtbf_s == pytest.approx(69, rel=0.06)
    assert measured(found) * (found.wall_us - 5 * S) == pytest.approx(
        found.parts_us["step"]
    )  # 5 s to start first
    assert expectation(account(stamps(restarts=0))) is None


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["goodput", str(tmp_path)]) == ExitCode.NOT_FOUND
    assert "expected the folder of a run that was started" in capsys.readouterr().err
