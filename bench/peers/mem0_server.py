"""mem0ai behind a minimal ASGI application, in the peers' environment, for bench/system/service.

    python -m undertow.bench.peers.mem0_server --url URL --encoder hash:384 --folder FOLDER

It has the two routes that the loads use: POST /v1/tenants/TENANT/memories and POST /v1/tenants/TENANT/search.
Each call runs on a thread of the default pool, as in mem0's own server; calls of the local store take turns.
Where mem0ai logs an error and goes on, the status is 500. Prints its address to standard error.
"""

from __future__ import annotations

import asyncio
import json
import logging
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

    def __init__(self, peer: Mem0, meter: Meter) -> None:
        self._peer, self._meter = peer, meter

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        _, version, tenants, tenant, route = scope["path"].split("/")
        assert (version, tenants) == ("v1", "tenants"), scope["path"]
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        asked = json.loads(body)
        with self._meter.request() as spent:
            if route == "memories":
                results = await asyncio.to_thread(self._peer.learned, tenant, asked["messages"])
            else:
                results = await asyncio.to_thread(self._peer.search, tenant, asked["query"], asked["top_k"])
        data = json.dumps({"results": results}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        status = 500 if spent.complaints else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})


def main() -> None:
    meter = Meter()
    logging.getLogger().addHandler(meter)
    peer = Mem0(options(), meter)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2_048)
    print(f"Ready on http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    config = uvicorn.Config(Application(peer, meter), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])
    peer.close()


if __name__ == "__main__":
    main()
