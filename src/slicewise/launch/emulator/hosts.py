"""Which Host headers a server on loopback answers: a page in a browser that resolves its own name to this
machine must not reach it."""

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
METADATA = LOOPBACK | {"metadata.google.internal", "metadata", "169.254.169.254"}


def is_ours(header: str, names: frozenset[str]) -> bool:
    """Whether a Host header, with or without a port, is one of ``names``."""
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdecimal() else header).lower() in names
