"""The API over REST: paths and JSON of v2 and v2alpha1; and the emulator's own controls below /emulator.

The controls need the token of the state file, which only its owner can read.
"""

import hmac
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from google.protobuf import json_format

from slicewise.launch.emulator import peers
from slicewise.launch.emulator.api import message_types
from slicewise.launch.emulator.control import Control
from slicewise.launch.emulator.errors import HTTP_STATUS, status
from slicewise.launch.emulator.hosts import LOOPBACK, is_ours
from slicewise.launch.emulator.records import Code, Refused
from slicewise.launch.emulator.service import Service

MAX_BODY_BYTES = 16 << 20
SERVICE = web.AppKey("service", Service)
CONTROL = web.AppKey("control", Control)

# (HTTP method, collection, verb after the colon, whether an id is named) -> (API method, field of the body)
ROUTES: Mapping[tuple[str, str, str, bool], tuple[str, str]] = {
    ("POST", "queuedResources", "", False): ("CreateQueuedResource", "queuedResource"),
    ("GET", "queuedResources", "", False): ("ListQueuedResources", ""),
    ("GET", "queuedResources", "", True): ("GetQueuedResource", ""),
    ("DELETE", "queuedResources", "", True): ("DeleteQueuedResource", ""),
    ("POST", "queuedResources", "reset", True): ("ResetQueuedResource", "*"),
    ("GET", "nodes", "", False): ("ListNodes", ""),
    ("GET", "nodes", "", True): ("GetNode", ""),
    ("DELETE", "nodes", "", True): ("DeleteNode", ""),
    ("PATCH", "nodes", "", True): ("UpdateNode", "node"),
    ("POST", "nodes", "getGuestAttributes", True): ("GetGuestAttributes", "*"),
    ("POST", "nodes", "simulateMaintenanceEvent", True): ("SimulateMaintenanceEvent", "*"),
}


def application(service: Service, control: Control) -> web.Application:
    app = web.Application(middlewares=[_errors, _only_ours], client_max_size=MAX_BODY_BYTES)
    app[SERVICE], app[CONTROL] = service, control
    one = r"/{version:v2|v2alpha1}/projects/{project}/locations/{zone}"
    app.router.add_get(one + "/operations", _operations)
    app.router.add_get(one + "/operations/{id}", _operation)
    app.router.add_route("*", one + r"/{collection:queuedResources|nodes}", _call)
    app.router.add_route("*", one + r"/{collection:queuedResources|nodes}/{id}", _call)
    app.router.add_route("*", one + "/{rest:.*}", _unimplemented)
    app.router.add_get("/compute/v1/projects/{project}", _project)
    app.router.add_post("/emulator/{verb}", _control)
    return app


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refused as the JSON that Google's APIs answer with."""
    try:
        return await handler(request)
    except Refused as refused:
        return _refusal(refused)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        code = Code.NOT_FOUND if error.status == 404 else Code.INVALID_ARGUMENT
        return _refusal(Refused(code, f"{request.method} {request.path}: {error.reason}."), error.status)


def _refusal(refused: Refused, http_status: int | None = None) -> web.Response:
    body = json_format.MessageToDict(status(refused))
    number = http_status or HTTP_STATUS[refused.code]
    error = {"code": number, "message": refused.message, "status": refused.code.name}
    if details := body.get("details"):
        error["details"] = details
    headers = {"Retry-After": str(int(refused.retry_s + 0.999))} if refused.retry_s is not None else {}
    return web.json_response({"error": error}, status=number, headers=headers)


@web.middleware
async def _only_ours(request: web.Request, handler: Any) -> web.StreamResponse:
    """A page in a browser names its origin, and no client of the API has one."""
    host = request.headers.get("Host", "")
    if not is_ours(host, LOOPBACK):
        raise Refused(Code.PERMISSION_DENIED, f"Host '{host}' is not this one.")
    if "Origin" in request.headers or request.headers.get("Sec-Fetch-Site", "none") not in (
        "none",
        "same-origin",
    ):
        raise Refused(Code.PERMISSION_DENIED, "The emulator does not answer web pages.")
    return await handler(request)


