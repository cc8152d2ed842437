"""What is asked for in a queued resource, checked before the API sees it."""

import getpass
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slicewise.catalog import slices
from slicewise.errors import UserError, did_you_mean

MAX_SLICES = 256
MAX_METADATA_BYTES = 256 * 1024  # of one value
OWNER_LABEL = "slicewise-owner"
Tier = Literal["on-demand", "spot", "best-effort", "reserved"]
# the software version of each generation that Cloud TPU's "TPU software versions" page names for JAX
RUNTIME_VERSIONS = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
    "tpu7x": "v2-alpha-tpu7-ubuntu2404",
}
_ID = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")
_TAG = _ID
_LABEL_KEY, _LABEL_VALUE = re.compile(r"[a-z][a-z0-9_-]{0,62}"), re.compile(r"[a-z0-9_-]{0,63}")
_RESERVATION = re.compile(
    r"(?:projects/[a-z0-9.:-]+/(?:locations|zones)/[a-z0-9-]+/reservations/)?[a-z0-9-]{1,63}"
)
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+\.[^@\s]+|default")


@dataclass(frozen=True)
class Request:
    """``valid_until_s`` is how long from now it may wait for slices. ``reservation`` is a name, or a path
    projects/.../reservations/NAME; with tier 'reserved' it may be left out. Node ids are PREFIX-0 and so on, or the
    name itself for a lone slice."""

    name: str
    accelerator_type: str
    node_count: int = 1
    node_prefix: str | None = None
    tier: Tier = "on-demand"
    runtime_version: str | None = None
    reservation: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    service_account: str | None = None
    startup_script: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    valid_until_s: float | None = None
    autocheckpoint: bool = False

    def __post_init__(self) -> None:
        """Raises UserError for what the API would refuse."""
        check_id(self.name, "name")
        if self.node_prefix is not None:
            check_id(f"{self.node_prefix}-{max(self.node_count - 1, 0)}", "--node-prefix and a number")
        if not 1 <= self.node_count <= MAX_SLICES:
            raise UserError(
                f"--node-count {self.node_count}: a queued resource holds 1 to {MAX_SLICES} slices."
            )
        if self.reservation and self.tier != "reserved":
            raise UserError(f"--reservation {self.reservation} needs --reserved.")
        if self.reservation and not _RESERVATION.fullmatch(self.reservation):
            raise UserError(
                f"--reservation '{self.reservation}': expected a name, or projects/P/locations/Z/reservations/NAME."
            )
        for tag in self.tags:
            if not _TAG.fullmatch(tag):
                raise UserError(
                    f"--tag '{tag}': expected lower-case letters, digits and hyphens, 63 at most."
                )
        for key, value in self.labels.items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                raise UserError(
                    f"--label {key}={value}: expected lower-case letters, digits, - and _, 63 at most each."
                )
        if self.service_account and not _EMAIL.fullmatch(self.service_account):
            raise UserError(f"--service-account '{self.service_account}' is no address of a service account.")
        if self.valid_until_s is not None and self.valid_until_s <= 0:
            raise UserError(f"--valid-until {self.valid_until_s:g} s: expected a time above 0.")
        for key, value in self._metadata().items():
            if len(value.encode()) > MAX_METADATA_BYTES:
                raise UserError(
                    f"{key} has {len(value.encode()):,} bytes; metadata takes at most {MAX_METADATA_BYTES:,}:"
                    " fetch the rest from a bucket."
                )
        _ = self.slice, self.runtime

    @property
    def slice(self) -> slices.Slice:
        """Raises UserError for a name that is no accelerator type of a TPU."""
        found = slices.parse(self.accelerator_type)
        if found.chip.kind != "tpu":
            raise UserError(f"accelerator type '{self.accelerator_type}': queued resources hold TPUs only.")
        default = slices.parse(found.accelerator_type)
        if found.topology != default.topology and found.chip.type_prefix not in _TYPES_OF_API:
            raise UserError(
                f"accelerator type '{self.accelerator_type}': only {', '.join(_TYPES_OF_API)} can be had in other"
                f" topologies than that of their size, here {default.name}."
            )
        return found

    @property
    def runtime(self) -> str:
        if self.runtime_version:
            return self.runtime_version
        family = self.slice.chip.type_prefix
        if family not in RUNTIME_VERSIONS:
            raise UserError(f"no runtime version is known for {family}: name one with --runtime-version.")
        return RUNTIME_VERSIONS[family]

    def _metadata(self) -> dict[str, str]:
        script = {"startup-script": self.startup_script} if self.startup_script else {}
        return {**self.metadata, **script}


