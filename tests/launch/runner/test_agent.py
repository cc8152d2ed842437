"""The agent over plain pipes, without SSH: what it does when either side, or one of its two processes, goes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processes import is_alive
from slicewise.errors import UserError
from slicewise.launch.runner.agent import processes_below, send_signal
from slicewise.launch.runner.agent_wire import MAGIC, STAMP, Frames, dumps, frame, loads
from slicewise.launch.runner.link import agent_source, boot_command


@given(
    st.lists(st.tuples(st.sampled_from([b"a", b"o", b"\0"]), st.binary(max_size=300))),
    st.integers(1, 64),
)
def test_frames_arrive_whole_however_they_are_cut(frames, step):
    data = b"".join(frame(kind, payload) for kind, payload in frames)
    reader, found = Frames(), []
    for at in range(0, len(data), step):
        found += reader.feed(data[at : at + step])
    assert found == frames


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=50)
def test_what_is_said_is_json_as_others_write_and_read_it(value):
    assert json.loads(dumps(value)) == value
    assert loads(json.dumps(value)) == value
    assert loads(json.dumps(value, ensure_ascii=False)) == value


@pytest.mark.parametrize("text", ["", "{", "[1,", "nul", "[1] 2", "{'a': 1}", '"\x01"'])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError, match="not JSON|Expecting|Invalid|Illegal"):
        loads(text)


def test_a_python_without_the_parts_of_json_takes_json_itself(monkeypatch):
    from slicewise.launch.runner import agent_wire

    monkeypatch.setitem(sys.modules, "_json", None)
    dumps, loads = agent_wire._coders()
    assert (dumps, loads) == (json.dumps, json.loads)


def test_an_agent_is_small():
    """Thousands of them may be on one machine. What is imported is most of what each takes."""
    script = (
        "import sys; exec(compile(sys.stdin.read(), 'agent', 'exec'), {'__name__': 'x'})\nprint(*sys.modules)"
    )
    done = subprocess.run(
        ["python3", "-ISc", script], input=agent_source()[8:].decode(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not {"re", "enum", "json", "contextlib", "collections", "signal", "zlib"} & {*done.stdout.split()}


@pytest.mark.parametrize("python", ["", "a b", "python3;x", "$(x)", "'", "py\nthon"])
def test_a_program_that_is_no_name_never_reaches_a_shell(python):
    with pytest.raises(UserError, match="is not a program"):
        boot_command(python)


class Pipe:
    """An agent and the far end of its pipes."""

    def __init__(self, root, silence_s=10.0, run="run"):
        self.process = subprocess.Popen(
            ["sh", "-c", boot_command("python3")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.process.stdin.write(agent_source())
        self.frames, self.waiting = Frames(), []
        assert self.process.stdout.readline() == MAGIC
        os.set_blocking(self.process.stdout.fileno(), False)
        self.send(b"H", {"root": str(root), "run": run, "silence_s": silence_s})
        self.agent = self.process.pid
        self.wait(b"h")

    def send(self, kind, payload):
        self.process.stdin.write(frame(kind, payload))
        self.process.stdin.flush()

    def start(self, line, root, step="command", **more):
        order = {
            "step": step, "place": "0-0", "arguments": ["bash", "-c", line], "directory": str(root),
            "environment": {}, "unset": [], "files": {}, "orphan_grace_s": 0.3,
        }  # fmt: skip
        self.send(b"S", order | more)

    def wait(self, kind, timeout_s=10.0):
        """The payload of the next frame of that kind."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for i, (found, payload) in enumerate(self.waiting):
                if found == kind:
                    del self.waiting[: i + 1]
                    return payload[STAMP.size :] if kind in (b"o", b"v") else json.loads(payload)
            assert time.monotonic() < deadline_s, f"no {kind!r}, but {self.waiting}"
            data = self.process.stdout.read1()
            self.waiting += self.frames.feed(data or b"")
            time.sleep(0.01)

    def close(self):
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def pipe(tmp_path):
    opened = []

    def make(**options):
        opened.append(Pipe(tmp_path, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_descendants_are_found_with_and_without_the_lists_of_the_kernel(monkeypatch):
    with subprocess.Popen(["bash", "-c", "(sleep 60 & wait) & sleep 60 & wait"]) as shell:
        deadline_s = time.monotonic() + 5
        while len(found := processes_below(shell.pid)) < 3:
            assert time.monotonic() < deadline_s
        exists = os.path.exists
        monkeypatch.setattr(
            os.path, "exists", lambda path: not str(path).endswith("children") and exists(path)
        )
        assert sorted(processes_below(shell.pid)) == sorted(found)
        send_signal([*found, shell.pid], signal.SIGKILL)


def gone(pids, timeout_s=5.0):
    deadline_s = time.monotonic() + timeout_s
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline_s, pids
        time.sleep(0.02)


STUBBORN = "trap '' TERM; setsid bash -c 'trap \"\" TERM; echo $$; while :; do sleep 1; done' & echo $$; wait; sleep 60"


def stubborn(agent, tmp_path):
    """Pids of two processes that ignore SIGTERM, one in a session of its own."""
    agent.start(STUBBORN, tmp_path)
    text = b""
    while text.count(b"\n") < 2:
        text += agent.wait(b"o")
    return [int(word) for word in text.split()]


@pytest.mark.parametrize(("line", "status"), [("exit 3", 3 << 8), ("kill -9 $$", 9), ("true", 0)])
def test_it_reports_how_the_command_ended_after_all_its_output(pipe, tmp_path, line, status):
    agent = pipe()
    agent.start(f"echo out; echo err >&2; {line}", tmp_path)
    assert agent.wait(b"o").startswith(b"out\n")
    ended = agent.wait(b"x")
    assert (ended["status"], ended["left"]) == (status, [])
    assert abs(ended["time"] - time.time()) < 60


def test_a_step_is_started_once_in_a_run_whoever_asks(pipe, tmp_path):
    first, second, other = pipe(), pipe(), pipe(run="other")
    first.start("echo ran >> count", tmp_path)
    assert first.wait(b"x")["status"] == 0
    second.start("echo ran >> count", tmp_path)
    assert "File exists" in second.wait(b"e")["message"]
    other.start("echo ran >> count", tmp_path)
    other.wait(b"x")
    assert (tmp_path / "count").read_text() == "ran\nran\n"
    first.start("echo ran >> count", tmp_path)
    assert "File exists" in first.wait(b"e")["message"]
    first.start("echo ran >> count", tmp_path, step="another")
    assert first.wait(b"x")["status"] == 0


def test_nothing_outlives_the_end_of_its_input(pipe, tmp_path):
    agent = pipe()
    pids = stubborn(agent, tmp_path)
    agent.process.stdin.close()
    gone([*pids, agent.agent])


def test_nothing_outlives_a_runner_that_is_silent(pipe, tmp_path):
    agent = pipe(silence_s=3.0)
    pids = stubborn(agent, tmp_path)
    for _ in range(18):
        agent.send(b"P", 1.5)
        assert agent.wait(b"p")[0] == 1.5
        time.sleep(0.2)
    assert all(map(is_alive, pids))
    gone([*pids, agent.agent])


def test_nothing_outlives_the_agent(pipe, tmp_path):
    agent = pipe()
    pids = stubborn(agent, tmp_path)
    agent.process.send_signal(signal.SIGKILL)
    gone(pids)


def test_the_command_does_not_outlive_its_keeper(pipe, tmp_path):
    agent = pipe()
    agent.start("echo $$; sleep 60", tmp_path)
    pid = int(agent.wait(b"o"))
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    assert agent.wait(b"x")["status"] == signal.SIGKILL
    gone([pid])


def test_signals_reach_every_process_and_wake_stopped_ones(pipe, tmp_path):
    agent = pipe()
    agent.start("trap 'echo saved; exit 76' TERM; echo up; kill -STOP $$; sleep 60", tmp_path)
    agent.wait(b"o")
    time.sleep(0.1)
    agent.send(b"K", int(signal.SIGTERM))
    assert agent.wait(b"o").endswith(b"saved\n")
    assert agent.wait(b"x")["status"] == 76 << 8


def test_output_that_nobody_takes_does_not_stop_it_from_hearing(pipe, tmp_path):
    agent = pipe(silence_s=3.0)
    agent.start("echo $$ > pid; exec cat /dev/zero", tmp_path)
    deadline_s = time.monotonic() + 5
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    gone([int((tmp_path / "pid").read_text()), agent.agent], 10)


def test_the_user_keeps_their_umask_and_the_run_folder_is_theirs_alone(pipe, tmp_path):
    before = os.umask(0o022)
    try:
        agent = pipe()
    finally:
        os.umask(before)
    agent.start("touch made", tmp_path, files={"secret": "x"})
    agent.wait(b"x")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "runs" / "run" / "0-0-secret").stat().st_mode & 0o777 == 0o600


def test_a_folder_that_cannot_be_made_is_an_answer_and_not_an_end(pipe, tmp_path):
    agent = pipe()
    (tmp_path / "file").write_text("")
    agent.start("true", tmp_path / "file" / "folder")
    assert "Not a directory" in agent.wait(b"e")["message"]
    agent.start("true", tmp_path, step="again")
    assert agent.wait(b"x")["status"] == 0
