"""Where each array of a run's state lies on slices that are not there: what a restore has to bring to which host."""

import json
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slicewise.compile import compiler
from slicewise.compile.compiler import CompileFailed, Request
from slicewise.errors import ExitCode, UserError
from slicewise.temporary import temporary_folder


@dataclass(frozen=True)
class HeldArray:
    """One array of the state and its division over the mesh."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]  # of each dim, the mesh axes that divide it
    part: tuple[int, ...]  # shape of what a device holds
    copies: int  # devices that hold the same part
    on_host: bool  # in the memory of the host, not of the device
    bytes_: int
    part_bytes: int
    host_bytes: int  # of the host that needs most: its devices' parts, each once


@dataclass(frozen=True)
class StateLayout:
    """The state that ``request``'s run restores, largest arrays first."""

    request: Request
    arrays: tuple[HeldArray, ...]
    hosts: int

    @property
    def total_bytes(self) -> int:
        """Of a checkpoint: every array once."""
        return sum(a.bytes_ for a in self.arrays)

    @property
    def device_bytes(self) -> int:
        return sum(a.part_bytes for a in self.arrays)

    @property
    def host_bytes(self) -> int:
        """What the host that needs most has to read."""
        return sum(a.host_bytes for a in self.arrays)


def state_layout(request: Request, *, timeout_s: float = 600.0) -> StateLayout:
    """Asks a process that knows the absent devices; nothing is compiled. Raises UserError as compile_request does."""
    compiler.check(request)
    with temporary_folder("slicewise-restore-") as work:
        log = work / "compiler.log"
        process = compiler.start(request, work, log)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired as e:
            said = f"the process that knows the devices was stopped: it took longer than {timeout_s:g} s."
            raise CompileFailed(said, code=ExitCode.INTERNAL) from e
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        outcome = _read(work / "outcome.json", log)
        if outcome["error"]:
            raise UserError(outcome["error"])
        found = _read(work / "arrays.json", log)
    arrays = [HeldArray(**{k: _tuples(v) for k, v in a.items()}) for a in found["arrays"]]
    return StateLayout(request, tuple(sorted(arrays, key=lambda a: (-a.bytes_, a.name))), found["hosts"])


def _read(path: Path, log: Path) -> dict[str, Any]:
    if not path.exists():
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise CompileFailed(f"the process that knows the devices crashed: {last}", code=ExitCode.INTERNAL)
    return json.loads(path.read_text())


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
