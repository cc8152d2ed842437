"""What a process writes: whole lines for a terminal, its last lines, and the raw bytes in a log."""

import codecs
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from slicewise.train.progress import PLAIN_INTERVAL_S, metrics_text

TAIL_LINES = 20
# Gloo's own sentence, which no switch turns off; threads cut its pieces into other lines. The logs keep it.
_GLOO = re.compile(
    r"\[Gloo\] Rank \d*|\d* is connected to \d*| peer ranks\. ?|Expected number of connected peer ranks is : \d*"
)
MAX_LINE_CHARS = 32 * 1024  # a longer line is shown in pieces: memory stays bounded

# cursor movements and other controls of one process would spoil the lines of all others
_CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


class LineReader:
    """Bytes in, whole printable lines out. Invalid UTF-8 becomes U+FFFD; of "a\\rb" only b is shown."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def feed(self, data: bytes) -> list[str]:
        """Lines that ``data`` completes. Empty ``data`` means the end: what is left becomes a line."""
        text = self._partial + self._decoder.decode(data, final=not data)
        *lines, self._partial = text.split("\n")
        while len(self._partial) > MAX_LINE_CHARS:
            lines.append(self._partial[:MAX_LINE_CHARS])
            self._partial = self._partial[MAX_LINE_CHARS:]
        if not data and self._partial:
            lines.append(self._partial)
            self._partial = ""
        lines = [_printable(line) for line in lines]
        self.tail.extend(lines)
        return lines


def _printable(line: str) -> str:
    return _CONTROLS.sub("", line.rstrip("\r").rsplit("\r", 1)[-1])


def without_gloo(line: str) -> str | None:
    """What a program wrote of a line; None for one with nothing but Gloo's pieces."""
    if "[Gloo]" not in line and "connected peer ranks is" not in line:
        return line
    rest = _GLOO.sub("", line)
    return None if re.fullmatch(r"[\d\s.]*", rest) else rest


def without_chatter(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same output in whole lines, but for what no user has written."""
    partial = b""
    for chunk in chunks:
        *lines, partial = (partial + chunk).split(b"\n")
        written = (without_gloo(line.decode("utf-8", "surrogateescape")) for line in lines)
        shown = [line.encode("utf-8", "surrogateescape") + b"\n" for line in written if line is not None]
        if shown:
            yield b"".join(shown)
    if partial:
        yield partial


class EventLines:
    """The events of one process as lines for its log: steps only now and then, and the last."""

    def __init__(self) -> None:
        self._last_s = float("-inf")

    def line(self, event: Mapping[str, Any]) -> str | None:
        match event.get("event"):
            case "text":
                return str(event.get("text", ""))
            case "phase":
                return f"{event.get('name', '')} ..."
            case "error":
                return f"error: {event.get('message', '')}"
            case "step":
                return self._step(event)
            case _:
                return None

    def _step(self, event: Mapping[str, Any]) -> str | None:
        now_s = time.monotonic()
        if event.get("step") != event.get("steps") and now_s - self._last_s < PLAIN_INTERVAL_S:
            return None
        self._last_s = now_s
        return f"step {event.get('step')}/{event.get('steps')}  {metrics_text(event)}"


def _private(path: str, flags: int) -> int:
    """Programs print what they should not, such as their environment."""
    return os.open(path, flags, 0o600)


class Log:
    """A file, for its owner only, with the raw bytes of one process; None as path keeps nothing."""

    def __init__(self, path: Path | None):
        """Raises OSError when the file cannot be opened."""
        self.path = path
        self._file: BinaryIO | None = None
        if path:
            self._file = open(path, "wb", buffering=0, opener=_private)  # noqa: SIM115

    def write(self, data: bytes) -> str | None:
        """A reason when the log had to end here; the process it belongs to is not to die of a full disk."""
        if self._file is None:
            return None
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file.fileno(), view) :]
        except OSError as error:
            self.close()
            return f"{self.path} is incomplete from here on: {error.strerror}"
        return None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
