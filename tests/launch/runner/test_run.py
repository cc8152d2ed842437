"""Runs over real OpenSSH servers: two slices of two workers. Each defect of today's runners is a test here."""

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from slicewise.errors import ExitCode, UserError
from slicewise.launch.runner import run as run_module

pytestmark = pytest.mark.multiprocess
RANK = "$SLICEWISE_PROCESS_ID"


def shell(text):
    return "bash", "-c", text


def test_every_worker_runs_the_command_in_the_shipped_tree_and_knows_its_place(target):
    line = (
        "python3 program.py; echo $TPU_WORKER_ID $TPU_WORKER_HOSTNAMES $MEGASCALE_SLICE_ID $MEGASCALE_NUM_SLICES "
        "$MEGASCALE_COORDINATOR_ADDRESS $MEGASCALE_PORT $SLICEWISE_PROCESS_ID $SLICEWISE_NUM_PROCESSES"
    )
    code, text = target.run(*shell(line), show="all")
    assert code == 0, text
    assert "s1w0 | from the tree" in text
    for s, w in ((0, 0), (0, 1), (1, 0), (1, 1)):
        log = next(target.folder.glob(f"logs/*/slice{s}-worker{w}.log"))
        assert (log.stat().st_mode | log.parent.stat().st_mode) & 0o077 == 0
        expected = f"{w} 127.0.0.1,127.0.0.1 {s} 2 127.0.0.1 8081 {2 * s + w} 4"
        assert f"s{s}w{w} | {expected}" in text
        assert target.log(s, w) == f"from the tree\n{expected}\n"
    assert text.endswith("s\n")
    assert "all 4 workers done after" in text.splitlines()[-1]


def test_one_slice_sees_no_variable_of_several(target, tmp_path):
    for home in target.folder.glob("home*"):  # left over from an earlier gang
        (home / ".bashrc").write_text("export MEGASCALE_NUM_SLICES=9 MEGASCALE_COORDINATOR_ADDRESS=gone\n")
    inventory = tmp_path / "one.toml"
    inventory.write_text(target.inventory.read_text().rpartition("[[slices]]")[0])
    code, text = target.run("env", target=str(inventory))
    assert (code, "TPU_WORKER_ID=0" in text) == (0, True)
    assert "MEGASCALE" not in text


def test_the_first_failure_in_time_is_last_and_gives_the_exit_code(target, tmp_path):
    wait = "while [ ! -e $F ]; do sleep .05; done; sleep .3"
    line = f"echo line of {RANK}; case {RANK} in 2) touch $F; exit 7;; 1) {wait}; exit 9;; esac; sleep 60"
    options = {"environment": {"F": str(tmp_path / "flag")}, "timing": {"failure_grace_s": 3.0}}
    code, text = target.run(*shell(line), **options)
    assert code == 7
    shown = text.splitlines()
    cause = next(i for i, line in enumerate(shown) if line.startswith("first failure: slice 1 worker 0"))
    assert "exited with code 7" in shown[cause]
    assert shown[cause + 1].startswith("its last 1 lines (")
    assert shown[cause + 2 :] == ["  line of 2"]
    assert "slice 0 worker 1 exited with code 9 (a consequence)" in shown[:cause]
    assert "stopped as a consequence: slice 0 worker 0, slice 1 worker 1" in shown[:cause]


def test_a_failure_of_any_worker_fails_the_run_even_when_the_first_succeeds(target):
    code, text = target.run(*shell(f"test {RANK} != 3"))
    assert code == 1
    assert "first failure: slice 1 worker 1" in text


def test_a_process_killed_by_a_signal_is_a_failure(target):
    code, text = target.run(*shell(f"[ {RANK} = 1 ] && kill -KILL $$; sleep 60"))
    assert code == 128 + signal.SIGKILL
    assert "slice 0 worker 1 (127.0.0.1) was killed by SIGKILL" in text


def test_one_that_raised_and_hangs_is_the_cause_though_others_end_first(target, tmp_path):
    """As JAX does: the exception is printed, then the process waits in the shutdown barrier for minutes."""
    raising = "printf 'Traceback (most recent call last):\\nValueError: bad\\n'; touch $F; exec sleep 60"
    abort = "while [ ! -e $F ]; do sleep .05; done; sleep .3; kill -ABRT $$"
    options = {"environment": {"F": str(tmp_path / "flag")}, "timing": {"failure_grace_s": 3.0}}
    code, text = target.run(*shell(f"case {RANK} in 3) {raising};; *) {abort};; esac"), **options)
    assert code == ExitCode.INTERNAL
    assert "first failure: slice 1 worker 1 (127.0.0.1) raised an exception and did not end by itself" in text
    assert text.endswith("  Traceback (most recent call last):\n  ValueError: bad\n")
    assert "was killed by SIGABRT (a consequence)" in text


