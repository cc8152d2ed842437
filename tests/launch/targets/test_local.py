import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter

import pytest
from rich.console import Console

from processes import is_alive
from slicewise.errors import ExitCode, UserError
from slicewise.launch import oom_kills
from slicewise.launch.policy import Watch
from slicewise.launch.targets.local import ClusterShape, run_local
from slicewise.train.goodput import read

pytestmark = pytest.mark.multiprocess
FOUR = ClusterShape(2, 2, 1)
TWO = ClusterShape(1, 2, 1)
ONE = ClusterShape(1, 1, 1)

PREAMBLE = """
import json, os, signal, subprocess, sys, time
rank, folder = int(os.environ["SLICEWISE_PROCESS_ID"]), os.path.dirname(os.path.abspath(__file__))
def emit(**event):
    os.write(int(os.environ["SLICEWISE_EVENTS_FD"]), (json.dumps(event) + "\\n").encode())
def mark(name):
    open(os.path.join(folder, name + ".tmp"), "w").write(str(os.getpid()))
    os.rename(os.path.join(folder, name + ".tmp"), os.path.join(folder, name))
def wait_for(*names):
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        time.sleep(0.005)
"""


@pytest.fixture
def script(tmp_path):
    """Writes what every rank does; a rank can mark() what it has reached and wait_for() marks of others."""

    def write(body):
        path = tmp_path / "rank.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        return path

    return write


def run(path, shape=FOUR, **options):
    """Exit code and lines on the terminal."""
    console = Console(file=io.StringIO(), width=100)
    code = run_local([str(path)], shape, console=console, **{"log_directory": None, **options})
    return code, console.file.getvalue().splitlines()


def eventually(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.01)


def pids(tmp_path, *names):
    """Of the processes that made these marks."""
    eventually(lambda: all((tmp_path / name).exists() for name in names))
    return [int((tmp_path / name).read_text()) for name in names]


def test_the_start_and_the_end_of_a_run_are_stamped_in_its_folder(script, tmp_path):
    for code, last in ((0, "done"), (1, "wait")):
        run(script(f"sys.exit({code})"), ONE, run_directory=tmp_path / last)
        states = [stamp.state for stamp in read(tmp_path / last)]
        assert states[0] == "start"
        assert states[-1] == last


# ---------------------------------------------------------------- output


def test_lines_of_all_processes_are_merged_whole_with_their_place_before_them(script, tmp_path):
    path = script("""
        for number in range(300):
            sys.stdout.write(f"out {number} "); sys.stdout.flush()
            sys.stdout.write(f"of {rank}\\n")
        print("err", rank, file=sys.stderr)
        sys.stdout.write("no newline at the end")
    """)
    code, lines = run(path, log_directory=tmp_path / "new" / "logs")
    assert code == 0
    for rank, place in enumerate(("s0h0", "s0h1", "s1h0", "s1h1")):
        mine = [line for line in lines if line.startswith(place)]
        expected = [
            *(f"out {number} of {rank}" for number in range(300)),
            f"err {rank}",
            "no newline at the end",
        ]
        assert Counter(mine) == Counter(f"{place} | {text}" for text in expected)
        log = tmp_path / "new" / "logs" / f"slice{place[1]}-host{place[3]}.log"
        assert log.read_text().count("\n") == 301
    assert len(lines) == 4 * 302


def test_logs_hold_raw_bytes_of_this_attempt_only(script, tmp_path):
    (tmp_path / "slice0-host0.log").write_text("of an earlier attempt\n")
    code, lines = run(
        script("sys.stdout.buffer.write(b'\\xff\\x1b[2Jx\\r\\n')"),
        ONE,
        log_directory=tmp_path,
    )
    assert (code, lines) == (0, ["s0h0 | \ufffdx"])
    assert (tmp_path / "slice0-host0.log").read_bytes() == b"\xff\x1b[2Jx\r\n"


