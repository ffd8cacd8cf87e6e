"""Access rules of routes, enforced before an endpoint is called.

Each endpoint is marked with `Access`; a route without a mark cannot be created, so none is open by accident.
Access is checked before the body is read, and the response is the same whether or not the tenant exists.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from undertow.serving.auth.principal import Principal, Scope, check_name
from undertow.serving.http.middleware.body_limits import bounded
from undertow.serving.http.middleware.disconnects import unless_gone
from undertow.serving.http.middleware.front import TENANT, sender_of
from undertow.serving.http.middleware.idempotency import KEY_HEADER, KeyOwner, answer_once
from undertow.serving.http.middleware.load_limits import LoadLimits
from undertow.serving.http.openapi import IDEMPOTENCY_KEY, PROBLEM_RESPONSES
from undertow.serving.http.problems import Problem, bad_field
from undertow.serving.http.routes.direct import LARGE_BODY_BYTES, DirectEndpoint
from undertow.serving.http.service_settings import ServiceSettings

if TYPE_CHECKING:
    from undertow.serving.http.service import Service

F = TypeVar("F", bound=Callable[..., Any])

MARK = "__undertow_access__"
# in the same words whichever it lacks, and whether or not there is such a tenant
FORBIDDEN = "This key lacks the scope {scope}, or is not for {reaches}. Ask for a key that has both."
LACKS_SCOPE = "This key lacks the scope {scope}. Ask for a key that has it."
STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


class TenantAccess(Enum):
    """Which tenants a key must cover."""

    TENANT = "this tenant"
    STORE = "all tenants"
    ANY = "any tenant"


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a route, and how it is served. Marks an endpoint, as a decorator.

    `scope`: None for no key, on /health/* only. `once`: it accepts an Idempotency-Key, and keeps its
    response. `act`: its name in the audit log, if refused requests are logged there. `imports`: its body may
    be as large as an import. `long`: it may take as long as an LLM, or as the reader of the response.
    `streams`: it goes on telling events, and is counted apart. `stores`: it stores turns, and a large body is
    not read where those of the tenant wait for room. `direct`: it is called without FastAPI's dependency
    solver, see direct.py.
    """

    scope: Scope | None
    reaches: TenantAccess = TenantAccess.TENANT
    once: bool = False
    act: str | None = None
    imports: bool = False
    long: bool = False
    stores: bool = False
    direct: bool = False
    streams: bool = False

    def __call__(self, endpoint: F) -> F:
        setattr(endpoint, MARK, self)
        return endpoint

    def allows(self, principal: Principal, tenant: str | None) -> bool:
        if self.scope is None:
            return True
        if self.reaches is TenantAccess.ANY:
            return self.scope in principal.scopes
        if self.reaches is TenantAccess.TENANT and tenant is None:
            return False
        return principal.may(self.scope, tenant)

    def described(self, endpoint_doc: str | None) -> str:
        """A route's description in the OpenAPI document."""
        words = (endpoint_doc or "").strip()
        if self.scope is None:
            return f"{words}\n\nNeeds no key."
        return f"{words}\n\nNeeds a key with the scope `{self.scope.value}`, for {self.reaches.value}."


