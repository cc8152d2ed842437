"""Profiles in the form that xprof reads: an XSpace protocol buffer with one plane.

Written by hand, because no small package has the message: numbers below are the fields of xplane.proto.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slicewise.report.timeline import Slice

VARINT, BYTES = 0, 2  # wire types


def encode(plane: str, tracks: Sequence[str], slices: Sequence["Slice"]) -> bytes:
    """One plane with a line for each of ``tracks``; what a slice says of itself are the stats of its event."""
    events = {name: k for k, name in enumerate(dict.fromkeys(s.name for s in slices), 1)}
    stats = {name: k for k, name in enumerate(dict.fromkeys(k for s in slices for k in s.details), 1)}
    body = _number(1, 1) + _text(2, plane)
    for row, track in enumerate(tracks, 1):
        mine = sorted((s for s in slices if s.track == track), key=lambda s: (s.start_ns, -s.end_ns))
        line = _number(1, row) + _text(2, track) + _number(10, row)
        line += b"".join(_message(4, _event(s, events, stats)) for s in mine)
        body += _message(3, line)
    body += b"".join(_entry(4, number, name) for name, number in events.items())
    body += b"".join(_entry(5, number, name) for name, number in stats.items())
    return _message(1, body)


def _event(s: "Slice", events: Mapping[str, int], stats: Mapping[str, int]) -> bytes:
    """XEvent: metadata 1, offset_ps 2, duration_ps 3, stats 4."""
    data = _number(1, events[s.name]) + _number(2, 1000 * s.start_ns)
    data += _number(3, 1000 * (s.end_ns - s.start_ns))
    return data + b"".join(_message(4, _stat(stats[name], value)) for name, value in s.details.items())


def _stat(name: int, value: str | float) -> bytes:
    """XStat: metadata 1, uint64 3 or str 5."""
    return _number(1, name) + (_text(5, value) if isinstance(value, str) else _number(3, round(value)))


def _entry(field: int, number: int, name: str) -> bytes:
    """An entry of a map from ids to XEventMetadata or XStatMetadata: id 1, name 2."""
    return _message(field, _number(1, number) + _message(2, _number(1, number) + _text(2, name)))


def _varint(value: int) -> bytes:
    assert value >= 0, value
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | VARINT) + _varint(value)


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | BYTES) + _varint(len(data)) + data


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode())
