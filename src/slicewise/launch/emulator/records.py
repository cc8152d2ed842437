"""What the emulated cloud holds: queued resources, nodes, operations. Plain data; `machine` moves it.

Numbers of states and codes are those of the API (google.cloud.tpu.v2, google.rpc.Code).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

NEVER = float("inf")


class State(IntEnum):
    """QueuedResourceState.State."""

    CREATING = 1
    ACCEPTED = 2
    PROVISIONING = 3
    FAILED = 4
    DELETING = 5
    ACTIVE = 6
    SUSPENDING = 7
    SUSPENDED = 8
    WAITING_FOR_RESOURCES = 9


class Initiator(IntEnum):
    USER = 1
    SERVICE = 2


class NodeState(IntEnum):
    """Node.State."""

    CREATING = 1
    READY = 2
    RESTARTING = 3
    DELETING = 5
    REPAIRING = 6
    PREEMPTED = 11


class Health(IntEnum):
    """Node.Health."""

    HEALTHY = 1
    TIMEOUT = 2
    UNHEALTHY_MAINTENANCE = 5


class Code(IntEnum):
    """google.rpc.Code."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class Tier(IntEnum):
    """Who gets chips first; a lower tier loses its chips to a higher one."""

    BEST_EFFORT = 0
    SPOT = 1
    ON_DEMAND = 2
    GUARANTEED = 3

    @property
    def preemptible(self) -> bool:
        return self <= Tier.SPOT


class Link(StrEnum):
    """How a node's network and processes behave."""

    OPEN = "open"
    PARTITIONED = "partitioned"  # no byte in or out; processes run on
    FROZEN = "frozen"  # processes are stopped too


@dataclass(frozen=True)
class Problem:
    """google.rpc.Status: why a queued resource failed."""

    code: Code
    message: str


class Refused(Exception):
    """The API's answer to a request it does not carry out.

    ``retry_s`` is the delay after which it says to try again; ``quota`` the quota that is used up.
    """

    def __init__(self, code: Code, message: str, *, retry_s: float | None = None, quota: str = ""):
        super().__init__(message)
        self.code, self.message, self.retry_s, self.quota = code, message, retry_s, quota


@dataclass(frozen=True)
class Settings:
    """How the emulated cloud behaves. Chips are counted by family, the head of an accelerator type (v5litepod);
    a family that is not named is without limit. ``repair_state`` is the state shown while slices are replaced,
    which the API does not document.
    """

    capacity: Mapping[str, int] = field(default_factory=dict)
    quota: Mapping[str, int] = field(default_factory=dict)  # of one project in one zone
    reservations: frozenset[str] = frozenset()  # their last name parts; empty = every reservation exists
    step_s: float = 0.05  # what each transition takes
    repair_state: State = State.ACTIVE
    suspend_multislice: bool = False  # whether the preemption of one of several slices suspends all


@dataclass(frozen=True)
class NodeSpec:
    """One slice as asked for. ``body`` is the API's Node in JSON; ``family`` and ``chips`` count capacity."""

    node_id: str
    family: str
    chips: int
    workers: int
    devices_per_worker: int
    topology: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """A queued resource as asked for; times are seconds on the machine's clock. ``body`` is the API's JSON."""

    specs: tuple[NodeSpec, ...]
    tier: Tier = Tier.ON_DEMAND
    valid_after_s: float = 0.0
    valid_until_s: float = NEVER
    reservation: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Endpoint:
    """Where a worker listens for SSH."""

    host: str
    port: int


class LossKind(StrEnum):
    PREEMPTION = "preemption"
    FAILURE = "failure"
    MAINTENANCE = "maintenance"


@dataclass(frozen=True)
class Loss:
    """A node is to be lost at ``at_s``; its chips stay away for ``hold_s``."""

    kind: LossKind
    at_s: float
    hold_s: float = 0.0
    suspend: bool = False


@dataclass(eq=False)
class Node:
    """One slice that exists. ``boot`` counts the starts of its VMs; ``up`` says that this start is complete."""

    name: str
    spec: NodeSpec
    queued_resource: str
    number: int
    created_s: float
    metadata: dict[str, str]
    state: NodeState = NodeState.CREATING
    health: Health = Health.HEALTHY
    placed: bool = False  # holds chips
    placement: int = 1  # counts the hardware that it has had
    running: bool = False
    boot: int = 0
    up: bool = False
    link: Link = Link.OPEN
    link_until_s: float = NEVER
    away_until_s: float = 0.0  # when a replacement can be had at the earliest
    endpoints: tuple[Endpoint, ...] = ()
    loss: Loss | None = None


@dataclass(eq=False)
class QueuedResource:
    """``state`` holds since ``since_s``. While ``repairing``, an ACTIVE one waits for slices or restarts."""

    name: str
    request: Request
    number: int
    created_s: float
    since_s: float
    state: State = State.CREATING
    initiator: Initiator = Initiator.USER
    error: Problem | None = None
    nodes: list[Node] = field(default_factory=list)
    repairing: bool = False

    @property
    def parent(self) -> str:
        return self.name.rsplit("/", 2)[0]

    @property
    def id(self) -> str:
        return self.name.rsplit("/", 1)[1]


@dataclass(eq=False)
class Operation:
    """A long-running operation; ``done_s`` is None while it runs. ``version`` is the API's that asked for it."""

    name: str
    verb: str  # create, delete, reset, update
    target: str
    created_s: float
    done_s: float | None = None
    version: str = ""
