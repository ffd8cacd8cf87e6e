"""Access control over HTTP: every route needs a key, its scope and its tenant."""

from __future__ import annotations

from collections.abc import Callable
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import orjson
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.datastructures import Headers

from undertow.engine.base.model import UndertowError
from undertow.serving.auth.principal import KeyLimits, Scope
from undertow.serving.http.hosting import Files, run
from undertow.serving.http.middleware.fair_turns import FairTurns
from undertow.serving.http.middleware.guard import OpenGuard
from undertow.serving.http.problems import Problem
from undertow.serving.http.routes.access import GuardedRoute, TenantAccess
from undertow.serving.http.service_settings import ServiceSettings

from ...support.cluster.in_process import settings as engine_settings
from ...support.service.http import Running, at, is_problem, said, serving
from ...support.service.wire import Wire

OPEN = {"/health/live", "/health/ready"}


@pytest.fixture(scope="module", autouse=True)
def ann(client: httpx2.Client) -> None:
    """A tenant that exists."""
    client.post(at("ann", "/memories"), json={"messages": said("the boat")})


def guarded(running: Running) -> list[GuardedRoute]:
    found = [context.original_route for context in iter_route_contexts(running.app.routes)]
    assert all(isinstance(route, GuardedRoute) for route in found if isinstance(route, APIRoute))
    return [route for route in found if isinstance(route, GuardedRoute)]


def routes(running: Running) -> list[tuple[str, str, Any]]:
    """Method, path and mark of every route of the service."""
    return [(m, route.path, route.access) for route in guarded(running) for m in route.methods or ()]


def test_every_route_needs_a_key(running: Running) -> None:
    client = running.client_of(None)
    wrong = running.client_of("ut_0123456789ab_" + "x" * 43)
    asked = routes(running)
    assert len(asked) >= 24
    for method, path, _ in asked:
        where = path.format(tenant="ann", memory_id="m", job_id="j", webhook_id="w")
        if path in OPEN:
            assert client.request(method, where).status_code == 200
            continue
        own = {"Origin": str(client.base_url).rstrip("/")}  # a form of /inspect is refused from elsewhere
        response = client.request(method, where, content=b"not read", headers=own)
        is_problem(response, 401, "key-refused" if path == "/inspect/sign-in" else "no-key")
        assert response.headers["www-authenticate"] == "Bearer"
        is_problem(wrong.request(method, where, content=b"not read"), 401, "key-refused")
    is_problem(client.get("/v1/none"), 401)


def test_every_route_needs_its_scope(running: Running) -> None:
    for method, path, access in routes(running):
        if access.scope is None:
            continue
        others = [scope for scope in Scope if scope is not access.scope]
        lacking = running.client(*others)
        elsewhere = running.client(access.scope, tenants=("bob",))
        for tenant in ("ann", "nobody"):
            where = path.format(tenant=tenant, memory_id="m", job_id="j", webhook_id="w")
            refused = is_problem(lacking.request(method, where, content=b"not read"), 403, "forbidden")
            assert f"lacks the scope {access.scope.value}" in refused["detail"]
            assert ("or is not for" in refused["detail"]) is (access.reaches is not TenantAccess.ANY)
            if access.reaches is not TenantAccess.ANY:
                told = elsewhere.request(method, where, content=b"not read")
                assert is_problem(told, 403, "forbidden") == refused


def test_every_request_waits_for_its_turn(running: Running, calls_of: Callable[..., list[str]]) -> None:
    begun = calls_of(FairTurns, "begin", lambda turns, turn: turn.tenant)
    own = {"Origin": running.url}
    for method, path, access in routes(running):
        where = path.format(tenant="waits", memory_id="m", job_id="j", webhook_id="w")
        begun.clear()
        with running.client().stream(method, where, content=b"{}", headers=own):
            assert begun == ([] if access.scope is None else ["waits" if "{tenant}" in path else ""]), where
    begun.clear()
    with Wire(running) as wire:  # a body that is kept for repeats is waited for before the turn
        headers = "Idempotency-Key: once", "Content-Length: 2"
        wire.head(running.key(), *headers, path=at("waits", "/flush"))
        for _ in range(3):
            running.client().get(at("waits", "/stats"))
        assert len(begun) == 3
        wire.socket.sendall(b"{}")
        assert wire.answer().status == 404
    assert len(begun) == 4


def test_no_request_is_handed_to_a_thread_of_the_framework(running: Running) -> None:
    """Such threads share the interpreter with the event loop, which would wait for them."""
    for route in guarded(running):
        dependants = [route.dependant]
        for dependant in dependants:
            assert iscoroutinefunction(dependant.call), (route.path, dependant.call)
            dependants += dependant.dependencies


