"""Each call of the service as an HTTP request: its path, its query, its body. Nothing is sent here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from undertow.serving.auth.principal import check_name

Time = str | datetime
"""A moment in ISO 8601 or as a datetime."""

Messages = str | Sequence[Mapping[str, Any]]
"""What was said: `{"role", "content", "name"?, "timestamp"?}` each, or the words of a user."""

JSON = "application/json"
NDJSON = "application/x-ndjson"


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `headers` are those of this call alone, its idempotency key among them."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    content: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float | None = None

    def in_background(self) -> Call:
        """The same, answered by a job at once."""
        return Call(
            self.method, self.path, self.query, self.content, (*self.headers, ("prefer", "respond-async"))
        )


def of_tenant(tenant: str, *parts: str) -> str:
    """The path of what is a tenant's, each part of it percent-encoded. ValueError: no tenant's name."""
    check_name(tenant)
    return "/".join(("/v1/tenants", *map(_segment, (tenant, *parts))))


def _segment(part: str) -> str:
    quoted = quote(part, safe="")
    # as they are, they would mean this folder and the one above
    return quoted.replace(".", "%2E") if part in (".", "..") else quoted


def reading(path: str, *, timeout_s: float | None = None, **query: Any) -> Call:
    """A GET. Of the query, what is None is left out."""
    return Call("GET", path, _query(query), timeout_s=timeout_s)


def asking(path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Call:
    """A POST that may be made again as it is."""
    return Call("POST", path, content=_json(body), headers=(("content-type", JSON),), timeout_s=timeout_s)


def changing(
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    idempotency_key: str | None = None,
    timeout_s: float | None = None,
) -> Call:
    """A call that changes something, under the caller's idempotency key or one of its own."""
    headers = [("idempotency-key", _key(idempotency_key))]
    if body is not None:
        headers.append(("content-type", JSON))
    content = None if body is None else _json(body)
    return Call(method, path, content=content, headers=tuple(headers), timeout_s=timeout_s)


def _key(given: str | None) -> str:
    """A key that a header can hold. ValueError: the caller's is none."""
    if given is None:
        return uuid4().hex
    if not (0 < len(given) <= 255 and given.isascii() and given.isprintable()):
        raise ValueError("idempotency_key is empty, longer than 255 or not printable ASCII; give one that is")
    return given


def adding_many(tenant: str, items: Iterable[Mapping[str, Any]]) -> Call:
    """Each item with what `item` takes. Not the call but each item has an idempotency key."""
    made = [item(**{"idempotency_key": uuid4().hex, **one}) for one in items]
    return asking(of_tenant(tenant, "memories"), {"items": made})


def importing(tenant: str, records: Iterable[Mapping[str, Any]], timeout_s: float | None) -> Call:
    """The records of an export, one a line."""
    headers = (("idempotency-key", uuid4().hex), ("content-type", NDJSON))
    lines = b"".join(_json(record) + b"\n" for record in records)
    return Call("POST", of_tenant(tenant, "import"), content=lines, headers=headers, timeout_s=timeout_s)


def item(
    messages: Messages,
    *,
    session_id: str | None = None,
    timestamp: Time | None = None,
    metadata: Mapping[str, Any] | None = None,
    idempotency_key: str | None = None,
) -> dict[str, Any]:
    """One thing to remember, as a body of `add` or an item of `add_many`."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return given(
        messages=said,
        session_id=session_id,
        timestamp=in_iso(timestamp),
        metadata=metadata,
        idempotency_key=idempotency_key,
    )


def listing(
    tenant: str,
    *,
    kinds: Sequence[str] | None,
    filters: Mapping[str, Any] | None,
    since: Time | None,
    until: Time | None,
    limit: int,
    after: str | None,
) -> Call:
    """One page of a tenant's memories."""
    query = given(kind=kinds, since=in_iso(since), until=in_iso(until), limit=limit, after=after)
    query |= {f"filter.{key}": value for key, value in (filters or {}).items()}
    return Call("GET", of_tenant(tenant, "memories"), _query(query))


def given(**values: Any) -> dict[str, Any]:
    """Those that are not None: what is left out, the service decides."""
    return {name: value for name, value in values.items() if value is not None}


def in_iso(moment: Time | None) -> str | None:
    return moment.isoformat() if isinstance(moment, datetime) else moment


def _query(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    pairs = []
    for name, value in values.items():
        many = value if isinstance(value, list | tuple) else [value]
        pairs += [(name, _in_query(one)) for one in many if one is not None]
    return tuple(pairs)


def _in_query(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _json(document: Any) -> bytes:
    """ValueError: NaN, infinity or half a surrogate pair, which JSON cannot hold."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise ValueError(f"{value!r:.60} cannot be sent as JSON; give text, numbers, lists, objects or datetimes")