def test_a_flood_without_newlines_and_a_flood_of_lines_pass_through(script, tmp_path):
    path = script("""
        if rank == 0:
            os.write(1, b"x" * 3_000_000)
        else:
            sys.stdout.write("".join(f"{number:07d}\\n" for number in range(200_000)))
    """)
    code, lines = run(path, TWO, log_directory=tmp_path)
    assert code == 0
    assert sum(line.count("x") for line in lines if line.startswith("s0h0 | ")) == 3_000_000
    assert [line[7:] for line in lines if line.startswith("s0h1 | ")] == [f"{n:07d}" for n in range(200_000)]
    assert (tmp_path / "slice0-host0.log").stat().st_size == 3_000_000


def test_a_failure_is_noticed_while_another_process_floods_for_ever(script):
    path = script("""
        if rank == 1:
            time.sleep(0.2); sys.exit(1)
        while True:
            os.write(1, b"flood\\n" * 1000)
    """)
    began = time.monotonic()
    code, lines = run(path, TWO, failure_grace_s=0.2)
    assert code == ExitCode.INTERNAL
    assert "first failure: slice 0 host 1 exited with code 1" in lines[-3:]
    assert time.monotonic() - began < 10


def test_a_full_disk_ends_the_log_and_not_the_run(script, tmp_path):
    (tmp_path / "slice0-host0.log").symlink_to("/dev/full")
    code, lines = run(script("print('a'); time.sleep(.1); print('b')"), ONE, log_directory=tmp_path)
    assert code == 0
    assert [line[7:] for line in lines if "incomplete" not in line] == ["a", "b"]
    assert len([line for line in lines if "No space left" in line]) == 1


# ---------------------------------------------------------------- progress


def test_progress_comes_from_the_first_process_and_text_from_all(script):
    path = script("""
        emit(event="phase", name="compile")
        for number in (1, 2, 3):
            emit(event="step", step=number, steps=3, loss=float(rank), step_time_s=0.5, tokens_per_s=10.0,
                 tflops_per_s_per_device=0.1, mfu=None)
        emit(event="text", text=f"text {rank}")
    """)
    code, lines = run(path, TWO)
    assert code == 0
    assert sorted(lines) == [
        "compile ...",
        "s0h1 | text 1",
        "step 1/3  loss 0.0000  0.5 s/step  10 tokens/s  0.1 TFLOP/s/device",
        "step 3/3  loss 0.0000  0.5 s/step  10 tokens/s  0.1 TFLOP/s/device",
        "text 0",
    ]


def test_what_is_no_event_is_shown_as_output(script):
    code, lines = run(script("os.write(int(os.environ['SLICEWISE_EVENTS_FD']), b'{bad\\n[1]\\n')"), ONE)
    assert (code, lines) == (0, ["s0h0 | {bad", "s0h0 | [1]"])


def test_on_a_terminal_lines_appear_above_one_bar_that_stays(script, tmp_path):
    path = script("""
        emit(event="step", step=1, steps=2, loss=1.0)
        wait_for("drawn")
        print("line 1", flush=True)
        emit(event="step", step=2, steps=2, loss=1.0)
        print("line 2", flush=True)
    """)
    file, environment = io.StringIO(), {"TERM": "xterm"}
    console = Console(file=file, width=100, force_terminal=True, color_system=None, _environ=environment)

    def watch():
        eventually(lambda: "1/2" in file.getvalue(), timeout_s=120)
        (tmp_path / "drawn").touch()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert run_local([str(path)], ONE, log_directory=None, console=console) == 0
    watcher.join()
    output = file.getvalue()
    assert output.index("1/2") < output.index("s0h0 | line 1\n") < output.rindex("s0h0 | line 2\n")
    assert "2/2" in output[output.rindex("s0h0 | line 2\n") :]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(0)", 0, None),
        ("sys.exit(1)", 1, "exited with code 1"),
        ("sys.exit(2)", 2, "exited with code 2"),
        ("sys.exit(75)", 75, "asks for a restart"),
        ("sys.exit(76)", 76, "no step is lost"),
        ("sys.exit(17)", 1, "exited with code 17"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "was killed by SIGKILL"),
        ("os.abort()", 1, "was killed by SIGABRT"),
        ("os.kill(os.getpid(), 40)", 1, "was killed by signal 40"),
    ],
)
def test_how_a_process_ends_decides_the_code_and_is_said(script, ending, code, words):
    result, lines = run(script(f"sys.stdout.flush()\n{ending}"), ONE)
    assert result == code
    assert (words is None) == (not any("first failure" in line for line in lines))
    if words:
        assert any(re.search(f"first failure: slice 0 host 0 .*{words}", line) for line in lines)


