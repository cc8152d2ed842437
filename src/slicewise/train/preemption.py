"""The platform is about to take this machine: heard of, passed on to the other processes, and bounded in time.

It says so by SIGTERM, and on Google Cloud in the metadata server. A thread listens, so that it also answers while the
main thread is in a compiler or a collective. This module does not import JAX: it listens before that does.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Self

from slicewise.errors import ExitCode

if TYPE_CHECKING:
    from slicewise.train.agreement import Agreement, Point
    from slicewise.train.progress import Sink

METADATA_INTERVAL_S = 2.0  # a spot VM of Google Cloud has 30 s from the notice
METADATA_TIMEOUT_S = 1.0
NOT_SAVED = 128 + signal.SIGTERM  # exit code of one that was asked to stop, and has not saved
_END, _LOOK = 0, 255  # no numbers of signals
_PRODUCT = Path("/sys/class/dmi/id/product_name")  # "Google Compute Engine" on its machines


class Preemption:
    """Listens from entering to leaving it, which is done in the main thread.

    Asked to stop before ``attach`` the process leaves at once, with PREEMPTED: nothing is lost that was not
    lost before. Afterwards all processes agree on a step, at which the loop saves and leaves. A second SIGTERM, or the
    end of the grace period, ends the process at once with NOT_SAVED.
    """

    def __init__(self) -> None:
        self._agreement: Agreement | None = None
        self._report: Sink | None = None
        self._grace_s = 0.0
        self._deadline_s: float | None = None
        self._signals = 0
        self._noticed = False
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) == signal.SIG_IGN:
            return self
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # The interpreter's own handler runs between two bytecodes only; the byte is written at once.
        handler = signal.signal(signal.SIGTERM, lambda *_: None)
        wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

        def restore() -> None:
            signal.set_wakeup_fd(wakeup)
            signal.signal(signal.SIGTERM, handler)

        self._restore = restore
        self._thread = threading.Thread(target=self._listen, name="preemption", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attach(self, agreement: "Agreement", grace_s: float, report: "Sink") -> None:
        """From now on there is a loop that can save: within ``grace_s`` of the notice."""
        self._grace_s, self._report, self._agreement = grace_s, report, agreement

    def heard(self, point: "Point") -> None:
        """All processes agreed on a point. Where none has begun a step there is nothing to save, or to wait for."""
        if point.what != "stop":
            return
        if point.begun == 0:
            self._leave_unbegun(point.why)
        self._set_deadline()

    def close(self) -> None:
        """SIGTERM does again what it did before."""
        if self._restore is None:
            return
        self._restore()
        self._restore = None
        self._wake(_END)
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _listen(self) -> None:
        metadata = metadata_server()
        while True:
            server = None if self._noticed else metadata
            waits_s = [METADATA_INTERVAL_S] if server else []
            if self._deadline_s is not None:
                waits_s.append(max(0.0, self._deadline_s - time.monotonic()))
            for number in self._bytes(min(waits_s, default=None)):
                if number == _END:
                    return
                if number == signal.SIGTERM:
                    self._on_signal()
            if server and (why := notice_at(server)):
                self._notice(why)
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                self._say(
                    f"could not save within {self._grace_s:g} s: stops, and the newest checkpoint counts"
                )
                self._leave(NOT_SAVED)

    def _bytes(self, timeout_s: float | None) -> bytes:
        """Numbers of the signals that came, and what ``_wake`` wrote."""
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        return os.read(self._read, 64) if ready else b""

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            self._leave(NOT_SAVED)
        self._notice("SIGTERM")

    def _notice(self, why: str) -> None:
        if self._noticed:
            return
        self._noticed = True
        if self._agreement is None:
            self._leave_unbegun(why)
        else:
            self._say(f"{why}: saves and stops, within {self._grace_s:g} s")
            self._set_deadline()
            self._agreement.request("stop", why)

    def _set_deadline(self) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._grace_s
            self._wake(_LOOK)

    def _wake(self, what: int) -> None:
        if self._restore is not None or what == _END:
            os.write(self._write, bytes([what]))

    def _say(self, text: str) -> None:
        if self._report:
            self._report({"event": "text", "text": text})

    def _leave_unbegun(self, why: str) -> None:
        if os.environ.get("SLICEWISE_PROCESS_ID", "0") == "0":  # once, where others hear of it too
            text = f"{why} before the first step: stops, with nothing to save"
            self._say(text) if self._report else print(text, file=sys.stderr)
        self._leave(ExitCode.PREEMPTED)

    def _leave(self, code: int) -> None:
        """Ends the process from any thread, whatever the main one does."""
        if self._report:
            self._report.close()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def metadata_server() -> str | None:
    """Its address, on a machine of Google Cloud (or of the emulator, which names another one)."""
    named = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_IP")
    if named:
        return named
    with contextlib.suppress(OSError):
        if _PRODUCT.read_text().startswith("Google"):
            return "169.254.169.254"
    return None


def notice_at(server: str) -> str:
    """What the metadata server announces; empty for nothing. A migration of the machine is no end of it."""
    if _metadata(server, "preempted") == "TRUE":
        return "the platform preempts this machine"
    event = _metadata(server, "maintenance-event")
    return f"maintenance of this machine ({event})" if event.startswith("TERMINATE") else ""


def _metadata(server: str, name: str) -> str:
    """Empty when it does not answer: that is no notice."""
    import urllib.request

    url = f"http://{server}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine's own link
    try:
        with opener.open(request, timeout=METADATA_TIMEOUT_S) as response:
            return response.read(4096).decode(errors="replace").strip()
    except OSError:  # HTTP errors are among them
        return ""
