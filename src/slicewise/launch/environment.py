"""What a process of a run sees of its place: slices, workers, and where the coordinator is.

The names are those that libtpu, JAX and Cloud TPU's own tools read; SLICEWISE_ ones are for ``slicewise train``.
"""

import socket
from collections.abc import Mapping, Sequence

from slicewise.launch.workers import Worker

JAX_PORT = 8482  # jax._src.clusters.cloud_tpu_cluster: coordinator_port
MEGASCALE_PORT = 8081  # as Ray, KubeRay's webhook and Levanter set it
# Left over from an earlier run these would point at slices that are gone: libtpu then waits for ever.
STALE = (
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    "MEGASCALE_PORT",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
)
# Of the cluster in which a shell runs that starts an emulated one: JAX would take the processes for its.
CLUSTERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_")


def without_cluster(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` without what says of another cluster who and where its processes are."""
    return {k: v for k, v in environment.items() if k not in STALE and not k.startswith(CLUSTERS)}


def place_environment(workers: Sequence[Worker], worker: Worker, port: int) -> dict[str, str]:
    """Environment of one worker's process. MEGASCALE_ variables are set for more than one slice only.

    ``port`` is of the JAX coordinator, at the first worker of slice 0.
    """
    ordered = sorted(workers, key=lambda w: (w.slice_index, w.worker_index))
    own_slice = [w for w in ordered if w.slice_index == worker.slice_index]
    num_slices = len(ordered) // len(own_slice)
    coordinator = ordered[0].internal_address
    process_id = worker.slice_index * len(own_slice) + worker.worker_index
    environment = {
        "TPU_WORKER_ID": str(worker.worker_index),
        "TPU_WORKER_HOSTNAMES": ",".join(w.internal_address for w in own_slice),
        "JAX_COORDINATOR_PORT": str(port),
        "SLICEWISE_COORDINATOR": f"{_bracketed(coordinator)}:{port}",
        "SLICEWISE_PROCESS_ID": str(process_id),
        "SLICEWISE_NUM_PROCESSES": str(len(ordered)),
        "SLICEWISE_NUM_SLICES": str(num_slices),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if num_slices > 1:
        environment |= {
            "MEGASCALE_COORDINATOR_ADDRESS": coordinator,
            "MEGASCALE_NUM_SLICES": str(num_slices),
            "MEGASCALE_SLICE_ID": str(worker.slice_index),
            "MEGASCALE_PORT": str(MEGASCALE_PORT),
        }
    return environment


def coordinator_port(workers: Sequence[Worker]) -> int:
    """JAX's own, or a free one where all workers are this machine, which may serve several runs at once."""
    address = min(workers, key=lambda w: (w.slice_index, w.worker_index)).internal_address
    if not (address.startswith("127.") or address in ("localhost", "::1")):
        return JAX_PORT
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
