"""Errors as problem details (RFC 9457), and the status of each engine error.

A problem tells the caller what to do, and reveals nothing about the server. The log has the operator's part:
types and code locations of exceptions, never their messages, which may quote a turn.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from undertow.engine.api.erasure import NotCertified
from undertow.engine.api.policy_change import PolicyConflict
from undertow.engine.api.transfer.export import ExportBroken
from undertow.engine.api.transfer.import_ import ImportCancelled, ImportNeedsAdmin, TenantExists
from undertow.engine.base.model import BadInput, InputError, NoLLM, UndertowError, UnknownMemory
from undertow.engine.cluster.routing.errors import ShardDown, ShardGone
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.llm.replies import BadReply, BrokenOff, ServerRefused
from undertow.engine.readers.record import READ_ON
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.store_info import StoreError
from undertow.engine.tenants.migration_records import InTransit, Moved
from undertow.engine.tenants.registry import ArenaFull, UnknownTenant
from undertow.serving.auth.audit import AuditError
from undertow.serving.telemetry.logs import log_failure

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
URN = "urn:undertow:error:"
MOST_ERRORS = 32
# parts that pydantic adds to a location for the alternatives of a union
FORM = re.compile(r"str|int|float|list\[.*\]|function-.*|nullable\[.*\]|constrained-.*")
# in a request's scope: the slug of its error, for metrics and the log
SLUG = "undertow.problem"
# and the media type of its document, if it is not MEDIA_TYPE
PROBLEM_MEDIA = "undertow.problem_media"
CLOSE = {"Connection": "close"}

TITLES = {
    400: "Bad request",
    401: "No valid key",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    408: "Request too slow",
    409: "Conflict",
    413: "Too large",
    422: "Bad input",
    429: "Too many",
    500: "Internal error",
    501: "Not implemented",
    503: "Unavailable",
}


class Problem(HTTPException):
    """An error as the caller sees it. `slug`: its kind, for programs."""

    def __init__(
        self,
        status: int,
        slug: str,
        detail: str,
        *,
        errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`errors`: {"field", "detail"} each. `retry_after_s` is rounded up to whole seconds."""
        wait = {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
        super().__init__(status, detail, {**wait, **(headers or {})})
        self.slug = slug
        self.errors = [dict(error) for error in errors]

    @property
    def document(self) -> dict[str, Any]:
        """Its JSON."""
        document = {
            "type": f"{URN}{self.slug}" if self.slug else "about:blank",
            "title": TITLES.get(self.status_code, "Error"),
            "status": self.status_code,
            "detail": self.detail,
        }
        return {**document, "errors": self.errors} if self.errors else document

    @property
    def response(self) -> Response:
        return self.response_as(MEDIA_TYPE)

    def response_as(self, media_type: str) -> Response:
        return Response(orjson.dumps(self.document), self.status_code, self.headers, media_type)


def bad_field(field: str, detail: str) -> Problem:
    """422 for one field."""
    return Problem(422, "input", f"{field}: {detail}", errors=[{"field": field, "detail": detail}])


class _Kind(NamedTuple):
    """The problem for an exception type. `detail` None: the exception's message."""

    status: int
    slug: str
    detail: str | None
    retry_after_s: float | None = None


_SHARD = "The part of the service that has this tenant cannot be reached now. Try again in a moment."
_STORE = "The store cannot be used now. Try again later; the service's log says what is wrong."
_LLM = (
    "The language model's server cannot be used now. Storing and searching go on; ask again later. "
    "The service's log says what is wrong."
)
_NO_LLM = (
    "This service runs without a language model, so it answers no questions; search finds the memories. "
    "Whoever runs it can give it one: `undertow serve --llm URL`."
)

# the first match counts, so subclasses come before their bases
KINDS: Mapping[type[Exception], _Kind] = {
    UnknownTenant: _Kind(404, "unknown-tenant", "This tenant has no memories here. Add some first."),
    UnknownMemory: _Kind(404, "unknown-memory", "This tenant has no memory with this id, or not any more."),
    InputError: _Kind(422, "input", None),
    TenantExists: _Kind(
        409,
        "tenant-exists",
        "This tenant exists already, even if only with deleted turns or a policy. "
        "Import under another name, or erase it first.",
    ),
    PolicyConflict: _Kind(409, "policy", None),
    NotCertified: _Kind(503, "resharding", None, 30),
    ImportNeedsAdmin: _Kind(403, "import-settings", None),
    ImportCancelled: _Kind(409, "called-off", "The tenant was erased meanwhile; nothing was imported."),
    ExportBroken: _Kind(
        503, "export-broken", "The tenant was erased or moved meanwhile. Export it again.", 1
    ),
    QueueFull: _Kind(429, "queue-full", "Too many turns wait to be stored. Try again in a moment.", 1),
    ArenaFull: _Kind(503, "memory-full", "There is no room in memory for this tenant now. Try again.", 5),
    EncoderDown: _Kind(503, "encoder", "The embedding endpoint cannot be used now. Try again later.", 5),
    BadReply: _Kind(503, "llm-reply", "The language model gave no usable answer. Ask in other words."),
    BrokenOff: _Kind(503, "llm-broke-off", "The answer broke off. Discard what arrived, and ask again."),
    ServerRefused: _Kind(503, "llm", _LLM, 30),
    ShardDown: _Kind(503, "shard", _SHARD, 5),
    ShardGone: _Kind(503, "shard", _SHARD, 5),
    Moved: _Kind(503, "moving", _SHARD, 1),
    InTransit: _Kind(503, "moving", _SHARD, 1),
    NoLLM: _Kind(503, "no-llm", _NO_LLM),
    StoreError: _Kind(503, "store", _STORE, 30),
    AuditError: _Kind(503, "audit", "The audit log cannot record this, so it was not begun. Try later.", 30),
    UndertowError: _Kind(503, "engine", "The engine cannot do this now. Try again later.", 5),
}
# what those of mem0's API, and of others, are here
CURES = {
    "user_id": "name whose memories in the path, /v1/tenants/{tenant}/",
    "agent_id": "name whose memories in the path, /v1/tenants/{tenant}/",
    "app_id": "name whose memories in the path, /v1/tenants/{tenant}/",
    "run_id": "did you mean session_id",
    "limit": "did you mean top_k",
    "k": "did you mean top_k",
    "text": "give messages, a list of {role, content}",
    "content": "give messages, a list of {role, content}",
    "data": "give text",
    "infer": "a turn is kept as it is, and episodes and facts come later. Leave it out",
}
FIELDS = (
    *("messages", "session_id", "timestamp", "metadata", "items", "idempotency_key"),
    *("query", "top_k", "kinds", "filters", "since", "until", "threshold", "explain"),
    *("question", "as_of", "mode", "stream", "text", "policy", "drop_edits", "url", "tenants"),
)
FRAMEWORK = {
    404: "There is nothing here. /docs and /openapi.json list the routes. A tenant in a path is "
    "percent-encoded: acme%2Fbob.",
    405: "This route does not know that method; the header Allow names those it knows.",
    400: "The request's body cannot be read.",
}
INTERNAL = _Kind(500, "internal", "The service failed at this request; its log says where.")


def problem_of(error: Exception) -> Problem:
    """The problem for any exception. Logs those that are the service's fault."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestValidationError):
        return _of_validation(error)
    if isinstance(error, HTTPException):
        return _of_framework(error)
    kind = next((kind for type_, kind in KINDS.items() if isinstance(error, type_)), INTERNAL)
    if kind.status >= 500:
        log_failure(log, error)
    if isinstance(error, InputError):
        return _of_input(error.problem)
    return Problem(kind.status, kind.slug, kind.detail or str(error), retry_after_s=kind.retry_after_s)


def _of_input(bad: BadInput) -> Problem:
    """Invalid input of a request; the message names no file."""
    line = [] if bad.line is None else [f"line {bad.line}"]
    place = ", ".join([*line, bad.field] if bad.field else line) or "body"
    return bad_field(place, f"{bad.reason}. {'Correct it.' if bad.cure == READ_ON else bad.cure}")


def _of_validation(error: RequestValidationError) -> Problem:
    """Names each invalid field, without its value."""
    details: dict[str, str] = {}
    for flaw in error.errors():
        details.setdefault(_field(flaw), _flaw(flaw, error.body))
    found = [{"field": field, "detail": detail} for field, detail in details.items()]
    first = found[0]
    return Problem(422, "input", f"{first['field']}: {first['detail']}", errors=found[:MOST_ERRORS])


def _flaw(flaw: Mapping[str, Any], body: object) -> str:
    if flaw["loc"] == ("body",) and isinstance(body, bytes) and body:
        return "was not sent as JSON. Send JSON, with Content-Type: application/json"
    if flaw["type"] == "json_invalid":
        return f"is no JSON, at character {flaw['loc'][-1]}"
    if flaw["type"] == "extra_forbidden":
        return _unknown(str(flaw["loc"][-1]))
    return str(flaw["msg"]).removeprefix("Value error, ")


def _unknown(field: str) -> str:
    """What to do about a field that there is not."""
    if cure := CURES.get(field):
        return f"is not known; {cure}."
    near = get_close_matches(field, FIELDS, n=1)
    return f"is not known; did you mean {near[0]}?" if near else "is not known. Leave it out."


def _field(flaw: Mapping[str, Any]) -> str:
    """A location in the request, such as messages[2].content, without pydantic's names of alternatives."""
    head, *rest = flaw["loc"] or ("body",)
    parts = rest if head in ("body", "query", "path", "header") else [head, *rest]
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not FORM.fullmatch(str(part)):
            text += f".{part}" if text else str(part)
    return text if text and flaw["type"] != "json_invalid" else "body"


def _of_framework(error: HTTPException) -> Problem:
    """404, 405 and 400, which the framework raises itself."""
    detail = FRAMEWORK.get(error.status_code, "The request cannot be served.")
    return Problem(error.status_code, "", detail, headers=error.headers)
