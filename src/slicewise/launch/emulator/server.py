"""The process of the emulator: keys, state file, servers, and their orderly end."""

import asyncio
import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import asyncssh
from aiohttp import web

from slicewise.errors import ExitCode, UserError, cannot_write
from slicewise.launch.emulator import marks, rest, rpc
from slicewise.launch.emulator.control import Control
from slicewise.launch.emulator.local import State, known_hosts_path, make_directory, private_file, state_path
from slicewise.launch.emulator.networks import HOST, Loopback, Namespaces
from slicewise.launch.emulator.records import Settings
from slicewise.launch.emulator.service import Service


@dataclass(frozen=True)
class Options:
    """A port of 0 is any that is free."""

    settings: Settings
    directory: Path
    rest_port: int = 0
    grpc_port: int = 0
    namespaces: bool = False


def run(options: Options, ready: Callable[[State], None]) -> None:
    """Serves until SIGINT, SIGTERM or the control 'stop'; ``ready`` is called once requests are answered.

    Raises UserError when another emulator has the directory, or a port is taken.
    """
    _raise_file_limit()
    with _owned(options.directory):
        asyncio.run(_serve(options, ready))


async def _serve(options: Options, ready: Callable[[State], None]) -> None:
    directory, stopped = options.directory, asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopped.set)
    identity = secrets.token_hex(8)
    host_key, user_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    key_path = directory / "id_ed25519"
    private_file(key_path, user_key.export_private_key().decode())
    network = Namespaces(identity) if options.namespaces else Loopback()
    await network.start()
    service = Service(options.settings, directory, identity, host_key, user_key, network)
    control = Control(service, secrets.token_urlsafe(24), stopped.set)
    guardian = marks.Guardian(f"{identity}/", network.cleanup)
    runner = web.AppRunner(rest.application(service, control), access_log=None, handle_signals=False)
    try:
        await runner.setup()
        site = web.TCPSite(runner, HOST, options.rest_port)
        with _port_errors(options.rest_port):
            await site.start()
        with _port_errors(options.grpc_port):
            grpc_server, grpc_port = await rpc.serve(service, HOST, options.grpc_port)
        state = State(
            pid=os.getpid(),
            rest=f"{HOST}:{runner.addresses[0][1]}",
            grpc=f"{HOST}:{grpc_port}",
            token=control.token,
            identity_file=str(key_path),
            host_key=" ".join(host_key.export_public_key().decode().split()[:2]),
        )
        # all workers show one key, whatever their port
        private_file(known_hosts_path(directory), f"* {state.host_key}\n")
        private_file(state_path(directory), json.dumps(vars(state), indent=2))
        ready(state)
        await stopped.wait()
        await grpc_server.stop(0.2)
    finally:
        state_path(directory).unlink(missing_ok=True)
        key_path.unlink(missing_ok=True)
        known_hosts_path(directory).unlink(missing_ok=True)
        await runner.cleanup()
        await service.close()
        await network.stop()
        guardian.close()
        shutil.rmtree(directory / "vms", ignore_errors=True)


@contextlib.contextmanager
def _owned(directory: Path):
    """The state directory, readable by its owner only, belongs to this process."""
    import fcntl

    try:
        make_directory(directory)
        directory.chmod(0o700)
        lock = open(directory / "lock", "w", opener=lambda path, flags: os.open(path, flags, 0o600))  # noqa: SIM115
    except OSError as error:
        raise cannot_write(f"the state directory {directory}", error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"an emulator is already running in {directory}: 'slicewise emulator stop' ends it,"
                " --state DIR starts another.",
                code=ExitCode.CONFLICT,
            ) from None
        yield


@contextlib.contextmanager
def _port_errors(port: int):
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise UserError(f"port {port} cannot be used on {HOST}: it is taken, or reserved.") from error


def _raise_file_limit() -> None:
    """A worker is two sockets, a command three pipes and a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 1 << 16
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