_TYPES_OF_API = {"v4": "V4", "v5p": "V5P"}  # three dims: one size can have several topologies


def check_id(text: str, what: str) -> None:
    """Raises UserError for an id that the API would refuse, such as one that leads to another path."""
    if not _ID.fullmatch(text):
        raise UserError(
            f"{what} '{text}': expected lower-case letters, digits and hyphens, 63 at most, first a letter and"
            " last no hyphen."
        )


def check_same_type(names: list[str]) -> str:
    """The one accelerator type of all slices. Raises UserError where several are mixed."""
    kinds = {slices.parse(name).accelerator_type: name for name in names}
    if len(kinds) > 1:
        raise UserError(
            f"all slices of a queued resource have the same accelerator type; {' and '.join(sorted(kinds))} were"
            " asked for: make one queued resource for each."
        )
    return names[0]


def owner(name: str | None = None) -> str:
    """A label value that says whose a queued resource is: ``name``, or the user of this machine."""
    return re.sub(r"[^a-z0-9_-]", "-", (name or getpass.getuser()).lower())[:63]


def to_message(request: Request, parent: str) -> Any:
    """The request as google.cloud.tpu_v2alpha1.QueuedResource."""
    from google.cloud import tpu_v2alpha1 as tpu
    from google.protobuf import duration_pb2

    cls = tpu.QueuedResource
    spec = cls.Tpu.NodeSpec(parent=parent, node=_node(request))
    if request.node_count == 1:
        spec.node_id = request.node_prefix or request.name
    else:
        spec.multi_node_params = cls.Tpu.NodeSpec.MultiNodeParams(
            node_count=request.node_count, node_id_prefix=request.node_prefix or request.name
        )
    message = cls(tpu=cls.Tpu(node_spec=[spec]))
    match request.tier:
        case "spot":
            message.spot = cls.Spot()
        case "best-effort":
            message.best_effort = cls.BestEffort()
        case "reserved":
            message.guaranteed = cls.Guaranteed(reserved=True)
            if request.reservation:
                short = "/" not in request.reservation
                message.reservation_name = (
                    f"{parent}/reservations/{request.reservation}" if short else request.reservation
                )
        case "on-demand":
            pass
        case _:
            raise UserError(f"no tier '{request.tier}'.{did_you_mean(request.tier, Tier.__args__)}")
    if request.valid_until_s is not None:
        duration = duration_pb2.Duration()
        duration.FromMilliseconds(int(request.valid_until_s * 1000))
        message.queueing_policy = cls.QueueingPolicy(valid_until_duration=duration)
    return message


def _node(request: Request) -> Any:
    from google.cloud import tpu_v2alpha1 as tpu

    here = request.slice
    node = tpu.Node(
        runtime_version=request.runtime,
        tags=list(request.tags),
        labels={OWNER_LABEL: owner(), **request.labels},
        metadata=request._metadata(),
        network_config=tpu.NetworkConfig(
            network=request.network or "", subnetwork=request.subnetwork or "", enable_external_ips=True
        ),
        autocheckpoint_enabled=request.autocheckpoint,
    )
    if here.topology == slices.parse(here.accelerator_type).topology:
        node.accelerator_type = here.accelerator_type
    else:
        kind = getattr(tpu.AcceleratorConfig.Type, _TYPES_OF_API[here.chip.type_prefix])
        node.accelerator_config = tpu.AcceleratorConfig(type_=kind, topology=here.name)
    if request.service_account:
        node.service_account = tpu.ServiceAccount(
            email=request.service_account, scope=["https://www.googleapis.com/auth/cloud-platform"]
        )
    return node
