"""mem0ai behind a minimal ASGI application, in the peers' environment, for bench/system/service.

    python -m undertow.bench.peers.mem0_server --url URL --encoder hash:384 --folder FOLDER

It has the two routes that the loads use: POST /v1/tenants/TENANT/memories and POST /v1/tenants/TENANT/search.
Each call runs on a thread of the default pool, as in mem0's own server; calls of the local store take turns.
Prints its address to standard error.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from undertow.bench.peers.mem0_runner import Mem0
from undertow.bench.peers.runner import Meter, options

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Application:
    """ASGI over one `Mem0`."""

    def __init__(self, peer: Mem0) -> None:
        self._peer = peer

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        _, version, tenants, tenant, route = scope["path"].split("/")
        assert (version, tenants) == ("v1", "tenants"), scope["path"]
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        act = {"memories": self._add, "search": self._search}[route]
        results = await asyncio.to_thread(act, tenant, json.loads(body))
        data = json.dumps({"results": results}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    def _add(self, tenant: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return self._peer.add_as_is(tenant, body["messages"])

    def _search(self, tenant: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return self._peer.search(tenant, body["query"], body["top_k"])


def main() -> None:
    peer = Mem0(options(), Meter())
    listener = socket.create_server(("127.0.0.1", 0), backlog=2_048)
    print(f"Ready on http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    config = uvicorn.Config(Application(peer), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
    peer.close()


if __name__ == "__main__":
    main()
