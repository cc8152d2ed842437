"""One persistent SSH connection to a worker, with an agent at its far end."""

import asyncio
import contextlib
import getpass
import re
from collections import deque
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import asyncssh

from slicewise.errors import UserError, cannot_write
from slicewise.launch.runner.agent_wire import MAGIC, Frames, frame
from slicewise.launch.workers import Worker

AGENT = (
    "agent_wire",
    "agent_tree",
    "agent",
)  # files that are sent, in the order in which they import each other
# preferred over asyncssh's first, which it computes in several calls a packet: a third of the time for a connection
CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
CONNECT_TIMEOUT_S = 20.0  # of one try
AGENT_TIMEOUT_S = 60.0  # from the connection to the agent's first word: a login shell may read slow files
DENIED = "refused to log in user"  # how such a reason begins
_PROGRAM = re.compile(r"[A-Za-z0-9_./~+-]+")
# Reads the agent from standard input, so that it need not be on the worker and nothing of it shows in ps. Each of its
# definitions is compiled alone: the compiler would keep two megabytes after the whole.
_BOOT = (
    'exec {python} -ISc \'exec("import os\\ndef r(n):\\n s=b\\"\\"\\n while len(s)<n:\\n'
    "  d=os.read(0,n-len(s))\\n  if not d:os._exit(1)\\n  s+=d\\n return s\\n"
    'g={{\\"__name__\\":\\"slicewise_agent\\"}}\\nl=0\\nfor p in r(int(r(8))).split(b\\"\\\\n\\\\n\\\\n\\"):\\n'
    ' exec(compile(b\\"\\\\n\\"*l+p,\\"slicewise_agent\\",\\"exec\\"),g)\\n l+=p.count(b\\"\\\\n\\")+3")\''
)


class LinkError(Exception):
    """Why a worker cannot be used, in words; ``final`` when another try cannot help."""

    def __init__(self, message: str, *, final: bool = False):
        super().__init__(message)
        self.final = final


def boot_command(python: str) -> str:
    """The shell command that starts an agent. Raises UserError for what is no program's name."""
    if not _PROGRAM.fullmatch(python):
        raise UserError(
            f"--python {python!r} is not a program: expected a name or path such as venv/bin/python."
        )
    return _BOOT.format(python=python)


def agent_source() -> bytes:
    """The agent as it is sent: its length in eight characters, then its text."""
    folder = resources.files("slicewise.launch.runner")
    files = [folder.joinpath(f"{name}.py").read_text() for name in AGENT]
    text = re.sub(r"^from slicewise.*\n", "", "\n\n".join(files), flags=re.M).encode()
    return b"%8d" % len(text) + text


