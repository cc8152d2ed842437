"""Which Host headers a server on loopback answers: a page in a browser that resolves its own name to this
machine must not reach it."""

from aiohttp import web

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
METADATA = LOOPBACK | {"metadata.google.internal", "metadata", "169.254.169.254"}


def refuse_others(names: frozenset[str]):
    """A middleware that answers 403 to requests for any other host."""

    @web.middleware
    async def check(request: web.Request, handler):
        host = request.headers.get("Host", "")
        name, colon, port = host.rpartition(":")
        if (name if colon and port.isdecimal() else host).lower() not in names:
            return web.json_response(
                {
                    "error": {
                        "code": 403,
                        "message": f"Host '{host}' is not this one.",
                        "status": "PERMISSION_DENIED",
                    }
                },
                status=403,
            )
        return await handler(request)

    return check
