"""The metadata server of each VM: the same paths and headers as on Google Cloud, one port a worker.

Programs find it by GCE_METADATA_IP and GCE_METADATA_HOST.
"""

import socket
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from slicewise.launch.emulator.hosts import METADATA, refuse_others

ROOT = "/computeMetadata/v1"


class MetadataServer:
    """``values(node, worker)`` gives the tree below /computeMetadata/v1, with text at its leaves."""

    def __init__(self, values: Callable[[str, int], Mapping[str, Any]]):
        self._values = values
        self._places: dict[int, tuple[str, int]] = {}  # port -> node, worker
        self._sites: dict[int, web.SockSite] = {}  # by id of the worker
        application = web.Application(middlewares=[refuse_others(METADATA)])
        application.router.add_get("/{path:.*}", self._get)
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)

    async def start(self) -> None:
        await self._runner.setup()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def serve(self, worker: object, sock: socket.socket, node: str, index: int) -> None:
        self._places[sock.getsockname()[1]] = (node, index)
        site = web.SockSite(self._runner, sock)
        await site.start()
        self._sites[id(worker)] = site

    async def close(self, worker: object) -> None:
        if site := self._sites.pop(id(worker), None):
            await site.stop()

    async def _get(self, request: web.Request) -> web.Response:
        headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        path = "/" + request.match_info["path"].strip("/")
        if path == "/":
            return web.Response(text="computeMetadata/\n", headers=headers)
        if request.headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in request.headers:
            return web.Response(status=403, text="Missing Metadata-Flavor:Google header.\n")
        assert request.transport is not None
        place = self._places.get(request.transport.get_extra_info("sockname")[1])
        if place is None or not f"{path}/".startswith(f"{ROOT}/"):
            return web.Response(status=404, text=f"{path} was not found.\n", headers=headers)
        found: Any = self._values(*place)
        for part in path.removeprefix(ROOT).strip("/").split("/"):
            if part:
                found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            return web.Response(status=404, text=f"{path} was not found.\n", headers=headers)
        if isinstance(found, Mapping):
            names = [f"{k}/" if isinstance(v, Mapping) else str(k) for k, v in sorted(found.items())]
            if request.query.get("recursive", "").lower() == "true":
                return web.json_response(dict(found), headers=headers)
            return web.Response(text="".join(f"{name}\n" for name in names), headers=headers)
        return web.Response(text=str(found), headers=headers)
