"""SSH of emulated workers: one server on a loopback port for each, all in one event loop (asyncssh).

As with OpenSSH's server, a command without a terminal survives the loss of its connection: its standard input ends
and its output has no reader. One with a terminal gets SIGHUP. All die with their VM.
"""

import asyncio
import contextlib
import os
import signal
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from slicewise.launch.emulator.networks import Plug, silence

SHELL = "/bin/bash"
READ_BYTES = 64 * 1024
ACCEPTED_VARIABLES = ("LANG", "LC_")  # that a client may set, as Debian's sshd_config has it


@dataclass(eq=False)
class Worker:
    """One host of a slice: where it lives, who may log in, and what it runs. ``groups`` are process groups that
    it leads and that have not been waited for; ``life`` counts restarts of the host."""

    home: Path
    environment: Mapping[str, str]
    plug: Plug
    allowed: Callable[[str], bool]  # whether a public key in OpenSSH's format may log in
    acceptor: asyncssh.SSHAcceptor | None = None
    connections: set[asyncssh.SSHServerConnection] = field(default_factory=set)
    groups: set[int] = field(default_factory=set)
    life: int = 0
    reachable: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self, host_key: asyncssh.SSHKey) -> None:
        self.reachable.set()
        self.acceptor = await asyncssh.listen(
            sock=self.plug.ssh,
            server_host_keys=[host_key],
            server_factory=lambda: _Server(self),
            process_factory=self._serve,
            sftp_factory=lambda channel: _Files(channel, self.home),
            allow_scp=True,
            encoding=None,
            gss_host=None,
            password_auth=False,
            kbdint_auth=False,
            host_based_auth=False,
            keepalive_interval=0,
            login_timeout=60,
        )

    def cut(self, cut: bool) -> None:
        """Takes the worker off the network, or puts it back."""
        if cut:
            self.reachable.clear()
        else:
            self.reachable.set()
        connected = [connection.get_extra_info("socket") for connection in self.connections]
        for sock in [self.plug.ssh, self.plug.metadata, *filter(None, connected)]:
            silence(sock, cut)

    def die(self) -> None:
        """Its process groups are killed and its connections break, as when the host loses power. Processes that
        left their groups are found by their marks."""
        self.life += 1
        self.signal(signal.SIGKILL)
        for connection in list(self.connections):
            connection.abort()
        self.connections.clear()

    def close(self) -> None:
        """Nothing listens any more."""
        if self.acceptor:
            self.acceptor.close()
        self.die()

    def signal(self, number: signal.Signals) -> None:
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    async def run(self, arguments: list[str], life: int, **options: Any) -> asyncio.subprocess.Process:
        """A process in a session of its own. The caller awaits `ended` on it. Raises ConnectionError when the
        host's ``life`` in which it was asked for is over."""
        if life != self.life:
            raise ConnectionError
        process = await asyncio.create_subprocess_exec(
            *self.plug.prefix,
            *arguments,
            **{"cwd": self.home, "env": self.environment, "start_new_session": True, **options},
        )
        if life != self.life:  # everything was killed while this one started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise ConnectionError
        self.groups.add(process.pid)
        return process

    async def ended(self, process: asyncio.subprocess.Process) -> int:
        """The exit code, negative for a signal."""
        try:
            return await process.wait()
        finally:
            self.groups.discard(process.pid)

    async def _serve(self, channel: asyncssh.SSHServerProcess[bytes]) -> None:
        """One command, or a shell, of one channel."""
        if channel.get_extra_info("connection") not in self.connections:
            return  # it broke before the command could start
        environment = dict(self.environment)
        given = channel.env or {}
        for name, value in given.items():
            if str(name).startswith(ACCEPTED_VARIABLES):
                environment[str(name)] = str(value)
        command = [SHELL, "-c", channel.command] if channel.command is not None else [SHELL, "-l"]
        try:
            run = self._with_terminal if channel.term_type else self._with_pipes
            code = await run(channel, command, environment)
            await self.reachable.wait()
            if code < 0:
                channel.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
            else:
                channel.exit(code)
        except (OSError, asyncssh.Error):  # the connection is gone, or the VM with its home directory
            channel.close()

    async def _with_pipes(self, channel: Any, command: list[str], environment: dict[str, str]) -> int:
        outputs = [await _pipe() for _ in range(2)]
        try:
            process = await self.run(
                command,
                self.life,
                env=environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=outputs[0].write_fd,
                stderr=outputs[1].write_fd,
            )
        finally:
            for output in outputs:
                os.close(output.write_fd)
        assert process.stdin is not None
        copies = [
            asyncio.create_task(self._copy_out(output.reader, writer))
            for output, writer in zip(outputs, (channel.stdout, channel.stderr), strict=True)
        ]
        copy_in = asyncio.create_task(_copy_in(channel, _into(process.stdin), process.pid, self.groups))
        copy_in.add_done_callback(lambda _: process.stdin.close())  # type: ignore[union-attr]
        try:
            exited = asyncio.create_task(self.ended(process))
            lost = asyncio.create_task(channel.wait_closed())
            copied = asyncio.gather(*copies)
            # the channel stays open while anything holds the output, as with OpenSSH
            await asyncio.wait([copied, lost], return_when=asyncio.FIRST_COMPLETED)
            for output in outputs:
                output.transport.close()  # a writer without readers gets SIGPIPE
            return await exited
        finally:
            for task in (copy_in, lost, *copies):
                task.cancel()

    async def _with_terminal(self, channel: Any, command: list[str], environment: dict[str, str]) -> int:
        master, slave = os.openpty()
        name = os.ttyname(slave)
        _resize(master, *channel.term_size)
        # the leader of a new session that opens a terminal gets it as its controlling terminal
        opened = ["/bin/sh", "-c", 'exec "$@" <>"$0" >&0 2>&0', name, *command]
        environment["TERM"] = channel.term_type
        try:
            process = await self.run(opened, self.life, env=environment, stdin=asyncio.subprocess.DEVNULL)
            reader, transport = await _reader(os.fdopen(os.dup(master), "rb", buffering=0))
            out = asyncio.create_task(self._copy_out(reader, channel.stdout))
            feed = asyncio.create_task(
                _copy_in(channel, _into_fd(master), process.pid, self.groups, terminal=master)
            )
            lost = asyncio.create_task(channel.wait_closed())
            exited = asyncio.create_task(self.ended(process))
            await asyncio.wait([exited, lost], return_when=asyncio.FIRST_COMPLETED)
            if not lost.done():
                os.close(slave)  # what is left to read ends now
                slave = -1
                await asyncio.wait([out, lost], return_when=asyncio.FIRST_COMPLETED)
            for task in (feed, lost, out):
                task.cancel()
            transport.close()
        finally:
            os.close(master)  # hangs up: SIGHUP
            if slave >= 0:
                os.close(slave)
        return await exited

    async def _copy_out(self, reader: asyncio.StreamReader, writer: Any) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            while data := await reader.read(READ_BYTES):
                await self.reachable.wait()
                writer.write(data)
                await writer.drain()


