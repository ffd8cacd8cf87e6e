"""Routes that say who may use them, and what passes before their endpoint is called.

Each endpoint is marked with `needs`. A route whose endpoint is not cannot be made, so none is open by
accident. What a key may do is looked at before the body is read, and the answer is the same whether the
tenant exists or not.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote_to_bytes

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from undertow.serving.auth.principal import Principal, Scope, check_name
from undertow.serving.http.middleware.body_limits import bounded
from undertow.serving.http.middleware.front import TENANT, asked_of
from undertow.serving.http.middleware.idempotency import KEY_HEADER, Sender, answer_once
from undertow.serving.http.middleware.load_limits import LoadLimits
from undertow.serving.http.openapi import IDEMPOTENCY_KEY, documented, told
from undertow.serving.http.problems import Problem, bad_field
from undertow.serving.http.routes.access_rules import TOLD, Access, TenantAccess
from undertow.serving.http.service_settings import ServiceSettings

if TYPE_CHECKING:
    from undertow.serving.http.services import Service

F = TypeVar("F", bound=Callable[..., Any])

MARK = "__undertow_access__"
FORBIDDEN = "This key may not do this here: it takes the scope {scope}, for {reaches}. Ask for one that may."


def needs(
    scope: Scope | None,
    *,
    reaches: TenantAccess = TenantAccess.TENANT,
    once: bool = False,
    act: str | None = None,
    imports: bool = False,
    long: bool = False,
) -> Callable[[F], F]:
    """Mark an endpoint; see Access. `scope` None: anybody may, which only /health/* should be."""

    def mark(endpoint: F) -> F:
        setattr(endpoint, MARK, Access(scope, reaches, once, act, imports, long))
        return endpoint

    return mark


class StrictRequest(Request):
    """Takes JSON as the standard has it: no NaN, no half surrogates, no endless nesting."""

    async def json(self) -> Any:
        return orjson.loads(await self.body())


class GuardedRoute(APIRoute):
    """A route that lets nobody pass whom its endpoint's mark does not allow. RuntimeError: it has none."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **more: Any) -> None:
        access = getattr(endpoint, MARK, None)
        if access is None:
            raise RuntimeError(f"{path}: its endpoint does not say who may use it: mark it with `needs`")
        self.access: Access = access
        more["responses"] = {**documented(access), **(more.get("responses") or {})}
        more["description"] = told(access, more.get("description") or inspect.getdoc(endpoint))
        if access.once:
            extra = dict(more.get("openapi_extra") or {})
            more["openapi_extra"] = {**extra, "parameters": [*extra.get("parameters", []), IDEMPOTENCY_KEY]}
        super().__init__(path, endpoint, **more)

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
        principal = asked_of(scope).principal
        if principal is None or not self.access.allows(principal, tenant):
            await self._refuse(service, principal, tenant)
        assert principal is not None
        headers = Headers(scope=scope)
        with service.load.share(principal.key_id, tenant), self._room(service.load):
            within = bounded(receive, headers, *self._bounds(service.settings))
            if self.access.once and KEY_HEADER in headers:
                erases = self.access.scope is Scope.ERASE
                owner = None if tenant is None else service.memories.tenant_key(tenant)
                sender = Sender(principal.key_id, tenant, owner)
                await answer_once(service.once, sender, erases, super().handle, scope, within, send)
            else:
                await super().handle(scope, within, send)

    def _room(self, load: LoadLimits) -> AbstractContextManager[None]:
        """A place among those that the route's kind of request has."""
        if self.access.imports:
            return load.importing()
        return load.long() if self.access.long else nullcontext()

    def _bounds(self, settings: ServiceSettings) -> tuple[int, float]:
        """How large a body may be, and how long it may take to come."""
        if self.access.imports:
            return settings.max_import_bytes, settings.import_timeout_s
        return settings.max_body_bytes, settings.body_timeout_s

    async def _refuse(self, service: Service, principal: Principal | None, tenant: str | None) -> None:
        """Problem 403, which the audit log tells of where the act is one that it tells of."""
        if self.access.act is not None and principal is not None:
            key = None if tenant is None else service.memories.tenant_key(tenant)
            await asyncio.to_thread(service.audit.refused, self.access.act, principal.key_id, tenant_key=key)
        scope, reaches = self.access.scope, TOLD[self.access.reaches]
        raise Problem(403, "forbidden", FORBIDDEN.format(scope=scope and scope.value, reaches=reaches))


def decode_path(scope: Connection) -> str | None:
    """Put the parts of the path as they were meant in the place of those that were sent; the tenant's name.

    From here on the access log knows the tenant too. Problem 422: a part cannot be meant for anything.
    """
    scope["path_params"] = {name: decoded(name, text) for name, text in scope["path_params"].items()}
    tenant: str | None = scope["path_params"].get("tenant")
    scope[TENANT] = tenant
    return tenant


def decoded(name: str, text: str) -> str:
    """A part of the path as it was meant. Problem 422: it is no percent-encoded UTF-8, or no name."""
    raw = text.encode("latin-1")
    stray = [raw[i + 1 : i + 3] for i in range(len(raw)) if raw[i : i + 1] == b"%"]
    if any(len(digits) != 2 or not _is_hex(digits) for digits in stray):
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


def _is_hex(digits: bytes) -> bool:
    return all(digit in b"0123456789abcdefABCDEF" for digit in digits)