@pytest.mark.parametrize("ran_out", [True, False])
def test_a_process_that_the_kernel_killed_for_want_of_memory_is_told_from_others(
    script, tmp_path, monkeypatch, ran_out
):
    """The counter of such kills stands in for the kernel, which would take somebody else's processes too."""
    counts = tmp_path / "vmstat"
    counts.write_text("pgfault 7\noom_kill 3\n")
    monkeypatch.setattr(oom_kills, "_COUNTS", counts)
    code, lines = run(
        script(f"""
        if {ran_out}:
            open(folder + "/vmstat", "w").write("pgfault 8\\noom_kill 4\\n")
        os.kill(os.getpid(), signal.SIGKILL)
        """),
        ONE,
    )
    assert code == ExitCode.INTERNAL
    said = " ".join(lines)
    assert "was killed by SIGKILL" in said
    assert ("memory had run out: lower global_batch_size" in said) == ran_out


def test_the_first_failure_in_time_decides_and_is_printed_last_with_the_end_of_its_log(script, tmp_path):
    path = script("""
        if rank == 2:
            for number in range(50):
                print("cause", number)
            sys.stdout.flush()
            mark("failed")
            os._exit(75)
        wait_for("failed")
        time.sleep(0.3 + rank / 10)
        print("consequence", rank)
        sys.exit(1)
    """)
    code, lines = run(path, log_directory=tmp_path)
    assert code == 75
    assert [line for line in lines if "(a consequence)" in line] == [
        f"slice {rank // 2} host {rank % 2} exited with code 1 (a consequence)" for rank in (0, 1, 3)
    ]
    assert lines[-1] == "first failure: slice 1 host 0 exited with code 75 (asks for a restart)"

    path.write_text(path.read_text().replace("75", "1"))
    code, lines = run(path, log_directory=tmp_path)
    assert code == 1
    assert lines[-22] == "first failure: slice 1 host 0 exited with code 1"
    assert lines[-21] == f"its last 20 lines ({tmp_path}/slice1-host0.log):"
    assert lines[-20:] == [f"  cause {number}" for number in range(30, 50)]


def test_after_a_failure_processes_that_hang_are_killed(script, tmp_path):
    path = script("""
        mark(f"rank{rank}")
        if rank == 1:
            wait_for("rank0", "rank2", "rank3")
            time.sleep(0.1)
            os.kill(int(open(os.path.join(folder, "rank3")).read()), signal.SIGSTOP)
            sys.exit(2)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    """)
    began = time.monotonic()
    code, lines = run(path, failure_grace_s=0.3)
    assert code == 2
    assert 0.3 < time.monotonic() - began < 5
    assert lines == [
        "stopped as a consequence: slice 0 host 0, slice 1 host 0, slice 1 host 1",
        "first failure: slice 0 host 1 exited with code 2",
        "it printed nothing",
    ]
    assert not any(map(is_alive, pids(tmp_path, "rank0", "rank1", "rank2", "rank3")))


def test_an_error_that_all_report_is_printed_once_and_without_a_log_tail(script):
    code, lines = run(
        script("""
        print("noise")
        emit(event="error", code=2, message="steps = -1 is not positive.")
        sys.exit(2)
    """)
    )
    assert code == ExitCode.USER
    assert [line for line in lines if "noise" not in line] == ["error: steps = -1 is not positive."]


