"""A job as a JobSet on GKE: one job a slice, restarted as a gang by the JobSet controller, queued by Kueue.

Which ends are worth a restart stands in the manifest. A pod that the platform evicts (maintenance, preemption), or
whose trainer says that it saved and was asked to stop, or wants a restart, costs nothing of maxRestarts; a failure
does; wrong input ends the job at once.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slicewise.catalog.slices import Slice
from slicewise.errors import ExitCode, UserError
from slicewise.launch.environment import JAX_PORT
from slicewise.launch.job_folder import JobSpec
from slicewise.launch.jobset_schema import validate
from slicewise.launch.place import JOBSET_JOB

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
CONTAINER = "trainer"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"
NODE_POOL = "cloud.google.com/gke-nodepool"  # GKE makes one for each slice
# of nodes with TPUs, as GKE names them ("Plan for TPUs in GKE", table of machine types)
ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5litepod": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "tpu7x": "tpu7x",
}
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names and .../labels
MAX_NAME, MAX_LABEL = 253, 63
_NAME = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
KILL_MARGIN_S = 30  # between the trainer's time to save and the pod's
API_TIMEOUT_S = 30
# The Job controller's words for a pod failure policy that matched on an exit code (k8s.io/kubernetes
# pkg/controller/job, matchPodFailurePolicy); with JobSet's message patterns they tell apart what shares one reason.
WRONG_INPUT = rf"failed with exit code {int(ExitCode.USER)} matching FailJob rule"


@dataclass(frozen=True)
class Placement:
    """What of the cluster a job uses."""

    slice: Slice
    image: str
    namespace: str = "default"
    context: str = ""  # of the kubeconfig; empty for its current one
    queue: str = ""  # of Kueue, in the namespace
    priority_class: str = ""
    service_account: str = ""
    secrets: tuple[str, ...] = ()  # of the namespace, whose keys become environment
    python: str = "python"

    @property
    def platform(self) -> dict[str, str]:
        """What finds the job again."""
        return {"namespace": self.namespace, "context": self.context}


def manifest(spec: JobSpec, root: str, placement: Placement) -> dict[str, Any]:
    """The JobSet, valid by the schema. ``root``: the job's folder. Holds no secrets, only names of them."""
    labels = {"app.kubernetes.io/managed-by": "slicewise"}
    if placement.queue:
        labels["kueue.x-k8s.io/queue-name"] = placement.queue
    made = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "JobSet",
        "metadata": {
            "name": spec.name,
            "namespace": placement.namespace,
            "labels": labels,
            "annotations": {EXCLUSIVE: NODE_POOL},
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _failure_policy(spec),
            "replicatedJobs": [
                {
                    "name": JOBSET_JOB,
                    "replicas": spec.slices,
                    "template": {"spec": _job(spec, root, placement)},
                }
            ],
        },
    }
    validate(made)
    return made


def _failure_policy(spec: JobSpec) -> dict[str, Any]:
    """The first rule that matches counts; what none matches restarts, and counts towards maxRestarts."""
    return {
        "maxRestarts": spec.budgets.failures,
        "rules": [
            {
                "name": "wrong_input",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [WRONG_INPUT],
            },
            {
                "name": "maintenance_or_preemption",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def _job(spec: JobSpec, root: str, placement: Placement) -> dict[str, Any]:
    orderly = [int(ExitCode.RESTART), int(ExitCode.PREEMPTED)]
    return {
        "parallelism": spec.hosts_per_slice,
        "completions": spec.hosts_per_slice,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod is no use without the others of its gang
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                _on_exit([int(ExitCode.USER)]),
                _on_exit(orderly),
            ]
        },
        "template": {"spec": _pod(spec, root, placement)},
    }


def _on_exit(codes: list[int]) -> dict[str, Any]:
    return {
        "action": "FailJob",
        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": codes},
    }


def _pod(spec: JobSpec, root: str, placement: Placement) -> dict[str, Any]:
    chip = placement.slice.chip
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "hostNetwork": True,  # DCN traffic at the speed of the machine
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": int(spec.watch.stop_grace_s) + KILL_MARGIN_S,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[chip.type_prefix],
            "cloud.google.com/gke-tpu-topology": placement.slice.name,
        },
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [_container(spec, root, placement)],
    }
    if placement.priority_class:
        pod["priorityClassName"] = placement.priority_class
    if placement.service_account:
        pod["serviceAccountName"] = placement.service_account
    return pod


def _container(spec: JobSpec, root: str, placement: Placement) -> dict[str, Any]:
    agent = ["-m", "slicewise.launch.agent", "--job", root, "--submission", spec.submission, "--on", "jobset"]
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": placement.image,
        "command": [placement.python, *agent],
        "env": [
            _from_label("SLICEWISE_SLICE", "jobset.sigs.k8s.io/job-index"),
            _from_label("SLICEWISE_RESTART", "jobset.sigs.k8s.io/restart-attempt"),
            {"name": "SLICEWISE_JOBSET", "value": spec.name},
            {
                "name": "SLICEWISE_COORDINATOR",
                "value": f"{spec.name}-{JOBSET_JOB}-0-0.{spec.name}:{JAX_PORT}",
            },
        ],
        "resources": {"limits": {"google.com/tpu": str(placement.slice.chips_per_host)}},
    }
    if placement.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in placement.secrets]
    return container


