"""Workers on loopback: OpenSSH servers with a configuration and a home of their own, or many in one process."""

import dataclasses
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from processes import is_alive
from slicewise.launch.runner.fleet import Timing
from slicewise.launch.runner.run import Options, run

ROOT = Path(__file__).parents[3]
QUICK = Timing(
    heartbeat_s=0.5, silence_s=4.0, orphan_grace_s=0.5, failure_grace_s=0.3, stop_grace_s=5, connect_s=20
)
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


def until(condition, timeout_s=20.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not in time"
        time.sleep(0.02)


@dataclass
class Target:
    """Workers to run on. ``folder`` holds their homes and hosts.toml; ``tree`` is what is shipped."""

    folder: Path
    tree: Path
    servers: list[subprocess.Popen]

    until, alive = staticmethod(until), staticmethod(is_alive)

    @property
    def inventory(self) -> Path:
        return self.folder / "hosts.toml"

    def run(self, *command, **options):
        """(exit code, what was printed) of a run in this process."""
        out = io.StringIO()
        timing = dataclasses.replace(QUICK, **options.pop("timing", {}))
        given = {
            "logs": self.folder / "logs",
            "tree": self.tree,
            "timing": timing,
            "target": str(self.inventory),
        }
        code = run(Options(command=command, **given | options), Console(file=out, width=200))
        return code, out.getvalue()

    def popen(self, *command, options=(), **popen):
        """The real command, with the timing of a test."""
        script = (
            "import signal, sys, slicewise.launch.runner.run as r, slicewise.launch.runner.fleet as f\n"
            "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
            f"f.Timing.__init__.__defaults__ = {tuple(dataclasses.astuple(QUICK))}\n"
            "from slicewise.cli import main\nsys.exit(main(sys.argv[1:]))"
        )
        return subprocess.Popen(
            [sys.executable, "-c", script, "run", "--on", str(self.inventory), *options, "--", *command],
            cwd=self.tree,
            stdin=subprocess.DEVNULL,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **popen},
        )

    def log(self, slice_index, worker_index):
        """Of the newest run."""
        newest = max((self.folder / "logs").glob("*/"), key=lambda p: p.stat().st_mtime_ns)
        return (newest / f"slice{slice_index}-worker{worker_index}.log").read_text()

    def pids(self, name="pid"):
        """What commands wrote into files of that name in their trees."""
        return [
            int(p.read_text())
            for p in self.folder.glob(f"home*/.slicewise/trees/*/{name}*")
            if p.read_text().strip()
        ]


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def keygen(path):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", path], check=True)


def start_sshd(folder, index, port):
    (folder / f"home{index}").mkdir(exist_ok=True)
    config = folder / f"sshd{index}"
    config.write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\n"
        f"PidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\nSetEnv HOME={folder}/home{index}\n"
    )
    command = [SSHD, "-D", "-e", "-f", config]
    with (folder / f"sshd{index}.log").open("ab") as log:
        return subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)


def listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def openssh_servers(tmp_path_factory):
    """Four of them, as two slices."""
    if SSHD is None:
        pytest.fail("OpenSSH's server is needed: apt-get install openssh-server")
    if os.getuid() == 0:  # what sshd insists on when it is root
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = tmp_path_factory.mktemp("sshd")
    keygen(folder / "key")
    keygen(folder / "host_key")
    ports = free_ports(4)
    servers = [start_sshd(folder, index, port) for index, port in enumerate(ports)]
    a, b, c, d = (f'"127.0.0.1:{port}"' for port in ports)
    (folder / "hosts.toml").write_text(
        f'identity_file = "{folder}/key"\n[[slices]]\nhosts = [{a}, {b}]\n[[slices]]\nhosts = [{c}, {d}]\n'
    )
    until(lambda: all(map(listening, ports)))
    yield folder, servers
    for server in servers:
        server.kill()
        server.wait()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder to ship; the user's own ssh configuration is out of sight."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "program.py").write_text("print('from the tree')\n")
    return folder


@pytest.fixture
def target(openssh_servers, tree):
    folder, servers = openssh_servers
    for home in folder.glob("home*"):
        shutil.rmtree(home)
        home.mkdir()
    return Target(folder, tree, servers)


@pytest.fixture
def many(tmp_path, tree):
    """A function that starts so many slices and workers in one process of asyncssh."""
    started = []

    def start(slices, per_slice):
        folder = tmp_path / "workers"
        folder.mkdir()
        command = [
            sys.executable,
            ROOT / "benchmarks" / "loopback_workers.py",
            folder,
            str(slices),
            str(per_slice),
        ]
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        started.append(server)
        assert server.stdout.readline() == b"ready\n"
        return Target(folder, tree, [server])

    yield start
    for server in started:
        server.send_signal(signal.SIGKILL)
        server.communicate()
