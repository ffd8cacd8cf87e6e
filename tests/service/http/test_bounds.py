"""Requests that are too large, too slow, cut off or no HTTP, and more of them than the service takes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from undertow.engine.base.model import Turn
from undertow.engine.base.queries import FlushCommand
from undertow.engine.base.results import Receipt
from undertow.engine.step.admission import QueueFull
from undertow.serving.async_memories import AsyncMemories

from ...support.llm_servers import wait_until
from ...support.service.http import PROBLEM, SOON_S, Running, at, intercepted, is_problem, said, serving

MAX_BYTES = 2_000


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bounds: dict[str, Any] = {
        "max_body_bytes": MAX_BYTES,
        "body_timeout_s": 1.0,
        "header_timeout_s": 0.5,
        "keep_alive_s": 1,
    }
    with serving(tmp_path_factory.mktemp("store"), **bounds) as service:
        yield service


@pytest.fixture(scope="module")
def key(running: Running) -> str:
    return running.key()


class Wire:
    """A connection on which a test says what it likes."""

    def __init__(self, running: Running) -> None:
        host, _, port = running.url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=SOON_S)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def head(self, key: str, *headers: str, path: str = at("ann", "/memories"), method: str = "POST") -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"X-API-Key: {key}", *headers, "", ""]
        self.socket.sendall("\r\n".join(lines).encode())

    def answer(self) -> HTTPResponse:
        """The next one, read to its end."""
        response = HTTPResponse(self.socket)
        response.begin()
        response.read()
        return response

    def heard_end(self) -> None:
        """The service closes, whatever it says before."""
        while self.socket.recv(65_536):
            pass

    def heard(self) -> tuple[int, dict[str, Any]]:
        """All that the service says until it closes: status and problem."""
        data = b""
        while piece := self.socket.recv(65_536):
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        assert f"content-type: {PROBLEM}".encode() in head.lower()
        return int(head.split()[1]), orjson.loads(body)


def test_a_length_above_the_bound_is_refused_before_the_body_comes(running: Running, key: str) -> None:
    with Wire(running) as wire:
        wire.head(key, f"Content-Length: {MAX_BYTES + 1}", "Content-Type: application/json")
        status, problem = wire.heard()
    assert (status, problem["type"]) == (413, "urn:undertow:error:too-large")


def test_chunks_are_counted(running: Running, key: str) -> None:
    with Wire(running) as wire:
        wire.head(key, "Transfer-Encoding: chunked", "Content-Type: application/json")
        for _ in range(3):
            wire.socket.sendall(b"3e8\r\n" + b" " * 1_000 + b"\r\n")
        assert wire.heard()[0] == 413


def test_a_slow_body_is_not_waited_for(running: Running, key: str) -> None:
    with Wire(running) as wire:
        wire.head(key, "Content-Length: 100", "Content-Type: application/json")
        wire.socket.sendall(b'{"mess')
        status, problem = wire.heard()
    assert (status, problem["type"]) == (408, "urn:undertow:error:slow")


@pytest.mark.parametrize("beginning", [b"", b"GET /v1/stats HTTP/1.1\r\nHost: loc"])
def test_slow_headers_are_not_waited_for(running: Running, beginning: bytes) -> None:
    with Wire(running) as wire:
        wire.socket.sendall(beginning)
        assert wire.heard()[0] == 408


def test_slow_headers_of_a_second_request(running: Running, key: str) -> None:
    with Wire(running) as wire:
        wire.socket.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert wire.socket.recv(65_536).startswith(b"HTTP/1.1 200")
        wire.socket.sendall(b"GET /health/live HTTP/1.1\r\nHo")
        assert wire.heard()[0] == 408


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01\x02\x00\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/1.1\r\nA:" + b"a" * 70_000]
)
def test_what_is_no_http(running: Running, raw: bytes) -> None:
    with Wire(running) as wire:
        wire.socket.sendall(raw)
        assert wire.heard()[0] == 400


def test_a_body_that_trickles_on_after_the_answer_keeps_no_connection(running: Running) -> None:
    with Wire(running) as wire:
        wire.head("no key", "Content-Length: 1000000")
        assert wire.socket.recv(65_536).startswith(b"HTTP/1.1 401")
        wire.socket.sendall(b"a")  # which ends the wait for another request
        wire.heard_end()


def test_a_connection_goes_on_after_a_body_that_came_too_late(running: Running) -> None:
    with Wire(running) as wire:
        wire.head("no key", "Content-Length: 3")
        assert wire.socket.recv(65_536).startswith(b"HTTP/1.1 401")
        wire.socket.sendall(b"abcGET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        heard = b""
        while b"HTTP/1.1 200" not in heard:
            piece = wire.socket.recv(65_536)
            assert piece, heard
            heard += piece


def test_a_late_body_has_its_time_and_the_next_request_another(tmp_path: Path) -> None:
    """A deadline that was left behind would end the connection under some later request."""
    with serving(tmp_path, body_timeout_s=0.2, keep_alive_s=60) as service, Wire(service) as wire:
        wire.head("none", "Content-Length: 3")
        assert wire.answer().status == 401
        head = f"POST {at('ann', '/memories')} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"
        wire.socket.sendall(b"abc" + head.encode())
        assert wire.answer().status == 401
        wire.socket.sendall(b"abc")
        time.sleep(1.0)
        wire.socket.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert wire.answer().status == 200


def test_a_connection_is_idle_after_a_late_body_as_after_an_answer(running: Running) -> None:
    """It is closed without a word, as no request was begun; and it is closed."""
    with Wire(running) as wire:
        wire.head("none", "Content-Length: 3")
        assert wire.answer().status == 401
        wire.socket.sendall(b"abc")
        assert wire.socket.recv(65_536) == b""


def test_a_sender_that_leaves_within_its_body_leaves_nothing(running: Running, key: str) -> None:
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


@pytest.mark.parametrize("sent", ("POST /v1/tenants/ann/memories HTTP/1.1\r\nHost: lo", None))
def test_a_request_that_is_cut_off_is_told_so(running: Running, key: str, sent: str | None) -> None:
    """In its headers, or in its body: who sends no more may still listen."""
    with Wire(running) as wire:
        if sent is None:
            wire.head(key, "Content-Length: 100", "Content-Type: application/json")
            wire.socket.sendall(b'{"mess')
        else:
            wire.socket.sendall(sent.encode())
        wire.socket.shutdown(socket.SHUT_WR)
        status, problem = wire.heard()
    assert (status, problem["type"]) == (400, "urn:undertow:error:cut-off")


def test_what_is_no_http_behind_an_answer_only_ends_the_connection(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with Wire(running) as wire:
        wire.head("none", "Transfer-Encoding: chunked")
        assert wire.answer().status == 401
        wire.socket.sendall(b"no chunk\r\n")
        wire.heard_end()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_connections_above_the_bound_are_told_so(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections=2) as running, Wire(running) as one, Wire(running):
        one.socket.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert one.socket.recv(65_536).startswith(b"HTTP/1.1 200")
        with Wire(running) as third:
            status, problem = third.heard()
    assert (status, problem["type"]) == (429, "urn:undertow:error:connections")


def test_a_get_with_a_large_body(running: Running, key: str) -> None:
    client = running.client_of(key)
    is_problem(client.request("GET", at("ann", "/memories"), content=b" " * (MAX_BYTES + 1)), 413)


class Held:
    """Memories whose searches wait until they are let go, as those of a busy shard do."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = threading.Event()

    def around(self, memories: AsyncMemories) -> AsyncMemories:
        search = memories.search

        async def held(*args: Any, **kwargs: Any) -> Any:
            self.begun += 1
            await asyncio.to_thread(self.go.wait, SOON_S)
            return await search(*args, **kwargs)

        memories.search = held  # type: ignore[method-assign]
        return memories


