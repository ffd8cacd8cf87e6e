"""The OpenAPI document: for each route who may use it, and every status that can come."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from undertow.serving.http.problems import MEDIA_TYPE
from undertow.serving.http.routes.access_rules import Access

TITLE = "Undertow"
SUMMARY = "Long-term memory for LLM agents."
DESCRIPTION = """\
Many tenants, each with memories of its own: **turns** as they were said, **episodes** and **facts** that a
language model writes when a topic recurs. A turn is durable and searchable when the answer to its request
comes; no language model stands in that path.

**Keys.** Send yours as `Authorization: Bearer ut_...` or as `X-API-Key`. A key is bound to tenants and to
scopes (read, write, erase, admin), of which none includes another. Whether a tenant exists makes no
difference to what a key that may not use it is told: 403.

**Tenants** stand in the path, percent-encoded: `acme/bob` is `/v1/tenants/acme%2Fbob`. The first turn makes a
tenant.

**Errors** are problem details (RFC 9457), `application/problem+json`, with a `type` for programs and a
`detail` for people; `errors` names the fields of bad input. 429 and most 503 say in `Retry-After` when to
come again.

**Repeating.** POST, PUT and DELETE that change something take an `Idempotency-Key`: the same request again
with the same key has the first answer and is not done twice; with another request the answer is 422, while
the first is under way 409. Adding knows its keys for ever, other requests for a day by default. A request
that failed may be sent again under its key, and takes effect once. Keys of two API keys never meet.

**Jobs.** Flush, import and erase take `Prefer: respond-async`: the answer is 202 with the job's `Location`,
and what was accepted is done even if the service is killed.

**Limits.** Requests a second and tokens a day are those of the key. Tokens are those of its answers; what
consolidating memories costs is the tenant's, as it comes later and from all who add: see `usage`. Beside
them, bounds hold on requests under way for a tenant, with a key and in all: beyond them the service refuses
at once, with 429. 503 says that a part of the service is away, or that it is ending.
"""

STATUSES = {
    400: "The body ended before it was complete.",
    401: "No key, or none that is accepted.",
    403: "The key may not do this here.",
    404: "This tenant, memory or job is not there.",
    408: "The body came too slowly.",
    409: "The first request with this Idempotency-Key is under way, or what is there stands against it.",
    413: "The body is too large.",
    422: "Something in the request cannot be taken; `errors` names the fields.",
    429: "Too many requests, too much under way, too many turns waiting, or the token budget is spent.",
    500: "The service failed at this request.",
    503: "A part of the service cannot be used now, or it is ending.",
}
WAITS = (429, 503)
PROBLEM = {"$ref": "#/components/schemas/ProblemView"}

SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, such as ut_0123456789ab_..."},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same key."},
}

IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same request again with the same key has the first one's answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


def problem_response(status: int) -> dict[str, Any]:
    """How a status of problem details is declared."""
    response: dict[str, Any] = {"description": STATUSES[status], "content": {MEDIA_TYPE: {"schema": PROBLEM}}}
    if status in WAITS:
        seconds = {"description": "Seconds to wait.", "schema": {"type": "string"}}
        response["headers"] = {"Retry-After": seconds}
    return response


def documented(access: Access) -> dict[int | str, dict[str, Any]]:
    """The statuses of a route beside its good ones."""
    return {status: problem_response(status) for status in STATUSES} if access.scope is not None else {}


def told(access: Access, endpoint_doc: str | None) -> str:
    """A route's description, with who may use it."""
    words = (endpoint_doc or "").strip()
    if access.scope is None:
        return f"{words}\n\nNeeds no key."
    return f"{words}\n\nNeeds a key with the scope `{access.scope.value}`, for {access.reaches.value}."


def describe(app: FastAPI) -> None:
    """Have the application give this document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=TITLE, version=app.version, summary=SUMMARY, description=DESCRIPTION, routes=app.routes
            )
            components = document.setdefault("components", {})
            components["securitySchemes"] = SCHEMES
            components.setdefault("schemas", {}).update(_problem_schema())
            document["security"] = [{name: []} for name in SCHEMES]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _problem_schema() -> dict[str, Any]:
    from undertow.serving.http.schemas.service import ProblemView

    return {"ProblemView": ProblemView.model_json_schema()}
