"""Sessions in front of the pages, as plain ASGI between the request observer and the front.

A session stands for a key: a request with a session's cookie gets the key as a header here, and then passes
the front and the guarded routes as any request of the API. So a key's rate, shares, scopes and tenants hold
on each page, and one that was revoked is refused at once. A request with a key of its own needs no session.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qs

import orjson
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from undertow.serving.auth.authenticator import is_loopback
from undertow.serving.http.middleware.body_limits import bounded, read_all, replayed
from undertow.serving.http.middleware.front import undecoded_path
from undertow.serving.http.middleware.guard import HOST, key_text
from undertow.serving.http.problems import MEDIA_TYPE, Problem
from undertow.serving.inspector.sessions import Sessions
from undertow.serving.inspector.views import STYLE, page

ROOT = "/inspect"
SIGN_IN, SIGN_OUT, STYLE_PATH = f"{ROOT}/sign-in", f"{ROOT}/sign-out", f"{ROOT}/style.css"
COOKIE = "undertow_inspect"
FORM_BYTES, FORM_S = 16 << 10, 10.0
POLICY = (
    "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# the query of the page after a sign-in
SIGNED_IN = "signed-in"
NOT_KEPT = "Your browser did not keep the session. Use https, or a browser on this machine and localhost."
FOREIGN = "This form was sent from another site, or by a browser that does not say from where. Open /inspect."


class _Route(NamedTuple):
    """What metrics and the request log name."""

    path: str


class InspectorGate:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, sessions: Sessions) -> None:
        self._app = app
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = undecoded_path(scope) if scope["type"] == "http" else ""
        if path != ROOT and not path.startswith(f"{ROOT}/"):
            await self._app(scope, receive, send)
            return
        token = Request(scope).cookies.get(COOKIE, "")
        out = _Out(self._sessions, token, path, scope, send)
        try:
            app, receive = await self._passed(path, token, scope, receive)
        except Problem as problem:
            scope["route"], app = _Route(ROOT), problem.response
        await app(scope, receive, out)

    async def _passed(self, path: str, token: str, scope: Scope, receive: Receive) -> tuple[ASGIApp, Receive]:
        """What serves a request, with its key in the headers. Problem: its form cannot be taken."""
        headers = Headers(scope=scope)
        if path == STYLE_PATH:
            scope["route"] = _Route(path)
            return Response(STYLE, media_type="text/css"), receive
        if key_text(headers) is not None:
            return self._app, receive
        if scope["method"] != "POST":
            key = self._sessions.key_of(token)
            return self._app if key is None else self._with_key(scope, key), receive
        _require_own_origin(headers)
        if path == SIGN_OUT:
            scope["route"] = _Route(path)
            self._sessions.close(token)
            response = RedirectResponse(ROOT, 303)
            response.delete_cookie(COOKIE, path=ROOT)
            return response, receive
        form = await read_all(bounded(receive, headers, FORM_BYTES, FORM_S))
        return self._with_key(scope, _field(form, "key")), replayed(b"", receive)

    def _with_key(self, scope: Scope, key: str) -> ASGIApp:
        """The application, as if the request had brought this key. The guard checks it, as any."""
        scope["headers"] = [*scope["headers"], (b"x-api-key", key.encode("utf-8", "replace"))]
        return self._app


class _Out:
    """`send` with the headers of every page. Shows a problem as a page to whoever reads pages."""

    def __init__(self, sessions: Sessions, token: str, path: str, scope: Scope, send: Send) -> None:
        self._sessions, self._token, self._path, self._scope, self._send = sessions, token, path, scope, send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            own = MutableHeaders(scope=message)
            own.update(HEADERS)
            reads_pages = "text/html" in Headers(scope=self._scope).get("accept", "")
            self._start = message if reads_pages and own.get("content-type") == MEDIA_TYPE else None
        if self._start is None:
            await self._send(message)
            return
        self._body += message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._show(self._start)

    async def _show(self, start: Message) -> None:
        """The problem as a page; the form to sign in where a key is missing or refused."""
        problem = orjson.loads(self._body)
        if start["status"] == 401:
            shown = page("sign_in", title="Sign in", told=self._why(problem["detail"]), signed_in=False)
            self._sessions.close(self._token)  # its key has ended, and so has it
        else:
            shown = page("problem", title=problem["title"], problem=problem, signed_in=bool(self._token))
        own = MutableHeaders(scope=start)
        own["content-type"], own["content-length"] = "text/html; charset=utf-8", str(len(shown))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": shown})

    def _why(self, detail: str) -> str | None:
        """Why a key is asked for; None: nobody has signed in yet."""
        if self._path == SIGN_IN:
            return detail
        if self._token:
            return "Your session has ended. Sign in again."
        return NOT_KEPT if self._scope["query_string"] == SIGNED_IN.encode() else None


def set_cookie(response: Response, headers: Headers, token: str) -> None:
    """The session's cookie. Over http, browsers send a secure one to their own machine at most."""
    host = HOST.fullmatch(headers.get("host", ""))
    local = host is not None and is_loopback((host[1] or host[2]).lower())
    response.set_cookie(COOKIE, token, path=ROOT, httponly=True, secure=not local, samesite="strict")


def _require_own_origin(headers: Headers) -> None:
    """Problem 403: the form may be another site's.

    Under `no-referrer` browsers send the origin "null" even to the same one, and then say by Sec-Fetch-Site
    from where it comes.
    """
    origin, site = headers.get("origin", "null"), headers.get("sec-fetch-site")
    own = origin.partition("//")[2] == headers.get("host", "")
    if site not in (None, "same-origin") or not (own or (origin == "null" and site)):
        raise Problem(403, "origin", FOREIGN)


def _field(form: bytes, name: str) -> str:
    """A field of a form; "" without it."""
    try:
        return parse_qs(form.decode("latin-1"), max_num_fields=8).get(name, [""])[0].strip()
    except ValueError:
        return ""
