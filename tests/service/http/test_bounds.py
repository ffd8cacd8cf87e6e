"""Requests that are too large, too slow, cut off or not HTTP, and more of them than the service accepts."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import httpx2
import pytest

from undertow.engine.base.queries import FlushCommand, SearchQuery
from undertow.engine.step.admission import QueueFull
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.http import protocol
from undertow.serving.http.protocol import Joined

from ...support.llm_servers import wait_until
from ...support.service.http import SOON_S, Held, Running, at, is_problem, said, serving
from ...support.service.wire import Wire, request_head

MAX_BYTES = 2_000
BOUNDS = {"max_body_bytes": MAX_BYTES, "body_timeout_s": 1.0, "header_timeout_s": 0.5, "keep_alive_s": 1}


@pytest.fixture(scope="module")
def key(running: Running) -> str:
    return running.key()


LIVE = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNK = b"3e8\r\n" + b" " * 1_000 + b"\r\n"
REFUSED: dict[str, tuple[tuple[str, ...], bytes, int, str]] = {
    "an announced length above the limit": ((f"Content-Length: {MAX_BYTES + 1}",), b"", 413, "too-large"),
    "chunks above the limit": (("Transfer-Encoding: chunked",), 3 * CHUNK, 413, "too-large"),
    "a slow body": (("Content-Length: 100",), b'{"mess', 408, "slow"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_large_or_slow_body_is_refused_before_its_end(running: Running, key: str, kind: str) -> None:
    headers, body, status, slug = REFUSED[kind]
    with Wire(running) as wire:
        wire.socket.sendall(request_head(key, *headers, "Content-Type: application/json") + body)
        found, problem = wire.heard()
    assert (found, problem["type"]) == (status, f"urn:undertow:error:{slug}")


@pytest.mark.parametrize(
    ("raw", "status", "second"),
    [
        (b"", 408, False),
        (b"GET /v1/stats HTTP/1.1\r\nHost: loc", 408, False),
        (b"GET /v1/stats HTTP/1.1\r\nHost: loc", 408, True),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400, False),
        (b"GET /\r\n\r\n", 400, False),
        (b"GET / HTTP/1.1\r\nA:" + b"a" * 70_000, 400, False),
        (b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 40_000 + b"\r\n\r\n", 400, False),
        (b"GET / HTTP/1.1\r\n\r\n", 400, False),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, False),
        # what proxies read differently: a bare line feed, a folded header, a space before the colon
        (b"GET / HTTP/1.1\nHost: a\n\n", 400, False),
        (b"GET / HTTP/1.1\r\nHost: a\r\nA: b\r\n c\r\n\r\n", 400, True),
        (b"GET / HTTP/1.1\r\nHost: a\r\nA : b\r\n\r\n", 400, True),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, x\r\n\r\n", 400, False),
    ],
)
def test_slow_headers_and_invalid_http_are_refused(
    running: Running, raw: bytes, status: int, second: bool
) -> None:
    """`second`: as the second request of its connection."""
    with Wire(running) as wire:
        if second:
            wire.socket.sendall(LIVE)
            assert wire.answer().status == 200
        wire.socket.sendall(raw)
        assert wire.heard()[0] == status


def test_another_protocol_is_not_offered_and_the_connection_ends(running: Running) -> None:
    with Wire(running) as wire:
        wire.socket.sendall(
            b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\nrest"
        )
        assert wire.answer().status == 200
        wire.until_end()


@pytest.mark.parametrize("bad", [b"nonsense\r\n\r\n", b"GET /x HTTP/1.1\r\n\r\n"])
def test_a_bad_request_behind_a_good_one_does_not_spoil_its_answer(running: Running, bad: bytes) -> None:
    body = b'{"messages": [{"role": "user", "content": "the boat"}]}'
    head = request_head(
        running.key(),
        f"Content-Length: {len(body)}",
        "Content-Type: application/json",
        path=at("ann", "/memories"),
    )
    with Wire(running) as wire:
        wire.socket.sendall(head + body + bad)
        assert wire.answer().status == 200
        wire.until_end()


@pytest.mark.parametrize("pieces", [[b"Idempotency-Key: a\r\n\r\n"], [b"a: " + 2_000_000 * b"b"]])
def test_trailers_are_refused(running: Running, pieces: list[bytes]) -> None:
    with Wire(running) as wire:
        wire.head(running.key(), "Transfer-Encoding: chunked")
        for piece in (b"0\r\n", *pieces):
            wire.socket.sendall(piece)
            time.sleep(0.1)  # each is read by itself
        assert wire.heard()[0] == 400


def test_empty_lines_put_no_deadline_off(running: Running) -> None:
    with Wire(running) as wire:
        wire.socket.sendall(LIVE)
        assert wire.answer().status == 200
        wire.socket.sendall(b"\r\n")
        assert wire.heard()[0] == 408


@pytest.mark.parametrize("after", ["close", "keep-alive"])
def test_a_late_body_neither_resets_the_connection_nor_keeps_it_open(running: Running, after: str) -> None:
    with Wire(running) as wire:
        wire.head("no key", "Content-Length: 2000000", f"Connection: {after}")
        assert wire.socket.recv(65_536).startswith(b"HTTP/1.1 401")
        wire.socket.sendall(1_900_000 * b"a")
        wire.until_end()
        wait_until(lambda: not running.server.server_state.connections)  # type: ignore[union-attr]


def test_a_connection_continues_after_a_late_body(running: Running) -> None:
    with Wire(running) as wire:
        wire.head("no key", "Content-Length: 3")
        assert wire.socket.recv(65_536).startswith(b"HTTP/1.1 401")
        wire.socket.sendall(b"abc" + LIVE)
        assert b"HTTP/1.1 200" in wire.until_end()


def test_the_deadline_of_a_late_body_does_not_end_later_requests(tmp_path: Path) -> None:
    """A deadline that was left behind would end the connection under some later request."""
    with serving(tmp_path, body_timeout_s=2.0, keep_alive_s=60) as service, Wire(service) as wire:
        wire.head("none", "Content-Length: 3")
        assert wire.answer().status == 401
        wire.socket.sendall(b"abc" + request_head("none", "Content-Length: 3"))
        assert wire.answer().status == 401
        wire.socket.sendall(b"abc")
        time.sleep(2.5)
        wire.socket.sendall(LIVE)
        assert wire.answer().status == 200


def test_an_idle_connection_after_a_late_body_is_closed(running: Running) -> None:
    """It is closed without a word, as no request was begun; and it is closed."""
    with Wire(running) as wire:
        wire.head("none", "Content-Length: 3")
        assert wire.answer().status == 401
        wire.socket.sendall(b"abc")
        assert wire.socket.recv(65_536) == b""


def test_a_client_that_disconnects_within_its_body_leaves_no_request(running: Running, key: str) -> None:
    load = running.service.load
    with Wire(running) as wire:
        wire.head(key, "Content-Length: 100", "Content-Type: application/json")
        wire.socket.sendall(b'{"mess')
        wait_until(lambda: load.under_way == 1)
        wire.socket.shutdown(socket.SHUT_WR)
        wait_until(lambda: load.under_way == 0)
    server = running.server
    assert server is not None
    wait_until(lambda: not server.server_state.connections)


@pytest.mark.parametrize("in_body", [False, True])
def test_a_request_that_is_cut_off_gets_a_problem(running: Running, key: str, in_body: bool) -> None:
    """A client that has shut down its sending side may still read."""
    with Wire(running) as wire:
        head = request_head(key, "Content-Length: 100", "Content-Type: application/json")
        wire.socket.sendall(head + b'{"mess' if in_body else head[:60])
        wire.socket.shutdown(socket.SHUT_WR)
        status, problem = wire.heard()
    assert (status, problem["type"]) == (400, "urn:undertow:error:cut-off")


def test_invalid_http_after_a_response_closes_the_connection(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with Wire(running) as wire:
        wire.head("none", "Transfer-Encoding: chunked")
        assert wire.answer().status == 401
        wire.socket.sendall(b"no chunk\r\n")
        wire.until_end()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_connections_above_the_limit_get_a_problem(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections=2) as running, Wire(running) as one, Wire(running):
        one.socket.sendall(LIVE)
        assert one.socket.recv(65_536).startswith(b"HTTP/1.1 200")
        with Wire(running) as third:
            status, problem = third.heard()
    assert (status, problem["type"]) == (429, "urn:undertow:error:connections")


def test_a_connection_is_freed_when_it_ends_not_by_the_collector(running: Running, key: str) -> None:
    def kept() -> list[protocol.Protocol]:
        made = [one for one in gc.get_objects() if type(one) is protocol.Protocol]
        return [one for one in made if one not in one.connections]

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with Wire(running) as wire:
                wire.head(key, path="/v1/stats", method="GET")
                assert wire.answer().status == 200
        wait_until(lambda: not kept())
    finally:
        gc.enable()


def test_a_get_with_a_large_body(running: Running, key: str) -> None:
    client = running.client_of(key)
    is_problem(client.request("GET", at("ann", "/memories"), content=b" " * (MAX_BYTES + 1)), 413)


def ask(pool: ThreadPoolExecutor, client: httpx2.Client, path: str) -> Future[httpx2.Response]:
    return pool.submit(client.post, path, json={"query": "x"})


def test_beyond_its_share_a_tenant_is_refused_at_once_and_others_are_not(tmp_path: Path) -> None:
    held = Held(SearchQuery)
    bounds: dict[str, Any] = {"max_tenant_requests": 2, "max_key_requests": 3, "max_requests": 4}
    with ThreadPoolExecutor(4) as pool, serving(tmp_path, wrap=held.around, **bounds) as running:
        one, two = running.client(), running.client()
        for tenant in ("ann", "bob"):
            one.post(at(tenant, "/memories"), json={"messages": said("hi")})
        try:
            asked = [ask(pool, one, at("ann", "/search")) for _ in range(2)]
            wait_until(lambda: held.begun == 2)
            for client in (one, two):
                busy = client.post(at("ann", "/search"), json={"query": "x"})
                is_problem(busy, 429, "tenant-busy")
                assert busy.headers["retry-after"] == "1"
            asked.append(ask(pool, one, at("bob", "/search")))
            wait_until(lambda: held.begun == 3)
            is_problem(one.get("/v1/stats"), 429, "key-busy")
            assert two.get("/v1/stats").status_code == 200
            asked.append(ask(pool, two, at("bob", "/search")))
            wait_until(lambda: held.begun == 4)
            is_problem(two.get("/v1/stats"), 429, "overload")
            assert two.get("/health/ready").status_code == 200
        finally:
            held.go.set()
        assert [one.result(SOON_S).status_code for one in asked] == [200] * 4
        assert one.get("/v1/stats").status_code == 200


def test_requests_that_wait_for_an_llm_leave_room_for_others(tmp_path: Path) -> None:
    held = Held(FlushCommand)
    with ThreadPoolExecutor(1) as pool, serving(tmp_path, wrap=held.around, max_long_requests=1) as running:
        client = running.client()
        client.post(at("ann", "/memories"), json={"messages": said("hi")})
        try:
            asked = ask(pool, client, at("ann", "/flush"))
            wait_until(lambda: held.begun == 1)
            for rest in ("/flush", "/answer"):
                is_problem(client.post(at("bob", rest), json={"question": "x"}), 429, "long")
            is_problem(client.get(at("ann", "/export")), 429, "long")
            assert client.post(at("ann", "/search"), json={"query": "x"}).status_code == 200
        finally:
            held.go.set()
        assert asked.result(SOON_S).status_code == 200
        assert client.get(at("ann", "/export")).status_code == 200


def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    ended = threading.Event()

    def endless(memories: AsyncMemories) -> AsyncMemories:
        async def export(tenant: str, *, vectors: bool = False) -> AsyncGenerator[dict[str, Any]]:
            try:
                while True:
                    await asyncio.sleep(0)
                    yield {"text": "x" * 65_536}
            finally:
                ended.set()

        memories.export = export  # type: ignore[method-assign]
        return memories

    with serving(tmp_path, wrap=endless, read_timeout_s=0.5) as running, Wire(running) as wire:
        wire.head(running.key(), path=at("ann", "/export"), method="GET")
        wait_until(lambda: ended.is_set() and running.service.load.under_way == 0)
        assert running.server is not None
        assert not running.server.server_state.connections


def test_imports_above_the_limit_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, max_imports=1) as running, Wire(running) as wire:
        client = running.client()
        wire.head(running.key(), "Content-Length: 100", path=at("ann", "/import"))
        wait_until(lambda: running.service.load.under_way == 1)
        is_problem(client.post(at("bob", "/import"), content=b"{}"), 429, "imports")
        assert client.get("/v1/tenants").status_code == 200


def test_mcp_requests_count_against_the_key_s_limit(tmp_path: Path) -> None:
    with serving(tmp_path, max_tenant_requests=1, max_key_requests=1) as running, Wire(running) as wire:
        key = running.key()
        wire.head(key, "Content-Length: 100", path="/mcp")
        wait_until(lambda: running.service.load.under_way == 1)
        is_problem(running.client_of(key).post("/mcp", json={}), 429, "key-busy")
        assert running.client().get("/v1/tenants").status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "slug", "wait"),
    [
        (QueueFull("16384 turns wait for shard s0. Try again in a moment."), 429, "queue-full", "1"),
        (RuntimeError("cannot store my secret"), 500, "internal", None),
    ],
)
def test_an_error_of_the_engine_is_a_problem_without_its_message(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    slug: str,
    wait: str | None,
) -> None:
    def failing(memories: AsyncMemories) -> AsyncMemories:
        memories.add = AsyncMock(side_effect=error)  # type: ignore[method-assign]
        return memories

    with serving(tmp_path, wrap=failing) as running:
        response = running.client().post(at("ann", "/memories"), json={"messages": said("my secret")})
        assert "secret" not in str(is_problem(response, status, slug))
        assert response.headers.get("retry-after") == wait
    assert ("RuntimeError" in caplog.text) == (status == 500)
    assert "secret" not in caplog.text


class Recorded:
    """A transport that tells what is written to it."""

    def __init__(self, transport: asyncio.Transport, written: list[bytes]) -> None:
        self._transport, self._written = transport, written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._written.append(data)
        self._transport.write(data)


def test_a_response_is_one_write_and_a_head_alone_comes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(
        protocol, "Joined", lambda transport, *more: Joined(cast("Any", Recorded(transport, written)), *more)
    )
    with serving(tmp_path) as running:
        client = running.client()
        asks: list[dict[str, Any]] = [{"messages": said("the boat")}, {"query": "boat"}, {"query": ""}]
        for n, asked in enumerate(asks, 1):
            client.post(at("ann", "/search" if "query" in asked else "/memories"), json=asked)
            assert len(written) == n and written[-1].startswith(b"HTTP/1.1 ")
            assert written[-1].partition(b"\r\n\r\n")[2]
        for ends in (False, True):
            with Wire(running) as wire:
                wire.head(running.key(), path="/health/live", method="HEAD")
                if ends:
                    wire.socket.shutdown(socket.SHUT_WR)
                assert wire.socket.recv(65_536).startswith(b"HTTP/1.1 ")


def test_a_head_that_waits_is_not_written_to_a_connection_that_has_ended() -> None:
    class Ended(asyncio.Transport):
        def is_closing(self) -> bool:
            return True

    async def go() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        Joined(Ended(), asyncio.get_running_loop(), lambda: False).write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.sleep(0)

    told: list[Any] = []
    asyncio.run(go())
    assert told == []
