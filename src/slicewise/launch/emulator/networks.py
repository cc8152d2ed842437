"""How workers are on the network: ports of 127.0.0.1, or a network namespace with an address of its own each."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slicewise.errors import ExitCode, UserError

HOST = "127.0.0.1"
BRIDGE = "slicewise0"
SUBNET = "10.231"  # the bridge is SUBNET.0.1; nothing routes it to other machines
METADATA_ADDRESS = "169.254.169.254"  # as on Google Cloud
SSH_PORT, METADATA_PORT = 22, 80
MAX_NAMESPACES = 4000  # a bridge has ten bits of ports, and each costs some milliseconds
BACKLOG = 128
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes


@dataclass(eq=False)
class Plug:
    """One worker's place: two sockets that listen, and what its processes need to be at that place."""

    ssh: socket.socket
    metadata: socket.socket
    address: str = HOST
    prefix: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""

    @property
    def port(self) -> int:
        return self.ssh.getsockname()[1]


class Network(Protocol):
    """``cleanup`` is a shell command that removes what a killed emulator leaves."""

    @property
    def cleanup(self) -> str: ...

    async def start(self) -> None: ...

    async def plug(self, hostname: str) -> Plug: ...

    def partition(self, plug: Plug, cut: bool) -> None: ...

    async def unplug(self, plugs: Iterable[Plug]) -> None: ...

    async def stop(self) -> None: ...


class Loopback:
    """A port of 127.0.0.1 for SSH and one for metadata."""

    cleanup = ""

    async def start(self) -> None:
        pass

    async def plug(self, hostname: str) -> Plug:
        """Raises OSError."""
        ssh, metadata = (socket.create_server((HOST, 0), backlog=BACKLOG) for _ in range(2))
        server = f"{HOST}:{metadata.getsockname()[1]}"
        return Plug(ssh, metadata, environment={"GCE_METADATA_IP": server, "GCE_METADATA_HOST": server})

    def partition(self, plug: Plug, cut: bool) -> None:
        """Nothing more: the sockets are cut off, and no other traffic can be told apart."""

    async def unplug(self, plugs: Iterable[Plug]) -> None:
        pass

    async def stop(self) -> None:
        pass


class Namespaces:
    """A network namespace each, on one bridge: port 22, 169.254.169.254, and a cable that can be pulled.

    Needs root. ``identity`` tells its namespaces from others.
    """

    def __init__(self, identity: str):
        self._prefix = f"sw{identity[:6]}-"
        self._numbers = 0

    @property
    def cleanup(self) -> str:
        """A shell command that removes what a killed emulator leaves."""
        return (
            f"for n in $(ip netns list | cut -d' ' -f1 | grep '^{self._prefix}'); do"
            f" ip netns del $n; rm -rf /etc/netns/$n; done; ip link del {BRIDGE}"
        )

    async def start(self) -> None:
        """Raises UserError where namespaces cannot be had."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise UserError("--netns needs root, and the program ip of iproute2.")
        if Path(f"/sys/class/net/{BRIDGE}").exists():
            raise UserError(
                f"--netns: the bridge {BRIDGE} is there already: one emulator at a time can have it."
            )
        try:
            await _ip(
                f"link add {BRIDGE} type bridge",
                f"addr add {SUBNET}.0.1/16 dev {BRIDGE}",
                f"link set {BRIDGE} up",
            )
        except OSError as error:
            raise UserError(f"--netns: {error}.", code=ExitCode.INTERNAL) from error

    async def plug(self, hostname: str) -> Plug:
        """Raises OSError."""
        self._numbers += 1
        if self._numbers > MAX_NAMESPACES:
            raise OSError(f"more than {MAX_NAMESPACES} namespaces were asked for")
        name, address = (
            f"{self._prefix}{self._numbers}",
            f"{SUBNET}.{1 + self._numbers // 250}.{1 + self._numbers % 250}",
        )
        await _ip(
            f"netns add {name}",
            f"link add {name} type veth peer name eth0 netns {name}",
            f"link set {name} master {BRIDGE} up",
        )
        await _ip(
            f"addr add {address}/16 dev eth0",
            f"addr add {METADATA_ADDRESS}/32 dev lo",
            "link set lo up",
            "link set eth0 up",
            f"route add default via {SUBNET}.0.1",
            namespace=name,
        )
        self._write_hosts(name, address, hostname)
        ssh, metadata = await asyncio.to_thread(
            _inside,
            name,
            lambda: (
                socket.create_server(("", SSH_PORT), backlog=BACKLOG),
                socket.create_server((METADATA_ADDRESS, METADATA_PORT), backlog=BACKLOG),
            ),
        )
        return Plug(ssh, metadata, address, ("ip", "netns", "exec", name), namespace=name)

    def _write_hosts(self, name: str, address: str, hostname: str) -> None:
        """What /etc/hosts is inside, where 'ip netns exec' puts it."""
        folder = Path("/etc/netns") / name
        folder.mkdir(parents=True, exist_ok=True)
        names = " ".join(dict.fromkeys((hostname, socket.gethostname())))
        lines = (
            f"{HOST} localhost",
            f"{METADATA_ADDRESS} metadata.google.internal metadata",
            f"{address} {names}",
        )
        (folder / "hosts").write_text("".join(f"{line}\n" for line in lines))

    def partition(self, plug: Plug, cut: bool) -> None:
        """Pulls the cable, for all traffic of the worker."""
        _spawn_ip("link", "set", plug.namespace, "down" if cut else "up")

    async def unplug(self, plugs: Iterable[Plug]) -> None:
        names = [plug.namespace for plug in plugs]
        with contextlib.suppress(OSError):
            await _ip(*(f"netns del {name}" for name in names))
        for name in names:
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)

    async def stop(self) -> None:
        with contextlib.suppress(OSError):
            await _ip(f"link del {BRIDGE}")


async def _ip(*lines: str, namespace: str = "") -> None:
    """Commands of iproute2, in one process. Raises OSError with what it says."""
    words = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate("".join(f"{line}\n" for line in lines).encode())
    if process.returncode:
        raise OSError(f"ip {lines[0]}: {' '.join(said.decode(errors='replace').split())}")


def _spawn_ip(*words: str) -> None:
    """Returns when it is done: what follows relies on the cable."""
    os.waitpid(os.posix_spawnp("ip", ["ip", *words], os.environ), 0)


def _inside(namespace: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gives in a network namespace, where the sockets that it opens stay. Raises OSError."""
    result: list[Any] = []

    def work() -> None:
        try:
            fd = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            try:
                os.setns(fd, os.CLONE_NEWNET)
            finally:
                os.close(fd)
            result.append(make())
        except OSError as error:
            result.append(error)

    # a thread of its own, which ends there: only the thread that entered is inside
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def silence(sock: Any, silent: bool) -> None:
    """Drops every packet that comes to a socket, before TCP sees it; so nothing is acknowledged, and nothing is
    lost once it is heard again. Linux only."""
    with contextlib.suppress(OSError):  # it was closed meanwhile
        if silent:
            program = struct.pack("H6xP", 1, ctypes.addressof(_DROP_ALL))
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        else:
            sock.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