def test_a_key_reaches_its_tenants_alone(running: Running) -> None:
    client = running.client(prefix="acme/")
    assert client.post(at("acme/bob", "/memories"), json={"messages": said("hi")}).status_code == 200
    assert client.post(at("acme%2Fbob", "/memories"), json={"messages": said("hi")}).status_code == 403
    is_problem(client.post(at("acme", "/search"), json={"query": "x"}), 403, "forbidden")
    assert client.get("/v1/tenants").json() == {"results": ["acme/bob"], "next": None}
    named = running.client(Scope.ADMIN, tenants=("ann", "nobody"))
    assert named.get("/v1/tenants").json()["results"] == ["ann"]
    is_problem(named.get("/v1/stats"), 403, "forbidden")


def test_a_method_that_is_not_known_is_a_problem_everywhere(running: Running) -> None:
    client = running.client()
    for path, allowed in (("/mcp", "POST"), ("/mcp/ann", "POST"), (at("ann", "/search"), "POST")):
        for method in ("GET", "DELETE"):
            refused = client.request(method, path)
            is_problem(refused, 405)
            assert refused.headers["allow"] == allowed


def test_a_key_may_come_in_either_header(running: Running) -> None:
    client, key = running.client_of(None), running.key(Scope.READ)
    path = at("ann", "/memories/none")
    assert client.get(path, headers={"X-API-Key": key}).status_code == 404
    assert client.get(path, headers={"Authorization": f"bearer {key}"}).status_code == 404
    assert client.get(path, headers={"Authorization": f"Basic {key}"}).status_code == 401


def test_every_request_counts_against_the_key_s_rate(running: Running) -> None:
    client = running.client(limits=KeyLimits(requests_per_s=0.001, burst=3))
    statuses = [client.post(at("ann", "/search"), json=body).status_code for body in ({}, {"query": "x"})]
    assert statuses == [422, 200]
    assert client.get("/v1/none").status_code == 404
    refused = client.post(at("ann", "/search"), json={"query": "x"})
    is_problem(refused, 429, "rate")
    assert 990 < int(refused.headers["retry-after"]) <= 1_001


def test_refused_acts_are_in_the_audit_log(running: Running) -> None:
    key = running.key(Scope.READ)
    client = running.client_of(key)
    client.delete(at("ann"))
    client.delete(at("ann", "/memories"))
    client.post("/v1/purge")
    client.post("/v1/replay")
    lines = [orjson.loads(line) for line in (running.folder / "audit.jsonl").read_bytes().splitlines()]
    mine = [line for line in lines if line["by"] == key.split("_")[1]]
    assert [(line["act"], line["outcome"]) for line in mine] == [
        (act, "refused") for act in ("erase", "delete_all", "purge", "replay")
    ]
    assert [("tenant_key" in line) for line in mine] == [True, True, False, False]
    assert b"ann" not in (running.folder / "audit.jsonl").read_bytes()


def test_refusals_that_were_counted_alone_are_in_the_audit_log_at_the_end(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        client = running.client(Scope.READ)
        for _ in range(3):
            client.post("/v1/purge")
    lines = [orjson.loads(line) for line in (tmp_path / "audit.jsonl").read_bytes().splitlines()]
    assert [line.get("counts") for line in lines if line["act"] == "purge"] == [None, {"refused_before": 1}]


def test_without_keys_only_this_machine_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path, open_to_all=True) as running:
        client = running.client_of(None)
        assert client.post(at("ann", "/memories"), json={"messages": said("hi")}).status_code == 200
        is_problem(client.get("/v1/stats", headers={"Host": "evil.example"}), 403, "host")
        is_problem(client.get("/v1/stats", headers={"Origin": "http://evil.example"}), 403, "host")
        assert client.get("/v1/status").status_code == 200


LOOPBACK = ("localhost", "127.0.0.1:80", "127.0.0.2", "127.9.9.9:1", "[::1]:8080", "LOCALHOST:1")
OTHERS = ("", "localhost.example", "[::2]", "127.0.0.1.example:80", "128.0.0.1", "10.0.0.1")


@pytest.mark.parametrize("host", [*LOOPBACK, *OTHERS])
def test_without_keys_only_a_loopback_host_is_admitted(host: str) -> None:
    headers = Headers({"host": host})
    if host in LOOPBACK:
        assert OpenGuard().admit(headers).key_id == "no-auth"
    else:
        with pytest.raises(Problem):
            OpenGuard().admit(headers)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_without_keys_it_listens_on_loopback_only(host: str, tmp_path: Path) -> None:
    files = Files(None, tmp_path / "audit.jsonl", tmp_path / "state")
    never = Mock(side_effect=AssertionError("nothing is opened"))
    with pytest.raises(UndertowError, match="loopback"):
        settings, engine = ServiceSettings(), engine_settings()
        run(never, files, host, 0, settings=settings, engine=engine, on_start=lambda _: None)


def test_an_endpoint_without_an_access_mark_is_refused() -> None:
    async def endpoint() -> None: ...

    app = FastAPI()
    app.router.route_class = GuardedRoute
    with pytest.raises(RuntimeError, match="who may use it"):
        app.get("/open")(endpoint)
