"""The hosts of a queued resource as the runner needs them."""

from typing import Any

from slicewise.errors import ExitCode, UserError
from slicewise.launch.queued_resources.calls import Client, connect, get, nodes
from slicewise.launch.queued_resources.target import find_target
from slicewise.launch.queued_resources.wait import advice
from slicewise.launch.workers import Worker


def workers_of(name: str) -> list[Worker]:
    """The workers of a queued resource of the target that the environment names (see `find_target`)."""
    return workers_of_client(connect(find_target(None, None)), name)


def workers_of_client(client: Client, name: str) -> list[Worker]:
    """By slice and worker. Raises UserError, with the state and what to do, when not all slices are up."""
    qr = get(client, name)
    state = qr.state.state.name
    if said := advice(qr):
        raise UserError(said, code=ExitCode.NO_SLICES)
    found = nodes(client, name)
    if len(found) < len(qr.tpu.node_spec) or any(node.state.name != "READY" for node in found):
        states = sorted({node.state.name for node in found})
        raise UserError(
            f"{name} is {state} and {len([n for n in found if n.state.name == 'READY'])} of"
            f" {len(qr.tpu.node_spec)} slices are READY{f' ({chr(44).join(states)})' if states else ''}: wait with"
            f" 'slicewise qr wait {name}'.",
            code=ExitCode.NO_SLICES,
        )
    return [worker for i, node in enumerate(found) for worker in _of_node(client, i, node)]


def _of_node(client: Client, slice_index: int, node: Any) -> list[Worker]:
    target = client.target
    return [
        Worker(
            slice_index,
            index,
            endpoint.access_config.external_ip or endpoint.ip_address,
            target.ssh_port or endpoint.port,
            target.user,
            target.identity_file,
            target.host_key,
            endpoint.ip_address,
        )
        for index, endpoint in enumerate(node.network_endpoints)
    ]
