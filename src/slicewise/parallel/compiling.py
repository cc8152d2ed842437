"""JAX's cache of compiled programs: what is damaged is made again, and processes on one machine share it.

The CPU processes of a cluster there compile a program once, and at the next start not at all. JAX alone would
have every process but the first compile everything at every start: only process 0 writes to the cache on disk, and on
CPUs the key of a program holds the number of the process that asks.
"""

import base64
import functools
import threading
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src import cache_key, compilation_cache

from slicewise.parallel import cluster

TIMEOUT_S = 86400  # of a compilation; who waits for a process that is dead is ended by the heartbeats
_MACHINE = "_hash_accelerator_config"  # what JAX's keys hold of the devices
_READ = "get_executable_and_time"  # an entry of JAX's cache
_PREFIX = "slicewise/compiling"
_lowering = threading.Lock()


def share_cache() -> None:
    """Every process of such a cluster looks where process 0 keeps the programs that all of them run.

    The keys of process 0 stay JAX's own. Beside the number of the process they name the instructions of the CPU,
    which are the same for all on one machine.
    """
    client = cluster.coordination_client()
    if client is None or not cluster.is_on_one_machine() or jax.devices()[0].platform != "cpu":
        return
    if not hasattr(cache_key, _MACHINE):  # no public part of JAX: without it each process compiles for itself
        return
    own, key = getattr(cache_key, _MACHINE), f"{_PREFIX}/machine"
    if jax.process_index() == 0:
        hashed: list[bytes] = []
        own(SimpleNamespace(update=hashed.append), np.array(jax.devices()))
        client.key_value_set(key, base64.b64encode(b"".join(hashed)).decode())
        return
    first = base64.b64decode(client.blocking_key_value_get(key, 1000 * cluster.INITIALIZATION_TIMEOUT_S))

    def shared(hash_obj: Any, devices: np.ndarray) -> None:
        if len(_processes(devices.flat)) > 1:
            hash_obj.update(first)
        else:
            own(hash_obj, devices)

    setattr(cache_key, _MACHINE, shared)


def lower(function: Any, *arguments: Any) -> jax.stages.Lowered:
    """``function.lower(*arguments)`` while no other thread lowers.

    Two that trace at once each make what both call, such as jnp.where, and whose is called where differs from start to
    start: programs that are the same, but not for the cache. The order in which a run lowers them counts as well.
    """
    with _lowering:
        return function.lower(*arguments)


def compile_in_turn(
    name: str, lowered: jax.stages.Lowered, devices: Iterable[jax.Device]
) -> jax.stages.Compiled:
    """``lowered.compile()``; where the cache is shared, by the first process of ``devices`` before the others.

    Every process of ``devices`` calls it, with a ``name`` that no other program of the run has.
    """
    client, processes = cluster.coordination_client(), _processes(devices)
    if client is None or len(processes) == 1 or not cluster.is_on_one_machine():
        return lowered.compile()
    key = f"{_PREFIX}/{name}"
    if jax.process_index() > min(processes):
        client.blocking_key_value_get(key, 1000 * TIMEOUT_S)
        return lowered.compile()
    try:
        return lowered.compile()
    finally:  # when it fails, the others find out why for themselves
        client.key_value_set(key, "done", allow_overwrite=True)


def _processes(devices: Iterable[jax.Device]) -> set[int]:
    return {device.process_index for device in devices}


def mend_cache() -> None:
    """An entry of the cache that cannot be read is removed: its program is compiled again, and kept.

    JAX alone warns of it at each start, and never writes over it.
    """
    read = getattr(compilation_cache, _READ, None)
    if read is None or hasattr(read, "__wrapped__"):  # no public part of JAX; done already
        return

    @functools.wraps(read)
    def mended(key: str, options: Any, backend: Any, *more: Any, **named: Any) -> tuple[Any, int | None]:
        try:
            return read(key, options, backend, *more, **named)
        except OSError:  # of the disk, not of what is on it
            raise
        except Exception:  # each compression and runtime has its own
            cache: Any = compilation_cache._get_cache(backend)
            (cache.path / f"{key}-cache").unlink(missing_ok=True)
            return None, None

    setattr(compilation_cache, _READ, mended)