def test_an_error_that_a_program_reports_counts_from_then_on(target):
    event = '{"event": "error", "code": 2, "message": "steps must be positive"}'
    line = f"[ {RANK} = 2 ] && echo '{event}' >&$SLICEWISE_EVENTS_FD; sleep 60"
    code, text = target.run(*shell(line))
    assert code == ExitCode.USER
    assert "first failure: slice 1 worker 0 (127.0.0.1)" in text
    assert "steps must be positive" in text


def test_what_cannot_be_executed_says_so_and_leads_to_a_shell(target):
    code, text = target.run("python3 program.py")
    assert code == 127
    assert "could not start: python3 program.py: No such file or directory" in text
    assert "bash -c" in text
    assert target.run("./program.py")[0] == 126


def test_arguments_arrive_as_they_are(target):
    words = ["printf", "<%s>", "a b", "$HOME", "it's", "*", ";", ""]
    assert "<a b><$HOME><it's><*><;><>" in target.run(*words)[1]


def test_only_changed_files_are_sent_again_and_what_a_command_wrote_stays(target):
    (target.tree / "old.py").write_text("1")
    assert "sent 8 files" in target.run(*shell("echo state > output"))[1]
    (target.tree / "old.py").unlink()
    (target.tree / "new.py").write_text("2")
    text = target.run(*shell("cat output; ls"))[1]
    assert "sent 4 files" in text
    assert "state\nnew.py\noutput\nprogram.py\n" in text
    assert "sent 0 files" in target.run("true")[1]


def test_a_shipped_file_that_a_command_changed_is_mended(target):
    target.run(*shell("echo broken >> program.py"))
    text = target.run("cat", "program.py")[1]
    assert "sent 4 files" in text
    assert "broken" not in text


def test_daemons_that_a_command_leaves_are_ended_with_it(target):
    daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)"
    daemon += "; open(f'pid{os.getpid()}', 'w').write(str(os.getpid())); time.sleep(60)"
    code, text = target.run(*shell(f'python3 -c "{daemon}"; while ! ls pid* >&2; do sleep .05; done'))
    assert code == 0, text
    assert len(target.pids()) == 4
    assert not any(map(target.alive, target.pids()))


# three processes each: the shell, a child, and a grandchild that ignores SIGTERM in a session of its own
STUBBORN = (
    "echo $$ > pid1; sleep 61 & echo $! > pid2; "
    "setsid bash -c 'trap \"\" TERM; echo $$ > pid3; while :; do sleep 1; done' & "
    "while [ ! -s pid3 ]; do sleep .05; done; echo all started; wait; sleep 60"
)


def started(target):
    target.until(lambda: len(target.pids()) == 12)
    return target.pids()


def gone(target, pids):
    target.until(lambda: not any(map(target.alive, pids)), 15)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_no_process_outlives_a_runner_that_is_stopped(target, number):
    with target.popen(*shell(STUBBORN)) as process:
        pids = started(target)
        process.send_signal(number)
        out = process.communicate(timeout=20)[0]
        gone(target, pids)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number), out
    if number == signal.SIGINT:
        assert "SIGINT: asking all workers to save and stop" in out
        assert "no process is left on any worker" in out


def test_a_second_ctrl_c_kills_at_once(target):
    with target.popen(*shell("trap '' TERM; echo $$ > pid1; while :; do sleep 1; done")) as process:
        target.until(lambda: len(target.pids()) == 4)
        process.send_signal(signal.SIGINT)
        assert any("a second signal kills them" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=4)
        gone(target, target.pids())
    assert process.returncode == 130


def test_a_run_that_saves_when_asked_to_stop_ends_with_its_own_code(target):
    with target.popen(
        *shell("trap 'echo saved; exit 76' TERM; echo $$ > pid1; while :; do sleep .1; done")
    ) as process:
        target.until(lambda: len(target.pids()) == 4)
        process.send_signal(signal.SIGTERM)
        out = process.communicate(timeout=20)[0]
    assert process.returncode == ExitCode.PREEMPTED, out
    assert "saved" in out


