"""The service's URL, and its calls as HTTP requests. Nothing is sent here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx2

from undertow.serving.auth.principal import check_name

Time = str | datetime
"""A moment in ISO 8601 or as a datetime."""

Messages = str | Sequence[Mapping[str, Any]]
"""Messages `{"role", "content", "name"?, "timestamp"?}`, or the text of one user message."""

JSON = "application/json"
NDJSON = "application/x-ndjson"


def checked_url(url: str) -> str:
    """The service's URL without a slash at its end. ValueError."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}. Give one such as http://localhost:8080") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise ValueError(f"{url!r} is no service's URL; give one such as http://localhost:8080")
    return url.rstrip("/")


def headers_of(key: str | None) -> list[tuple[str, str]]:
    """The headers of every call. ValueError: the key is malformed; the message does not quote it."""
    if key is None:
        return []
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("the key is empty or holds what no key holds; give it as it was made")
    return [("authorization", f"Bearer {key}")]


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `headers`: its own, such as an idempotency key."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    content: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()
    timeout_s: float | None = None

    def in_background(self) -> Call:
        """The same call, carried out as a job."""
        return replace(self, headers=(*self.headers, ("prefer", "respond-async")), timeout_s=None)


def of_tenant(tenant: str, *parts: str) -> str:
    """A path below a tenant, each part percent-encoded. ValueError: an invalid tenant name."""
    check_name(tenant)
    # "." and ".." would otherwise mean this folder and its parent
    quoted = (p.replace(".", "%2E") if p in (".", "..") else quote(p, safe="") for p in (tenant, *parts))
    return "/".join(("/v1/tenants", *quoted))


def reading(path: str, *, timeout_s: float | None = None, **query: Any) -> Call:
    """A GET; None in the query is left out."""
    return Call("GET", path, _query(query), timeout_s=timeout_s)


def asking(path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Call:
    """A POST that is safe to repeat."""
    return Call("POST", path, content=_json(body), headers=(("content-type", JSON),), timeout_s=timeout_s)


def changing(
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    idempotency_key: str | None = None,
    timeout_s: float | None = None,
) -> Call:
    """A call that changes something, under the given idempotency key or a new one."""
    key = uuid4().hex if idempotency_key is None else idempotency_key
    if not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        raise ValueError("idempotency_key is empty, longer than 255 or not printable ASCII; give one that is")
    call = Call(method, path, headers=(("idempotency-key", key),), timeout_s=timeout_s)
    if body is None:
        return call
    return replace(call, content=_json(body), headers=(*call.headers, ("content-type", JSON)))


def adding_many(tenant: str, items: Iterable[Mapping[str, Any]]) -> Call:
    """Items with the fields of `item`. Each item has an idempotency key; the call has none."""
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
    """The body of `add`, or an item of `add_many`."""
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    return given(
        messages=said,
        session_id=session_id,
        timestamp=in_iso(timestamp),
        metadata=metadata,
        idempotency_key=idempotency_key,
    )


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None; the service chooses the others."""
    return {name: value for name, value in values.items() if value is not None}


def in_iso(moment: Time | None) -> str | None:
    return moment.isoformat() if isinstance(moment, datetime) else moment


def _query(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, one if isinstance(one, str) else _json(one).decode())
        for name, value in values.items()
        for one in (value if isinstance(value, list | tuple) else [value])
        if one is not None
    )


def _json(document: Any) -> bytes:
    """ValueError: NaN, infinity or half a surrogate pair, which JSON cannot hold."""
    return json.dumps(document, ensure_ascii=False, allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise ValueError(f"{value!r:.60} cannot be sent as JSON; give text, numbers, lists, objects or datetimes")
