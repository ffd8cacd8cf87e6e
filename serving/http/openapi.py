"""The OpenAPI document: its texts, and the error responses of every route."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from undertow.serving.client.results import Model
from undertow.serving.http.problems import MEDIA_TYPE

TITLE = "Undertow"
SUMMARY = "Long-term memory for LLM agents."
DESCRIPTION = """\
Each tenant has its own memories: **turns** as they were said, **episodes** and **facts** that a language
model writes when a topic recurs. A turn is durable and searchable when its request is answered; no language
model is on that path.

**Keys.** Send yours as `Authorization: Bearer ut_...` or as `X-API-Key`, or a token of the service's OpenID
Connect issuer, if it has one, as bearer. A key is bound to tenants and to
scopes (read, write, erase, admin); no scope includes another. A key that may not use a tenant gets 403,
whether or not the tenant exists.

**Tenants** are part of the path, percent-encoded: `acme/bob` is `/v1/tenants/acme%2Fbob`. The first turn
creates a tenant.

**Errors** are problem details (RFC 9457), `application/problem+json`, with a `type` for programs and a
`detail` for people; `errors` names the fields of bad input. 429 and most 503 responses have a
`Retry-After`.

**Repeating.** POST, PUT and DELETE requests that change something accept an `Idempotency-Key`: the same
request with the same key gets the first response and is not carried out twice. A different request gets
422; while the first is under way, 409. Add keys are kept for the tenant's lifetime, others for a day by
default. A request that failed may be repeated under its key, and takes effect once. Keys of different API
keys never collide. Only `POST /v1/webhooks` ignores an `Idempotency-Key`: its response has a secret.

**Jobs.** Flush, import and erase accept `Prefer: respond-async`: the response is 202 with the job's
`Location`. An accepted job is carried out even if the service is killed.

**Limits.** A key has a rate of requests per second and a budget of tokens per day. The budget covers its
answers. Consolidation tokens are counted for the tenant: see `usage`. Requests under way are also limited
per tenant, per key and in total; requests over a limit get 429 and are never queued. 503: a part of the
service is unavailable, or it is shutting down.
"""

STATUSES = {
    400: "The body ended before it was complete.",
    401: "No key, or none that is accepted.",
    403: "The key lacks the scope, or is for other tenants.",
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


# of fields and parameters whose model says nothing else
WORDS = {
    "after_seq": "Only turns with a higher `seq`: the `next_after_seq` of the page before; -1: all.",
    "answer": "What the language model says.",
    "at": "Never shown: up to which record of each journal its receiver has taken all.",
    "attempts": "How often in a row it has failed.",
    "cached_prompt_tokens": "Those of them that the server had in its prefix cache.",
    "calls": "Calls of the language model.",
    "certificates": "One for each tenant that was purged.",
    "change": "The change of the policy that is under way; null: none is.",
    "completion_tokens": "Tokens that the language model wrote.",
    "cosine": "Of the vectors of query and memory, -1 to 1.",
    "created_at": "When it was made, in UTC.",
    "detail": "What is wrong, and what to do.",
    "disabled_at": "When it was disabled, in UTC.",
    "drop_edits": "Change even if users have reworded or deleted memories; the history stays.",
    "episodes_removed": "Episodes of every generation, without deleted ones.",
    "erased_at": "When its memories disappeared, in UTC.",
    "error": "Why its last request failed; null: none has since it last succeeded.",
    "errors": "The fields of bad input.",
    "event": "What was done.",
    "explanation": "If it was asked for: how the search came about.",
    "facts_removed": "Facts of every generation, without deleted ones.",
    "failing_since": "Since when it fails, in seconds since 1970.",
    "finished_at": "When it ended, in UTC.",
    "generation": "The number of the policy's reading of the log; each change makes a new one.",
    "id": "Its id.",
    "include_text": "With the text of memories.",
    "items": "One for each item of the request, in order.",
    "job_id": "The job's id.",
    "key_id": "The key that made it.",
    "kind": "Which of the three kinds of memory.",
    "left_out": "The best of what was not returned, best first.",
    "limit": "The most results.",
    "matched": "Words of the query that it has; `exercise ~ yoga`: a related word in its place.",
    "memories": "What the language model was given.",
    "memory": "Its text.",
    "metadata": "Your own fields of these turns, to filter by.",
    "neighbour_cosine": "The higher cosine of the turns right before and after it; null: none counts.",
    "neighbour_words": "What the words of those two turns add to `words`.",
    "next": "The cursor of the next page; null at the end.",
    "next_after_seq": "The `after_seq` of the next page; null at the end.",
    "operation": "What the job does.",
    "out_of_reach": "Where bytes of the tenant may still be.",
    "passing": "How many turns pass each filter that was set: `time`, `filters`.",
    "policy": "The policy's name.",
    "prompt_tokens": "Tokens that the language model was sent.",
    "purged_at": "When its bytes were removed, in UTC.",
    "reason": "Which condition left it out.",
    "recall": "The share of the best turns that the index finds; 1: all.",
    "records": "How many records of the log it reads again.",
    "replayed": "How many parked jobs run again.",
    "results": "What was found or done, in order.",
    "rows_removed": "Rows of the journal that were removed.",
    "score": "How near it is; the highest is the best.",
    "scores": "By id, the parts of the score of each memory returned or left out.",
    "search": "hybrid: by cosine and words. dense: by cosine alone.",
    "secret": "What signs its requests; shown once.",
    "seq": "The turn's number in its tenant.",
    "session_id": "The conversation of the messages.",
    "source_seqs": "The turns that it rests on, by `seq`.",
    "status": "How it stands; of a problem or an item, the HTTP status.",
    "stretch_words": "What the words of the best turn nearby in its session add to `words`.",
    "telling_words": "Words that weigh more in the query's vector; null: all weigh alike.",
    "tenant_key": "The keyed hash of the tenant's name.",
    "tenant_keys": "The keyed hashes of the tenants whose events it gets; null: all tenants.",
    "text": "The new text.",
    "timestamp": "When it was said; null: unknown.",
    "title": "The HTTP status in words.",
    "turns": "How many turns the tenant has.",
    "turns_removed": "Turns, deleted ones included.",
    "type": "For programs: `urn:undertow:error:` and a name; `about:blank`: the status says all.",
    "url": "Where events are posted: https at a public address, or in a network that the service allows.",
    "usage": "What the answer cost.",
    "webhook_id": "The webhook's id.",
    "words": "What its own words give: a share of the most that the query's words can give, 0 to 1.",
    "words_only": "Found by words alone, as the encoder could not be reached.",
}


class ProblemView(Model):
    """Problem details for HTTP APIs (RFC 9457). `detail` says what to do; `errors` names fields."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] | None = None


