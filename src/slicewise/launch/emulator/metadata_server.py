"""The metadata server of each VM: the same paths and headers as on Google Cloud."""

import asyncio
import functools
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from slicewise.launch.emulator.hosts import METADATA, is_ours

ROOT = "/computeMetadata/v1"
HEADERS = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}


class MetadataServer:
    """``values(node, worker)`` gives the tree below /computeMetadata/v1, with text at its leaves."""

    def __init__(self, values: Callable[[str, int], Mapping[str, Any]]):
        self._values = values
        self._servers: dict[socket.socket, tuple[asyncio.Server, web.Server]] = {}

    async def serve(self, sock: socket.socket, node: str, index: int) -> None:
        """Answers on a listening socket as the server of this worker."""
        server = web.Server(functools.partial(self._answer, node, index), access_log=None)
        listener = await asyncio.get_running_loop().create_server(server, sock=sock)
        self._servers[sock] = (listener, server)

    def close(self, sock: socket.socket) -> None:
        """It answers no more."""
        if found := self._servers.pop(sock, None):
            listener, server = found
            listener.close()
            for connection in server.connections:
                connection.force_close()

    async def _answer(self, node: str, index: int, request: web.BaseRequest) -> web.Response:
        status, text = self._get(node, index, request)
        return web.Response(status=status, text=text, headers=HEADERS)

    def _get(self, node: str, index: int, request: web.BaseRequest) -> tuple[int, str]:
        if not is_ours(request.headers.get("Host", ""), METADATA):
            return 403, "This is the metadata server of another host.\n"
        path = "/" + request.path.strip("/")
        if path == "/":
            return 200, "computeMetadata/\n"
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            return 403, "Missing Metadata-Flavor:Google header.\n"
        missing = 404, f"{path} was not found.\n"
        if not f"{path}/".startswith(f"{ROOT}/"):
            return missing
        found: Any = self._values(node, index)
        for part in filter(None, path.removeprefix(ROOT).split("/")):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            return missing
        if not isinstance(found, Mapping):
            return 200, str(found)
        if request.query.get("recursive", "").lower() == "true":
            return 200, json.dumps(found)
        return 200, "".join(
            f"{k}/\n" if isinstance(v, Mapping) else f"{k}\n" for k, v in sorted(found.items())
        )
