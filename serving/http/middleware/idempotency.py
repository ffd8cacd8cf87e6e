"""Idempotency-Key: the same request again has the first one's answer, and is not done twice.

An answer is kept when the request has succeeded; one that was refused has changed nothing, and may be tried
again under the same key. Of one that failed, or was cut off, nobody knows: it is done again as a repeat, to
which what is done already is no error. Adding to memory does not come here: the journal itself knows its
keys (turns.py).
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
# of a response, what is its own
KEPT_HEADERS = ("content-type", "location")
# of a request, what is part of it beside its path and body
ASKED_HEADERS = ("prefer",)
# of a request that is done, whether it was begun before
AGAIN = "undertow.again"

OTHER_REQUEST = "This Idempotency-Key was used for another request. Take a new key for a new request."
UNDER_WAY = "The first request with this Idempotency-Key is still under way. Ask again in a moment."


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
        """The same with another Location, if it has one."""
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
    """A request that is to be done now, and its entry. `again`: it was begun before; see Once.begin."""

    mark: bytes
    at: float
    again: bool


class IdempotencyStore:
    """The answers that are kept."""

    def __init__(self, state: StateDb, keep_s: float) -> None:
        self._state = state
        self._keep_s = keep_s
        # what another process has begun and not ended was cut off: it is done again
        self._process = secrets.token_hex(8)

    async def begin(
        self, mark: bytes, tenant_key: str | None, request: bytes
    ) -> Response | IdempotentRequest:
        """The answer that was given; else the request is to be done now. Problem 409, 422.

        Again: a service that has ended since had begun it, and nobody knows how far it came. `tenant_key`:
        whose erasure is to forget it.
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
                    raise Problem(409, "under-way", UNDER_WAY, retry_after_s=1)
            db.execute(
                "insert or replace into kept values (?, ?, ?, ?, ?, null, null, null)",
                (mark, tenant_key, request, self._process, now),
            )
            return IdempotentRequest(mark, now, row is not None)

        return await self._state.run(begin)

    async def keep(self, begun: IdempotentRequest, response: Response) -> None:
        """The answer to what was begun, unless that was forgotten meanwhile."""
        headers = {
            name.decode(): value.decode("latin-1")
            for name, value in response.headers
            if name.decode() in KEPT_HEADERS
        }
        row = (time.time(), response.status, orjson.dumps(headers).decode(), bytes(response.body))
        await self._change("update kept set at = ?, status = ?, headers = ?, body = ?", begun, *row)

    async def give_up(self, begun: IdempotentRequest) -> None:
        """What was begun was refused."""
        await self._change("delete from kept", begun)

    async def leave(self, begun: IdempotentRequest) -> None:
        """Nobody knows how far what was begun came: as if its process had ended."""
        await self._change("update kept set process = ''", begun)

    async def _change(self, change: str, begun: IdempotentRequest, *values: object) -> None:
        """Of the very entry that was begun: forgotten meanwhile, it may have a successor."""
        where = f"{change} where mark = ? and at = ?"
        await self._state.run(lambda db: db.execute(where, (*values, begun.mark, begun.at)))

    async def forget(self, tenant_key: str) -> None:
        """Drop all that is kept for a tenant."""
        await self._state.run(lambda db: db.execute("delete from kept where tenant_key = ?", (tenant_key,)))


def _response(status: int, headers: str, body: bytes) -> Response:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in orjson.loads(headers).items()]
    pairs.append((b"content-length", str(len(body)).encode()))
    return Response(status, pairs, bytearray(body))


class Sender(NamedTuple):
    """Who sends a request: an API key's id; and the tenant in its path, by name and by keyed hash."""

    key_id: str
    tenant: str | None
    tenant_key: str | None


async def answer_once(
    once: IdempotencyStore,
    sender: Sender,
    outlives_erasure: bool,
    handle: Callable[[Scope, Receive, Send], Awaitable[None]],
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Have `handle` answer a request with an Idempotency-Key, or give the answer that it gave before.

    The key is the sender's own: of this API key, this tenant and this route. `outlives_erasure`: so does the
    answer to an erasure, a repeat of which is not to erase what came after it. Problem 409, 422.

    What is kept has no tenant's name in it: a path stands there from the tenant's on, and so does a Location.
    """
    headers = Headers(scope=scope)
    key = idempotency_key(headers)
    body = await read_all(receive)
    mark = _digest(sender.key_id, scope["method"], scope["route"].path, sender.tenant_key or "", key)
    asked = [headers.get(name, "") for name in ASKED_HEADERS]
    root, rest = _parted(scope["path"], sender.tenant)
    request = _digest(rest, scope["query_string"].decode("latin-1"), *asked, body)
    begun = await once.begin(mark, None if outlives_erasure else sender.tenant_key, request)
    if isinstance(begun, Response):
        await begun.located(lambda place: root + place).give(send)
        return
    scope[AGAIN] = begun.again
    response = Response()
    try:
        await handle(scope, replayed(body, receive), response.take)
    except Exception as error:
        problem = problem_of(error)
        await _end_without(once, begun, problem.status_code)
        raise problem from error
    except BaseException:
        await once.leave(begun)
        raise
    if 200 <= response.status < 300:
        await once.keep(begun, response.located(lambda place: place.removeprefix(root)))
    else:
        await _end_without(once, begun, response.status)
    await response.give(send)


async def _end_without(once: IdempotencyStore, begun: IdempotentRequest, status: int) -> None:
    """What was begun ends without success."""
    await (once.leave(begun) if status >= 500 else once.give_up(begun))


def _parted(path: str, tenant: str | None) -> tuple[str, str]:
    """A path as it was sent: up to the tenant's part, and what follows."""
    parts = path.split("/")
    cut = 0 if tenant is None else parts.index("tenants") + 2
    return "/".join(parts[:cut]), "/".join(["", *parts[cut:]] if cut else parts)


def idempotency_key(headers: Headers) -> str:
    """The request's Idempotency-Key, which it has. Problem 422: it cannot be one."""
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