def test_an_error_that_one_reports_names_it_and_came_before_the_exits_it_caused(script):
    code, lines = run(
        script("""
        if rank == 3:
            emit(event="error", code=2, message="no such file")
            mark("told")
            time.sleep(100)  # as in a shutdown barrier
        wait_for("told")
        time.sleep(0.1)
        if rank == 0:
            emit(event="error", code=1, message="of another kind")
        sys.exit(1)
    """),
        failure_grace_s=0.5,
    )
    assert code == ExitCode.USER
    assert "slice 0 host 0 (a consequence): of another kind" in lines
    assert lines[-1] == "error on slice 1 host 1: no such file"


@pytest.mark.parametrize("code", ["0", "17", '"x"', "null"])
def test_an_error_with_a_code_outside_the_table_is_internal(script, code):
    path = script(f"""
        null = None
        emit(event="error", code={code}, message="m")
        sys.exit(2)
    """)
    assert run(path, ONE)[0] == ExitCode.INTERNAL


def test_a_process_that_stays_after_the_others_finished_is_a_failure(script, monkeypatch):
    monkeypatch.setattr("slicewise.launch.attempt.DONE_GRACE_S", 0.5)
    code, lines = run(script("if rank == 1: print('stuck', flush=True); time.sleep(100)"), TWO)
    assert code == ExitCode.INTERNAL
    assert "first failure: slice 0 host 1 was still running 0.5 s after another process had finished" in lines
    assert not any("consequence" in line for line in lines)


def test_a_process_without_progress_has_failed_and_all_leave_their_stacks(script):
    path = script("""
        import faulthandler
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        emit(event="progress", step=7)
        def waits_for_ever():
            time.sleep(100)
        waits_for_ever()
    """)
    code, lines = run(path, TWO, watch=Watch(stall_timeout_s=0.4), failure_grace_s=0.5)
    assert code == ExitCode.INTERNAL
    assert any("made no progress for 0.4 s, since step 7" in line for line in lines)
    for place in ("s0h0 | ", "s0h1 | "):
        assert any(line.startswith(place) and "in waits_for_ever" in line for line in lines)


def test_all_that_a_process_wrote_is_handed_out_before_its_exit(script, monkeypatch):
    monkeypatch.setattr("slicewise.launch.processes.READ_BYTES", 2)
    monkeypatch.setattr("slicewise.launch.processes.MAX_DRAIN_READS", 10_000)
    path = script("""
        print("x" * 5000, flush=True)
        emit(event="error", code=2, message="y" * 5000)
        os._exit(1)
    """)
    code, lines = run(path, ONE)
    assert (code, lines) == (2, ["s0h0 | " + "x" * 5000, "error: " + "y" * 5000])


def test_grandchildren_end_with_the_run_and_do_not_hold_it_up(script, tmp_path, monkeypatch):
    monkeypatch.setattr("slicewise.launch.processes.DRAIN_WAIT_S", 60.0)
    path = script("""
        sleeper = "import os, time; open(%r, 'w').write(str(os.getpid())); time.sleep(100)"
        subprocess.Popen([sys.executable, "-c", sleeper % os.path.join(folder, f"sleeper{rank}")])
        wait_for(f"sleeper{rank}")
        time.sleep(0.1)
        print("done")
    """)
    began = time.monotonic()
    code, lines = run(path, TWO)
    assert (code, sorted(lines)) == (0, ["s0h0 | done", "s0h1 | done"])
    assert time.monotonic() - began < 20
    sleepers = pids(tmp_path, "sleeper0", "sleeper1")
    eventually(
        lambda: not any(map(is_alive, sleepers)), timeout_s=2
    )  # killed already, and no children of ours


def test_file_descriptors_threads_and_signal_handlers_are_given_back(script):
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), signal.getsignal(signal.SIGTERM)

    path = script("sys.exit(rank)")
    run(path)
    before = held()
    run(path)
    assert held() == before


def test_a_cluster_can_be_run_by_a_thread_which_takes_no_signals(script):
    results = []
    path = script("sys.exit(75)")
    thread = threading.Thread(target=lambda: results.append(run(path, ONE)[0]))
    thread.start()
    thread.join(20)
    assert results == [ExitCode.RESTART]


