"""Requests that would wait too long for the event loop are refused by their connection, unread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path

import httpx2
import pytest

from undertow.serving.http.middleware.admission import LEAST_WAITING, Admission, Place
from undertow.serving.http.protocol import tenant_in

from ...support.llm_servers import wait_until
from ...support.service.http import Running, at, is_problem, said, serving
from ...support.service.wire import Wire, request_head


class World:
    """Admission with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[int] = []
        self.admission = Admission(0.1, self.told.append, lambda: self.now_s)

    def serve(self, count: int, each_s: float) -> None:
        """So many requests that wait at once, begun one after the other."""
        for _ in range(count):
            self.admission.enter(b"ann")
        for _ in range(count):
            self.now_s += each_s
            self.admission.leave(b"ann")


@pytest.mark.parametrize(("each_s", "most"), [(0.001, 100), (0.002, 50), (0.1, LEAST_WAITING)])
def test_so_many_may_wait_as_the_loop_begins_in_the_time(each_s: float, most: int) -> None:
    world = World()
    world.serve(round(1 / each_s), each_s)
    world.now_s += 3_600.0  # idle, which says nothing of the rate
    world.serve(200, each_s)
    assert world.admission.most == pytest.approx(most, rel=0.05)


@pytest.mark.anyio
async def test_a_tenant_with_few_waiting_requests_is_not_refused_for_those_of_others() -> None:
    admission = World().admission
    while not admission.refuses(b"hostile"):
        admission.enter(b"hostile")
    names = [b"%d" % n for n in range(10 * admission.most)]
    for n, name in enumerate(names):
        if not (refused := admission.refuses(name)):
            admission.enter(name)
        assert n > 10 or not refused
    assert admission.refuses(b"hostile") and admission.refuses(b"new")
    assert admission.waiting.total() <= 2 * admission.most


@pytest.mark.anyio
async def test_refusals_are_counted_and_told_together(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for _ in range(world.admission.most):
        world.admission.enter(b"ann")
    assert all(world.admission.refuses(b"ann") for _ in range(1_000))
    assert not caplog.records
    world.admission.tell()
    assert world.told == [1_000]
    assert [record.fields["refused"] for record in caplog.records] == [1_000]  # type: ignore[attr-defined]


def test_a_place_is_left_once_and_not_taken_after_that() -> None:
    waiting = (admission := World().admission).waiting
    early, place = Place(admission, b"ann"), Place(admission, b"ann")
    early.leave()
    early.enter()
    place.enter()
    assert waiting.total() == 1
    place.leave()
    place.leave()
    assert not waiting


@pytest.mark.parametrize(
    ("path", "tenant"),
    [
        (b"/v1/tenants/ann/search", b"ann"),
        (b"/v1/tenants/%61nn", b"ann"),
        (b"/v1/tenants/a%2Fb/stats", b"a/b"),
        (b"/v1/tenants", b""),
        (b"/mcp/ann", b""),
    ],
)
def test_a_tenant_s_name_is_the_same_however_it_is_written(path: bytes, tenant: bytes) -> None:
    assert tenant_in(path) == tenant


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(Path(tmp_path_factory.mktemp("service")), body_timeout_s=1.0) as running:
        yield running


@pytest.fixture
def full(running: Running) -> Iterator[Admission]:
    """As many requests wait as may, each of another tenant: a stand-in for a loop with much to do."""
    admission = running.service.admission
    names = [b"waiting %d" % n for n in range(4_096)]

    async def fill(act: Callable[[bytes], None]) -> None:
        for name in names:
            act(name)
        admission._begun = 0  # of what did not run, which says nothing of the loop

    assert running.server is not None
    loop = running.server.servers[0].get_loop()
    asyncio.run_coroutine_threadsafe(fill(admission.enter), loop).result()
    yield admission
    asyncio.run_coroutine_threadsafe(fill(admission.leave), loop).result()


SEARCH = b'{"query": "boat"}'


def asked(key: str, *more: str, method: str = "POST") -> bytes:
    length = f"Content-Length: {len(SEARCH)}"
    head = request_head(key, length, "Content-Type: application/json", *more, path=at("ann", "/search"))
    return head.replace(b"POST", method.encode(), 1) + SEARCH


def refused(answer: HTTPResponse) -> bool:
    waits = answer.status == 429 and answer.headers["retry-after"] == "1"
    return waits and answer.headers["content-type"] == "application/problem+json"


def hear(wire: Wire, line: bytes, count: int) -> None:
    """Responses to requests that were sent together, up to so many with this line."""
    heard = b""
    while heard.count(line) < count:
        part = wire.socket.recv(65_536)
        assert part, heard
        heard += part


def test_in_overload_a_request_is_refused_unread_and_its_connection_goes_on(
    running: Running, full: Admission, caplog: pytest.LogCaptureFixture
) -> None:
    key = running.key()
    client = running.client_of(key)
    problem = client.post(at("ann", "/search"), content=b" " * 100_000)
    assert is_problem(problem, 429, "overload")["detail"] == "Too many requests are under way. Try again."
    assert client.post(at("ann", "/search"), json={"query": "x"}).status_code == 429
    with Wire(running) as wire:
        for _ in range(2):
            wire.socket.sendall(asked("no key, which is not looked at"))
            assert refused(wire.answer())
        wire.socket.sendall(asked(key) + asked(key))
        hear(wire, b"HTTP/1.1 429", 2)
        wire.socket.sendall(asked(key, method="HEAD"))
        assert wire.socket.recv(65_536).endswith(b"\r\n\r\n")
        wire.socket.sendall(asked(key, "Connection: close"))
        assert wire.until_end().startswith(b"HTTP/1.1 429")
    assert not [one for one in caplog.records if one.name == "asyncio"]


def test_the_body_of_a_refused_request_does_not_keep_its_connection_open(
    running: Running, full: Admission
) -> None:
    with Wire(running) as wire:
        wire.head(running.key(), "Content-Length: 1000000")
        assert refused(wire.answer())
        wire.socket.sendall(b"a")
        wire.until_end()


def test_in_overload_health_and_metrics_are_answered_and_tell_of_the_refusals(
    running: Running, full: Admission
) -> None:
    client: httpx2.Client = running.client()
    for path in ("/health/live", "/health/ready", "/v1/status", "/metrics", "/metrics?x=1"):
        assert client.get(path).status_code == 200
    assert client.get("/v1/tenants").status_code == 429
    wait_until(lambda: 'undertow_http_refused_total{reason="overload"}' in client.get("/metrics").text)


def test_requests_leave_their_places_whatever_becomes_of_them(running: Running) -> None:
    admission, client = running.service.admission, running.client()
    client.post(at("ann", "/memories"), json={"messages": said("the boat")})
    for path, key in (("/search", None), ("/nowhere", None), ("/search", "wrong"), ("/export", None)):
        headers = {} if key is None else {"Authorization": key}
        client.post(at("ann", path), json={"query": "x"}, headers=headers)
        client.get(at("ann", path), headers=headers)
    with Wire(running) as wire:
        wire.socket.sendall(asked(running.key()) * 3)
        hear(wire, b"HTTP/1.1 200", 3)
    wait_until(lambda: not admission.waiting)
