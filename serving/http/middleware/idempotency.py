"""Idempotency-Key: a repeated request gets the first response, and is not carried out twice.

A response is kept if the request succeeded. A refused request changed nothing, and may be tried again under
its key. A request that failed or was interrupted is carried out again as a repeat, for which work that is
done already is no error. Add requests do not pass here: the journal has their dedupe keys (add_batches.py).
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from undertow.serving.http.middleware.body_limits import read_all, replayed
from undertow.serving.http.problems import Problem, bad_field, problem_of
from undertow.serving.http.state_db import StateDb

KEY_HEADER = "idempotency-key"
LONGEST_KEY = 255
# kept with a response
KEPT_HEADERS = ("content-type", "location")
# compared between repeats, like path and body
REQUEST_HEADERS = ("prefer",)
# in a request's scope: whether an earlier process began it
AGAIN = "undertow.again"

OTHER_REQUEST = "This Idempotency-Key was used for another request. Take a new key for a new request."
UNDER_WAY = "The first request with this Idempotency-Key is still under way. Ask again in a moment."


def under_way() -> Problem:
    """The answer to a repeat whose first request has not ended."""
    return Problem(409, "under-way", UNDER_WAY, retry_after_s=1)


@dataclass(slots=True)
class Response:
    """A whole response."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)

    async def take(self, message: Message) -> None:
        """A `send` that collects it."""
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", []))
        else:
            self.body += message.get("body", b"")

    def located(self, change: Callable[[str], str]) -> Response:
        """The same response with a changed Location, if it has one."""
        headers = [
            (name, change(value.decode("latin-1")).encode("latin-1") if name == b"location" else value)
            for name, value in self.headers
        ]
        return Response(self.status, headers, self.body)

    async def give(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": bytes(self.body)})


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """The entry of a request to carry out. `again`: it was begun before; see IdempotencyStore.begin."""

    mark: bytes
    at: float
    again: bool


class IdempotencyStore:
    """The kept responses."""

    def __init__(self, state: StateDb, keep_s: float) -> None:
        self._state = state
        self._keep_s = keep_s
        # requests that another process began and did not finish are repeated
        self._process = secrets.token_hex(8)

    async def begin(
        self, mark: bytes, tenant_key: str | None, request: bytes
    ) -> Response | IdempotentRequest:
        """The kept response, or the entry of a request to carry out now. Problem 409, 422.

        `again`: a service that has ended since began it, and nobody knows how far it got. `tenant_key`: the
        tenant whose erasure deletes the entry.
        """

        def begin(db: sqlite3.Connection) -> Response | IdempotentRequest:
            now = time.time()
            db.execute("delete from kept where at < ?", (now - self._keep_s,))
            row = db.execute(
                "select request, process, status, headers, body from kept where mark = ?", (mark,)
            ).fetchone()
            if row is not None:
                known, process, status, headers, body = row
                if known != request:
                    raise Problem(422, "idempotency-key-reused", OTHER_REQUEST)
                if status is not None:
                    return _response(status, headers, body)
                if process == self._process:
                    raise under_way()
            db.execute(
                "insert or replace into kept values (?, ?, ?, ?, ?, null, null, null)",
                (mark, tenant_key, request, self._process, now),
            )
            return IdempotentRequest(mark, now, row is not None)

        return await self._state.run(begin)

    async def keep(self, begun: IdempotentRequest, response: Response) -> None:
        """Keep the response, unless the entry was deleted meanwhile."""
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in response.headers
            if name.decode() in KEPT_HEADERS
        }
        row = (time.time(), response.status, orjson.dumps(headers).decode(), bytes(response.body))
        await self._change("update kept set at = ?, status = ?, headers = ?, body = ?", begun, *row)

    async def fail(self, begun: IdempotentRequest, status: int) -> None:
        """Forget a refused request (4xx), which changed nothing. A failed one (5xx) is left unfinished."""
        if status >= 500:
            await self.leave(begun)
        else:
            await self._change("delete from kept", begun)

    async def leave(self, begun: IdempotentRequest) -> None:
        """Leave a request unfinished, as if its process had ended: nobody knows how far it got."""
        await self._change("update kept set process = ''", begun)

    async def _change(self, change: str, begun: IdempotentRequest, *values: object) -> None:
        """Change this very entry: if it was deleted meanwhile, the key may have a newer one."""
        where = f"{change} where mark = ? and at = ?"
        await self._state.run(lambda db: db.execute(where, (*values, begun.mark, begun.at)))

    async def forget(self, tenant_key: str) -> None:
        """Delete everything kept for a tenant."""
        await self._state.run(lambda db: db.execute("delete from kept where tenant_key = ?", (tenant_key,)))


def _response(status: int, headers: str, body: bytes) -> Response:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in orjson.loads(headers).items()]
    pairs.append((b"content-length", str(len(body)).encode()))
    return Response(status, pairs, bytearray(body))


class KeyOwner(NamedTuple):
    """The sender of a request: an API key's id, the tenant in the path, and that tenant's keyed hash.

    `erases`: the request is an erasure. Its kept response outlives the tenant, so that a repeat does not
    erase memories added since.
    """

    key_id: str
    tenant: str | None
    tenant_key: str | None
    erases: bool = False


async def answer_once(
    once: IdempotencyStore,
    sender: KeyOwner,
    handle: Callable[[Scope, Receive, Send], Awaitable[None]],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Respond to a request with an Idempotency-Key: by `handle`, or with the kept response.

    A key is scoped to an API key, a tenant and a route. Problem 409, 422. Nothing that is kept contains a
    tenant's name: a path, and a Location, is kept from the part after the tenant.
    """
    headers = Headers(scope=scope)
    key = idempotency_key(headers)
    body = await read_all(receive)
    mark = _digest(sender.key_id, scope["method"], scope["route"].path, sender.tenant_key or "", key)
    relevant = [headers.get(name, "") for name in REQUEST_HEADERS]
    root, rest = _parted(scope["path"], sender.tenant)
    request = _digest(rest, scope["query_string"].decode("latin-1"), *relevant, body)
    begun = await once.begin(mark, None if sender.erases else sender.tenant_key, request)
    if isinstance(begun, Response):
        await begun.located(lambda place: root + place).give(send)
        return
    scope[AGAIN] = begun.again
    response = Response()
    try:
        await handle(scope, replayed(body, receive), response.take)
    except Exception as error:
        problem = problem_of(error)
        await once.fail(begun, problem.status_code)
        raise problem from error
    except BaseException:
        await once.leave(begun)
        raise
    if 200 <= response.status < 300:
        await once.keep(begun, response.located(lambda place: place.removeprefix(root)))
    else:
        await once.fail(begun, response.status)
    await response.give(send)


def _parted(path: str, tenant: str | None) -> tuple[str, str]:
    """A path as it was sent, split after the tenant."""
    parts = path.split("/")
    cut = 0 if tenant is None else parts.index("tenants") + 2
    return "/".join(parts[:cut]), "/".join(["", *parts[cut:]] if cut else parts)


def idempotency_key(headers: Headers) -> str:
    """The Idempotency-Key of a request that has one. Problem 422: it is invalid."""
    key = headers[KEY_HEADER]
    if not 1 <= len(key) <= LONGEST_KEY or not key.isprintable():
        raise bad_field("Idempotency-Key", f"must be 1 to {LONGEST_KEY} printable characters, as a UUID.")
    return key


def _digest(*parts: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8) + raw)
    return digest.digest()