def test_a_log_directory_that_cannot_be_made_is_told_before_anything_starts(script, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot create the log directory .*file/logs") as caught:
        run(script("mark('started')"), log_directory=tmp_path / "file" / "logs")
    assert caught.value.code == ExitCode.INTERNAL
    assert not (tmp_path / "started").exists()


def test_when_one_process_cannot_be_started_none_is_left(script, tmp_path):
    (tmp_path / "slice1-host1.log").mkdir()
    with pytest.raises(UserError, match=r"cannot start 4 processes: .*slice1-host1.log") as caught:
        run(script("mark(f'rank{rank}'); time.sleep(100)"), log_directory=tmp_path)
    assert caught.value.code == ExitCode.INTERNAL
    assert not any(is_alive(int(path.read_text())) for path in tmp_path.glob("rank?"))


# ---------------------------------------------------------------- the parent is asked to stop, or dies

PARENT = """
import signal, sys
from pathlib import Path
from rich.console import Console
from slicewise.launch.targets.local import ClusterShape, run_local
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.{hangup})
shape = ClusterShape(1, 2, 1)
sys.exit(run_local([sys.argv[1]], shape, log_directory=None, console=Console(), stop_grace_s={grace}))
"""


@contextlib.contextmanager
def parent(path, *, grace=30.0, hangup="SIG_DFL"):
    code = PARENT.format(grace=grace, hangup=hangup)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


READY = 'mark(f"rank{rank}"); wait_for("rank0", "rank1")\n'
SAVES = "signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True), os._exit(76)))\n" + READY
IGNORES = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_asked_to_stop_the_processes_may_save_and_the_code_says_so(script, tmp_path, number):
    with parent(script(SAVES + "time.sleep(100)")) as process:
        ranks = pids(tmp_path, "rank0", "rank1")
        process.send_signal(number)
        out, _ = process.communicate(timeout=10)
    assert process.returncode == ExitCode.PREEMPTED
    assert sorted(line for line in out.splitlines() if "saved" in line) == ["s0h0 | saved", "s0h1 | saved"]
    assert number.name in out
    assert not any(map(is_alive, ranks))


@pytest.mark.parametrize("saves", [True, False])
def test_others_have_time_to_save_with_one_that_was_asked_to_stop_only_if_there_is_something(
    script, tmp_path, saves
):
    stepped = 'emit(event="step", step=1)\n' if saves else ""
    path = script(READY + stepped + "time.sleep(0 if rank == 0 else 2)\nmark(f'late{rank}')\nos._exit(76)")
    code, _ = run(path, TWO, failure_grace_s=0.2)
    assert code == ExitCode.PREEMPTED
    assert (tmp_path / "late1").exists() == saves


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_processes_that_ignore_sigterm_are_killed_after_the_grace(script, tmp_path, number, code):
    with parent(script(IGNORES + "time.sleep(100)"), grace=0.3) as process:
        ranks = pids(tmp_path, "rank0", "rank1")
        process.send_signal(number)
        out, _ = process.communicate(timeout=10)
    assert process.returncode == code
    assert out.splitlines()[-1].endswith("stopped by themselves: slice 0 host 0, slice 0 host 1")
    assert not any(map(is_alive, ranks))


@pytest.mark.parametrize(("says", "code"), [("", ExitCode.PREEMPTED), ("emit(event='text', text='')\n", 143)])
def test_a_process_that_was_stopped_before_it_could_listen_has_lost_nothing(script, tmp_path, says, code):
    with parent(script(says + READY + "time.sleep(100)")) as process:
        pids(tmp_path, "rank0", "rank1")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == code


@pytest.mark.parametrize("ends", ["signal.SIG_DFL", "lambda *_: os._exit(143)"])
def test_when_one_could_not_save_the_others_do_not_get_the_whole_grace(script, tmp_path, ends):
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN if rank else {ends})\n" + READY + "time.sleep(100)"
    with parent(script(body)) as process:
        ranks = pids(tmp_path, "rank0", "rank1")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == 143
    assert not any(map(is_alive, ranks))