def test_a_runner_that_is_frozen_is_taken_for_gone(target):
    with target.popen(*shell(STUBBORN)) as process:
        pids = started(target)
        process.send_signal(signal.SIGSTOP)
        gone(target, pids)
        process.kill()
        process.communicate()


def test_a_reader_that_leaves_ends_the_run(target):
    with target.popen(*shell("echo $$ > pid1; while :; do echo line; sleep .01; done")) as process:
        target.until(lambda: len(target.pids()) == 4)
        process.stdout.close()
        process.wait(20)
        gone(target, target.pids())
    assert process.returncode == 128 + signal.SIGHUP


def sessions(target, index):
    """Pids of the processes of one sshd that serve connections."""
    children = Path(
        f"/proc/{target.servers[index].pid}/task/{target.servers[index].pid}/children"
    ).read_text()
    return [int(pid) for pid in children.split()]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dropped_link_ends_the_worker_there_and_names_it_here_and_runs_nothing_twice(target, number):
    line = f"echo x >> count; {STUBBORN}"
    served = []

    def drop():
        started(target)
        served.extend(sessions(target, 2))
        for pid in served:
            os.kill(pid, number)

    thread = threading.Thread(target=drop)
    thread.start()
    code, text = target.run(*shell(line))
    thread.join()
    gone(target, target.pids())
    for pid in served if number == signal.SIGSTOP else ():
        os.kill(pid, signal.SIGKILL)
    assert code == ExitCode.UNAVAILABLE, text
    assert "first failure: slice 1 worker 0 (127.0.0.1) was lost: " in text, text
    assert "stopped as a consequence: slice 0 workers 0, 1, slice 1 worker 1" in text, text
    counts = list(target.folder.glob("home*/.slicewise/trees/*/count"))
    assert [path.read_text() for path in counts] == ["x\n"] * 4


def test_a_host_key_is_recorded_for_the_run_and_another_one_is_refused(target, tmp_path):
    target.run("true")
    recorded = max((target.folder / "logs").glob("*/known_hosts"), key=lambda p: p.stat().st_mtime_ns)
    assert len(recorded.read_text().splitlines()) == 4
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    other = " ".join((tmp_path / "other.pub").read_text().split()[:2])
    own = " ".join((target.folder / "host_key.pub").read_text().split()[:2])
    port = target.inventory.read_text().split("127.0.0.1:")[1].split('"')[0]
    table = f'identity_file = "{target.folder}/key"\n[[slices]]\nhosts = [{{host = "127.0.0.1", '
    table += f'port = {port}, host_key = "%s"}}]\n'
    pinned = tmp_path / "pinned.toml"
    pinned.write_text(table % own)
    assert target.run("true", target=str(pinned))[0] == 0
    pinned.write_text(table % other)
    with pytest.raises(
        UserError, match=r"slice 0 worker 0 .* cannot be reached: showed host key SHA256:.* not the one"
    ):
        target.run("true", target=str(pinned))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{port} {other}\n")
    with pytest.raises(UserError, match=r"known_hosts has another one for it.*\nNothing was started"):
        target.run("true")


def test_a_host_key_that_cannot_be_recorded_is_our_disks_fault_and_not_the_workers(target, monkeypatch):
    keys = run_module.HostKeys
    monkeypatch.setattr(run_module, "HostKeys", lambda record, user: keys(Path("/dev/full"), user))
    with pytest.raises(UserError, match="/dev/full cannot be written: No space left on device") as caught:
        target.run("true")
    assert caught.value.code == ExitCode.INTERNAL


