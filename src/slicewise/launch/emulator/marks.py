"""Processes of emulated VMs, found by a mark in their environment: no fork, new session or lost parent hides one.

Needs /proc. Where there is none, only the process groups that the emulator started itself can be reached.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

MARK = "SLICEWISE_VM"
SCANS = 20  # a process may fork while others are being killed
_PROC = Path("/proc")
_VALUE = re.compile(rb"(?:^|\0)%s=([^\0]*)" % MARK.encode())

# Waits for the end of a pipe that only the emulator holds, so that the kernel tells it of every death.
_GUARDIAN = """
import os, signal, sys, time
os.read(0, 1)
mark = b"{mark}=" + sys.argv[1].encode()
quiet = 0  # scans in a row that found none: a process that is just starting has no mark yet
for _ in range({scans}):
    quiet += 1
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{{pid}}/environ", "rb") as file:
                if any(v.startswith(mark) for v in file.read().split(bytes(1))):
                    os.kill(int(pid), signal.SIGKILL)
                    quiet = 0
        except OSError:
            pass
    if quiet == 3:
        break
    time.sleep(0.05)
if sys.argv[2]:
    os.system(sys.argv[2])
"""


def marked(prefixes: Collection[str]) -> list[int]:
    """Ids of processes whose mark starts with one of ``prefixes``; the dead that nobody waited for have none."""
    wanted = tuple(prefix.encode() for prefix in prefixes)
    if not wanted or not _PROC.is_dir():
        return []
    found = []
    for pid in filter(str.isdigit, os.listdir(_PROC)):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if any(value.startswith(wanted) for value in _VALUE.findall(file.read())):
                found.append(int(pid))
    return found


def send(prefixes: Collection[str], number: signal.Signals) -> None:
    """A signal to every process of these marks. For SIGKILL it looks again until it finds none that is new."""
    sent: set[int] = set()
    for _ in range(SCANS if number == signal.SIGKILL else 1):
        found = set(marked(prefixes)) - sent
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if not found:
            break
        sent |= found


class Guardian:
    """A process that kills every process with the mark once this one is gone, whatever ended it, and then runs
    the shell command ``cleanup``."""

    def __init__(self, prefix: str, cleanup: str = ""):
        script = _GUARDIAN.format(mark=MARK, scans=SCANS)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", script, prefix, cleanup],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of reach of a Ctrl-C or a kill of the emulator's group
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
