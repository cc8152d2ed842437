"""Which slices take part in an attempt, when some are lost and the job may go on without them, or when they are back.

On an emulated cluster a slice is there unless ``absent.json`` in the job's folder says otherwise; real slices are there
when agents of all their hosts report.
"""

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Literal

from slicewise.errors import UserError
from slicewise.launch.job_folder import Claim, JobFolder, JobSpec
from slicewise.launch.storage import StorageError, read_json, write_json
from slicewise.launch.supervisor import CHECK_INTERVAL_S, Supervised, stop_requests

ABSENT = "absent.json"


def chosen(spec: JobSpec, present: Collection[int]) -> tuple[int, ...]:
    """The slices of an attempt when only ``present`` are there: as many as the job can use; empty when too few."""
    sizes = (spec.slices, *spec.elastic_sizes)
    size = next((size for size in sizes if size <= len(present)), 0)
    return tuple(sorted(present)[:size])


def several(slices: Collection[int]) -> str:
    """ "slice 1", or "slices 0 and 2"."""
    words = [str(n) for n in sorted(slices)]
    return f"slice {words[0]}" if len(words) == 1 else f"slices {', '.join(words[:-1])} and {words[-1]}"


# ---------------------------------------------------------------- slices of an emulated cluster


def set_absent(job: JobFolder, spec: JobSpec, slices: Collection[int]) -> None:
    """From now on these are not there, and all others are. Raises UserError for a slice that the job has not."""
    for n in slices:
        if not 0 <= n < spec.slices:
            raise UserError(f"slice {n}: expected one of 0 to {spec.slices - 1}, the slices of the job.")
    write_json(job.folder, ABSENT, {"slices": sorted(set(slices)), "time": time.time()})


def present(job: JobFolder, spec: JobSpec) -> tuple[frozenset[int], float]:
    """The slices that are there, and for how long it has been so, in seconds."""
    document = read_json(job.folder, ABSENT) or {"slices": [], "time": 0.0}
    return frozenset(range(spec.slices)) - set(document["slices"]), time.time() - document["time"]


def wait_for_slices(
    job: JobFolder, spec: JobSpec, claim: Claim, say: Callable[[str], None]
) -> tuple[int, ...] | None:
    """The slices of an attempt, once all are there, or enough and the others for too long not.

    None when the job is cancelled, or another supervisor took over, or this process is asked to stop.
    """
    told = False
    with stop_requests() as stop:
        while True:
            with contextlib.suppress(StorageError):
                there, since_s = present(job, spec)
                slices = chosen(spec, there)
                if len(there) == spec.slices or (slices and since_s >= spec.watch.replacement_wait_s):
                    return slices
                if not told:
                    told = True
                    say(f"{several(frozenset(range(spec.slices)) - there)} lost: waits for a replacement")
                if job.is_cancelled(claim.submission) or not job.is_current(claim):
                    return None
            if stop.wait(CHECK_INTERVAL_S):
                return None


class Watched(Supervised):
    """Supervision of an attempt on some ``slices`` of an emulated cluster, which may be lost or come back."""

    def __init__(self, job: JobFolder, spec: JobSpec, claim: Claim, slices: tuple[int, ...]):
        super().__init__(job, claim)
        self._spec, self._slices = spec, slices
        self.lost: frozenset[int] = frozenset()
        self.grows = False

    def orders(self) -> Literal["", "stop", "grow", "abandon"]:
        orders = super().orders()
        with contextlib.suppress(StorageError):
            there, _ = present(self._job, self._spec)
            self.lost |= frozenset(self._slices) - there
            self.grows = self.grows or (not self.lost and len(chosen(self._spec, there)) > len(self._slices))
        return orders or ("grow" if self.grows else "")

    def gone(self) -> list[int]:
        hosts = self._spec.hosts_per_slice
        return [
            n * hosts + host
            for n, one in enumerate(self._slices)
            if one in self.lost
            for host in range(hosts)
        ]
