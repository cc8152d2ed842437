"""The emulated cloud as a state machine: requests, faults and time go in, records change. No clock, no input
or output: whoever drives it says what time it is, starts the VMs of nodes in ``dirty`` and reports them up.

Two invariants hold after every call: a queued resource has chips for all its slices or for none of those that
it waits for, and the chips in use never exceed the capacity.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from slicewise.launch.emulator.records import (
    NEVER,
    Code,
    Endpoint,
    Health,
    Initiator,
    Link,
    Loss,
    LossKind,
    Node,
    NodeState,
    Operation,
    Problem,
    QueuedResource,
    Refused,
    Request,
    Settings,
    State,
)

DELETABLE = (State.ACCEPTED, State.FAILED, State.SUSPENDED)  # without force
WAITING = (State.CREATING, State.ACCEPTED, State.WAITING_FOR_RESOURCES)


@dataclass
class Machine:
    """``dirty`` names nodes whose VMs may have to change; ``noticed`` those whose processes get SIGTERM. The
    driver empties both."""

    settings: Settings = field(default_factory=Settings)
    now_s: float = 0.0
    queue: dict[str, QueuedResource] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    noticed: set[str] = field(default_factory=set)
    _holds: list[tuple[str, int, float]] = field(default_factory=list)  # (family, chips, until)
    _requests: dict[str, str] = field(default_factory=dict)  # request id -> operation
    _pending: list[Operation] = field(default_factory=list)
    _numbers: int = 0

    # ------------------------------------------------------------ requests

    def create(self, name: str, request: Request, request_id: str = "") -> Operation:
        """Queue a request. Raises Refused where the name is taken or the quota is used up."""
        key = f"{name}#{request_id}"
        if request_id and key in self._requests:
            return self.operations[self._requests[key]]
        if name in self.queue:
            raise Refused(Code.ALREADY_EXISTS, f"Resource '{name}' already exists")
        parent = name.rsplit("/", 2)[0]
        taken = {
            node_name(q.parent, spec.node_id) for q in self.queue.values() for spec in q.request.specs
        } | self.nodes.keys()
        for spec in request.specs:
            if node_name(parent, spec.node_id) in taken:
                raise Refused(
                    Code.ALREADY_EXISTS, f"Resource '{node_name(parent, spec.node_id)}' already exists"
                )
        self._check_quota(parent, request)
        qr = QueuedResource(name, request, self._number(), self.now_s, self.now_s)
        self.queue[name] = qr
        operation = self.operation("create", name)
        if request_id:
            self._requests[key] = operation.name
        self.advance(self.now_s)
        return operation

    def _check_quota(self, parent: str, request: Request) -> None:
        for family in {spec.family for spec in request.specs}:
            limit = self.settings.quota.get(family)
            if limit is None:
                continue
            asked = _chips(request.specs, family)
            held = sum(_chips(q.request.specs, family) for q in self.queue.values() if q.parent == parent)
            if held + asked > limit:
                raise Refused(
                    Code.RESOURCE_EXHAUSTED,
                    f"Quota limit '{family}-chips' has been exceeded. Limit: {limit} in {parent}:"
                    f" {held} in use by queued resources in any state, {asked} asked for.",
                    quota=f"{family}-chips",
                )

    def delete(self, name: str, force: bool = False) -> Operation:
        """Raises Refused for a state that needs force, unless its nodes are gone."""
        qr = self.find(name)
        if qr.state != State.DELETING:
            if not force and qr.state not in DELETABLE and (qr.nodes or qr.state != State.ACTIVE):
                raise Refused(
                    Code.FAILED_PRECONDITION,
                    f"Queued resource '{name}' is in state {self.shown(qr).name}; it can be deleted without"
                    f" force only in {', '.join(s.name for s in DELETABLE)}, or once its nodes are deleted.",
                )
            for node in qr.nodes:
                self._halt(node, NodeState.DELETING)
            self._enter(qr, State.DELETING, Initiator.USER)
        operation = self.operation("delete", name)
        self.advance(self.now_s)
        return operation

    def reset(self, name: str) -> Operation:
        """Restart every slice. Raises Refused unless it is ACTIVE."""
        qr = self.find(name)
        if qr.state != State.ACTIVE or qr.repairing:
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"Queued resource '{name}' is in state {self.shown(qr).name}; only an ACTIVE one can be reset.",
            )
        qr.repairing = True
        self._restart(qr)
        operation = self.operation("reset", name)
        self.advance(self.now_s)
        return operation

    def delete_node(self, name: str) -> Operation:
        """Deletes one slice; what is left of its queued resource is suspended."""
        node = self.find_node(name)
        qr = self.queue[node.queued_resource]
        if qr.state != State.ACTIVE:
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"Node '{name}' belongs to a queued resource in state {self.shown(qr).name}; delete that instead.",
            )
        self._remove(qr, node)
        self._suspend(qr, Initiator.USER)
        operation = self.operation("delete", name)
        self.advance(self.now_s)
        return operation

    def update_metadata(self, name: str, metadata: dict[str, str]) -> Operation:
        self.find_node(name).metadata = dict(metadata)
        operation = self.operation("update", name)
        self.advance(self.now_s)
        return operation

    # ------------------------------------------------------------ faults

    def lose(
        self, name: str, kind: LossKind, *, after_s: float = 0.0, hold_s: float = 0.0, suspend: bool = False
    ) -> None:
        """A node is preempted, fails or is taken for maintenance: with notice, ``after_s`` from now."""
        node, qr = self._ready(name)
        if kind == LossKind.PREEMPTION and not qr.request.tier.preemptible:
            raise Refused(
                Code.FAILED_PRECONDITION,
                f"Node '{name}' is neither spot nor best-effort: it cannot be preempted, only fail.",
            )
        node.loss = Loss(kind, self.now_s + after_s, hold_s, suspend)
        if after_s > 0 and (kind != LossKind.MAINTENANCE or node.spec.body.get("autocheckpointEnabled")):
            self.noticed.add(name)
        if kind == LossKind.MAINTENANCE:
            node.health = Health.UNHEALTHY_MAINTENANCE
        self.advance(self.now_s)

    def cut(self, name: str, link: Link, for_s: float = NEVER) -> None:
        """Partition or freeze a node, or open its link again."""
        node, _ = self._ready(name)
        node.link, node.link_until_s = link, self.now_s + for_s
        node.health = Health.HEALTHY if link == Link.OPEN else Health.TIMEOUT
        self.dirty.add(name)
        self.advance(self.now_s)

    def _ready(self, name: str) -> tuple[Node, QueuedResource]:
        node = self.find_node(name)
        if node.state != NodeState.READY:
            raise Refused(
                Code.FAILED_PRECONDITION, f"Node '{name}' is {node.state.name}; only a READY node can break."
            )
        return node, self.queue[node.queued_resource]

    def set_capacity(self, family: str, chips: int) -> None:
        """More or fewer chips; fewer than are in use take effect as slices are given back."""
        self.settings = replace(self.settings, capacity={**self.settings.capacity, family: chips})
        self.advance(self.now_s)

    # ------------------------------------------------------------ time

    def up(self, name: str, boot: int, endpoints: Sequence[Endpoint]) -> None:
        """The driver reports that the VMs of a node's start ``boot`` are up; an older start is ignored."""
        node = self.nodes.get(name)
        if node is not None and node.boot == boot and node.running:
            node.up, node.endpoints = True, tuple(endpoints)
            self.advance(self.now_s)

    def broken(self, name: str, boot: int, message: str) -> None:
        """The driver reports that the VMs of a node's start ``boot`` cannot be had: the request fails."""
        node = self.nodes.get(name)
        if node is not None and node.boot == boot and node.running:
            qr = self.queue[node.queued_resource]
            for each in list(qr.nodes):
                self._remove(qr, each)
            self._fail(qr, Code.INTERNAL, message)
            self.advance(self.now_s)

    def advance(self, now_s: float) -> None:
        """Everything that is due by ``now_s`` happens."""
        self.now_s = max(self.now_s, now_s)
        self._holds = [hold for hold in self._holds if hold[2] > self.now_s]
        while True:
            changed = [self._step(qr) for qr in list(self.queue.values())]
            if not self._grant() and not any(changed):
                break
        for operation in [o for o in self._pending if self._is_done(o)]:
            operation.done_s = self.now_s
            self._pending.remove(operation)

    def due_s(self) -> float:
        """When `advance` has something to do next, as far as only time is missing; NEVER if nothing."""
        due = [hold[2] for hold in self._holds]
        for qr in self.queue.values():
            due.append(self._due_s(qr))
            for node in qr.nodes:
                due += [node.link_until_s, node.loss.at_s if node.loss else NEVER]
        return min((t for t in due if t > self.now_s), default=NEVER)

    def _due_s(self, qr: QueuedResource) -> float:
        if qr.state in (State.FAILED, State.SUSPENDED) or (qr.state == State.ACTIVE and not qr.repairing):
            return NEVER
        due = qr.since_s + self.settings.step_s
        if qr.state in WAITING:
            waits = [t for t in (due, qr.request.valid_after_s) if t > self.now_s]
            return min([*waits, qr.request.valid_until_s])
        return due

    def _step(self, qr: QueuedResource) -> bool:
        """One transition of one queued resource, if one is due."""
        over = self.now_s >= qr.since_s + self.settings.step_s
        if qr.state in WAITING and self.now_s >= qr.request.valid_until_s:
            return self._fail(
                qr, Code.DEADLINE_EXCEEDED, "The valid-until time passed before resources came."
            )
        match qr.state:
            case State.CREATING if over:
                known = self.settings.reservations
                reservation = qr.request.reservation.rsplit("/", 1)[-1]
                if reservation not in ("", "-") and known and reservation not in known:
                    return self._fail(
                        qr, Code.NOT_FOUND, f"Reservation '{qr.request.reservation}' not found."
                    )
                return self._enter(qr, State.ACCEPTED, Initiator.SERVICE)
            case State.ACCEPTED if over:
                return self._enter(qr, State.WAITING_FOR_RESOURCES, Initiator.SERVICE)
            case State.PROVISIONING if over and all(node.up for node in qr.nodes):
                self._ready_all(qr)
                return self._enter(qr, State.ACTIVE, Initiator.SERVICE)
            case State.SUSPENDING if over:
                return self._enter(qr, State.SUSPENDED, qr.initiator)
            case State.DELETING if over:
                for node in list(qr.nodes):
                    self._remove(qr, node)
                del self.queue[qr.name]
                return True
            case State.ACTIVE:
                return self._step_active(qr, over)
        return False

    def _step_active(self, qr: QueuedResource, over: bool) -> bool:
        for node in qr.nodes:
            if node.link_until_s <= self.now_s:
                node.link, node.link_until_s, node.health = Link.OPEN, NEVER, Health.HEALTHY
                self.dirty.add(node.name)
            if node.loss and node.loss.at_s <= self.now_s:
                self._lose_now(qr, node, node.loss)
                return True
        if qr.repairing and over and all(node.placed and node.up for node in qr.nodes):
            qr.repairing = False
            self._ready_all(qr)
            return True
        return False

    def _is_done(self, operation: Operation) -> bool:
        if operation.verb == "delete":
            return operation.target not in self.queue and operation.target not in self.nodes
        qr = self.queue.get(operation.target)
        if operation.verb == "create":
            return qr is None or qr.state != State.CREATING
        return qr is None or not qr.repairing

    # ------------------------------------------------------------ chips

    def free(self, family: str) -> float:
        """Chips that nobody has; below 0 after the capacity was cut."""
        limit = self.settings.capacity.get(family)
        if limit is None:
            return NEVER
        used = sum(n.spec.chips for n in self.nodes.values() if n.placed and n.spec.family == family)
        return limit - used - sum(chips for f, chips, _ in self._holds if f == family)

    def _grant(self) -> bool:
        """Gives chips to whom they suffice for all that is missing: higher tiers first, then older requests."""
        waiting = [q for q in self.queue.values() if self._wants(q)]
        for qr in sorted(waiting, key=lambda q: (-q.request.tier, q.number)):
            if not self._fits(qr, ()):
                victims = self._victims(qr)
                if victims is None:
                    continue
                for victim in victims:
                    self._suspend(victim, Initiator.SERVICE)
            if qr.state == State.WAITING_FOR_RESOURCES:
                self._provision(qr)
            else:
                self._restart(qr)
            return True
        return False

    def _wants(self, qr: QueuedResource) -> bool:
        if qr.state == State.WAITING_FOR_RESOURCES:
            # a state that a user can see, however much is free
            return self.now_s >= max(qr.request.valid_after_s, qr.since_s + self.settings.step_s)
        missing = [node for node in qr.nodes if not node.placed]
        wanted = qr.state == State.ACTIVE and qr.repairing and bool(missing)
        return wanted and all(node.away_until_s <= self.now_s for node in missing)

    def _missing(self, qr: QueuedResource) -> Sequence:
        if qr.state == State.WAITING_FOR_RESOURCES:
            return qr.request.specs
        return [node.spec for node in qr.nodes if not node.placed]

    def _fits(self, qr: QueuedResource, without: Iterable[QueuedResource]) -> bool:
        missing, given = self._missing(qr), [n.spec for v in without for n in v.nodes if n.placed]
        families = {spec.family for spec in missing}
        return all(self.free(f) + _chips(given, f) >= _chips(missing, f) for f in families)

    def _victims(self, qr: QueuedResource) -> list[QueuedResource] | None:
        """The fewest preemptible queued resources, youngest first, whose chips make room; None if none do."""
        if qr.request.tier.preemptible:
            return None
        families = {spec.family for spec in qr.request.specs}
        victims: list[QueuedResource] = []
        for other in sorted(self.queue.values(), key=lambda q: (q.request.tier, -q.number)):
            if not (other.request.tier.preemptible and other.state in (State.ACTIVE, State.PROVISIONING)):
                continue
            if families & {n.spec.family for n in other.nodes if n.placed}:
                victims.append(other)
                if self._fits(qr, victims):
                    return victims
        return None

    # ------------------------------------------------------------ transitions

    def _provision(self, qr: QueuedResource) -> None:
        for spec in qr.request.specs:
            metadata = dict(spec.body.get("metadata", {}))
            name = node_name(qr.parent, spec.node_id)
            node = Node(name, spec, qr.name, self._number(), self.now_s, metadata, placed=True)
            qr.nodes.append(node)
            self.nodes[name] = node
            self._boot(node, NodeState.CREATING)
        self._enter(qr, State.PROVISIONING, Initiator.SERVICE)

    def _restart(self, qr: QueuedResource) -> None:
        """Slices that lost their chips get new ones; all start again."""
        for node in qr.nodes:
            self._boot(node, NodeState.RESTARTING if node.placed else NodeState.CREATING)
            node.placement += not node.placed
            node.placed = True
        qr.since_s = self.now_s

    def _lose_now(self, qr: QueuedResource, node: Node, loss: Loss) -> None:
        if loss.hold_s:
            node.away_until_s = self.now_s + loss.hold_s
            self._holds.append((node.spec.family, node.spec.chips, node.away_until_s))
        preempted = loss.kind == LossKind.PREEMPTION
        self._halt(node, NodeState.PREEMPTED if preempted else NodeState.REPAIRING)
        alone = len(qr.nodes) == 1 or self.settings.suspend_multislice
        if loss.suspend or (preempted and alone):
            self._suspend(qr, Initiator.SERVICE)
        else:
            qr.repairing, qr.since_s = True, self.now_s

    def _suspend(self, qr: QueuedResource, initiator: Initiator) -> None:
        for node in qr.nodes:
            self._halt(node, NodeState.PREEMPTED)
        self._enter(qr, State.SUSPENDING, initiator)

    def _fail(self, qr: QueuedResource, code: Code, message: str) -> bool:
        qr.error = Problem(code, message)
        return self._enter(qr, State.FAILED, Initiator.SERVICE)

    def _enter(self, qr: QueuedResource, state: State, initiator: Initiator) -> bool:
        qr.state, qr.initiator, qr.since_s, qr.repairing = state, initiator, self.now_s, False
        return True

    def _ready_all(self, qr: QueuedResource) -> None:
        for node in qr.nodes:
            node.state = NodeState.READY

    def _boot(self, node: Node, state: NodeState) -> None:
        node.boot += 1
        node.running, node.up, node.state, node.loss = True, False, state, None
        node.link, node.link_until_s, node.health = Link.OPEN, NEVER, Health.HEALTHY
        self.dirty.add(node.name)

    def _halt(self, node: Node, state: NodeState) -> None:
        node.placed = node.running = node.up = False
        node.state, node.loss, node.endpoints, node.link_until_s = state, None, (), NEVER
        self.dirty.add(node.name)

    def _remove(self, qr: QueuedResource, node: Node) -> None:
        self._halt(node, NodeState.DELETING)
        qr.nodes.remove(node)
        del self.nodes[node.name]

    # ------------------------------------------------------------ look-ups

    def shown(self, qr: QueuedResource) -> State:
        """The state that the API shows."""
        return self.settings.repair_state if qr.repairing else qr.state

    def find(self, name: str) -> QueuedResource:
        if name not in self.queue:
            raise Refused(Code.NOT_FOUND, f"Resource '{name}' was not found")
        return self.queue[name]

    def find_node(self, name: str) -> Node:
        if name not in self.nodes:
            raise Refused(Code.NOT_FOUND, f"Resource '{name}' was not found")
        return self.nodes[name]

    def find_operation(self, name: str) -> Operation:
        if name not in self.operations:
            raise Refused(Code.NOT_FOUND, f"Resource '{name}' was not found")
        return self.operations[name]

    def operation(self, verb: str, target: str) -> Operation:
        """A new one, done when what it does is."""
        parent = target.rsplit("/", 2)[0]
        operation = Operation(f"{parent}/operations/operation-{self._number()}", verb, target, self.now_s)
        self.operations[operation.name] = operation
        self._pending.append(operation)
        return operation

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


def node_name(parent: str, node_id: str) -> str:
    return f"{parent}/nodes/{node_id}"


def _chips(specs: Iterable, family: str) -> int:
    return sum(spec.chips for spec in specs if spec.family == family)
