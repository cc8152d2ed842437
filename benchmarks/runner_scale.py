"""How long slicewise run takes to have a command on every worker of a large fleet, all of it on this machine.

    python benchmarks/runner_scale.py [WORKERS ...]

Every worker is an SSH server on a port and a home of its own, its agent a process. The command is a barrier: it
ends once it runs on every worker. Targets on two cores: 256 workers connected, shipped to and commanded in under
10 s; 1,000 in under 60 s; less than 1 GB of memory for the runner. What the servers and agents take from the same
cores is part of the times. "started" is from the order to start until the command ran on the last worker, and "a
worker" the share of one in "all". Memory is PSS, in which pages that several processes share are divided among them:
of the runner; and a worker, of its SSH server, its agent with its keeper, and its command. "CPU" is processor time a
worker, of the runner and of everything else.
"""

import argparse
import io
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from slicewise.launch.runner.fleet import Timing
from slicewise.launch.runner.run import Options, run

SIZES = (16, 64, 256, 1000)
PER_SLICE = 4
# one shell a worker: it adds its mark, then polls gently, for the barrier must not take the cores from the others
BARRIER = "touch $B/$SLICEWISE_PROCESS_ID; while [ ! -e $B/all ]; do sleep 1; done"
TIMING = Timing(heartbeat_s=10.0, silence_s=120.0, connect_s=300.0)
HEAD = (
    "workers",
    "connected",
    "shipped",
    "started",
    "all",
    "a worker",
    "runner",
    "sshd",
    "agent",
    "command",
    "CPU here",
    "CPU there",
)
TOOK = r" in (?:(\d+) min )?([0-9.]+) s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "workers", nargs="*", type=int, default=SIZES, help="how many (default 16 64 256 1000)"
    )
    sizes = parser.parse_args().workers
    load = os.getloadavg()[0]
    print(
        f"{time.strftime('%Y-%m-%d')} python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}"
    )
    print("".join(f"{cell:>12s}" for cell in HEAD))
    for workers in sizes:
        print(measured(workers), flush=True)


def measured(workers: int) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            sys.executable,
            Path(__file__).with_name("loopback_workers.py"),
            folder,
            str(workers // PER_SLICE),
        ]
        server = subprocess.Popen(
            [*command, str(PER_SLICE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert server.stdout is not None
            server.stdout.readline()
            return _measured(workers, folder, server.pid)
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
            time.sleep(1)  # for agents to see it


def _measured(workers: int, folder: Path, server: int) -> str:
    """The run is a child, so that its memory is its own."""
    (folder / "project").mkdir()
    (folder / "project" / "program.py").write_text("print('here')\n")
    (folder / "barrier").mkdir()
    watcher = os.fork()
    if watcher == 0:
        run_child(folder)
    began_s, all_s, memory = time.monotonic(), 0.0, Memory()
    barrier = folder / "barrier"
    while True:
        done, status, used = os.wait4(watcher, os.WNOHANG)
        if done:
            break
        if not all_s and len(os.listdir(barrier)) >= workers:
            all_s = time.monotonic() - began_s
            memory = memory_of(watcher, server)
            (barrier / "all").touch()
        time.sleep(0.05)
    deadline_s = time.monotonic() + 20
    while (
        below(server) and time.monotonic() < deadline_s
    ):  # the processor time of those that have ended counts
        time.sleep(0.2)
    text = (folder / "output").read_text()
    assert status == 0, text
    connected_s, shipped_s = (60 * float(m or 0) + float(sec) for m, sec in re.findall(TOOK, text)[:2])
    cells = (
        f"{workers:,}", f"{connected_s:.1f} s", f"{shipped_s:.1f} s", f"{all_s - connected_s - shipped_s:.1f} s",
        f"{all_s:.1f} s", f"{1e3 * all_s / workers:.1f} ms", f"{memory.runner / 2**20:.0f} MB",
        *(f"{part / 2**20 / workers:.2f} MB" for part in (memory.servers, memory.agents, memory.commands)),
        f"{1e3 * (used.ru_utime + used.ru_stime) / workers:.1f} ms",
        f"{1e3 * cpu_s(server) / workers:.1f} ms",
    )  # fmt: skip
    return "".join(f"{cell:>12s}" for cell in cells)


def run_child(folder: Path) -> None:
    os.chdir(folder / "project")
    out = io.StringIO()
    environment = {"B": str(folder / "barrier")}
    options = Options(
        str(folder / "hosts.toml"), ["sh", "-c", BARRIER], environment=environment, tree=Path("."),
        logs=folder / "logs", timing=TIMING,
    )  # fmt: skip
    code = 1
    try:
        code = run(options, Console(file=out, width=200))
    finally:
        (folder / "output").write_text(out.getvalue())
        os._exit(code)


def below(pid: int) -> list[int]:
    from slicewise.launch.runner.agent import processes_below

    return processes_below(pid)


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Memory:
    """PSS in bytes."""

    runner: int = 0
    servers: int = 0
    agents: int = 0
    commands: int = 0


def memory_of(runner: int, server: int) -> Memory:
    agents = commands = 0
    for pid in below(server):
        try:
            is_agent = Path(f"/proc/{pid}/comm").read_text().startswith("python")
        except OSError:
            continue
        agents += is_agent * proportional_bytes(pid)
        commands += (not is_agent) * proportional_bytes(pid)
    return Memory(proportional_bytes(runner), proportional_bytes(server), agents, commands)


def proportional_bytes(pid: int) -> int:
    """Memory of a process, shared pages divided among those that share them."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (OSError, ProcessLookupError):
        return 0
    found = re.search(r"^Pss: +(\d+) kB", text, re.M)
    return int(found[1]) << 10 if found else 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    main()
