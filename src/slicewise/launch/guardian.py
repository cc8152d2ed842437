"""A process group that dies with this process, whatever ends it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

# It leads the group and waits for the end of a pipe whose other end only this process holds, so the kernel
# tells it of every death, SIGKILL included. Unlike PR_SET_PDEATHSIG this also ends grandchildren, does not
# depend on the thread that started a process, and leaves no moment between fork and exec uncovered: a
# child that has not reached exec holds a copy of the pipe, and is in the group when it lets go of it.
_GUARDIAN = "import os, signal\nos.read(0, 1)\nos.killpg(0, signal.SIGKILL)"
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_INTERPRETER = (sys.executable, "-I", "-S", "-c")  # nothing of site-packages: it starts in 10 ms


class Guardian:
    """Leads the process group ``group_id``; other processes join with ``Popen(process_group=group_id)``.

    A process that starts a session of its own leaves the group and is out of reach.
    """

    def __init__(self) -> None:
        # a blocked signal stays blocked over exec: a signal to the group cannot end its guardian
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED)
        try:
            self._process = subprocess.Popen(
                [*_INTERPRETER, _GUARDIAN],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._gone = threading.Event()

    @property
    def group_id(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send a signal to every process of the group. Safe in a signal handler."""
        if not self._gone.is_set():  # until the guardian is reaped its pid cannot name another group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group_id, number)

    def close(self, timeout_s: float) -> None:
        """End every process of the group."""
        self.signal(signal.SIGKILL)
        self._gone.set()
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
