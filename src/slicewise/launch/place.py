"""Which worker of a gang is this machine? Each platform says it in its own way."""

import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from slicewise.errors import ExitCode, UserError
from slicewise.launch.job_folder import JobSpec

METADATA_ADDRESS = "169.254.169.254"
METADATA_TIMEOUT_S = 5.0
JOBSET_JOB = "slice"  # the replicated job whose jobs are the slices


@dataclass(frozen=True)
class Place:
    slice_id: int
    host: int
    address: str  # where the other workers reach this one

    def check(self, spec: JobSpec) -> None:
        """Raises UserError when the job has no such place."""
        if self.slice_id < spec.slices and self.host < spec.hosts_per_slice:
            return
        raise UserError(
            f"this machine is host {self.host} of slice {self.slice_id}, but the job was submitted for "
            f"{spec.slices} slices of {spec.hosts_per_slice} hosts: submit it for what there is."
        )


def of_tpu_vm() -> Place:
    """From the metadata server of a Cloud TPU VM. Raises UserError when there is none."""
    host = _whole(_attribute("agent-worker-number"), "agent-worker-number")
    environment = dict(re.findall(r"^(\w+):\s*'([^'\n]*)'", _attribute("tpu-env"), re.M))
    slice_id = _whole(environment.get("MEGASCALE_SLICE_ID", "0"), "MEGASCALE_SLICE_ID")
    endpoints = _attribute("worker-network-endpoints").strip().split(",")
    if host >= len(endpoints):
        raise UserError(f"the metadata server names {len(endpoints)} workers, and this one is number {host}.")
    return Place(slice_id, host, endpoints[host].rpartition(":")[2])


def of_pod(environment: Mapping[str, str]) -> Place:
    """Of a JobSet, whose manifest puts the labels of the pod into the environment."""
    slice_id = _whole(environment.get("SLICEWISE_SLICE", ""), "SLICEWISE_SLICE")
    host = _whole(environment.get("JOB_COMPLETION_INDEX", ""), "JOB_COMPLETION_INDEX")
    name = environment.get("SLICEWISE_JOBSET", "")
    return Place(slice_id, host, f"{name}-{JOBSET_JOB}-{slice_id}-{host}.{name}")


def of_slurm_task(environment: Mapping[str, str], spec: JobSpec) -> Place:
    """Tasks are numbered slice by slice."""
    task = _whole(environment.get("SLURM_PROCID", ""), "SLURM_PROCID")
    slice_id, host = divmod(task, spec.hosts_per_slice)
    address = environment.get("SLICEWISE_HOST") or environment.get("SLURMD_NODENAME", "")
    return Place(slice_id, host, address or "127.0.0.1")


def _attribute(name: str) -> str:
    server = os.environ.get("GCE_METADATA_IP", METADATA_ADDRESS)
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine's own link
    try:
        with opener.open(request, timeout=METADATA_TIMEOUT_S) as response:
            return response.read().decode()
    except (urllib.error.URLError, OSError) as error:
        raise UserError(
            f"the metadata server at {server} does not give {name} ({error}): is this a Cloud TPU VM?",
            code=ExitCode.INTERNAL,
        ) from error


def _whole(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text.strip()):
        raise UserError(f"{name} is {text!r}, expected a number: it says which worker this is.")
    return int(text)
