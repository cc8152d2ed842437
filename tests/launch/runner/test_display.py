import contextlib
import io
import os
import threading
import time

from rich.console import Console

from slicewise.launch.runner import display as display_module
from slicewise.launch.runner.display import Display
from slicewise.launch.runner.members import Member, State
from slicewise.launch.workers import Worker


def members(slices, per_slice):
    places = [(s, w) for s in range(slices) for w in range(per_slice)]
    return [Member(Worker(s, w, f"host{s}{w}", 22, "u", None, None), i) for i, (s, w) in enumerate(places)]


def shown(them, *said, terminal=True, broken=lambda: None):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, height=40, color_system=None)
    with Display(console, them, "title", time.monotonic(), broken) as display:
        for what in said:
            (display.say if isinstance(what, str) else display.event)(what)
    return out.getvalue()


def test_a_terminal_shows_a_row_a_worker_under_the_lines():
    them = members(2, 2)
    them[0].state, them[1].state, them[1].code = State.RUNNING, State.FAILED, 7
    them[0].last_line = "[bold]not markup"
    text = shown(them, "[red]a line")
    assert "[red]a line\n" in text.replace("\r", "")
    last = text[text.rindex("worker") - 60 :]
    assert "slice 0 worker 0  host00  running     [bold]not markup" in text
    assert "slice 0 worker 1  host01  failed 7" in text
    assert "title" in last


def test_many_workers_share_a_row_a_slice_and_trouble_is_never_hidden():
    them = members(64, 4)
    for member in them:
        member.state = State.RUNNING
    them[4 * 60].state = State.LOST
    rows = [line.split() for line in shown(them).splitlines()]
    assert ["60", "3", "1"] in rows
    assert ["49", "more", "196"] in rows
    assert any(row[-3:] == ["slice", "running", "lost"] for row in rows)


def test_progress_of_the_first_worker_is_one_line_below_and_plain_elsewhere():
    step = {"event": "step", "step": 3, "steps": 3, "loss": 1.5}
    assert "step 3/3  loss 1.5000" in shown(members(1, 1), step)
    assert shown(members(1, 1), {"event": "phase", "name": "compile"}, step, terminal=False) == (
        "compile ...\nstep 3/3  loss 1.5000\n"
    )


def test_a_terminal_that_takes_nothing_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(display_module, "CLOSE_S", 0.2)
    read, write = os.pipe()
    with open(write, "w") as blocked:
        began_s = time.monotonic()
        with Display(Console(file=blocked), members(1, 1), "t", 0.0, lambda: None) as display:
            for _ in range(3 * display_module.QUEUED):
                display.say("x" * 1000)
        assert time.monotonic() - began_s < 5
        threading.Thread(
            target=lambda: [None for _ in iter(lambda: os.read(read, 1 << 16), b"")], daemon=True
        ).start()
        for thread in threading.enumerate():
            if thread.name == "display":
                thread.join(1)


def test_a_closed_pipe_is_told_once():
    read, write = os.pipe()
    os.close(read)
    told = []
    pipe = os.fdopen(write, "w")
    with Display(Console(file=pipe), members(1, 1), "t", 0.0, lambda: told.append(1)) as display:
        display.say("line")
        deadline_s = time.monotonic() + 5
        while not told and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert told == [1]
    with contextlib.suppress(BrokenPipeError):
        pipe.close()