async def _call(request: web.Request) -> web.Response:
    version, collection = request.match_info["version"], request.match_info["collection"]
    parent = f"projects/{request.match_info['project']}/locations/{request.match_info['zone']}"
    identifier, _, verb = request.match_info.get("id", "").partition(":")
    route = ROUTES.get((request.method, collection, verb, bool(identifier)))
    if route is None:
        raise Refused(Code.UNIMPLEMENTED, f"The emulator has no {request.method} {request.path}.")
    method, body_field = route
    assert request.transport is not None
    client, server = (request.transport.get_extra_info(end)[1] for end in ("peername", "sockname"))
    peers.check(method, client, server)
    name = f"{parent}/{collection}/{identifier}" if identifier else ""
    fields = _fields(request, method, parent, name)
    if body_field:
        content = await _json(request)
        fields = {**fields, **content} if body_field == "*" else {**fields, body_field: content}
    if method == "UpdateNode":
        fields["node"]["name"] = name
    types = message_types(version)
    service = request.app[SERVICE]
    if method not in service.apis[version].methods:
        raise Refused(Code.UNIMPLEMENTED, f"{version} has no method {method}.")
    message = getattr(types, f"{method}Request")()
    try:
        json_format.ParseDict(fields, message, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise Refused(Code.INVALID_ARGUMENT, f"Invalid JSON payload: {error}") from error
    return _answer(request, service.call(version, method, message))


def _fields(request: web.Request, method: str, parent: str, name: str) -> dict[str, Any]:
    """The request's fields that path and query give. gcloud writes True where JSON has true."""
    query = request.query
    fields: dict[str, Any] = {}
    if method == "UpdateNode":
        fields["updateMask"] = query.get("updateMask", "")
    elif name:
        fields["name"] = name
    else:
        fields["parent"] = parent
    for key in ("queuedResourceId", "requestId", "pageSize", "pageToken"):
        if key in query:
            fields[key] = query[key]
    if "force" in query:
        fields["force"] = query["force"].lower() == "true"
    return fields


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        content = await request.json() if request.can_read_body else {}
    except ValueError as error:
        raise Refused(Code.INVALID_ARGUMENT, f"Invalid JSON payload: {error}") from error
    if not isinstance(content, dict):
        raise Refused(Code.INVALID_ARGUMENT, "Invalid JSON payload: expected an object.")
    return content


def _answer(request: web.Request, message: Any) -> web.Response:
    """As JSON; enums as numbers where the client asks for that."""
    as_numbers = "enum-encoding=int" in request.query.get("$alt", "")
    content = json_format.MessageToDict(message, use_integers_for_enums=as_numbers)
    return web.json_response(content)


async def _operation(request: web.Request) -> web.Response:
    project, zone, identifier = (request.match_info[key] for key in ("project", "zone", "id"))
    name = f"projects/{project}/locations/{zone}/operations/{identifier}"
    return _answer(request, request.app[SERVICE].operation(name))


async def _operations(request: web.Request) -> web.Response:
    parent = f"projects/{request.match_info['project']}/locations/{request.match_info['zone']}"
    found = [json_format.MessageToDict(message) for message in request.app[SERVICE].operations(parent)]
    return web.json_response({"operations": found})


async def _unimplemented(request: web.Request) -> web.Response:
    raise Refused(Code.UNIMPLEMENTED, f"The emulator has no {request.method} {request.path}.")


async def _project(request: web.Request) -> web.Response:
    """What gcloud reads of Compute Engine before it connects by SSH."""
    name = request.match_info["project"]
    return web.json_response(
        {"kind": "compute#project", "name": name, "commonInstanceMetadata": {"items": []}}
    )


async def _control(request: web.Request) -> web.Response:
    control = request.app[CONTROL]
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), control.token.encode()):
        raise Refused(Code.UNAUTHENTICATED, "The token of the emulator's state file is needed.")
    answer = control.act(request.match_info["verb"], await _json(request))
    return web.json_response(json.loads(json.dumps(answer)))
