"""Calls of the API: one connection, and a function for each thing that can be done."""

import socket
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slicewise.errors import ExitCode, UserError
from slicewise.launch.queued_resources.api_errors import RETRY_FOR_S, call
from slicewise.launch.queued_resources.request import Request, check_id, to_message
from slicewise.launch.queued_resources.target import Target

CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 1.0  # on loopback
PAGE_SIZE = 500


def _say(line: str) -> None:
    print(line, file=sys.stderr)


class EmulatorGone(UserError):
    """The emulator has ended, and its slices with it: no later call can succeed."""


@dataclass(frozen=True)
class Client:
    """``say`` gets a line when a call is repeated."""

    target: Target
    api: Any  # google.cloud.tpu_v2alpha1.TpuClient
    say: Callable[[str], None] = _say
    retry_for_s: float = RETRY_FOR_S

    def name(self, identifier: str) -> str:
        """The full name. Raises UserError for an id that cannot be one."""
        check_id(identifier, "name")
        return f"{self.target.parent}/queuedResources/{identifier}"

    def _call(self, method: str, **fields: Any) -> Any:
        function = getattr(self.api, method)

        def act() -> Any:
            self._refuse_gone()  # gRPC calls a dead service unavailable, which asks for patience
            return function(request=fields, timeout=CALL_TIMEOUT_S, retry=None)

        try:
            return call(act, self.say, self.retry_for_s)
        except UserError as error:
            from google.api_core.exceptions import ServiceUnavailable

            if self.target.endpoint is None or not isinstance(error.__cause__, ServiceUnavailable):
                raise
            said = str(error).splitlines()[0]
            raise UserError(
                f"{said}\nThat is an emulator: 'slicewise emulator status' shows whether it runs.",
                code=error.code,
            ) from error

    def _refuse_gone(self) -> None:
        """Raises EmulatorGone where nobody listens at the emulator's address."""
        if self.target.endpoint is None:
            return
        host, _, port = self.target.endpoint.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            raise EmulatorGone(
                f"the emulator at {self.target.endpoint} has ended, and its slices with it: start one with"
                " 'slicewise emulator start'.",
                code=ExitCode.UNAVAILABLE,
            ) from None
        except OSError:  # it is busy: the call itself shows whether it answers
            return


def connect(target: Target, *, say: Callable[[str], None] = _say, retry_for_s: float = RETRY_FOR_S) -> Client:
    """A client of v2alpha1, the version that has best-effort and reserved capacity, and maintenance. Raises
    UserError when the extra is missing or nobody is logged in."""
    try:
        import grpc
        from google.cloud import tpu_v2alpha1 as tpu
        from google.cloud.tpu_v2alpha1.services.tpu.transports import TpuGrpcTransport
    except ModuleNotFoundError as error:
        raise UserError(
            f"queued resources need {error.name}, which is not installed: pip install 'slicewise[cloud]'."
        ) from error
    if target.endpoint is None:
        return Client(target, call(tpu.TpuClient, say, 0.0), say, retry_for_s)
    # a list of 256 slices with their startup scripts is larger than the default 4 MB
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", 256 << 20)]
    channel = grpc.insecure_channel(target.endpoint, options=options)
    return Client(target, tpu.TpuClient(transport=TpuGrpcTransport(channel=channel)), say, retry_for_s)


def create(client: Client, request: Request) -> Any:
    """Asks for it; returns the queued resource once the API has taken it in. A repeated call cannot make a
    second one: all tries carry the same request id. Raises UserError."""
    client._call(
        "create_queued_resource",
        parent=client.target.parent,
        queued_resource_id=request.name,
        queued_resource=to_message(request, client.target.parent),
        request_id=str(uuid.uuid4()),
    )
    return get(client, request.name)


def get(client: Client, name: str) -> Any:
    """google.cloud.tpu_v2alpha1.QueuedResource. Raises UserError, NOT_FOUND when there is none."""
    return client._call("get_queued_resource", name=client.name(name))


def list_all(client: Client) -> list[Any]:
    """Every queued resource of the target, all pages. Raises UserError."""
    return _pages(client, "list_queued_resources", "queued_resources")


def nodes(client: Client, name: str) -> list[Any]:
    """The nodes of a queued resource that exist, in the order of its slices. Raises UserError."""
    qr = get(client, name)
    place = {spec.node_id: i for i, spec in enumerate(qr.tpu.node_spec)}
    found = [n for n in _pages(client, "list_nodes", "nodes") if n.name.rsplit("/", 1)[1] in place]
    return sorted(found, key=lambda node: place[node.name.rsplit("/", 1)[1]])


def _pages(client: Client, method: str, field: str) -> list[Any]:
    found: list[Any] = []
    token = ""
    while True:
        page = client._call(
            method, parent=client.target.parent, page_size=PAGE_SIZE, page_token=token
        ).raw_page
        found += getattr(page, field)
        token = page.next_page_token
        if not token:
            return found


def delete(client: Client, name: str, *, force: bool = False) -> None:
    """Asks for deletion; `wait_until_gone` waits for it. Raises UserError where its state needs ``force``."""
    client._call("delete_queued_resource", name=client.name(name), force=force, request_id=str(uuid.uuid4()))


def reset(client: Client, name: str) -> None:
    """Asks for a restart of every slice; `wait` waits for it. Raises UserError unless it is ACTIVE."""
    client._call("reset_queued_resource", name=client.name(name))


def delete_node(client: Client, node: str) -> None:
    """Asks for the deletion of one slice, which suspends what is left."""
    check_id(node, "node")
    client._call("delete_node", name=f"{client.target.parent}/nodes/{node}")


def states(found: Sequence[Any]) -> list[str]:
    return [node.state.name for node in found]