@dataclass
class _Output:
    write_fd: int
    reader: asyncio.StreamReader
    transport: asyncio.ReadTransport


async def _pipe() -> _Output:
    read_fd, write_fd = os.pipe()
    reader, transport = await _reader(os.fdopen(read_fd, "rb", buffering=0))
    return _Output(write_fd, reader, transport)


async def _reader(file: Any) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, file)
    return reader, transport


def _into(writer: asyncio.StreamWriter) -> Callable[[bytes], Awaitable[None]]:
    async def write(data: bytes) -> None:
        writer.write(data)
        await writer.drain()

    return write


def _into_fd(fd: int) -> Callable[[bytes], Awaitable[None]]:
    async def write(data: bytes) -> None:
        await asyncio.to_thread(os.write, fd, data)

    return write


async def _copy_in(
    channel: Any,
    write: Callable[[bytes], Awaitable[None]],
    group: int,
    groups: set[int],
    terminal: int | None = None,
) -> None:
    """Standard input, signals and window sizes of a channel to a process, until the channel sends no more."""
    while True:
        try:
            data = await channel.stdin.read(READ_BYTES)
            if not data:
                return
            await write(data)
        except asyncssh.SignalReceived as received:
            number = getattr(signal, f"SIG{received.signal}", None)
            if number is not None and group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, number)
        except asyncssh.TerminalSizeChanged as size:
            if terminal is not None:
                _resize(terminal, size.width, size.height, size.pixwidth, size.pixheight)
        except asyncssh.BreakReceived:
            pass
        except (OSError, asyncssh.Error):  # the process closed its input, or the connection is lost
            return


def _resize(terminal: int, width: int, height: int, pixel_width: int = 0, pixel_height: int = 0) -> None:
    import fcntl
    import termios

    size = struct.pack("HHHH", height or 24, width or 80, pixel_height, pixel_width)
    with contextlib.suppress(OSError):
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, size)


class _Server(asyncssh.SSHServer):
    """Any user name may log in with an allowed key; nothing is forwarded."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._worker.connections.add(conn)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._connection:
            self._worker.connections.discard(self._connection)

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        return self._worker.allowed(key.export_public_key().decode())


class _Files(asyncssh.SFTPServer):
    """Relative paths start at the VM's home directory."""

    def __init__(self, channel: asyncssh.SSHServerChannel, home: Path):
        super().__init__(channel)
        self._home = os.fsencode(home)

    def exit(self) -> None:
        self.channel.exit(0)  # OpenSSH's scp takes a channel without an exit status for a failure

    def map_path(self, path: bytes) -> bytes:
        return os.path.join(self._home, path)
