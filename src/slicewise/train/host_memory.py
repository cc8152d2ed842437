"""Whether a run fits the memory of the machine whose CPU devices it uses: else the kernel ends it without a word.

A device of another kind has memory of its own, and says itself what does not fit.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import jax

from slicewise.config import RunConfig
from slicewise.costs.units import quantity
from slicewise.data.loader import PREFETCHED_BATCHES
from slicewise.errors import UserError
from slicewise.parallel import cluster
from slicewise.train.step import TrainStep

_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # a limit above it is none


def check(config: RunConfig, step: TrainStep) -> None:
    """Raises UserError where the batches held at once, or the training state, alone exceed this machine's memory.

    Nothing is compiled or allocated before.
    """
    if not _is_host(step):
        return
    rows, length = config.data.global_batch_size, config.data.sequence_length
    limit = limit_bytes()
    ahead = PREFETCHED_BATCHES * len(step.abstract_batch) * 4 * rows * length
    wanted = _held_bytes(step.abstract_batch, step) + ahead * _local_devices(step) // step.mesh.devices.size
    if wanted > limit:
        raise UserError(
            f"global_batch_size x sequence_length = {rows:,} x {length:,} tokens do not fit: the batches held at once"
            f" take {quantity(wanted, 'B')}, this machine has {quantity(limit, 'B')} of memory; lower one of them."
        )
    if (wanted := _held_bytes(step.abstract_state, step)) > limit:
        raise UserError(
            f"{step.spec.name} does not fit: its weights and optimiser state take {quantity(wanted, 'B')} on"
            f" {_devices(step)}, this machine has {quantity(limit, 'B')} of memory; choose a smaller model"
            f" {_or_more_sharding(step)}."
        )


def check_compiled(config: RunConfig, step: TrainStep, update: Any) -> list[str]:
    """Raises UserError where the compiled ``update`` needs more memory than this machine has; else a line where it
    needs more than is free now."""
    analyse = getattr(update, "memory_analysis", None)  # what wraps a program has none
    stats = analyse() if analyse and _is_host(step) else None
    if stats is None:
        return []
    state = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    wanted = (state + stats.temp_size_in_bytes) * _local_devices(step)
    what = f"a step takes {quantity(wanted, 'B')} on {_devices(step)}"
    if wanted > (limit := limit_bytes()):
        raise UserError(
            f"{what}, this machine has {quantity(limit, 'B')} of memory; lower global_batch_size (now"
            f" {config.data.global_batch_size}) or sequence_length (now {config.data.sequence_length}), raise"
            f" gradient_accumulation_steps (now {config.optimizer.gradient_accumulation_steps}), or choose a smaller"
            f" model {_or_more_sharding(step)}."
        )
    if wanted > (free := _meminfo_bytes("MemAvailable", limit)):
        return [f"warning: {what}, of which {quantity(free, 'B')} are free: the kernel may end the run."]
    return []


def limit_bytes() -> int:
    """Most that the processes of this machine, or of this container, can have: memory and swap."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = _meminfo_bytes("MemTotal", found) + _meminfo_bytes("SwapTotal", 0)
    return min([found, *_container_limits_bytes()])


def _meminfo_bytes(name: str, default: int) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return default
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), default)


def _container_limits_bytes() -> list[int]:
    """Of the control groups of this process and those above, in either version of their file system."""
    try:
        own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    limits = []
    for _, controllers, path in own:
        if controllers not in ("", "memory"):
            continue
        root, name = (_GROUPS / "memory", "memory.limit_in_bytes") if controllers else (_GROUPS, "memory.max")
        folder = root / path.lstrip("/")
        for parent in (folder, *folder.parents):
            if parent == root or root in parent.parents:
                with contextlib.suppress(OSError, ValueError):  # absent, or "max"
                    limits.append(int((parent / name).read_text()))
    return [limit for limit in limits if limit < _UNLIMITED]


def _is_host(step: TrainStep) -> bool:
    return step.mesh.devices.flat[0].platform == "cpu"


def _held_bytes(abstract: Any, step: TrainStep) -> int:
    """Of arrays as the devices of this machine hold them, replicas included."""
    return _local_devices(step) * sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(abstract)
    )


def _local_devices(step: TrainStep) -> int:
    """Of the mesh, on this machine: all of an emulated cluster."""
    if cluster.is_on_one_machine():
        return step.mesh.devices.size
    return sum(device.process_index == jax.process_index() for device in step.mesh.devices.flat)


def _devices(step: TrainStep) -> str:
    count = _local_devices(step)
    return f"{count} devices" if count > 1 else "one device"


def _or_more_sharding(step: TrainStep) -> str:
    replicas = step.mesh.shape["data"]
    return "or shard it over fsdp instead of data" if replicas > 1 else "or more machines"
