"""One request of mem0's client, served by requests to the service's own routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import orjson
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope

from undertow.serving.http.middleware.body_limits import bounded, read_all, replayed
from undertow.serving.http.middleware.front import TENANT, sender_of
from undertow.serving.http.middleware.idempotency import KEY_HEADER, LONGEST_KEY, Response
from undertow.serving.http.problems import URN, Problem, bad_field
from undertow.serving.http.routes.access import decoded
from undertow.serving.http.routes.direct import LARGE_BODY_BYTES
from undertow.serving.http.service import Service

OF_BODY = frozenset({b"content-type", b"content-length"})

# A field's values that mean what is done here anyway, and what to tell about others.
Rules = Mapping[str, tuple[tuple[Any, ...], str]]


class Call:
    """A request of mem0's client. `params`: of its path; `query`: of its query string."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, params: Mapping[str, str]) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._large = False
        self._body: dict[str, Any] | None = None
        self.params = {name: decoded(name, text) for name, text in params.items()}
        self.query = _query(scope["query_string"])
        self.service: Service = scope["app"].state.service

    async def body(self) -> dict[str, Any]:
        """The request's JSON object. Problem 4xx, as of any body."""
        if self._body is None:
            self._body = await self._read()
        return self._body

    def replace(self, body: dict[str, Any]) -> None:
        """Go on as if the request had this body."""
        self._body = body

    async def _read(self) -> dict[str, Any]:
        settings, key_id = self.service.settings, sender_of(self._scope).key_id
        limits = settings.max_body_bytes, settings.body_timeout_s
        # the requests that it becomes count for the tenant
        with self.service.load.share(key_id, None):
            raw = await read_all(bounded(self._receive, Headers(scope=self._scope), *limits))
        self._large = len(raw) > LARGE_BODY_BYTES
        try:
            body = await self._run(orjson.loads, raw, large=self._large)
        except orjson.JSONDecodeError as error:
            raise bad_field("body", f"is no JSON, at character {error.pos}") from None
        if not isinstance(body, dict):
            raise bad_field("body", "must be a JSON object.")
        return body

    async def ask(
        self, method: str, tenant: str, rest: str = "", body: Any = None, *, mark: str = "", **query: Any
    ) -> Any:
        """What one of a tenant's own routes returns. Problem, or an engine's error.

        `mark`: tells apart the parts of a request with an Idempotency-Key.
        """
        return await self.ask_at(method, f"/v1/tenants/{quote(tenant, safe='')}{rest}", body, mark, query)

    async def ask_at(
        self, method: str, path: str, body: Any = None, mark: str = "", query: Mapping[str, Any] | None = None
    ) -> Any:
        """What the route at a path returns."""
        raw = b"" if body is None else await self._run(orjson.dumps, body, large=self._large)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
        if (key := Headers(scope=self._scope).get(KEY_HEADER)) is not None:
            if len(key) <= LONGEST_KEY < len(key + mark):
                key = sha256(key.encode("latin-1")).hexdigest()
            headers.append((KEY_HEADER.encode(), f"{key}{mark}".encode("latin-1")))
        given = {name: value for name, value in (query or {}).items() if value is not None}
        inner = {
            **self._scope,
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": urlencode(given, doseq=True).encode(),
            "headers": headers,
        }
        response = Response()
        try:
            await self._app(inner, replayed(raw, self._receive), response.take)
        finally:  # the request log names the tenant
            self._scope[TENANT] = inner.get(TENANT)
        if response.status < 300:
            large = len(response.body) > LARGE_BODY_BYTES
            return await self._run(orjson.loads, response.body, large=large)
        raise _problem(response)

    async def _run(self, run: Callable[[Any], Any], what: Any, *, large: bool) -> Any:
        """On a thread, if it would hold the event loop."""
        if not large:
            return run(what)
        return await self.service.turns.aside(sender_of(self._scope).key_id, run, what, paced=False)


def checked(given: Mapping[str, Any], known: set[str], rules: Rules) -> None:
    """Problem 422 for the first field that is unknown, or has a value that `rules` do not allow."""
    for name, value in given.items():
        if name in rules:
            allowed, words = rules[name]
            if value is not None and not any(value is one for one in allowed):
                raise bad_field(name, words)
        elif name not in known and value is not None:
            raise bad_field(name, "is no field here. Leave it out; docs/mem0.md lists what is understood.")


def _query(text: bytes) -> dict[str, str]:
    """The parameters of a query string. Problem 422: nobody could tell which memories are meant."""
    try:
        pairs = parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise bad_field("query", "is no percent-encoded UTF-8. Percent-encode its UTF-8.") from None
    query = dict(pairs)
    if len(query) < len(pairs):
        raise bad_field("query", "holds a parameter twice. Give each once.")
    return query


def _problem(response: Response) -> Problem:
    """The problem that an inner response is."""
    told = orjson.loads(response.body)
    headers = {
        name.decode(): value.decode("latin-1") for name, value in response.headers if name not in OF_BODY
    }
    _, _, slug = str(told["type"]).partition(URN)
    return Problem(response.status, slug, told["detail"], errors=told.get("errors", ()), headers=headers)
