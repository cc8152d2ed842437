"""What an agent does for one attempt of its worker: the trainer with its environment, and its report."""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from slicewise.errors import ExitCode, UserError
from slicewise.launch.environment import STALE, place_environment
from slicewise.launch.job_folder import Claim, JobFolder, JobSpec
from slicewise.launch.leader import Ended
from slicewise.launch.place import Place
from slicewise.launch.storage import StorageError
from slicewise.launch.supervisor import Supervised
from slicewise.launch.targets.local import THREADS_PER_DEVICE, xla_flags
from slicewise.launch.trainer import Trainer
from slicewise.launch.worker_files import WorkerFiles
from slicewise.launch.workers import Worker
from slicewise.train.elastic import ALL_SLICES
from slicewise.train.goodput_log import LaunchLog

POLL_S = 0.5  # how often an agent looks into a folder on disk
BUCKET_POLL_S = 2.0  # and in a bucket


def say(text: str) -> None:
    """A line of the agent's own log, which the platform keeps."""
    print(text, flush=True)


def poll_interval_s(job: JobFolder) -> float:
    return BUCKET_POLL_S if "://" in job.root else POLL_S


def name_of(spec: JobSpec, place: Place) -> str:
    return spec.place(place.slice_id * spec.hosts_per_slice + place.host)


def gang_environment(spec: JobSpec, place: Place, addresses: Mapping[str, str], port: int) -> dict[str, str]:
    """For a gang that agents form: who is who, and nothing that is left of an earlier gang.

    Slices that ``addresses`` has none of are not in it, and the others are numbered anew.
    """
    workers = gang_workers(spec, addresses)
    slices = slices_of(spec, addresses)
    own = workers[slices.index(place.slice_id) * spec.hosts_per_slice + place.host]
    base = {name: value for name, value in os.environ.items() if name not in STALE}
    return {**base, **place_environment(workers, own, port)}


def gang_workers(spec: JobSpec, addresses: Mapping[str, str]) -> list[Worker]:
    return [
        Worker(rank, host, addresses[spec.place(n * spec.hosts_per_slice + host)], 22, "", None, None)
        for rank, n in enumerate(slices_of(spec, addresses))
        for host in range(spec.hosts_per_slice)
    ]


def slices_of(spec: JobSpec, places: Collection[str]) -> list[int]:
    """The slices of which all hosts are among ``places``, ascending."""
    hosts = range(spec.hosts_per_slice)
    return [
        n
        for n in range(spec.slices)
        if all(spec.place(n * spec.hosts_per_slice + host) in places for host in hosts)
    ]


def platform_environment(spec: JobSpec, place: Place, coordinator: str) -> dict[str, str]:
    """For a gang that the platform forms: what it has set for the slices stays as it is."""
    return {
        **os.environ,
        "SLICEWISE_COORDINATOR": coordinator,
        "SLICEWISE_PROCESS_ID": str(place.slice_id * spec.hosts_per_slice + place.host),
        "SLICEWISE_NUM_PROCESSES": str(spec.workers),
        "SLICEWISE_NUM_SLICES": str(spec.slices),
    }


def run_trainer(
    job: JobFolder,
    spec: JobSpec,
    place: Place,
    claim: Claim,
    environment: Mapping[str, str],
    look: Callable[[Trainer], None],
) -> Ended:
    """Runs the trainer of one attempt to its end, calling ``look`` at every interval. Raises what ``look`` raises."""
    name, supervised = name_of(spec, place), Supervised(job, claim)
    leads = environment.get("SLICEWISE_PROCESS_ID", "0") == "0"
    log = LaunchLog(job.run_directory if leads else None)
    environment = {
        **job.environment,
        **environment,
        "SLICEWISE_PLACE": name,
        ALL_SLICES: str(spec.slices),
        **spec.environment,
        "SLICEWISE_ATTEMPT": str(claim.attempt),
    }
    if spec.cpu_devices:
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags(environment.get("XLA_FLAGS", ""), spec.cpu_devices),
            "NPROC": str(max(os.cpu_count() or 1, THREADS_PER_DEVICE * spec.cpu_devices)),
        }

    def saw(event: Mapping[str, Any]) -> None:
        supervised.saw(0 if leads else 1, event)

    try:
        with WorkerFiles(job, spec, claim.attempt) as files:
            environment |= files.python_path(environment.get("PYTHONPATH", ""))
            environment |= log.begin()
            with Trainer(files, name, environment, spec.watch, saw, say) as trainer:
                while trainer.code is None:
                    trainer.poll(poll_interval_s(job))
                    if trainer.code is None:
                        with contextlib.suppress(StorageError):
                            look(trainer)
    except UserError as error:  # before the trainer began
        say(f"slicewise: {error}")
        return Ended(error.code, time.time(), str(error))
    log.stamp("done" if trainer.code == ExitCode.DONE else "wait")
    return Ended(trainer.code, trainer.ended, trainer.message, trainer.asked is not None)
