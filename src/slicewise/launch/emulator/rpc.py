"""The API over gRPC, both versions on one port, with the long-running operations that clients poll."""

from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.longrunning import operations_pb2

from slicewise.launch.emulator import peers
from slicewise.launch.emulator.api import VERSIONS, message_types
from slicewise.launch.emulator.errors import status
from slicewise.launch.emulator.records import Refused
from slicewise.launch.emulator.service import Service

OPERATIONS = "google.longrunning.Operations"
# method -> response; every request is called METHODRequest
RESPONSES = {
    "CreateQueuedResource": "Operation",
    "GetQueuedResource": "QueuedResource",
    "ListQueuedResources": "ListQueuedResourcesResponse",
    "DeleteQueuedResource": "Operation",
    "ResetQueuedResource": "Operation",
    "GetNode": "Node",
    "ListNodes": "ListNodesResponse",
    "DeleteNode": "Operation",
    "UpdateNode": "Operation",
    "GetGuestAttributes": "GetGuestAttributesResponse",
    "SimulateMaintenanceEvent": "Operation",
}
Call = Callable[[Any, str], Any]  # of a request and the peer that sent it
_CODES = {code.value[0]: code for code in grpc.StatusCode}


async def serve(service: Service, host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """A started server and its port."""
    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)]
    )
    ports: list[int] = []
    for version in VERSIONS:
        name = f"google.cloud.tpu.{version}.Tpu"
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(name, _handlers(service, version, ports))]
        )
    handlers = _operation_handlers(service)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(OPERATIONS, handlers)])
    ports.append(server.add_insecure_port(f"{host}:{port}"))
    await server.start()
    return server, ports[0]


def _handlers(service: Service, version: str, ports: list[int]) -> Mapping[str, Any]:
    """``ports`` will hold the server's."""
    types = message_types(version)
    handlers = {}
    for method, response in RESPONSES.items():
        if method not in service.apis[version].methods:
            continue
        answer = operations_pb2.Operation if response == "Operation" else getattr(types, response)
        request = getattr(types, f"{method}Request")
        handlers[method] = _handler(_caller(service, version, method, ports), request, answer)
    return handlers


def _operation_handlers(service: Service) -> Mapping[str, Any]:
    requests = operations_pb2

    def get(request: Any, peer: str) -> Any:
        return service.operation(request.name)

    def listing(request: Any, peer: str) -> Any:
        return requests.ListOperationsResponse(operations=service.operations(request.name))

    return {
        "GetOperation": _handler(get, requests.GetOperationRequest, requests.Operation),
        "ListOperations": _handler(listing, requests.ListOperationsRequest, requests.ListOperationsResponse),
    }


def _caller(service: Service, version: str, method: str, ports: list[int]) -> Call:
    def call(request: Any, peer: str) -> Any:
        port = peer.rpartition(":")[2]
        if port.isdecimal():
            peers.check(method, int(port), ports[0])
        return service.call(version, method, request)

    return call


def _handler(call: Call, request_type: Any, response_type: Any) -> Any:
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return call(request, context.peer())
        except Refused as refused:
            details = (("grpc-status-details-bin", status(refused).SerializeToString()),)
            await context.abort(_CODES[refused.code], refused.message, details)

    return grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=request_type.FromString,
        response_serializer=response_type.SerializeToString,
    )
