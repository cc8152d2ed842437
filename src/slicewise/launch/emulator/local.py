"""The emulator as others see it: where it runs, how to start, control and end it. Needs no extra to import."""

import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slicewise.errors import ExitCode, UserError, cannot_write

STATE_VARIABLE = "SLICEWISE_EMULATOR"
START_TIMEOUT_S = 60.0
PROJECT, ZONE = "emulated", "local-a"


@dataclass(frozen=True)
class State:
    """A running emulator: host:port of its servers, and the secrets that control it."""

    pid: int
    rest: str
    grpc: str
    token: str
    identity_file: str
    host_key: str


def default_directory() -> Path:
    """$SLICEWISE_EMULATOR, else a folder of the user's own state."""
    if given := os.environ.get(STATE_VARIABLE):
        return Path(given).absolute()
    return user_state() / "emulator"


def user_state() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base).absolute() / "slicewise"


def known_hosts_path(directory: Path) -> Path:
    """For OpenSSH, which takes host keys from files only; beside the private key, and gone with it."""
    return directory / "known_hosts"


def state_path(directory: Path) -> Path:
    return directory / "emulator.json"


def make_directory(directory: Path) -> None:
    """A new one is ignored by git, so that its keys and VMs are not shipped with a working tree around it.

    Raises OSError.
    """
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (directory / ".gitignore").write_text("*\n")


def private_file(path: Path, text: str) -> None:
    """Replaces ``path`` by a file that only its owner can read; readers see the old or the new one, whole."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with open(temporary, "w", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
        file.write(text)
    temporary.replace(path)


def running(directory: Path | None = None) -> State:
    """The emulator of ``directory``. Raises UserError when none is running."""
    directory = directory or default_directory()
    try:
        state = State(**json.loads(state_path(directory).read_text()))
        os.kill(state.pid, 0)
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"no emulator is running in {directory}: start one with 'slicewise emulator start', or name"
            " Google Cloud with --project and --zone."
        ) from None
    return state


def control(state: State, verb: str, **fields: Any) -> dict[str, Any]:
    """One of the emulator's controls. Raises UserError with its reason when it refuses."""
    request = urllib.request.Request(
        f"http://{state.rest}/emulator/{verb}",
        json.dumps({key: value for key, value in fields.items() if value is not None}).encode(),
        {"Authorization": f"Bearer {state.token}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    try:
        with opener.open(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise UserError(_reason(error)) from None
    except OSError as error:
        raise UserError(
            f"the emulator at {state.rest} does not answer: {error}.", code=ExitCode.INTERNAL
        ) from None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the emulator answered {error.code}."


def start(directory: Path, arguments: Sequence[str] = ()) -> State:
    """A new emulator in the background, with more ``arguments`` of 'slicewise emulator start'; its output goes
    to emulator.log of the directory. Raises UserError, with what it printed, when it does not come up."""
    try:
        make_directory(directory)
    except OSError as error:
        raise cannot_write(f"the state directory {directory}", error) from error
    log = directory / "emulator.log"
    command = [sys.executable, "-m", "slicewise", "emulator", "start", "--state", str(directory), *arguments]
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(UserError):
            if (state := running(directory)).pid == pid:
                return state
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            known = ExitCode(code) if code in list(ExitCode) and code else ExitCode.INTERNAL
            raise UserError(log.read_text().strip().removeprefix("slicewise: "), code=known)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise UserError(
        f"the emulator did not start in {START_TIMEOUT_S:g} s: see {log}.", code=ExitCode.INTERNAL
    )


def stop(directory: Path | None = None) -> None:
    """Ends the emulator and all its VMs; returns when it has gone. Raises UserError when none is running."""
    state = running(directory)
    control(state, "stop")
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(state.pid, os.WNOHANG)  # where it is a child of ours
        try:
            os.kill(state.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise UserError(
        f"the emulator (pid {state.pid}) did not end in {START_TIMEOUT_S:g} s.", code=ExitCode.INTERNAL
    )


@contextlib.contextmanager
def started(directory: Path, arguments: Sequence[str] = ()) -> Iterator[State]:
    """An emulator for as long as the block runs."""
    state = start(directory, arguments)
    try:
        yield state
    finally:
        with contextlib.suppress(UserError):
            stop(directory)