class StrictRequest(Request):
    """Reads standard JSON: no NaN, no unpaired surrogates, bounded nesting."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class GuardedRoute(APIRoute):
    """A route that enforces its endpoint's mark. RuntimeError: there is no mark."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        access = getattr(endpoint, MARK, None)
        if access is None:
            raise RuntimeError(f"{path}: its endpoint does not say who may use it: mark it with `Access`")
        self.access: Access = access
        if access.scope is not None:
            more["responses"] = {**PROBLEM_RESPONSES, **(more.get("responses") or {})}
        more["description"] = access.described(more.get("description") or inspect.getdoc(endpoint))
        if access.once:
            extra = dict(more.get("openapi_extra") or {})
            more["openapi_extra"] = {**extra, "parameters": [*extra.get("parameters", []), IDEMPOTENCY_KEY]}
        super().__init__(path, endpoint, **more)
        # of others the turn comes first: whoever reads no body does not wait for what comes after it
        self._reads_body = self.body_field is not None or access.imports
        self._only_reads = access.scope is Scope.READ and access.act is None and not access.once
        self._serve: ASGIApp = DirectEndpoint(endpoint) if access.direct else super().handle

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly

    async def handle(self, scope: Connection, receive: Receive, send: Send) -> None:
        known = scope["method"] in (self.methods or ())
        if not known or self.access.scope is None:
            await super().handle(scope, receive, send)
            return
        service: Service = scope["app"].state.service
        tenant = decode_path(scope)
        principal = sender_of(scope)
        if not self.access.allows(principal, tenant):
            # a key takes no place of a tenant that it does not cover
            covered = tenant if tenant is not None and principal.reach.covers(tenant) else None
            with service.load.share(principal.key_id, covered):
                await self._refuse(service, principal, tenant)
        headers = Headers(scope=scope)
        load, key_id, name = service.load, principal.key_id, tenant or ""
        with self._share(load, key_id, tenant), self._room(load, key_id, tenant):
            announced = headers.get("content-length", "")
            if self.access.stores and announced.isdecimal() and int(announced) > LARGE_BODY_BYTES:
                load.require_room(key_id, name)
            receive = bounded(
                receive, headers, *self._bounds(service.settings), grace_s=service.settings.body_timeout_s
            )
            turn = service.turns.turn(name, scope)
            is_once = self.access.once and KEY_HEADER in headers
            with unless_gone(scope) if self._only_reads else nullcontext():
                if self._reads_body or is_once:
                    receive = turn.after_body(receive)
                else:
                    await turn.begin()
                if is_once:
                    owner = None if tenant is None else service.memories.tenant_key(tenant)
                    sender = KeyOwner(key_id, tenant, owner, erases=self.access.scope is Scope.ERASE)
                    work: Awaitable[None] = answer_once(
                        service.once, sender, self._serve, scope, receive, send
                    )
                else:
                    work = self._serve(scope, receive, send)
                await turn.timed(work)

    def _share(self, load: LoadLimits, key_id: str, tenant: str | None) -> AbstractContextManager[None]:
        return nullcontext() if self.access.streams else load.share(key_id, tenant)

    def _room(self, load: LoadLimits, key_id: str, tenant: str | None) -> AbstractContextManager[None]:
        """A slot under the limit for this kind of request."""
        if self.access.imports:
            return load.importing(key_id, tenant)
        if self.access.streams:
            return load.streaming(key_id, tenant or "")
        return load.long() if self.access.long else nullcontext()

    def _bounds(self, settings: ServiceSettings) -> tuple[int, float]:
        """The largest body in bytes, and the longest time to receive it in seconds."""
        if self.access.imports:
            return settings.max_import_bytes, settings.import_timeout_s
        return settings.max_body_bytes, settings.body_timeout_s

    async def _refuse(self, service: Service, principal: Principal, tenant: str | None) -> None:
        """Raise Problem 403; log the refusal if the audit log covers the act."""
        if self.access.act is not None:
            await service.refused(self.access.act, principal.key_id, tenant)
        scope, reaches = self.access.scope, self.access.reaches
        words = LACKS_SCOPE if reaches is TenantAccess.ANY else FORBIDDEN
        raise Problem(403, "forbidden", words.format(scope=scope and scope.value, reaches=reaches.value))


def decode_path(scope: Connection) -> str | None:
    """Percent-decode the path parameters in place; returns the tenant's name, if the path has one.

    The request log names the tenant from here on. Problem 422: a parameter cannot be decoded.
    """
    scope["path_params"] = {name: decoded(name, text) for name, text in scope["path_params"].items()}
    tenant: str | None = scope["path_params"].get("tenant")
    scope[TENANT] = tenant
    return tenant


def decoded(name: str, text: str) -> str:
    """A percent-decoded path parameter. Problem 422: it is not percent-encoded UTF-8, or not a valid name."""
    if STRAY_PERCENT.search(text):
        raise bad_field(name, "holds a % without two hexadecimal digits. Percent-encode it.")
    try:
        part = unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise bad_field(name, "is no UTF-8 once percent-decoded. Percent-encode its UTF-8.") from None
    try:
        check_name(part)
    except ValueError as error:
        raise bad_field(name, str(error)) from None
    return part
