"""Where the hosts of a run are: an inventory file, a queued resource, or one of the emulator.

user = "me"                              # default: the user of this machine
port = 22
identity_file = "~/.ssh/id_ed25519"      # default: what ssh itself would use

[[slices]]
hosts = ["10.0.0.1", "10.0.0.2:2222"]    # workers 0 and 1 of slice 0

[[slices]]
hosts = [{host = "10.0.1.1", address = "192.168.0.1"}, {host = "10.0.1.2"}]
"""

import getpass
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from slicewise.errors import ExitCode, UserError, did_you_mean

MAX_SLICES = 256  # of one queued resource; an inventory is held to the same
_SCHEMES = ("emulator", "qr")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")


@dataclass(frozen=True)
class Worker:
    """One host of a slice, and how to reach it. Slices and their workers are numbered from 0 without gaps.

    ``known_host_key`` is the only key the host may show, as ``ssh-ed25519 AAAA...``; None accepts a new one.
    ``address`` is where the other workers reach it, when that differs from ``host``.
    """

    slice_index: int
    worker_index: int
    host: str
    port: int
    user: str
    identity_file: str | None
    known_host_key: str | None
    address: str | None = None

    @property
    def name(self) -> str:
        return f"slice {self.slice_index} worker {self.worker_index}"

    @property
    def internal_address(self) -> str:
        return self.address or self.host


def _split_port(value: Any) -> Any:
    """``"host:port"`` or ``"[ipv6]:port"`` as a table; anything else as it is."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\[([^]]+)\](?::(\d{1,5}))?|([^:]*):(\d{1,5})", value)
    if not match:
        return {"host": value}
    host, port = match[1] or match[3], match[2] or match[4]
    return {"host": host, "port": int(port)} if port else {"host": host}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Host(_Strict):
    host: str = Field(pattern=f"^(?:{_HOST.pattern})$")
    address: str | None = Field(None, pattern=f"^(?:{_HOST.pattern})$")
    port: int | None = Field(None, ge=1, le=65535)
    user: str | None = Field(None, min_length=1)
    identity_file: str | None = None
    host_key: str | None = Field(None, pattern=r"^[a-z0-9@.-]+ [A-Za-z0-9+/]+=*( .*)?$")


class _Slice(_Strict):
    hosts: list[Annotated[_Host, BeforeValidator(_split_port)]] = Field(min_length=1)


class _Inventory(_Strict):
    port: int = Field(22, ge=1, le=65535)
    user: str | None = Field(None, min_length=1)
    identity_file: str | None = None
    slices: list[_Slice] = Field(min_length=1, max_length=MAX_SLICES)


def workers_of(target: str) -> list[Worker]:
    """The workers of ``--on TARGET``, by slice and worker: an inventory file, ``emulator:NAME`` or ``qr:NAME``.

    Raises UserError when there is no such target, or it is not ready.
    """
    scheme, colon, name = target.partition(":")
    if colon and scheme in _SCHEMES:
        if not name:
            raise UserError(f"--on {target!r} has no name: expected {scheme}:NAME_OF_A_QUEUED_RESOURCE.")
        workers = _resolver(scheme)(name)
    else:
        workers = read_inventory(Path(target))
    check_shape(workers, target)
    return workers


def _resolver(scheme: str) -> Callable[[str], list[Worker]]:
    if scheme == "emulator":
        from slicewise.launch.emulator import workers_of
    else:
        from slicewise.launch.queued_resources import workers_of
    return workers_of


def check_shape(workers: list[Worker], target: str) -> None:
    """Raises UserError unless slices are 0 to n-1, all of one size, and no place is taken twice."""
    sizes: dict[int, list[int]] = {}
    for worker in workers:
        sizes.setdefault(worker.slice_index, []).append(worker.worker_index)
    if not workers:
        raise UserError(f"{target} has no workers.")
    if sorted(sizes) != list(range(len(sizes))):
        raise UserError(f"{target}: slices are numbered {sorted(sizes)}, expected 0 to {len(sizes) - 1}.")
    for index, members in sorted(sizes.items()):
        if sorted(members) != list(range(len(sizes[0]))):
            raise UserError(
                f"{target}: slice {index} has workers {sorted(members)}, expected 0 to {len(sizes[0]) - 1} as in "
                "slice 0; all slices of a run must be of one size."
            )


def read_inventory(path: Path) -> list[Worker]:
    """Workers of an inventory file. Raises UserError."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(
            f"no inventory file {str(path)!r}. --on takes such a file, emulator:NAME or qr:NAME."
            + did_you_mean(str(path).partition(":")[0], _SCHEMES)
        ) from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.", code=ExitCode.INTERNAL) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    try:
        inventory = _Inventory.model_validate(table)
    except ValidationError as error:
        raise UserError(f"{path}: {_first_problem(error)}") from None
    return [
        _worker(inventory, host, slice_index, worker_index)
        for slice_index, part in enumerate(inventory.slices)
        for worker_index, host in enumerate(part.hosts)
    ]


def _worker(inventory: _Inventory, host: _Host, slice_index: int, worker_index: int) -> Worker:
    identity = host.identity_file or inventory.identity_file
    return Worker(
        slice_index,
        worker_index,
        host.host,
        host.port or inventory.port,
        host.user or inventory.user or getpass.getuser(),
        str(Path(identity).expanduser()) if identity else None,
        host.host_key,
        host.address,
    )


def _first_problem(error: ValidationError) -> str:
    problems = error.errors()
    problem: Mapping[str, Any] = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        tables: dict[int, type[_Strict]] = {1: _Inventory, 3: _Slice}
        known = tables.get(len(problem["loc"]), _Host).model_fields
        near = did_you_mean(str(problem["loc"][-1]), known)
        return f"unknown key {place}.{near} Known here: {', '.join(known)}."
    if problem["type"] == "missing":
        return f'{place} is missing. An inventory has [[slices]], each with hosts = ["HOST", ...].'
    return f"{place} = {problem['input']!r}: {problem['msg']}."
