"""Joining the cluster: which processes exist, which devices they hold, which slice each device belongs to."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import distributed

from slicewise.errors import UserError

HEARTBEAT_TIMEOUT_S = 20
SHUTDOWN_TIMEOUT_S = 30
INITIALIZATION_TIMEOUT_S = 300


def initialize() -> None:
    """Connects this process to the others of its job; a lone process stays alone.

    The emulated cluster says who is who by SLICEWISE_ variables. Elsewhere JAX detects the cluster itself
    (Cloud TPU, GKE, Slurm, Open MPI).
    """
    # JAX would swallow SIGTERM to announce a preemption, also a second one and while it compiles: train.preemption
    jax.config.update("jax_enable_preemption_service", False)
    if coordinator := os.environ.get("SLICEWISE_COORDINATOR"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            coordinator,
            num_processes=int(os.environ["SLICEWISE_NUM_PROCESSES"]),
            process_id=int(os.environ["SLICEWISE_PROCESS_ID"]),
            initialization_timeout=INITIALIZATION_TIMEOUT_S,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        )
        return
    try:
        jax.distributed.initialize(
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S, shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S
        )
    except ValueError as e:
        if "coordinator_address" not in str(e):  # anything but "no cluster found"
            raise


def wait_for_all(point: str) -> None:
    """Returns when every process got here. Before the first collective: peers that wait in it give up after 30 s."""
    if jax.process_count() > 1:
        # JAX's own barrier for users is a collective of the devices, which is what has to wait here.
        client = distributed.global_state.client
        assert client is not None
        client.wait_at_barrier(f"slicewise_{point}", 1000 * INITIALIZATION_TIMEOUT_S)


def coordination_client() -> Any:
    """The client of the coordination service, with its key-value store; None for a lone process."""
    return distributed.global_state.client


def is_on_one_machine() -> bool:
    """Whether all processes of an emulated cluster share this machine."""
    return os.environ.get("SLICEWISE_COORDINATOR", "").startswith("127.")


def emulated_slices() -> int | None:
    """How many slices the launcher says there are; CPU devices do not know theirs."""
    text = os.environ.get("SLICEWISE_NUM_SLICES")
    return int(text) if text else None


@dataclass(frozen=True)
class SliceDevices:
    """The devices of the cluster as an object array [slices, devices per slice]."""

    array: np.ndarray

    @property
    def num_slices(self) -> int:
        return self.array.shape[0]

    @property
    def devices_per_slice(self) -> int:
        return self.array.shape[1]


def by_slice(
    devices: Sequence[jax.Device], *, emulated: int | None = None, expected: int | None = None
) -> SliceDevices:
    """Groups ``devices`` by slice: the device's own slice_index, or equal ranges of processes when emulated.

    ``expected`` is the number of slices that should be there. Raises UserError for slices that differ in size,
    an absent slice, or another number of slices than expected.
    """
    processes = 1 + max(d.process_index for d in devices)
    groups: dict[int, list[jax.Device]] = {}
    for device in sorted(devices, key=lambda d: (d.process_index, d.id)):
        if emulated is None:
            index = getattr(device, "slice_index", None) or 0
        else:
            index = device.process_index * emulated // processes
        groups.setdefault(index, []).append(device)
    counts = {index: len(group) for index, group in sorted(groups.items())}
    shown = ", ".join(f"slice {index}: {count}" for index, count in counts.items())
    wanted = expected or emulated or 1 + max(counts)
    if sorted(counts) != list(range(wanted)):
        raise UserError(
            f"expected slices 0 to {wanted - 1}, found {shown} (devices); a slice is absent or extra."
        )
    if len(set(counts.values())) > 1:
        raise UserError(f"slices differ in size ({shown} devices); all slices of a run must be of one type.")
    array = np.empty((len(counts), counts[0]), dtype=object)
    for index, group in groups.items():
        array[index] = group
    return SliceDevices(array)


def found() -> SliceDevices:
    """The devices of the running job, by slice."""
    expected = os.environ.get("MEGASCALE_NUM_SLICES")
    emulated = emulated_slices() if jax.devices()[0].platform == "cpu" else None  # others know their slice
    return by_slice(jax.devices(), emulated=emulated, expected=int(expected) if expected else None)
