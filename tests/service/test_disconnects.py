"""Requests of clients that disconnect before the response: a reading ends, a change does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from undertow.engine.base.memory_api import Receipts
from undertow.engine.base.model import Turn
from undertow.serving.async_memories import AsyncMemories

from ..support.llm_servers import wait_until
from ..support.service.http import SOON_S, Running, at, said
from ..support.service.wire import Wire


def send(wire: Wire, running: Running, path: str, body: object) -> None:
    """To a tenant: a POST, or a GET without a body."""
    sent = b"" if body is None else orjson.dumps(body)
    headers = ("Content-Type: application/json", f"Content-Length: {len(sent)}")
    wire.head(running.key(), *headers, path=at("ann", path), method="GET" if body is None else "POST")
    wire.socket.sendall(sent)


@pytest.mark.parametrize(
    "path, body",
    [("/search", {"query": "boat"}), ("/answer", {"question": "What boat?"}), ("/memories?limit=5", None)],
)
def test_work_for_a_client_that_left_ends(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, str] | None
) -> None:
    begun, ended = threading.Event(), threading.Event()

    async def wait(*_: Any) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(AsyncMemories, "call", wait)
    with Wire(running) as wire:
        send(wire, running, path, body)
        assert begun.wait(SOON_S)
        assert not ended.is_set()
    assert ended.wait(SOON_S)


def test_turns_of_a_client_that_left_are_stored(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, stored = (threading.Event() for _ in range(3))
    add = AsyncMemories.add

    async def wait(memories: AsyncMemories, turns: Sequence[Turn]) -> Receipts:
        begun.set()
        while not go.is_set():
            await asyncio.sleep(0.005)
        receipts = await add(memories, turns)
        stored.set()
        return receipts

    monkeypatch.setattr(AsyncMemories, "add", wait)
    assert running.server is not None
    connections = running.server.server_state.connections
    with Wire(running) as wire:
        send(wire, running, "/memories", {"messages": said("the mast")})
        assert begun.wait(SOON_S) and connections
    wait_until(lambda: not connections)
    go.set()
    assert stored.wait(SOON_S)
