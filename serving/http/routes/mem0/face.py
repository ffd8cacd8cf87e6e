"""mem0's routes, as plain ASGI between the front and the application.

They pass the front, which authenticates; what a request becomes passes the service's own routes, which hold
its scope, its shares, its turn and its bounds. So nothing is decided here, and all else passes through.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from undertow.serving.http.middleware.front import undecoded_path
from undertow.serving.http.problems import PROBLEM_MEDIA, Problem
from undertow.serving.http.routes.mem0 import methods, own_server
from undertow.serving.http.routes.mem0.call import Call

JSON = "application/json"


class Mem0Route:
    """One route. `path`: as metrics and the request log name it."""

    def __init__(self, verb: str, path: str, serve: Callable[[Call], Awaitable[Any]] | str) -> None:
        """`serve`: a text says why there is no such thing, and what to use instead."""
        self.verb = verb
        self.path = path
        self.serve = serve
        self.pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path.replace("*", ".*")))


NO_PROFILES = "Undertow has no profiles. Search finds a user's episodes and facts."
# what mem0 has and Undertow has not: what to use instead
ABSENT = {
    "/v1/exports/*": "Undertow has no exports by a schema. GET /v1/tenants/TENANT/export has all.",
    "/v1/summary/": "Undertow has no summaries. POST /v1/tenants/TENANT/answer answers questions.",
    "/v2/profiles/*": NO_PROFILES,
    "/v2/entities/*/profile/": NO_PROFILES,
    "/v1/feedback/": "Undertow has no feedback on single memories. Reword or delete what is wrong.",
    "/api/v1/webhooks/*": "Undertow has no webhooks of this form. POST /v1/webhooks, as docs/events.md says.",
    "/api/v1/orgs/*": "Undertow has no projects and members. A key's tenants and scopes say who may what.",
    "/reset": "Nothing deletes all users at once. DELETE /memories?user_id=... deletes one's.",
    "/configure*": "Undertow is configured where it is started. docs/service.md says how.",
    "/entities*": "GET /v1/tenants lists them, and DELETE /v1/tenants/TENANT erases one.",
    "/v1/event*": "Nothing waits here. GET /v1/tenants/TENANT/events tells what happens.",
}
ROUTES = (
    Mem0Route("GET", "/v1/ping/", methods.ping),
    Mem0Route("POST", "/v3/memories/add/", methods.add),
    Mem0Route("POST", "/v3/memories/search/", methods.search),
    Mem0Route("POST", "/v3/memories/", methods.get_all),
    Mem0Route("DELETE", "/v1/memories/", methods.delete_all),
    Mem0Route("GET", "/v1/memories/{id}/", methods.get),
    Mem0Route("PUT", "/v1/memories/{id}/", methods.update),
    Mem0Route("DELETE", "/v1/memories/{id}/", methods.delete),
    Mem0Route("GET", "/v1/memories/{id}/history/", methods.history),
    Mem0Route("PUT", "/v1/batch/", methods.batch_update),
    Mem0Route("DELETE", "/v1/batch/", methods.batch_delete),
    Mem0Route("GET", "/v1/entities/", methods.users),
    Mem0Route("DELETE", "/v2/entities/{type}/{name}/", methods.delete_user),
    Mem0Route("POST", "/memories", methods.add),
    Mem0Route("GET", "/memories", own_server.get_all),
    Mem0Route("DELETE", "/memories", methods.delete_all),
    Mem0Route("GET", "/memories/{id}", methods.get),
    Mem0Route("PUT", "/memories/{id}", own_server.update),
    Mem0Route("DELETE", "/memories/{id}", methods.delete),
    Mem0Route("GET", "/memories/{id}/history", methods.history),
    Mem0Route("POST", "/search", own_server.search),
    *(Mem0Route("", path, why) for path, why in ABSENT.items()),
)


class Mem0Face:
    """ASGI middleware inside the front."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Problem, or an engine's error, which the front tells."""
        if scope["type"] != "http" or (found := _found(scope, scope["path"])) is None:
            await self._app(scope, receive, send)
            return
        route, params = found
        scope["route"] = route
        if isinstance(route.serve, str):
            raise Problem(501, "no-such-feature", route.serve)
        written = orjson.dumps(await route.serve(Call(self._app, scope, receive, params)))
        await Response(written, media_type=JSON)(scope, receive, send)


class Mem0Errors:
    """ASGI middleware outside the front: mem0's client reads the `detail` of application/json alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _found(scope, undecoded_path(scope)) is not None:
            scope[PROBLEM_MEDIA] = JSON
        await self._app(scope, receive, send)


def _found(scope: Scope, path: str) -> tuple[Mem0Route, dict[str, str]] | None:
    for route in ROUTES:
        if route.verb in ("", scope["method"]) and (found := route.pattern.fullmatch(path)):
            return route, found.groupdict()
    return None
