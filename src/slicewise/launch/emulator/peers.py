"""Whose program is at the other end of a connection on loopback: who may create VMs runs commands as us."""

import os
from pathlib import Path

from slicewise.launch.emulator.records import Code, Refused

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_READING = ("Get", "List")


def owner(client_port: int, server_port: int) -> int | None:
    """User id of the socket at ``client_port`` that is connected to ``server_port``; None when the system does
    not tell."""
    here, there = f":{client_port:04X}", f":{server_port:04X}"
    for table in _TABLES:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()  # number, local address, remote address, state, queues, timer, retries, uid
            if fields[1].endswith(here) and fields[2].endswith(there):
                return int(fields[7])
    return None


def check(method: str, client_port: int, server_port: int) -> None:
    """Raises Refused when a user of this machine other than ours and root asks for a change."""
    if method.startswith(_READING):
        return
    if owner(client_port, server_port) not in (None, 0, os.geteuid()):
        raise Refused(Code.PERMISSION_DENIED, "The emulator belongs to another user of this machine.")
