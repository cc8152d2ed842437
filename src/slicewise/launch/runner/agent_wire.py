"""How the runner and its agents speak: frames, and JSON without the package json.

That imports re, and signal imports enum; with what these import they are a third of a small process and of its start.
Sent to workers with the agent: nothing but the standard library.
"""

import struct

MAGIC = b"slicewise-agent-1\n"  # ends whatever a login shell has printed
HEADER = struct.Struct(">cI")
STAMP = struct.Struct(">d")


class suppress:
    """As contextlib has it, without what that imports."""

    def __init__(self, *kinds):
        self.kinds = kinds

    def __enter__(self):
        pass

    def __exit__(self, kind, *rest):
        return kind is not None and issubclass(kind, self.kinds)


class _Decoder:
    """What the scanner of JSON asks of one."""

    strict, object_hook, object_pairs_hook = True, None, None
    parse_float, parse_int, parse_constant = float, int, float


def _coders():
    """dumps and loads; those of the package json where they cannot be had without it."""
    try:
        import _json  # what json is made of

        text = _json.encode_basestring_ascii
        encode = _json.make_encoder(None, repr, text, None, ": ", ", ", False, False, False)
        scan = _json.make_scanner(_Decoder)  # type: ignore[arg-type]

        def dumps(value):
            return "".join(encode(value, 0))

        def loads(text):
            try:
                value, end = scan(text, 0)
            except StopIteration:
                end = -1
            if end != len(text):
                raise ValueError("not JSON: " + text[:200])
            return value

        probe = {"a": [1, 2.5, "\u00e9", None, True]}
        assert loads(dumps(probe)) == probe
        return dumps, loads
    except (ImportError, AttributeError, TypeError, AssertionError, ValueError):
        import json

        return json.dumps, json.loads


dumps, loads = _coders()


def frame(kind, payload=b""):
    """A frame; a payload that is not bytes is sent as JSON."""
    data = payload if isinstance(payload, bytes) else dumps(payload).encode()
    return HEADER.pack(kind, len(data)) + data


class Frames:
    """Bytes in, whole frames out, as (kind, payload)."""

    def __init__(self):
        self._data = bytearray()

    def feed(self, data):
        self._data += data
        found, at = [], 0
        while len(self._data) - at >= HEADER.size:
            kind, size = HEADER.unpack_from(self._data, at)
            if len(self._data) - at < HEADER.size + size:
                break
            found.append((kind, bytes(self._data[at + HEADER.size : at + HEADER.size + size])))
            at += HEADER.size + size
        del self._data[:at]
        return found
