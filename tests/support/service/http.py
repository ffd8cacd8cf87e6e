"""Shared by the tests of the HTTP service: a real service on loopback, over a real store, with keys."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
from fastapi import FastAPI

from undertow.engine.base.queries import ApiCall
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.storage.location import Location
from undertow.serving.async_memories import AsyncMemories, open_memories
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import NO_LIMITS, KeyLimits, Scope, TenantScope
from undertow.serving.http.hosting import Files, hosted
from undertow.serving.http.server import HttpServer, bound, run_loop
from undertow.serving.http.service import Service
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.state_db import StateDb
from undertow.serving.inspector.pages import inspector

from ..cluster.in_process import PARTS
from ..cluster.in_process import settings as engine_settings

SOON_S = 60.0
ALL_SCOPES = tuple(Scope)
PROBLEM = "application/problem+json"


def at(tenant: str, rest: str = "") -> str:
    """A path of a tenant's."""
    return f"/v1/tenants/{quote(tenant, safe='')}{rest}"


def said(text: str, reply: str = "noted") -> list[dict[str, str]]:
    """One exchange."""
    return [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]


@dataclass
class Running:
    """A service that runs in a thread of this process."""

    folder: Path
    url: str = ""
    server: HttpServer | None = None
    app: FastAPI = field(default_factory=FastAPI)
    failure: BaseException | None = None
    _clients: list[httpx2.Client] = field(default_factory=list)

    def key(
        self,
        *scopes: Scope,
        tenants: tuple[str, ...] = (),
        prefix: str | None = None,
        limits: KeyLimits = NO_LIMITS,
    ) -> str:
        """The text of a new key, for all tenants unless it is bound."""
        reach = TenantScope(tenants, prefix, all_tenants=not tenants and prefix is None)
        made = KeyFile(self.folder / "keys.json").create(reach, scopes or ALL_SCOPES, limits=limits)
        return made.text

    def client(self, *scopes: Scope, **bound: Any) -> httpx2.Client:
        """A client with a new key."""
        return self.client_of(self.key(*scopes, **bound))

    def client_of(self, key: str | None) -> httpx2.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        client = httpx2.Client(base_url=self.url, headers=headers, timeout=SOON_S)
        self._clients.append(client)
        return client

    @property
    def service(self) -> Service:
        """The parts of the application."""
        service: Service = self.app.state.service
        return service

    def close(self) -> None:
        for client in self._clients:
            client.close()


def intercepted(
    memories: AsyncMemories,
    kinds: type[ApiCall[Any]] | tuple[type[ApiCall[Any]], ...],
    act: Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]],
) -> AsyncMemories:
    """The memories, with `act` instead of each call of some kinds; its second argument makes the call."""
    whole = memories.call

    async def call(asked: ApiCall[Any]) -> Any:
        if isinstance(asked, kinds):
            return await act(asked, lambda: whole(asked))
        return await whole(asked)

    memories.call = call  # type: ignore[method-assign, assignment]
    return memories


class Held:
    """Holds calls of some kinds, of one tenant or of all, until `go` is set; `begun` counts them."""

    def __init__(self, *kinds: type[ApiCall[Any]], tenant: str | None = None) -> None:
        self.begun = 0
        self.go = threading.Event()
        self._kinds, self._tenant = kinds, tenant

    def around(self, memories: AsyncMemories) -> AsyncMemories:
        return intercepted(memories, self._kinds, self._hold)

    async def _hold(self, call: Any, go_on: Callable[[], Awaitable[Any]]) -> Any:
        if self._tenant in (None, call.tenant):
            self.begun += 1
            await asyncio.to_thread(self.go.wait, SOON_S)
        return await go_on()


@contextmanager
def serving(
    folder: Path,
    *,
    parts: EngineParts = PARTS,
    open_to_all: bool = False,
    open_with: Callable[..., AsyncMemories] = open_memories,
    wrap: Callable[[AsyncMemories], AsyncMemories] = lambda memories: memories,
    engine: dict[str, Any] | None = None,
    extend: Callable[[FastAPI], None] | None = inspector,
    **bounds: Any,
) -> Iterator[Running]:
    """A service over the store in `folder`, for as long as the block; `bounds` are ServiceSettings."""
    settings = ServiceSettings(**{"drain_notice_s": 0, **bounds})
    engines = engine_settings(**(engine or {}))
    running = Running(folder)
    ready = threading.Event()

    def _opened(loop: asyncio.AbstractEventLoop) -> AsyncMemories:
        return open_with(folder, engines, parts=parts, loop=loop)

    async def serve() -> None:
        files = Files.beside(Location.of(folder), None, None, open_to_all=open_to_all)
        async with await asyncio.to_thread(_opened, asyncio.get_running_loop()) as memories:
            with (
                closing(StateDb(files.state)) as state,
                hosted(wrap(memories), state, files, settings, engines, extend=extend) as app,
            ):

                def tell(port: int) -> None:
                    running.url = f"http://127.0.0.1:{port}"
                    ready.set()

                running.app = app
                running.server = HttpServer(app, tell)
                await running.server.serve(bound("127.0.0.1", 0))

    def run() -> None:
        try:
            run_loop(serve())
        except BaseException as failure:  # noqa: BLE001 - told where the service was started
            running.failure = failure
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="service")
    thread.start()
    try:
        assert ready.wait(SOON_S)
        if running.failure is not None:
            raise running.failure
        yield running
    finally:
        if running.server is not None:
            running.server.should_exit = True
        thread.join(SOON_S)
        running.close()
        assert not thread.is_alive()
    if running.failure is not None:
        raise running.failure


def is_problem(response: httpx2.Response, status: int, slug: str | None = None) -> dict[str, Any]:
    """The problem that a response is, of this status and kind."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    document: dict[str, Any] = response.json()
    assert document["status"] == status
    assert document["detail"]
    if slug is not None:
        assert document["type"] == f"urn:undertow:error:{slug}", document
    return document