class Asking:
    """Searches that go on in threads of their own."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self._threads: list[threading.Thread] = []

    def ask(self, client: httpx2.Client, tenant: str, rest: str = "/search") -> None:
        def ask() -> None:
            self.statuses.append(client.post(at(tenant, rest), json={"query": "x"}).status_code)

        self._threads.append(threading.Thread(target=ask))
        self._threads[-1].start()

    def join(self) -> list[int]:
        for thread in self._threads:
            thread.join(SOON_S)
        return self.statuses


def test_beyond_its_share_a_tenant_is_refused_at_once_and_others_are_not(tmp_path: Path) -> None:
    held, asking = Held(), Asking()
    bounds: dict[str, Any] = {"max_tenant_requests": 2, "max_key_requests": 3, "max_requests": 4}
    with serving(tmp_path, wrap=held.around, **bounds) as running:
        one, two = running.client(), running.client()
        for tenant in ("ann", "bob"):
            one.post(at(tenant, "/memories"), json={"messages": said("hi")})
        try:
            for _ in range(2):
                asking.ask(one, "ann")
            wait_until(lambda: held.begun == 2)
            for client in (one, two):
                busy = client.post(at("ann", "/search"), json={"query": "x"})
                is_problem(busy, 429, "tenant-busy")
                assert busy.headers["retry-after"] == "1"
            asking.ask(one, "bob")
            wait_until(lambda: held.begun == 3)
            is_problem(one.get("/v1/stats"), 429, "key-busy")
            assert two.get("/v1/stats").status_code == 200
            asking.ask(two, "bob")
            wait_until(lambda: held.begun == 4)
            is_problem(two.get("/v1/stats"), 429, "overload")
            assert two.get("/health/ready").status_code == 200
        finally:
            held.go.set()
        assert asking.join() == [200] * 4
        assert one.get("/v1/stats").status_code == 200


def test_what_waits_for_an_llm_leaves_room_for_all_else(tmp_path: Path) -> None:
    held, asking = Held(), Asking()

    def slow(memories: AsyncMemories) -> AsyncMemories:
        async def flush(_: FlushCommand, __: object) -> bool:
            held.begun += 1
            await asyncio.to_thread(held.go.wait, SOON_S)
            return True

        return intercepted(memories, FlushCommand, flush)

    with serving(tmp_path, wrap=slow, max_long_requests=1) as running:
        client = running.client()
        client.post(at("ann", "/memories"), json={"messages": said("hi")})
        try:
            asking.ask(client, "ann", "/flush")
            wait_until(lambda: held.begun == 1)
            for rest in ("/flush", "/answer"):
                is_problem(client.post(at("bob", rest), json={"question": "x"}), 429, "long")
            is_problem(client.get(at("ann", "/export")), 429, "long")
            assert client.post(at("ann", "/search"), json={"query": "x"}).status_code == 200
        finally:
            held.go.set()
        assert asking.join() == [200]
        assert client.get(at("ann", "/export")).status_code == 200


def test_who_reads_nothing_of_an_answer_is_cut_off(tmp_path: Path) -> None:
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


def test_imports_under_way_are_few(tmp_path: Path) -> None:
    with serving(tmp_path, max_imports=1) as running, Wire(running) as wire:
        client = running.client()
        wire.head(running.key(), "Content-Length: 100", path=at("ann", "/import"))
        wait_until(lambda: running.service.load.under_way == 1)
        is_problem(client.post(at("bob", "/import"), content=b"{}"), 429, "imports")
        assert client.get("/v1/tenants").status_code == 200


def test_at_mcp_a_key_has_no_more_than_its_share(tmp_path: Path) -> None:
    with serving(tmp_path, max_tenant_requests=1, max_key_requests=1) as running, Wire(running) as wire:
        key = running.key()
        wire.head(key, "Content-Length: 100", path="/mcp")
        wait_until(lambda: running.service.load.under_way == 1)
        is_problem(running.client_of(key).post("/mcp", json={}), 429, "key-busy")
        assert running.client().get("/v1/tenants").status_code == 200


def test_a_full_queue_is_no_failure(tmp_path: Path) -> None:
    def full(memories: AsyncMemories) -> AsyncMemories:
        async def add(turns: Any) -> list[Receipt]:
            raise QueueFull("16384 turns wait for shard s0. Try again in a moment.")

        memories.add = add  # type: ignore[method-assign]
        return memories

    with serving(tmp_path, wrap=full) as running:
        response = running.client().post(at("ann", "/memories"), json={"messages": said("hi")})
        is_problem(response, 429, "queue-full")
        assert response.headers["retry-after"] == "1"


def test_what_goes_wrong_inside_is_told_without_its_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(memories: AsyncMemories) -> AsyncMemories:
        async def add(turns: list[Turn]) -> list[Receipt]:
            raise RuntimeError(f"cannot store {turns[0].text}")

        memories.add = add  # type: ignore[method-assign,assignment]
        return memories

    with serving(tmp_path, wrap=broken) as running:
        response = running.client().post(at("ann", "/memories"), json={"messages": said("my secret")})
        assert "secret" not in str(is_problem(response, 500, "internal"))
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text