def test_workers_that_cannot_be_reached_are_named_and_nothing_starts(target, tmp_path):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    inventory = tmp_path / "partly.toml"
    inventory.write_text(
        target.inventory.read_text() + f'[[slices]]\nhosts = ["127.0.0.1:{port}", "localhost:{port}"]\n'
    )
    with pytest.raises(UserError) as caught:
        target.run(*shell("touch pid1"), target=str(inventory), timing={"connect_s": 1})
    assert "slice 2 workers 0, 1 (127.0.0.1) cannot be reached" in str(caught.value)
    assert caught.value.code == ExitCode.UNAVAILABLE
    assert not list(target.folder.glob("home*/.slicewise/trees/*/pid1"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_worker_whose_disk_is_full_is_named_and_nothing_starts(target):
    disk = target.folder / "home2" / ".slicewise"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        (target.tree / "large").write_bytes(os.urandom(200_000))
        with pytest.raises(UserError) as caught:
            target.run(*shell("touch pid1"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert str(caught.value).splitlines() == [
        "slice 1 worker 0 (127.0.0.1) cannot take the working tree: No space left on device.",
        "Nothing was started.",
    ]
    assert caught.value.code == ExitCode.INTERNAL
    assert not list(target.folder.glob("home*/.slicewise/trees/*/pid1"))


def test_a_refused_login_says_who_and_is_not_tried_for_long(target, tmp_path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "stranger"], check=True)
    text = target.inventory.read_text().replace(f"{target.folder}/key", f"{tmp_path}/stranger")
    (tmp_path / "stranger.toml").write_text(text)
    with pytest.raises(UserError, match="refused to log in user") as caught:
        target.run("true", target=str(tmp_path / "stranger.toml"))
    assert caught.value.code == ExitCode.DENIED


def test_a_login_shell_that_prints_and_one_without_python_are_handled(target):
    for home in target.folder.glob("home*"):
        (home / ".bashrc").write_text("echo Welcome; echo more >&2\n")
    assert target.run("true")[0] == 0
    with pytest.raises(UserError, match=r"the agent ended with code 127: .*nopython"):
        target.run("true", python="nopython3")


def test_a_flood_of_output_reaches_the_log_whole_and_the_terminal_in_part(target):
    code, text = target.run(*shell("seq 1 300000"))
    assert code == 0
    assert target.log(0, 0) == "".join(f"{i}\n" for i in range(1, 300001))
    assert "all 4 workers done" in text


def test_secrets_are_on_no_command_line(target, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hush-hush")
    environment = run_module.parse_environment(["API_TOKEN", "PLAIN=1"])
    look = "echo $API_TOKEN$PLAIN; cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c hush-[h]ush; true"
    text = target.run(*shell(look), environment=environment)[1]
    assert "hush-hush1\n0\n" in text
    for path in target.folder.glob("home*/.slicewise/**/*"):
        assert path.is_symlink() or path.stat().st_mode & 0o077 == 0


def test_an_agent_that_is_killed_is_a_lost_worker_and_leaves_nothing(target):
    kill = "for p in $(cat /proc/$PPID/status | awk '/^PPid/ {print $2}'); do kill -KILL $p; done"
    code, text = target.run(*shell(f"echo $$ > pid1; [ {RANK} = 1 ] && {kill}; sleep 60"))
    assert code == ExitCode.UNAVAILABLE
    assert "slice 0 worker 1 (127.0.0.1) was lost: the agent was killed by SIGKILL" in text
    gone(target, target.pids())


def test_ctrl_c_before_anything_runs_ends_at_once(target, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        inventory = tmp_path / "silent.toml"
        inventory.write_text(f'[[slices]]\nhosts = ["127.0.0.1:{silent.getsockname()[1]}"]\n')
        target = type(target)(tmp_path, target.tree, [])
        inventory.rename(target.inventory)
        with target.popen("true") as process:
            silent.accept()[0].close()
            process.send_signal(signal.SIGINT)
            out = process.communicate(timeout=10)[0]
    assert process.returncode == 130, out
    assert "Traceback" not in out


def test_folders_of_one_name_do_not_share_a_tree(target, tmp_path):
    target.run("true")
    other = tmp_path / "elsewhere" / target.tree.name
    other.mkdir(parents=True)
    target.run("true", tree=other)
    assert len(list(target.folder.glob("home0/.slicewise/trees/*/program.py"))) == 1
    assert len(list(target.folder.glob("home0/.slicewise/trees/*/"))) == 2


def test_nothing_is_shipped_when_asked_not_to(target):
    code, text = target.run(*shell('[ "$PWD" = "$HOME" ] && ls'), tree=None)
    assert code == 0
    assert "working tree" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"show": "4"}, "expected all, or a worker from 0 to 3"),
        ({"show": "-1"}, "expected all"),
        ({"name": "../x"}, "--name '../x'"),
        ({"python": "python3;reboot"}, "is not a program"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_connected(target, options, message):
    with pytest.raises(UserError, match=message):
        target.run("true", **options)


@pytest.mark.parametrize("item", ["", "=x", "A B=c", "1A=x", "SURELY_NOT_SET"])
def test_a_variable_that_is_none_is_refused(item):
    with pytest.raises(UserError, match="--env"):
        run_module.parse_environment([item])