def _from_label(name: str, label: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}


def check(placement: Placement) -> None:
    """Raises UserError for a slice that GKE has no nodes for, and for names that Kubernetes would refuse."""
    names = [
        ("--namespace", placement.namespace, MAX_LABEL),
        ("--queue", placement.queue, MAX_LABEL),  # the value of a label
        ("--priority-class", placement.priority_class, MAX_NAME),
        ("--service-account", placement.service_account, MAX_NAME),
        *(("--secret", name, MAX_NAME) for name in placement.secrets),
    ]
    for option, name, most in names:
        if name and (len(name) > most or not re.fullmatch(_NAME, name)):
            raise UserError(
                f"{option} {name!r}: expected at most {most} lower-case letters, digits, '-' and '.', with a letter"
                " or digit first and last."
            )
    family = placement.slice.chip.type_prefix
    if family not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise UserError(f"--type {placement.slice.name} of {family}: GKE has TPU slices of {known}.")


def as_yaml(made: Mapping[str, Any]) -> str:
    try:
        import yaml
    except ImportError as error:
        raise UserError("manifests need pyyaml: pip install 'slicewise[kubernetes]'.") from error
    return yaml.safe_dump(made, sort_keys=False)


# ---------------------------------------------------------------- the cluster


def apply(made: Mapping[str, Any], placement: Placement) -> None:
    """Creates the JobSet. Raises UserError with the API server's reason."""
    platform = placement.platform
    _call(
        platform,
        lambda api: api.create_namespaced_custom_object(
            GROUP, VERSION, platform["namespace"], PLURAL, made, _request_timeout=API_TIMEOUT_S
        ),
    )


def state(platform: Mapping[str, Any], name: str) -> str:
    """completed, failed, queued (by Kueue), running, or gone; after how many restarts, where there were some."""
    try:
        found = _get(platform, name)
    except UserError as error:
        if error.code == ExitCode.NOT_FOUND:
            return "gone"
        raise
    status = found.get("status", {})
    terminal = status.get("terminalState")
    suspended = found.get("spec", {}).get("suspend", False)
    word = {"Completed": "completed", "Failed": "failed"}.get(terminal, "queued" if suspended else "running")
    restarts = status.get("restarts", 0)
    return f"{word} after {restarts} restarts" if restarts else word


def cancel(platform: Mapping[str, Any], name: str) -> None:
    """Deletes the JobSet; its pods get their time to save. None being there is fine."""
    try:
        _call(
            platform,
            lambda api: api.delete_namespaced_custom_object(
                GROUP,
                VERSION,
                platform["namespace"],
                PLURAL,
                name,
                propagation_policy="Foreground",
                _request_timeout=API_TIMEOUT_S,
            ),
        )
    except UserError as error:
        if error.code != ExitCode.NOT_FOUND:
            raise


def _get(platform: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return _call(
        platform,
        lambda api: api.get_namespaced_custom_object(
            GROUP, VERSION, platform["namespace"], PLURAL, name, _request_timeout=API_TIMEOUT_S
        ),
    )


def _call(platform: Mapping[str, Any], act: Any) -> Any:
    try:
        import kubernetes
        import urllib3
    except ImportError as error:
        raise UserError("jobs on JobSet need kubernetes: pip install 'slicewise[kubernetes]'.") from error
    try:
        client = kubernetes.config.new_client_from_config(context=platform.get("context") or None)
    except kubernetes.config.ConfigException as error:
        raise UserError(
            f"kubeconfig: {str(error).splitlines()[0]} 'kubectl config get-contexts' lists some."
        ) from error
    try:
        with client:
            return act(kubernetes.client.CustomObjectsApi(client))
    except kubernetes.client.ApiException as error:
        raise _as_user_error(error) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise UserError(
            f"the Kubernetes API at {client.configuration.host} does not answer: {str(error).splitlines()[0]}.",
            code=ExitCode.UNAVAILABLE,
        ) from error


def _as_user_error(error: Any) -> UserError:
    """The API server's message, what to do, and the exit code of its kind."""
    import json

    try:
        text = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        text = error.reason or "no reason given"
    advice, code = {
        401: ("Log in to the cluster again.", ExitCode.DENIED),
        403: ("Ask for a role that may create jobsets in this namespace.", ExitCode.DENIED),
        404: ("Is JobSet installed there, and does the namespace exist?", ExitCode.NOT_FOUND),
        409: ("Choose another --name, or delete the old one.", ExitCode.CONFLICT),
        429: ("Too many requests: wait, then try again.", ExitCode.RATE_LIMITED),
    }.get(error.status, ("The same request fails again: change it.", ExitCode.USER))
    if error.status >= 500:
        advice, code = "The API server failed: try again later.", ExitCode.UNAVAILABLE
    return UserError(f"Kubernetes answered {error.status}: {text}\n{advice}", code=code)
