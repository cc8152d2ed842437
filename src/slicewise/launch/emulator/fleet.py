"""The VMs of nodes: started, cut off and killed until they are what the state machine wants."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from slicewise.launch.emulator import marks
from slicewise.launch.emulator.metadata_server import MetadataServer
from slicewise.launch.emulator.records import Endpoint, Link, Node
from slicewise.launch.emulator.ssh import Worker
from slicewise.launch.targets.local import THREADS_PER_DEVICE, xla_flags

HOST = "127.0.0.1"
STARTUP_LOG = "startup-script.log"
# what a VM sees of the emulator's own environment; the rest of it may hold secrets
_INHERITED = re.compile(r"PYTHONPATH|LANG|LC_\w+|TZ|TMPDIR|JAX_COMPILATION_CACHE_DIR|COVERAGE_\w+")


@dataclass(eq=False)
class Machines:
    """The VMs of one node: what they are, and which start and link of the node they follow."""

    mark: str
    workers: list[Worker] = field(default_factory=list)
    boot: int = 0
    link: Link = Link.OPEN
    task: asyncio.Task | None = None


class Fleet:
    """``report_up(name, boot, endpoints)`` is called when all VMs of a node have started; ``allowed(name, key)``
    says whether a public key may log in to a node."""

    def __init__(
        self,
        directory: Path,
        identity: str,
        host_key: asyncssh.SSHKey,
        allowed: Callable[[str, str], bool],
        report_up: Callable[[str, int, list[Endpoint]], None],
        metadata: MetadataServer,
    ):
        self._directory, self._identity, self._host_key = directory, identity, host_key
        self._allowed, self._report_up, self._metadata = allowed, report_up, metadata
        self._machines: dict[str, Machines] = {}
        self._tasks: set[asyncio.Task] = set()
        self._discarded = 0

    def follow(self, names: Iterable[str], nodes: Mapping[str, Node]) -> None:
        """Make the VMs of these nodes what the nodes say. What has to end has ended on return."""
        ended = {}
        for name in names:
            node, machines = nodes.get(name), self._machines.get(name)
            if machines is not None and (node is None or not node.running or node.boot != machines.boot):
                ended[name] = machines
        self._kill(ended, nodes)
        for name in names:
            node, machines = nodes.get(name), self._machines.get(name)
            if node is None or not node.running:
                continue
            if machines is None or machines.boot != node.boot:
                machines = machines or Machines(self._mark(name))
                machines.boot, machines.link = node.boot, Link.OPEN
                self._machines[name] = machines
                self._spawn(self._start(node, machines, node.boot))
            elif machines.link != node.link:
                self._relink(machines, node.link)

    def notify(self, names: Iterable[str]) -> None:
        """SIGTERM to every process of these nodes: they are about to be lost."""
        marks.send([m.mark for n in names if (m := self._machines.get(n))], signal.SIGTERM)

    def count(self, name: str) -> int:
        """Processes that a node runs."""
        return len(marks.marked([self._mark(name)]))

    async def close(self) -> None:
        self._kill(dict(self._machines), {})
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _mark(self, name: str) -> str:
        return f"{self._identity}/{name}/"

    def _spawn(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _kill(self, ended: Mapping[str, Machines], nodes: Mapping[str, Node]) -> None:
        """Every process of these ends. VMs that are to start again keep their disks and addresses."""
        for machines in ended.values():
            for worker in machines.workers:
                worker.die()
        marks.send([machines.mark for machines in ended.values()], signal.SIGKILL)
        for name, machines in ended.items():
            node = nodes.get(name)
            for worker in machines.workers:
                worker.cut(False)
            if node is None or not node.running:
                for worker in machines.workers:
                    worker.close()
                    self._spawn(self._metadata.close(worker))
                del self._machines[name]
                self._discard(self._home(name))

    def _discard(self, home: Path) -> None:
        """The disks of a node are gone at once; their files are removed while requests are answered."""
        self._discarded += 1
        trash = self._directory / "vms" / f".{self._discarded}"
        with contextlib.suppress(OSError):
            home.rename(trash)
            self._spawn(asyncio.to_thread(shutil.rmtree, trash, ignore_errors=True))

    def _relink(self, machines: Machines, link: Link) -> None:
        machines.link = link
        for worker in machines.workers:
            worker.cut(link != Link.OPEN)
        marks.send([machines.mark], signal.SIGSTOP if link == Link.FROZEN else signal.SIGCONT)

    async def _start(self, node: Node, machines: Machines, boot: int) -> None:
        if not machines.workers:
            machines.workers = [await self._create(node, machines, i) for i in range(node.spec.workers)]
        if machines.boot != boot or self._machines.get(node.name) is not machines:
            return  # it was lost or restarted meanwhile
        endpoints = [Endpoint(HOST, worker.sockets[0].getsockname()[1]) for worker in machines.workers]
        if script := node.metadata.get("startup-script"):
            for worker in machines.workers:
                self._spawn(self._run_startup_script(worker, worker.life, script))
        self._report_up(node.name, boot, endpoints)

    async def _create(self, node: Node, machines: Machines, index: int) -> Worker:
        home = self._home(node.name) / str(index)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        metadata_socket, ssh_socket = (socket.create_server((HOST, 0), backlog=128) for _ in range(2))
        environment = self._environment(node, index, home, metadata_socket.getsockname()[1], machines)
        worker = Worker(home, environment, lambda key: self._allowed(node.name, key))
        await worker.listen(self._host_key, ssh_socket)
        await self._metadata.serve(worker, metadata_socket, node.name, index)
        worker.sockets.append(metadata_socket)
        return worker

    async def _run_startup_script(self, worker: Worker, life: int, script: str) -> None:
        """Root runs it at every start, before anyone has logged in."""
        with contextlib.suppress(OSError), open(worker.home / STARTUP_LOG, "ab") as log:
            path = worker.home / ".startup-script"
            path.write_text(script)
            path.chmod(0o700)
            shell = [] if script.startswith("#!") else ["/bin/bash"]
            process = await worker.run(
                [*shell, str(path)], life, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )
            await worker.ended(process)

    def _home(self, name: str) -> Path:
        return self._directory / "vms" / name

    def _environment(
        self, node: Node, index: int, home: Path, metadata_port: int, machines: Machines
    ) -> dict[str, str]:
        """A login's environment, the emulated host's devices, and where its metadata server is."""
        body, devices = node.spec.body, node.spec.devices_per_worker
        return {
            **{name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)},
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
            "HOME": str(home),
            "USER": os.environ.get("USER", "slicewise"),
            "LOGNAME": os.environ.get("USER", "slicewise"),
            "SHELL": "/bin/bash",
            "GCE_METADATA_IP": f"{HOST}:{metadata_port}",
            "GCE_METADATA_HOST": f"{HOST}:{metadata_port}",
            "TPU_ACCELERATOR_TYPE": str(body.get("acceleratorType", "")),
            "TPU_WORKER_ID": str(index),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags("", devices),
            "NPROC": str(max(os.cpu_count() or 1, THREADS_PER_DEVICE * devices)),
            marks.MARK: f"{machines.mark}{index}",
        }
