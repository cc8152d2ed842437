"""The VMs of nodes: started, cut off and killed until they are what the state machine wants."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import asyncssh

from slicewise.launch.emulator import marks
from slicewise.launch.emulator.metadata_server import MetadataServer
from slicewise.launch.emulator.networks import Network
from slicewise.launch.emulator.records import Endpoint, Link, Node
from slicewise.launch.emulator.ssh import Worker
from slicewise.launch.targets.local import THREADS_PER_DEVICE, xla_flags

STARTUP_LOG = "startup-script.log"
# what a VM sees of the emulator's own environment; the rest of it may hold secrets
_INHERITED = re.compile(r"PYTHONPATH|LANG|LC_\w+|TZ|TMPDIR|JAX_COMPILATION_CACHE_DIR|COVERAGE_\w+")


@dataclass(eq=False)
class Machines:
    """The VMs of one node: what they are, and which placement, start and link of the node they follow."""

    mark: str
    placement: int
    workers: list[Worker] = field(default_factory=list)
    boot: int = 0
    link: Link = Link.OPEN
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """``report_up(name, boot, endpoints)`` is called when all VMs of a node have started, ``report_broken(name,
    boot, reason)`` when they cannot; ``allowed(name, key)`` says whether a public key may log in to a node."""

    def __init__(
        self,
        directory: Path,
        identity: str,
        host_key: asyncssh.SSHKey,
        allowed: Callable[[str, str], bool],
        report_up: Callable[[str, int, list[Endpoint]], None],
        report_broken: Callable[[str, int, str], None],
        metadata: MetadataServer,
        network: Network,
    ):
        self._directory, self._identity, self._host_key = directory, identity, host_key
        self._allowed, self._report_up, self._report_broken = allowed, report_up, report_broken
        self._metadata, self._network = metadata, network
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
                machines = machines or Machines(self._mark(name), node.placement)
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
            self._cut(machines, Link.OPEN)
            if node is None or not node.running or node.placement != machines.placement:
                del self._machines[name]
                self._remove(machines.workers)
                machines.workers = []
                self._discard(self._home(name))

    def _discard(self, home: Path) -> None:
        """The disks of a node are gone at once; their files are removed while requests are answered."""
        self._discarded += 1
        trash = self._directory / "vms" / f".{self._discarded}"
        with contextlib.suppress(OSError):
            home.rename(trash)
            self._spawn(asyncio.to_thread(shutil.rmtree, trash, ignore_errors=True))

    def _remove(self, workers: Iterable[Worker]) -> None:
        """These hosts leave the network."""
        for worker in workers:
            worker.close()
            self._metadata.close(worker.plug.metadata)
        self._spawn(self._network.unplug([worker.plug for worker in workers]))

    def _cut(self, machines: Machines, link: Link) -> None:
        if Link.PARTITIONED in (link, machines.link):
            for worker in machines.workers:
                self._network.partition(worker.plug, link == Link.PARTITIONED)
        for worker in machines.workers:
            worker.cut(link != Link.OPEN)
        machines.link = link

    def _relink(self, machines: Machines, link: Link) -> None:
        self._cut(machines, link)
        marks.send([machines.mark], signal.SIGSTOP if link == Link.FROZEN else signal.SIGCONT)

    async def _start(self, node: Node, machines: Machines, boot: int) -> None:
        def wanted() -> bool:
            return machines.boot == boot and self._machines.get(node.name) is machines

        async with machines.starting:
            if not wanted():  # lost or restarted meanwhile
                return
            try:
                if not machines.workers:
                    made = [await self._create(node, machines, i) for i in range(node.spec.workers)]
                    if self._machines.get(node.name) is not machines:
                        self._remove(made)
                        return
                    machines.workers = made
            except OSError as error:
                self._report_broken(node.name, boot, f"a VM cannot start: {error.strerror or error}")
                return
            if not wanted():
                return
        if script := node.metadata.get("startup-script"):
            for worker in machines.workers:
                self._spawn(self._run_startup_script(worker, worker.life, script))
        endpoints = [Endpoint(worker.plug.address, worker.plug.port) for worker in machines.workers]
        self._report_up(node.name, boot, endpoints)

    async def _create(self, node: Node, machines: Machines, index: int) -> Worker:
        """Raises OSError."""
        home = self._home(node.name) / str(index)
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        plug = await self._network.plug(f"{node.spec.node_id}-w-{index}")
        environment = {**self._environment(node, index, home, machines), **plug.environment}
        worker = Worker(home, environment, plug, lambda key: self._allowed(node.name, key))
        await worker.listen(self._host_key)
        await self._metadata.serve(plug.metadata, node.name, index)
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

    def _environment(self, node: Node, index: int, home: Path, machines: Machines) -> dict[str, str]:
        """A login's environment, and the emulated host's devices."""
        body, devices = node.spec.body, node.spec.devices_per_worker
        return {
            **{name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)},
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
            "HOME": str(home),
            "USER": os.environ.get("USER", "slicewise"),
            "LOGNAME": os.environ.get("USER", "slicewise"),
            "SHELL": "/bin/bash",
            "TPU_ACCELERATOR_TYPE": str(body.get("acceleratorType", "")),
            "TPU_WORKER_ID": str(index),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags("", devices),
            "NPROC": str(max(os.cpu_count() or 1, THREADS_PER_DEVICE * devices)),
            marks.MARK: f"{machines.mark}{index}",
        }