def test_a_second_signal_kills_at_once_even_if_the_terminal_is_blocked(script, tmp_path):
    with parent(script(IGNORES + "while True: os.write(1, b'flood' * 1000 + b'\\n')")) as process:
        ranks = pids(tmp_path, "rank0", "rank1")
        time.sleep(0.5)  # nobody reads: the parent blocks in a write
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        eventually(lambda: not any(map(is_alive, ranks)), timeout_s=2)
        process.communicate(timeout=10)
    assert process.returncode == 130


def test_finishing_in_spite_of_the_signal_is_done(script, tmp_path):
    with parent(script(IGNORES + "wait_for('go')")) as process:
        pids(tmp_path, "rank0", "rank1")
        process.send_signal(signal.SIGINT)
        assert "SIGINT" in process.stdout.readline()
        (tmp_path / "go").touch()
        process.communicate(timeout=10)
    assert process.returncode == 0


def test_a_hangup_that_nohup_ignores_stays_ignored(script, tmp_path):
    with parent(script(READY + "wait_for('go')"), hangup="SIG_IGN") as process:
        pids(tmp_path, "rank0", "rank1")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        (tmp_path / "go").touch()
        process.communicate(timeout=10)
    assert process.returncode == 0


def test_a_stopped_process_goes_on_to_save_when_asked_to_stop(script, tmp_path):
    with parent(script(SAVES + "time.sleep(100)")) as process:
        ranks = pids(tmp_path, "rank0", "rank1")
        os.kill(ranks[1], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
    assert process.returncode == ExitCode.PREEMPTED
    assert not any(map(is_alive, ranks))


def test_when_the_parent_is_killed_while_processes_are_to_stop_nothing_is_left(script, tmp_path):
    with parent(script(IGNORES + "time.sleep(100)")) as process:
        ranks = pids(tmp_path, "rank0", "rank1")
        process.send_signal(signal.SIGTERM)
        assert "SIGTERM" in process.stdout.readline()
        time.sleep(0.1)
        process.kill()
        try:
            eventually(lambda: not any(map(is_alive, ranks)), timeout_s=5)
        finally:
            for pid in filter(is_alive, ranks):
                os.kill(pid, signal.SIGKILL)


def test_when_the_parent_is_killed_nothing_is_left(script, tmp_path):
    path = script(
        IGNORES
        + """
if rank == 0:
    sleeper = "import os, time; open(%r, 'w').write(str(os.getpid())); time.sleep(100)"
    subprocess.Popen([sys.executable, "-c", sleeper % os.path.join(folder, "sleeper")])
    wait_for("sleeper")
    mark("ready")
time.sleep(100)
"""
    )
    with parent(path) as process:
        pids(tmp_path, "ready")
        family = pids(tmp_path, "rank0", "rank1", "sleeper")
        os.kill(family[1], signal.SIGSTOP)
        group = os.getpgid(family[0])
        process.kill()
        try:
            eventually(lambda: not any(map(is_alive, [*family, group])), timeout_s=5)
        finally:
            for pid in filter(is_alive, family):
                os.kill(pid, signal.SIGKILL)


def test_a_parent_killed_while_it_starts_processes_leaves_none(script, tmp_path):
    path = script("mark(f'rank{rank}'); time.sleep(100)")
    for delay_s in (0.0, 0.01, 0.03):
        with parent(path) as process:
            eventually(lambda process=process: children_of(process.pid))
            time.sleep(delay_s)
            process.kill()
            process.wait()
        eventually(lambda: not processes_with(str(path)), timeout_s=5)


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="utf-8") as children:
        return children.read().split()


def processes_with(argument):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as cmdline:
            if argument.encode() in cmdline.read().split(b"\0") and is_alive(name):
                found.append(name)
    return found


def test_when_the_reader_of_the_terminal_goes_nothing_is_left(script, tmp_path):
    path = script(READY + "while True: os.write(1, b'x\\n'); time.sleep(0.01)")
    with parent(path) as process:
        ranks = pids(tmp_path, "rank0", "rank1")
        process.stdout.close()
        process.wait(timeout=10)
        assert process.returncode != 0
    assert not any(map(is_alive, ranks))


def test_starting_and_watching_processes_imports_no_jax():
    code = "import sys, slicewise.launch.targets.local; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
