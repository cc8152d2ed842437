import io
import json
import os
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from slicewise.train import progress
from slicewise.train.progress import (
    EVENTS_FD,
    PLAIN_INTERVAL_S,
    ProgressDisplay,
    emit,
    metrics_text,
    reporter,
)


def step(number, steps=100, **more):
    figures = {
        "loss": 2.5,
        "step_time_s": 0.25,
        "tokens_per_s": 12345.6,
        "tflops_per_s_per_device": 1.234,
        "mfu": None,
    }
    return {"event": "step", "step": number, "steps": steps, **figures, **more}


def plain(clock):
    console = Console(file=io.StringIO(), width=200)
    return ProgressDisplay(console, clock=clock), console.file


def terminal(width=120):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, _environ={"TERM": "xterm"})
    return ProgressDisplay(console), console


@pytest.fixture
def pipe(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setenv(EVENTS_FD, str(write))
    fds = {read, write}
    yield read, lambda fd: (os.close(fd), fds.discard(fd))
    for fd in fds:
        os.close(fd)


def test_figures_are_shown_with_units_and_absent_ones_left_out():
    assert metrics_text(step(1)) == "loss 2.5000  0.25 s/step  12,346 tokens/s  1.23 TFLOP/s/device"
    assert metrics_text(step(1, mfu=0.412)).endswith("MFU 41.2%")
    assert metrics_text({"loss": float("nan")}) == "loss nan"


def test_off_a_terminal_steps_are_first_last_and_one_an_interval():
    now = 0.0
    display, out = plain(lambda: now)
    for number in range(1, 101):
        display(step(number))
        now += PLAIN_INTERVAL_S / 10
    display.close()
    shown = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert shown == [*range(1, 100, 10), 100]


def test_off_a_terminal_an_interrupted_run_still_shows_its_last_step():
    display, out = plain(lambda: 0.0)
    with display:
        for number in (1, 2, 3):
            display(step(number))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1/100", "3/100"]


def test_off_a_terminal_phases_text_and_errors_are_lines_without_markup():
    display, out = plain(lambda: 0.0)
    display({"event": "phase", "name": "compile"})
    display({"event": "text", "text": "saved [step 3] :smile:"})
    display({"event": "error", "code": 2, "message": "bad"})
    assert out.getvalue().splitlines() == ["compile ...", "saved [step 3] :smile:", "error: bad"]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_the_bar_stays_at_its_final_state():
    display, console = terminal()
    with display:
        display({"event": "phase", "name": "compile"})
        display(step(50))
        console.print("a line of another process")
        display(step(100, loss=1.5, mfu=0.5))
    output = console.file.getvalue()
    last_frame = output[output.rindex("a line of another process") :]
    assert "100/100" in last_frame
    assert "loss 1.5000" in last_frame
    assert "MFU 50.0%" in last_frame
    assert "elapsed" in last_frame
    assert "remaining" in last_frame
    assert output.endswith("\x1b[?25h"), "the cursor is visible again"


def test_on_a_narrow_terminal_no_line_of_the_bar_wraps():
    display, console = terminal(width=60)
    with display:
        display(step(50))
    frames = console.file.getvalue().replace("\r", "\n").split("\n")
    assert any("..." in line or "\u2026" in line for line in frames if "loss" in line)


def test_a_resumed_run_does_not_count_earlier_steps_as_speed():
    display, _ = terminal()
    with display:
        display({"event": "phase", "name": "restore"})
        display(step(90))
        assert display._bar._progress.tasks[0].speed is None
        assert display._bar._progress.tasks[0].completed == 90


@pytest.mark.parametrize("make", [lambda: plain(lambda: 0.0)[0], lambda: terminal()[0]])
def test_an_event_without_figures_or_of_another_kind_breaks_nothing(make):
    with make() as display:
        for event in ({}, {"event": "new"}, {"event": "step"}, {"event": "phase"}, {"event": "text"}):
            display(event)


def test_emit_writes_one_json_line(pipe):
    read, _ = pipe
    assert emit(step(3, loss=float("inf")))
    assert json.loads(os.read(read, 4096)) == step(3, loss=float("inf"))


def test_emit_takes_scalars_of_numpy(pipe):
    import numpy

    assert emit({"event": "step", "loss": numpy.float32(0.5)})
    assert json.loads(os.read(pipe[0], 4096))["loss"] == 0.5


def test_events_of_threads_do_not_mix_however_long(pipe):
    read, close = pipe
    write = int(os.environ[EVENTS_FD])
    texts = [str(index) * 20_000 for index in range(8)]
    threads = [threading.Thread(target=emit, args=({"event": "text", "text": text},)) for text in texts]
    for thread in threads:
        thread.start()
    closer = threading.Thread(target=lambda: ([thread.join() for thread in threads], close(write)))
    closer.start()
    with os.fdopen(os.dup(read), "rb") as stream:
        received = [json.loads(line)["text"] for line in stream]
    closer.join()
    assert sorted(received) == texts


def test_emit_to_a_reader_that_has_gone_returns_false(pipe):
    read, close = pipe
    close(read)
    assert emit(step(1)) is False


@pytest.mark.parametrize("value", [None, "", "x", "99999"])
def test_emit_without_a_usable_reader_returns_false(monkeypatch, value):
    monkeypatch.delenv(EVENTS_FD, raising=False)
    if value is not None:
        monkeypatch.setenv(EVENTS_FD, value)
    assert emit(step(1)) is False


def test_the_reporter_writes_events_exactly_when_a_parent_listens(pipe, monkeypatch, capsys):
    with reporter() as report:
        report(step(1))
    assert json.loads(os.read(pipe[0], 4096))["step"] == 1
    assert capsys.readouterr().out == ""
    monkeypatch.delenv(EVENTS_FD)
    with reporter() as report:
        report(step(1))
    assert capsys.readouterr().out.startswith("step 1/100  loss 2.5000")


def test_a_rank_imports_neither_rich_nor_jax_to_report():
    code = f"import sys, {progress.__name__} as p; p.emit({{}}); print({{'rich', 'jax'}} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
