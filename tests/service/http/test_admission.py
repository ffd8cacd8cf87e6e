"""Requests that would wait too long for the event loop are refused by their connection, unread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from undertow.serving.http.middleware import admission
from undertow.serving.http.middleware.admission import LEAST_WAITING, Admission
from undertow.serving.http.protocol import tenant_in

from ...support.llm_servers import wait_until
from ...support.service.http import Running, at, is_problem, said
from ...support.service.wire import Wire, request_head

BOUNDS = {"body_timeout_s": 1.0}


@pytest.mark.parametrize(("each_s", "most"), [(0.001, 100), (0.002, 50), (0.1, LEAST_WAITING)])
def test_so_many_may_wait_as_the_loop_begins_in_the_time(
    each_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, limits = 0.0, Admission(0.1, print)
    monkeypatch.setattr(admission, "perf_counter", lambda: now_s)
    for count in (round(1 / each_s), 200):
        for leave in [limits.enter(b"ann") for _ in range(count)]:
            now_s += each_s
            leave()
        now_s += 3_600.0  # idle, which says nothing of the rate
    assert limits.most == pytest.approx(most, rel=0.05)


@pytest.mark.anyio
async def test_a_tenant_with_few_waiting_requests_is_not_refused_for_those_of_others() -> None:
    limits = Admission(0.1, print)
    while not limits.refuses(b"hostile"):
        limits.enter(b"hostile")
    names = [b"%d" % n for n in range(10 * limits.most)]
    for n, name in enumerate(names):
        if not (refused := limits.refuses(name)):
            limits.enter(name)
        assert n > 10 or not refused
    assert limits.refuses(b"hostile") and limits.refuses(b"new")
    assert limits.waiting.total() <= 2 * limits.most


@pytest.mark.anyio
async def test_refusals_are_counted_and_told_together(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []
    limits = Admission(0.1, told.append)
    leave, *_ = [limits.enter(b"ann") for _ in range(limits.most)]
    assert all(limits.refuses(b"ann") for _ in range(1_000)) and not caplog.records
    limits.tell()
    assert told == [record.fields["refused"] for record in caplog.records] == [1_000]  # type: ignore[attr-defined]
    leave()
    leave()
    assert limits.waiting.total() == limits.most - 1, "a place is left once"


def test_a_tenant_s_name_is_the_same_however_it_is_written() -> None:
    assert tenant_in(b"/v1/tenants/ann/search") == tenant_in(b"/v1/tenants/%61nn") == b"ann"
    assert tenant_in(b"/v1/tenants/a%2Fb/stats") == b"a/b"
    assert tenant_in(b"/v1/tenants") == tenant_in(b"/mcp/ann") == b""


@pytest.fixture
def full(running: Running) -> Iterator[None]:
    """As many requests wait as may, each of another tenant: a stand-in for a loop with much to do."""
    limits = running.service.admission
    others = {b"waiting %d" % n: 1 for n in range(4_096)}
    limits.waiting.update(others)
    yield
    limits.waiting.subtract(others)
    limits.waiting += Counter()  # without those of none


BODY = b'{"query": "boat"}'


def asked(key: str, *more: str, method: str = "POST") -> bytes:
    headers = f"Content-Length: {len(BODY)}", "Content-Type: application/json", *more
    return request_head(key, *headers, path=at("ann", "/search"), method=method) + BODY


def hear(wire: Wire, line: bytes, count: int) -> None:
    """Responses to requests that were sent together, up to so many with this line."""
    heard = b""
    while heard.count(line) < count:
        part = wire.socket.recv(65_536)
        assert part, heard
        heard += part


@pytest.mark.usefixtures("full")
def test_in_overload_a_request_is_refused_unread_and_its_connection_goes_on(running: Running) -> None:
    refused = running.client().post(at("ann", "/search"), content=b" " * 100_000)
    assert is_problem(refused, 429, "overload")["detail"] == "Too many requests are under way. Try again."
    assert refused.headers["retry-after"] == "1"
    with Wire(running) as wire:
        for _ in range(2):
            wire.socket.sendall(asked("no key, which is not looked at") * 2)
            hear(wire, b"HTTP/1.1 429", 2)
        wire.socket.sendall(asked("none", method="HEAD"))
        assert wire.socket.recv(65_536).endswith(b"\r\n\r\n")
        wire.socket.sendall(asked("none", "Connection: close"))
        assert wire.until_end().startswith(b"HTTP/1.1 429")
    with Wire(running) as wire:
        wire.head("none", "Content-Length: 1000000")
        hear(wire, b"HTTP/1.1 429", 1)
        wire.socket.sendall(b"a")  # the rest of the body does not come in time
        wire.until_end()


@pytest.mark.usefixtures("full")
def test_in_overload_health_and_metrics_are_answered_and_tell_of_the_refusals(running: Running) -> None:
    client = running.client()
    for path in ("/health/live", "/health/ready", "/v1/status", "/metrics", "/metrics?x=1"):
        assert client.get(path).status_code == 200
    assert client.get("/v1/tenants").status_code == 429
    wait_until(lambda: 'undertow_http_refused_total{reason="overload"}' in client.get("/metrics").text)


def test_requests_leave_their_places_whatever_becomes_of_them(running: Running) -> None:
    client = running.client()
    client.post(at("ann", "/memories"), json={"messages": said("the boat")})
    for path in ("/search", "/nowhere", "/export"):
        for by in (client, running.client_of(None)):
            by.post(at("ann", path), json={"query": "x"})
            by.get(at("ann", path))
    with Wire(running) as wire:
        wire.socket.sendall(asked(running.key()) * 3)
        hear(wire, b"HTTP/1.1 200", 3)
    wait_until(lambda: not running.service.admission.waiting)
