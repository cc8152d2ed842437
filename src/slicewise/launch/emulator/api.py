"""The Queued Resources API over the state machine, in the terms of one version's protocol buffers.

Each function of `METHODS` takes a request message and gives a response message; both transports serve it.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2, json_format
from google.rpc import status_pb2

from slicewise.catalog import slices
from slicewise.errors import UserError
from slicewise.launch.emulator.machine import Machine
from slicewise.launch.emulator.records import (
    NEVER,
    Code,
    LossKind,
    Node,
    NodeSpec,
    NodeState,
    Operation,
    QueuedResource,
    Refused,
    Request,
    Tier,
)

MAX_SLICES = 256
VERSIONS = ("v2", "v2alpha1")
ID = re.compile(r"[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?")  # RFC 1035
PARENT = re.compile(r"projects/([a-z0-9][a-z0-9.:-]{0,98})/locations/([a-z0-9][a-z0-9-]{0,62})")
_ACCELERATOR_HEADS = {
    "V2": "v2",
    "V3": "v3",
    "V4": "v4",
    "V5LITE_POD": "v5litepod",
    "V5P": "v5p",
    "V6E": "v6e",
}


def invalid(message: str) -> Refused:
    return Refused(Code.INVALID_ARGUMENT, message)


class Api:
    """One version of the API. ``multi`` is the field that asks for several nodes, which the versions name
    differently."""

    def __init__(self, version: str, machine: Machine, host_key: str):
        self.version, self._machine, self._host_key = version, machine, host_key
        self.types = message_types(version)
        self.multi = "multi_node_params" if version == "v2alpha1" else "multislice_params"
        self.methods: dict[str, Callable[[Any], Any]] = {
            "CreateQueuedResource": self.create,
            "GetQueuedResource": lambda request: self.queued_resource(self._machine.find(request.name)),
            "ListQueuedResources": self.list,
            "DeleteQueuedResource": self.delete,
            "ResetQueuedResource": lambda request: self.operation(self._machine.reset(request.name)),
            "GetNode": lambda request: self.node(self._machine.find_node(request.name)),
            "ListNodes": self.list_nodes,
            "DeleteNode": lambda request: self.operation(self._machine.delete_node(request.name)),
            "UpdateNode": self.update_node,
            "GetGuestAttributes": self.guest_attributes,
        }
        if version == "v2alpha1":
            self.methods |= {"SimulateMaintenanceEvent": self.simulate_maintenance}

    # ------------------------------------------------------------ queued resources

    def create(self, message: Any) -> operations_pb2.Operation:
        check_parent(message.parent)
        identifier = message.queued_resource_id
        if not ID.fullmatch(identifier):
            raise invalid(
                f"queued_resource_id '{identifier}' is invalid: it must start with a lower-case letter, followed"
                " by up to 62 lower-case letters, digits or hyphens, and must not end with a hyphen."
            )
        request = self._request(message.parent, identifier, message.queued_resource)
        name = f"{message.parent}/queuedResources/{identifier}"
        return self.operation(self._machine.create(name, request, message.request_id))

    def _request(self, parent: str, identifier: str, qr: Any) -> Request:
        specs = [spec for given in qr.tpu.node_spec for spec in self._specs(parent, identifier, given)]
        if not specs:
            raise invalid("queued_resource.tpu.node_spec must name at least one node.")
        if len(specs) > MAX_SLICES:
            raise invalid(f"A queued resource holds at most {MAX_SLICES} nodes; {len(specs)} were asked for.")
        if len({spec.node_id for spec in specs}) < len(specs):
            raise invalid("Two nodes of a queued resource have the same node_id.")
        if len({(spec.body.get("acceleratorType"), spec.topology) for spec in specs}) > 1:
            raise invalid("All nodes of a queued resource must have the same accelerator type.")
        after_s, until_s = _times(qr.queueing_policy)
        body = json_format.MessageToDict(qr)
        for output_only in ("name", "createTime", "state"):
            body.pop(output_only, None)
        return Request(tuple(specs), _tier(qr), after_s, until_s, qr.reservation_name, body)

    def _specs(self, parent: str, identifier: str, given: Any) -> Sequence[NodeSpec]:
        if given.parent and given.parent != parent:
            raise invalid(f"node_spec.parent is '{given.parent}', expected '{parent}'.")
        several = given.HasField(self.multi)
        if several == bool(given.node_id):
            raise invalid(f"A node_spec needs exactly one of node_id and {self.multi}.")
        body = json_format.MessageToDict(given.node)
        where = _slice(given.node)
        if not given.node.runtime_version:
            raise invalid("node.runtime_version must be set.")
        if several:
            params = getattr(given, self.multi)
            if not 2 <= params.node_count <= MAX_SLICES:
                raise invalid(
                    f"{self.multi}.node_count is {params.node_count}: it must be 2 to {MAX_SLICES}."
                )
            prefix = params.node_id_prefix or identifier
            ids = [f"{prefix}-{i}" for i in range(params.node_count)]
        else:
            ids = [given.node_id]
        for node_id in (ids[0], ids[-1]):
            if not ID.fullmatch(node_id):
                raise invalid(
                    f"node_id '{node_id}' is invalid: lower-case letters, digits and hyphens, 63 at most."
                )
        body["acceleratorType"] = where.accelerator_type
        return [
            NodeSpec(
                node_id,
                where.chip.type_prefix,
                where.chips,
                where.hosts,
                where.devices_per_host,
                where.name,
                body,
            )
            for node_id in ids
        ]

    def list(self, message: Any) -> Any:
        check_parent(message.parent)
        found = [q for q in self._machine.queue.values() if q.parent == message.parent]
        page, token = _page(found, message)
        rendered = [self.queued_resource(q) for q in page]
        return self.types.ListQueuedResourcesResponse(queued_resources=rendered, next_page_token=token)

    def delete(self, message: Any) -> operations_pb2.Operation:
        return self.operation(self._machine.delete(message.name, message.force))

    def queued_resource(self, qr: QueuedResource) -> Any:
        message = self.types.QueuedResource()
        body = {key: value for key, value in qr.request.body.items() if key != "tpu"}
        json_format.ParseDict(body, message, ignore_unknown_fields=True)
        message.name = qr.name
        _set_time(message.create_time, qr.created_s)
        template: Any = None
        for spec in qr.request.specs:
            node_spec = message.tpu.node_spec.add(parent=qr.parent, node_id=spec.node_id)
            if template is None or template[0] is not spec.body:
                template = (spec.body, self._template(spec))
            node_spec.node.CopyFrom(template[1])
        state = message.state
        shown = self._machine.shown(qr)
        state.state, state.state_initiator = int(shown), int(qr.initiator)
        data = getattr(state, f"{shown.name.lower()}_data", None)
        if data is not None:
            data.SetInParent()
        if qr.error:
            state.failed_data.error.CopyFrom(status_pb2.Status(code=qr.error.code, message=qr.error.message))
        return message

    def _template(self, spec: NodeSpec) -> Any:
        return json_format.ParseDict(dict(spec.body), self.types.Node(), ignore_unknown_fields=True)

    # ------------------------------------------------------------ nodes

    def list_nodes(self, message: Any) -> Any:
        check_parent(message.parent)
        found = [n for n in self._machine.nodes.values() if n.name.startswith(f"{message.parent}/nodes/")]
        page, token = _page(found, message)
        return self.types.ListNodesResponse(nodes=[self.node(n) for n in page], next_page_token=token)

    def node(self, node: Node) -> Any:
        message = self._template(node.spec)
        qr = self._machine.find(node.queued_resource)
        message.name, message.state, message.health = node.name, int(node.state), int(node.health)
        message.id, message.queued_resource = node.number, node.queued_resource
        message.multislice_node = len(qr.request.specs) > 1
        message.accelerator_config.topology = node.spec.topology
        _set_time(message.create_time, node.created_s)
        message.metadata.clear()
        message.metadata.update(node.metadata)
        for endpoint in node.endpoints:
            made = message.network_endpoints.add(ip_address=endpoint.host, port=endpoint.port)
            made.access_config.external_ip = endpoint.host
        if self.version == "v2alpha1" and node.loss and node.loss.kind == LossKind.MAINTENANCE:
            message.upcoming_maintenance.can_reschedule = False
            start = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(node.loss.at_s))
            message.upcoming_maintenance.window_start_time = start
            message.upcoming_maintenance.maintenance_status = 1  # PENDING
        return message

    def update_node(self, message: Any) -> operations_pb2.Operation:
        if list(message.update_mask.paths) != ["metadata"]:
            raise Refused(
                Code.UNIMPLEMENTED, "The emulator updates only a node's metadata (updateMask=metadata)."
            )
        return self.operation(self._machine.update_metadata(message.node.name, dict(message.node.metadata)))

    def simulate_maintenance(self, message: Any) -> operations_pb2.Operation:
        self._machine.lose(message.name, LossKind.MAINTENANCE)
        return self.operation(self._machine.operation("simulateMaintenanceEvent", message.name))

    def guest_attributes(self, message: Any) -> Any:
        """What a worker publishes of itself: its SSH host key and its name."""
        node = self._machine.find_node(message.name)
        if node.state != NodeState.READY:
            raise Refused(
                Code.NOT_FOUND, f"Node '{node.name}' has no guest attributes: it is {node.state.name}."
            )
        workers = [int(i) for i in message.worker_ids if i.isdecimal()] or range(node.spec.workers)
        if strange := [i for i in workers if i >= node.spec.workers]:
            raise invalid(
                f"Node '{node.name}' has workers 0 to {node.spec.workers - 1}, and no {strange[0]}."
            )
        response = self.types.GetGuestAttributesResponse()
        kind, _, key = self._host_key.partition(" ")
        for worker in workers:
            attributes = response.guest_attributes.add(query_path=message.query_path)
            entries = attributes.query_value.items
            entries.add(namespace="hostkeys", key=kind, value=key.split()[0])
            entries.add(namespace="guestInventory", key="hostname", value=f"{node.spec.node_id}-w-{worker}")
        return response

    # ------------------------------------------------------------ operations

    def operation(self, operation: Operation) -> operations_pb2.Operation:
        operation.version = operation.version or self.version
        done = operation.done_s is not None
        message = operations_pb2.Operation(name=operation.name, done=done)
        metadata = self.types.OperationMetadata(
            target=operation.target, verb=operation.verb, api_version=self.version
        )
        _set_time(metadata.create_time, operation.created_s)
        if operation.done_s is not None:
            _set_time(metadata.end_time, operation.done_s)
        message.metadata.Pack(metadata)
        if done:
            message.response.Pack(self._response(operation))
        return message

    def _response(self, operation: Operation) -> Any:
        """v2 answers a deletion with Empty, v2alpha1 with the resource."""
        if "/nodes/" in operation.target:
            node = self._machine.nodes.get(operation.target)
            return self.node(node) if node else empty_pb2.Empty()
        if operation.verb == "delete" and self.version == "v2":
            return empty_pb2.Empty()
        qr = self._machine.queue.get(operation.target)
        return self.queued_resource(qr) if qr else self.types.QueuedResource(name=operation.target)


class _Types:
    """The protocol-buffer classes of one version, by their names."""

    def __init__(self, module: Any):
        self._module = module

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._module, name).pb()
        setattr(self, name, made)
        return made


def message_types(version: str) -> Any:
    from google.cloud import tpu_v2, tpu_v2alpha1

    return _Types({"v2": tpu_v2, "v2alpha1": tpu_v2alpha1}[version])


def check_parent(parent: str) -> None:
    if not PARENT.fullmatch(parent) or ".." in parent:
        raise invalid(f"parent '{parent}' is invalid: expected projects/PROJECT/locations/ZONE.")


def _slice(node: Any) -> slices.Slice:
    """The slice that a node asks for, by type or by generation and topology."""
    text = node.accelerator_type
    try:
        if text:
            found = slices.parse(text)
            if found.chip.kind != "tpu" or found.accelerator_type != text:
                raise UserError(f"'{text}' is no accelerator type of Cloud TPU.")
            return found
        if node.HasField("accelerator_config"):
            config = node.accelerator_config
            kind = config.DESCRIPTOR.fields_by_name["type_"].enum_type.values_by_number[config.type_].name
            return slices.parse(f"{_ACCELERATOR_HEADS.get(kind, kind.lower())}:{config.topology}")
    except UserError as error:
        raise invalid(f"Invalid accelerator: {error}") from error
    raise invalid("node.accelerator_type or node.accelerator_config must be set.")


def _tier(qr: Any) -> Tier:
    match qr.WhichOneof("tier"):
        case "spot":
            return Tier.SPOT
        case "best_effort":
            return Tier.BEST_EFFORT
        case "guaranteed":
            return Tier.GUARANTEED
    return Tier.GUARANTEED if qr.reservation_name else Tier.ON_DEMAND


def _times(policy: Any) -> tuple[float, float]:
    """(valid after, valid until), in seconds since the epoch."""
    now_s = time.time()
    match policy.WhichOneof("start_timing_constraints"):
        case "valid_until_duration":
            return 0.0, now_s + policy.valid_until_duration.ToTimedelta().total_seconds()
        case "valid_until_time":
            return 0.0, policy.valid_until_time.ToNanoseconds() / 1e9
        case "valid_after_duration":
            return now_s + policy.valid_after_duration.ToTimedelta().total_seconds(), NEVER
        case "valid_after_time":
            return policy.valid_after_time.ToNanoseconds() / 1e9, NEVER
        case "valid_interval":
            interval = policy.valid_interval
            until_s = interval.end_time.ToNanoseconds() / 1e9 if interval.HasField("end_time") else NEVER
            return interval.start_time.ToNanoseconds() / 1e9, until_s
    return 0.0, NEVER


def _page(found: Sequence, message: Any) -> tuple[Sequence, str]:
    """(the page that a list request asks for, the token of the next). A token is the number of the last item
    before it, so that deletions between two pages hide nothing."""
    token = message.page_token
    if token and not (token.isascii() and token.isdecimal() and len(token) < 10):
        raise invalid(f"page_token '{token}' is none that was given out.")
    if message.page_size < 0:
        raise invalid(f"page_size {message.page_size}: it must be 0 or more.")
    left = [item for item in found if item.number > int(token or 0)]
    page = left[: message.page_size or 500]
    return page, str(page[-1].number) if len(page) < len(left) else ""


def _set_time(timestamp: Any, at_s: float) -> None:
    timestamp.FromNanoseconds(int(at_s * 1e9))
