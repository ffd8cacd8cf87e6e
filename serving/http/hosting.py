"""Opens everything that a service needs, serves, and closes it in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import Location
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.auth.audit import FILE_NAME as AUDIT_NAME
from undertow.serving.auth.audit import AuditLog
from undertow.serving.auth.authenticator import Authenticator, is_loopback
from undertow.serving.auth.key_file import FILE_NAME as KEYS_NAME
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.limits import RequestRates
from undertow.serving.auth.oidc import TokenVerifier
from undertow.serving.auth.principal import KeyLimits
from undertow.serving.client import AsyncClient
from undertow.serving.http.app import make_app
from undertow.serving.http.mcp_endpoint import HERE, in_process
from undertow.serving.http.middleware.guard import Guard, KeyGuard, OpenGuard
from undertow.serving.http.middleware.token_budget import TokenBudgets
from undertow.serving.http.server import HttpServer, bound, run_loop
from undertow.serving.http.service import Service
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.state_db import StateDb
from undertow.serving.mcp.server import Caller
from undertow.serving.mcp.stdio import serve_stdio
from undertow.serving.telemetry.tracing import tracing

STATE_NAME = "service"

# given the event loop that serves; called on another thread
OpenMemories = Callable[[asyncio.AbstractEventLoop], AsyncMemories]


@dataclass(frozen=True, slots=True)
class Files:
    """The paths of a service's own files. `keys`: None if no key is required."""

    keys: Path | None
    audit: Path
    state: Path

    @classmethod
    def beside(cls, store: Location, keys: Path | None, state: Path | None, *, open_to_all: bool) -> Files:
        """The given paths; by default, in the store's folder. UndertowError: the store is not a folder."""
        folder = store.folder
        if folder is None and state is None:
            raise UndertowError(f"{store} is no folder: give --state FOLDER for the service's own files")
        if folder is None and keys is None and not open_to_all:
            raise UndertowError(f"{store} is no folder: give --keys FILE for the keys")
        where = state or Path(str(folder), STATE_NAME)
        key_path = None if open_to_all else (keys or Path(str(folder), KEYS_NAME)).absolute()
        return cls(key_path, (folder or where).absolute() / AUDIT_NAME, where.absolute())


@contextmanager
def hosted(
    memories: AsyncMemories,
    state: StateDb,
    files: Files,
    settings: ServiceSettings | None = None,
    engine: Settings | None = None,
    *,
    extend: Callable[[FastAPI], None] | None = None,
) -> Iterator[FastAPI]:
    """The application over some memories, with its files open. `extend`: see make_app. UndertowError.

    The state comes first, before the memories are opened: a second service on a root must end here, without
    taking the shards over from the one that runs.
    """
    with ExitStack() as stack:
        service = Service(
            memories,
            state,
            guard=_guard(stack, files.keys, settings or ServiceSettings()),
            budgets=TokenBudgets(state),
            audit=AuditLog(files.audit),
            key_file=None if files.keys is None else KeyFile(files.keys),
            settings=settings,
            engine=engine,
        )
        yield make_app(service, tracing(), extend=extend)


def _guard(stack: ExitStack, keys_path: Path | None, settings: ServiceSettings) -> Guard:
    if keys_path is None:
        if settings.oidc_issuer is not None:
            raise UndertowError("an OIDC issuer and --insecure-no-auth exclude each other: leave one out")
        return OpenGuard()
    keys = Authenticator(keys_path)
    stack.callback(keys.close)
    tokens = None
    if settings.oidc_issuer is not None and settings.oidc_audience is not None:
        limits = KeyLimits(settings.oidc_requests_per_s, None, settings.oidc_tokens_per_day)
        try:
            tokens = TokenVerifier(settings.oidc_issuer, settings.oidc_audience, limits)
        except ValueError as error:
            raise UndertowError(f"UNDERTOW_SERVICE_OIDC_ISSUER: {error}") from None
        stack.callback(tokens.close)
    return KeyGuard(keys, RequestRates(), tokens)


def run(
    open_memories: OpenMemories,
    files: Files,
    host: str,
    port: int,
    *,
    settings: ServiceSettings,
    engine: Settings,
    on_start: Callable[[int], None],
    extend: Callable[[FastAPI], None] | None = None,
) -> None:
    """Serve until a signal ends it. UndertowError: it cannot start.

    `extend`: see make_app. `on_start` gets the port once requests are accepted. Without keys `host` must be a
    loopback address.
    """
    if files.keys is None and not is_loopback(host):
        raise UndertowError(
            f"without keys the service listens on a loopback address alone, and {host} is none: leave out "
            "--host, or make keys with `undertow keys create`"
        )
    listening = bound(host, port)  # before the store is opened, which takes long

    async def serve(state: StateDb) -> None:
        async with await asyncio.to_thread(open_memories, asyncio.get_running_loop()) as memories:
            with hosted(memories, state, files, settings, engine, extend=extend) as app:
                await HttpServer(app, on_start).serve(listening)

    try:
        with closing(StateDb(files.state)) as state:
            run_loop(serve(state))
    finally:
        for one in listening:
            one.close()


async def serve_mcp(
    open_memories: OpenMemories, files: Files, tenant: str | None, settings: ServiceSettings, engine: Settings
) -> None:
    """Serve MCP on stdio over a store of this machine, until standard input ends. UndertowError."""
    with closing(StateDb(files.state)) as state:
        async with await asyncio.to_thread(open_memories, asyncio.get_running_loop()) as memories:
            with hosted(memories, state, files, settings, engine) as app:
                async with app.router.lifespan_context(app), in_process(app) as http:
                    await serve_stdio(Caller(AsyncClient(HERE, http=http), tenant))
