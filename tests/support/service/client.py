"""Shared by the client's tests: a server with scripted replies, and one way to call both clients."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from undertow.serving.client import AsyncClient, Client, Retries

# as patient as the default in the number of tries, but not in time
QUICK = Retries(patience_s=5, first_s=0.001, longest_s=0.01)


class Driven:
    """Either client, called synchronously: coroutines are run, iterators become lists."""

    def __init__(self, client: Client | AsyncClient, runner: asyncio.Runner) -> None:
        self.client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        return lambda *args, **kwargs: self._whole(method(*args, **kwargs))

    def _whole(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            return self._runner.run(_awaited(result))
        if isinstance(result, AsyncIterator):
            return self._runner.run(_collected(result))
        return list(result) if isinstance(result, Iterator) else result


async def _awaited(result: Any) -> Any:
    return await result


async def _collected(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@contextmanager
def driven(kind: str, url: str, key: str | None = None, **more: Any) -> Iterator[Driven]:
    """The client of a kind, "sync" or "async", open."""
    make: type[Client | AsyncClient] = {"sync": Client, "async": AsyncClient}[kind]
    with asyncio.Runner() as runner:
        client = Driven(make(url, key, **{"retries": QUICK, **more}), runner)
        yield client
        client.close()


@dataclass
class Reply:
    """One answer. `cut`: the connection ends after so many bytes of the body; -1: before any answer."""

    status: int = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None

    @classmethod
    def of(cls, document: Any, status: int = 200, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return cls(status, json.dumps(document).encode(), named)


@dataclass(frozen=True)
class Seen:
    """One request, as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Scripted(ThreadingHTTPServer):
    """Gives its replies in turn and repeats the last; without any it is silent until it is closed."""

    daemon_threads = True

    def __init__(self, *replies: Reply) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.replies = list(replies)
        self.seen: list[Seen] = []
        self.closing = threading.Event()
        self._turn = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_reply(self, seen: Seen) -> Reply | None:
        with self._turn:
            self.seen.append(seen)
            return self.replies.pop(0) if len(self.replies) > 1 else next(iter(self.replies), None)


class _Handler(BaseHTTPRequestHandler):
    server: Scripted
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.server.next_reply(Seen(self.command, self.path, headers, body))
        if reply is None:
            self.server.closing.wait()
        if reply is None or reply.cut == -1:
            self.close_connection = True
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body[: reply.cut])
        self.close_connection = reply.cut is not None

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def scripted(*replies: Reply) -> Iterator[Scripted]:
    server = Scripted(*replies)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def scene(
    kind: str, *replies: Reply, key: str | None = None, **more: Any
) -> Iterator[tuple[Scripted, Driven]]:
    """A server with its replies, and a client of it."""
    with scripted(*replies) as server, driven(kind, server.url, key, **more) as client:
        yield server, client