def _problem_response(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {"description": STATUSES[status], "content": {MEDIA_TYPE: {"schema": PROBLEM}}}
    if status in WAITS:
        seconds = {"description": "Seconds to wait.", "schema": {"type": "string"}}
        response["headers"] = {"Retry-After": seconds}
    return response


PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: _problem_response(status) for status in STATUSES
}
"""The error responses of every route that needs a key."""


# Swagger UI's files come with the package fastapi_offline: the page loads nothing from elsewhere
PAGE = f"""\
<!DOCTYPE html>
<html lang="en">
<title>{TITLE}</title>
<meta charset="utf-8">
<link rel="stylesheet" href="/docs/swagger-ui.css">
<div id="page"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</html>
"""
START = 'SwaggerUIBundle({url: "/openapi.json", dom_id: "#page"})'
# it sets styles of elements, and shows pictures of its own
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
MEDIA = {"css": "text/css", "js": "text/javascript"}
PAGE_FILES = ("swagger-ui.css", "swagger-ui-bundle.js", "start.js")
PAGE_PATHS = ("/docs", *(f"/docs/{name}" for name in PAGE_FILES))


async def _page(request: Request) -> Response:
    if (name := request.path_params.get("name")) is None:
        return HTMLResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY})
    return Response(
        _file(name), media_type=MEDIA[name.rpartition(".")[2]], headers={"Cache-Control": "max-age=3600"}
    )


@cache
def _file(name: str) -> bytes:
    return START.encode() if name == "start.js" else (files("fastapi_offline") / "static" / name).read_bytes()


def describe(app: FastAPI) -> None:
    """Make the application serve this document, and its page."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=TITLE, version=app.version, summary=SUMMARY, description=DESCRIPTION, routes=app.routes
            )
            components = document.setdefault("components", {})
            components["securitySchemes"] = SCHEMES
            components.setdefault("schemas", {})["ProblemView"] = ProblemView.model_json_schema()
            ways = [way for path in document["paths"].values() for way in path.values()]
            fields = [(of["name"], of) for way in ways for of in way.get("parameters", ())]
            for schema in components["schemas"].values():
                fields += schema.get("properties", {}).items()
            for name, of in fields:
                if name in WORDS and not any("description" in one for one in (of, *of.get("anyOf", ()))):
                    of["description"] = WORDS[name]
            document["security"] = [{name: []} for name in SCHEMES]
            app.openapi_schema = document
        return app.openapi_schema

    for path in ("/docs", "/docs/{name}"):
        app.add_route(path, _page, include_in_schema=False)
    app.openapi = openapi  # type: ignore[method-assign]
