"""ssh and scp to the workers of a queued resource, with the programs of OpenSSH.

A command on several workers starts on all of them at once, whatever their number, and is never started again: a
dropped connection is reported as that.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slicewise.errors import ExitCode, UserError
from slicewise.launch.emulator.local import known_hosts_path, user_state
from slicewise.launch.output import LineReader
from slicewise.launch.workers import Worker

CONNECTION_LOST = 255  # what ssh ends with when the connection failed; the command itself may do so too
KEEPALIVE = ("ConnectTimeout=20", "ServerAliveInterval=10", "ServerAliveCountMax=3")
READ_BYTES = 1 << 16
DRAIN_S = 5.0  # for a killed ssh to let go of its output


@dataclass(frozen=True)
class Ended:
    """``code`` is ssh's: the command's, or 255 for a lost connection."""

    worker: Worker
    code: int


def choose(workers: Sequence[Worker], slice_: str, worker: str) -> list[Worker]:
    """Those of a slice's index and a worker's index in it; 'all' is every one. Raises UserError for an index
    that there is not."""
    chosen = list(workers)
    for text, what, of in (
        (slice_, "--slice", lambda w: w.slice_index),
        (worker, "--worker", lambda w: w.worker_index),
    ):
        if text == "all":
            continue
        last = max(map(of, workers))
        if not (text.isascii() and text.isdecimal() and len(text) < 6 and int(text) <= last):
            raise UserError(f"{what} {text}: expected 0 to {last}, or all.")
        chosen = [w for w in chosen if of(w) == int(text)]
    return chosen


def ssh_command(worker: Worker, command: str | None, *, batch: bool) -> list[str]:
    """The words of one ssh; the remote shell reads ``command``, None is a login shell."""
    words = [
        _program("ssh"),
        *_options(worker, batch),
        "-p",
        str(worker.port),
        f"{worker.user}@{worker.host}",
    ]
    return [*words, command] if command else words


def scp_command(worker: Worker, sources: Sequence[str], target: str, *, recursive: bool) -> list[str]:
    """The words of one scp; a path that starts with ':' is on the worker."""
    host = f"[{worker.host}]" if ":" in worker.host else worker.host
    there = [
        f"{worker.user}@{host}{path}" if path.startswith(":") else _here(path) for path in (*sources, target)
    ]
    flags = ["-r"] if recursive else []
    return [_program("scp"), "-q", *flags, *_options(worker, True), "-P", str(worker.port), *there]


def check_copy(sources: Sequence[str], target: str, *, recursive: bool) -> None:
    """Raises UserError for paths that do not go one way, and for those of this machine that cannot be copied."""
    if any(path.startswith(":") for path in sources) == target.startswith(":"):
        raise UserError("scp copies to a worker or from one: write the paths there as :PATH.")
    for source in (path for path in sources if not path.startswith(":")):
        if not os.path.exists(source):
            raise UserError(f"{source}: there is no such file here.")
        if os.path.isdir(source) and not recursive:
            raise UserError(f"{source} is a folder: add --recursive.")
    folder = Path(target).absolute().parent
    if not target.startswith(":") and not folder.is_dir():
        raise UserError(f"{target}: there is no folder {folder} here.")


def _here(path: str) -> str:
    """A path of this machine so that scp takes it for neither an option nor HOST:PATH."""
    return path if path.startswith("/") else f"./{path}"


def _options(worker: Worker, batch: bool) -> list[str]:
    """The host's key is checked against the one that is known; an unknown one is taken at first and kept."""
    words: list[str] = []
    known = _known_hosts(worker)
    strict = "yes" if worker.known_host_key else "accept-new"
    options = [f"UserKnownHostsFile={known}", f"StrictHostKeyChecking={strict}", "LogLevel=ERROR", *KEEPALIVE]
    if worker.identity_file:
        options.append("IdentitiesOnly=yes")
        words += ["-i", worker.identity_file]
    if batch:
        options.append("BatchMode=yes")
    return words + [word for option in options for word in ("-o", option)]


def _known_hosts(worker: Worker) -> Path:
    if worker.known_host_key:  # of an emulator, which has written it
        assert worker.identity_file is not None
        return known_hosts_path(Path(worker.identity_file).parent)
    folder = user_state()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / "known_hosts"


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise UserError(
            f"there is no {name} on this machine: install OpenSSH's client.", code=ExitCode.INTERNAL
        )
    return path


def run_on(
    workers: Sequence[Worker], command: Callable[[Worker], list[str]], say: Callable[[Worker, str], None]
) -> list[Ended]:
    """``command(worker)`` here for all workers at once, each line of output to ``say``; what ended, in the order
    of time. On Ctrl-C all are ended."""
    return asyncio.run(_run_on(workers, command, say))


async def _run_on(
    workers: Sequence[Worker], command: Callable[[Worker], list[str]], say: Callable[[Worker, str], None]
) -> list[Ended]:
    ended: list[Ended] = []

    async def follow(worker: Worker, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        reader = LineReader()
        while data := await process.stdout.read(READ_BYTES):
            for line in reader.feed(data):
                say(worker, line)
        for line in reader.feed(b""):
            say(worker, line)
        ended.append(Ended(worker, await process.wait()))

    # all are started before any is followed: asyncio does not take back a process that it is just starting
    processes = [await _start(command(worker)) for worker in workers]
    try:
        async with asyncio.TaskGroup() as group:
            for worker, process in zip(workers, processes, strict=True):
                group.create_task(follow(worker, process))
    except* BrokenPipeError:
        raise BrokenPipeError from None  # the reader of our output left, as head does
    finally:
        await asyncio.gather(*map(_end, processes))
    return ended


async def _start(words: list[str]) -> asyncio.subprocess.Process:
    pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    return await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=both
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Killed if it still runs. Unread output would keep its pipe open beyond the event loop."""
    if process.returncode is None:
        process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            await process.communicate()


def exec_ssh(worker: Worker, command: str | None) -> None:
    """This process becomes ssh: terminal, signals and exit code are its own."""
    words = ssh_command(worker, command, batch=False)
    os.execv(words[0], words)