class HostKeys:
    """Which key a host may show: the one it is known by, else the first that it shows in this run.

    Hosts in the user's known_hosts must show a key of that file. New keys are written to ``record``.
    """

    def __init__(self, record: Path | None, user_file: Path | None = None):
        self._record = record
        self._seen: dict[tuple[str, int], bytes] = {}
        self._user: Any = None
        self.failed: UserError | None = None  # nothing is accepted that could not be recorded
        if user_file is not None and user_file.exists():
            try:
                self._user = asyncssh.read_known_hosts(str(user_file))
            except (ValueError, OSError) as error:
                raise UserError(f"{user_file} cannot be read: {error}.") from error

    def argument(self, worker: Worker) -> Any:
        """asyncssh's ``known_hosts``. Raises LinkError for a key that is none."""
        if worker.known_host_key:
            try:
                return [asyncssh.import_public_key(worker.known_host_key)], [], []
            except asyncssh.KeyImportError as error:
                raise LinkError(f"its known host key is not a key: {error}", final=True) from error
        return self._user or ([], [], [])

    def accept(self, worker: Worker, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> str | None:
        """None, or why a key that is not among the trusted ones is refused."""
        shown = f"{key.get_fingerprint()} ({key.get_algorithm()})"
        if worker.known_host_key:
            return f"showed host key {shown}, which is not the one it is known by"
        if self._user is not None and any(self._user.match(host, addr, port)[0]):
            return f"showed host key {shown}, and known_hosts has another one for it; if the host was replaced, "\
                f"remove that entry (ssh-keygen -R '[{host}]:{port}')"  # fmt: skip
        data = key.export_public_key()
        if self._seen.setdefault((host, port), data) != data:
            return f"showed host key {shown}, another one than before in this run"
        if self._record is not None:
            name = host if port == 22 else f"[{host}]:{port}"
            try:
                with self._record.open("a") as file:
                    file.write(f"{name} {' '.join(data.decode().split()[:2])}\n")
            except OSError as error:
                self.failed = cannot_write(str(self._record), error)
                return str(self.failed)
        return None


class Identities:
    """Private keys, each read once."""

    def __init__(self) -> None:
        self._keys: dict[str, asyncssh.SSHKey] = {}

    def argument(self, path: str) -> list[asyncssh.SSHKey]:
        if path not in self._keys:
            try:
                self._keys[path] = asyncssh.read_private_key(path)
            except asyncssh.KeyEncryptionError as error:
                message = (
                    f"identity file {path} has a passphrase; load it into ssh-agent and leave it out here"
                )
                raise LinkError(message, final=True) from error
            except (asyncssh.KeyImportError, OSError) as error:
                raise LinkError(f"identity file {path} cannot be read: {error}", final=True) from error
        return [self._keys[path]]


class _Client(asyncssh.SSHClient):
    def __init__(self, worker: Worker, keys: HostKeys):
        self._worker, self._keys = worker, keys
        self.refused: str | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.refused = self._keys.accept(self._worker, host, addr, port, key)
        return self.refused is None


class Link(asyncssh.SSHClientSession[bytes]):
    """Frames to and from one agent. ``on_frame`` and ``on_lost`` are called in the event loop."""

    def __init__(self, on_frame: Callable[[bytes, bytes], None], on_lost: Callable[[str], None]):
        self._on_frame, self._on_lost = on_frame, on_lost
        self._frames: Frames | None = None
        self._before = bytearray()
        self.complaints: deque[bytes] = deque(maxlen=16)
        self._channel: asyncssh.SSHClientChannel[bytes] | None = None
        self._connection: asyncssh.SSHClientConnection | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.up = asyncio.get_running_loop().create_future()
        self.closed = False
        self._ended = "the connection was closed"

    def attach(self, connection: asyncssh.SSHClientConnection) -> None:
        self._connection = connection

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self._channel = chan

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if datatype is not None:  # standard error: of the login shell, or the agent's own end
            self.complaints.append(data[-500:])
            return
        if self._frames is None:
            self._before += data
            _, found, rest = bytes(self._before).partition(MAGIC)
            if not found:
                return
            self._frames, data = Frames(), rest
            self._before.clear()
            if not self.up.done():
                self.up.set_result(None)
        for kind, payload in self._frames.feed(data):
            self._on_frame(kind, payload)

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def exit_status_received(self, status: int) -> None:
        if not self.up.done():
            words = b"".join([*self.complaints, b"\n", self._before]).decode("utf-8", "replace").split("\n")
            said = "; ".join(line.strip() for line in words if line.strip())[-300:]
            self.up.set_exception(LinkError(f"the agent ended with code {status}: {said}", final=True))
        self._ended = f"the agent ended with code {status}"

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self._ended = f"the agent was killed by SIG{signal}"

    def connection_lost(self, exc: Exception | None) -> None:
        self._may_write.set()
        reason = str(exc) if exc else self._ended
        if not self.up.done():
            self.up.set_exception(LinkError(reason))
        if not self.closed:
            self.closed = True
            self._on_lost(reason)

    def send(self, kind: bytes, payload: Any = b"") -> None:
        """Never waits; nothing is sent over a link that is closed."""
        if self._channel is not None and not self.closed:
            with contextlib.suppress(OSError, asyncssh.Error):
                self._channel.write(frame(kind, payload))

    def send_bytes(self, data: bytes) -> None:
        assert self._channel is not None
        self._channel.write(data)

    async def drained(self) -> None:
        """Until the worker has taken most of what was sent."""
        await self._may_write.wait()

    def abort(self) -> None:
        """Close at once, without a word to the other side or a call of ``on_lost``."""
        self.closed = True
        if self._connection is not None:
            self._connection.abort()


async def open_link(
    worker: Worker,
    *,
    host_keys: HostKeys,
    identities: Identities,
    boot: str,
    agent: bytes,
    on_frame: Callable[[bytes, bytes], None],
    on_lost: Callable[[str], None],
) -> Link:
    """A link whose agent runs. Raises LinkError."""
    client = _Client(worker, host_keys)
    link = Link(on_frame, on_lost)
    link.up.add_done_callback(lambda future: future.cancelled() or future.exception())
    options: dict[str, Any] = {}
    if worker.identity_file:
        options = {"client_keys": identities.argument(worker.identity_file), "agent_path": None}
    try:
        connection, _ = await asyncssh.create_connection(
            lambda: client,
            worker.host,
            worker.port,
            username=worker.user or getpass.getuser(),
            known_hosts=host_keys.argument(worker),
            connect_timeout=CONNECT_TIMEOUT_S,
            login_timeout=CONNECT_TIMEOUT_S,
            encryption_algs=CIPHERS,
            compression_algs=None,  # files are compressed already, and logs cost more processor time than network
            **options,
        )
        link.attach(connection)
        await connection.create_session(lambda: link, boot, encoding=None)
        link.send_bytes(agent)
        async with asyncio.timeout(AGENT_TIMEOUT_S):
            await link.up
    except LinkError:
        link.abort()
        raise
    except asyncssh.PermissionDenied as error:
        raise LinkError(f"{DENIED} {worker.user}: {error.reason}", final=True) from error
    except asyncssh.HostKeyNotVerifiable as error:
        if host_keys.failed:
            raise host_keys.failed from error
        raise LinkError(client.refused or str(error), final=True) from error
    except (asyncssh.ConfigParseError, asyncssh.KeyImportError) as error:
        raise LinkError(f"ssh configuration: {error}", final=True) from error
    except TimeoutError as error:
        link.abort()
        raise LinkError(f"no answer within {CONNECT_TIMEOUT_S:g} s") from error
    except (OSError, asyncssh.Error) as error:
        link.abort()
        raise LinkError(str(getattr(error, "strerror", None) or error)) from error
    return link
