"""Legal requests that would cost everyone else: each is bounded, and says what to do."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx2
import orjson
import pytest
from starlette.datastructures import Headers

from undertow.engine.api.transfer.export import ExportTrailer
from undertow.engine.base.memory_api import Receipts
from undertow.engine.base.model import Turn
from undertow.engine.base.pacing import BURST_S
from undertow.engine.storage.location import Location
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.auth.principal import Scope
from undertow.serving.http.hosting import Files, hosted
from undertow.serving.http.middleware import fair_turns
from undertow.serving.http.middleware.fair_turns import FairTurns
from undertow.serving.http.middleware.guard import OpenGuard
from undertow.serving.http.problems import Problem
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.state_db import StateDb

from ...cluster.shard.test_drivers import opened
from ...support.cluster.in_process import settings
from ...support.llm_servers import wait_until
from ...support.service.http import SOON_S, Running, at, is_problem, said, serving
from ...support.service.wire import Wire, request_head
from .test_fair_turns import World


@pytest.fixture(scope="module", autouse=True)
def ann(client: httpx2.Client) -> None:
    """A tenant that exists."""
    client.post(at("ann", "/memories"), json={"messages": said("the boat"), "metadata": {"n": 5}})


KEYS: dict[str, Any] = {f"key {n}": n for n in range(17)}
VALUES: dict[str, Any] = {"n": list(range(65))}
OPERANDS: dict[str, Any] = {"n": {"$in": list(range(64)), "$lt": 3}}
ONE = at("ann", "/memories")


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        (KEYS, "at most 16"),
        (VALUES, "at most 64"),
        (OPERANDS, "at most 64"),
        ({"n": {}}, "'n' is {}, with no operator"),
        ({"n": {"$near": 1}}, "'n' has the operator '$near'. Use one of $eq, $ne"),
        ({"n": {"$gt": None}}, "'n' $gt is None. Compare with a number"),
        ({"n": {"$prefix": 1}}, "'n' $prefix is 1. Give the text"),
        ({"n": {"$in": "a"}}, "'n' $in is 'a'. Give a list"),
    ],
)
def test_wrong_filters_are_refused_in_words(
    client: httpx2.Client, filters: dict[str, Any], words: str
) -> None:
    asked = {"query": "boat", "filters": filters}
    for response in (
        client.post(at("ann", "/search"), json=asked),
        client.get(ONE, params={"filters": json.dumps(filters)}),
    ):
        document = is_problem(response, 422, "input")
        assert words in document["detail"] and "filters" in document["errors"][0]["field"]


def test_operators_filter_a_search_and_a_list(client: httpx2.Client) -> None:
    for where, count in (({"n": {"$gte": 5, "$lt": 6}}, 1), ({"n": {"$ne": 5}}, 0), ({"m": {"$ne": 5}}, 1)):
        found = client.post(at("ann", "/search"), json={"query": "boat", "filters": where}).json()
        listed = client.get(ONE, params={"filters": json.dumps(where)}).json()
        assert len(found["results"]) == len(listed["results"]) == count
    both: dict[str, str | int] = {"filters": json.dumps({"m": {"$ne": 5}}), "filter.n": 5}
    assert len(client.get(ONE, params=both).json()["results"]) == 1
    twice = client.get(ONE, params={**both, "filter.m": 1})
    assert "is given as filters too" in is_problem(twice, 422, "input")["detail"]
    for text in ("[]", "{", "null"):
        document = is_problem(client.get(ONE, params={"filters": text}), 422, "input")
        assert document["errors"][0]["field"] == "filters"


@pytest.mark.parametrize(("filters", "words"), [(KEYS, "at most 16"), (VALUES, "at most 64")])
def test_filters_are_bounded_in_bodies_and_in_query_strings(
    client: httpx2.Client, filters: dict[str, Any], words: str
) -> None:
    asked = {"query": "boat", "filters": filters}
    in_query = {f"filter.{key}": values for key, values in filters.items()}
    for response in (client.post(at("ann", "/search"), json=asked), client.get(ONE, params=in_query)):
        assert words in is_problem(response, 422, "input")["detail"]


def test_filters_within_their_bounds_are_taken(client: httpx2.Client) -> None:
    """In a query string each number stands for a text as well."""
    filters = {f"key {n}": "x" for n in range(15)} | {"n": list(range(64))}
    asked = client.post(at("ann", "/search"), json={"query": "boat", "filters": filters})
    assert asked.json()["results"] == []
    listed = client.get(at("ann", "/memories"), params={"filter.n": list(range(64))})
    assert [memory["metadata"] for memory in listed.json()["results"]] == [{"n": 5}]


def test_queries_and_questions_are_bounded(client: httpx2.Client) -> None:
    assert client.post(at("ann", "/search"), json={"query": "x" * 8_192}).status_code == 200
    for path, field in (("/search", "query"), ("/answer", "question")):
        document = is_problem(client.post(at("ann", path), json={field: "x" * 8_193}), 422, "input")
        assert document["errors"][0]["field"] == field and "8192" in document["detail"]


def test_an_import_of_too_many_lines_is_refused_unread(client: httpx2.Client) -> None:
    document = is_problem(client.post(at("new", "/import"), content=b"{}\n" * 1_000_001), 422, "input")
    assert "more than 1,000,000 lines" in document["detail"]


def audited(running: Running, act: str) -> list[str]:
    """The outcomes of an act in the audit log."""
    lines = map(orjson.loads, (running.folder / "audit.jsonl").read_bytes().splitlines())
    return [line["outcome"] for line in lines if line["act"] == act]


@pytest.mark.parametrize("sets", ["policy", "settings"])
def test_an_import_that_sets_policy_or_thresholds_needs_the_scope_admin(
    running: Running, client: httpx2.Client, sets: str
) -> None:
    first, *records, _ = map(orjson.loads, client.get(at("ann", "/export")).content.splitlines())
    plain = running.client(Scope.READ, Scope.WRITE)

    def sent(by: httpx2.Client, to: str, **headers: str) -> httpx2.Response:
        seal = ExportTrailer()
        for record in records:
            seal.add(record)
        body = b"\n".join(map(orjson.dumps, [first, *records, seal.end("ann")]))
        return by.post(at(to, "/import"), content=body, headers=headers)

    assert sent(plain, f"{sets} 1").status_code == 200, "a plain export sets what the store has"
    if sets == "policy":
        policy = {"kind": "control", "tenant": "ann", "seq": -1, "control": "policy"}
        records.insert(1, policy | {"body": {"policy": "eager"}})
    else:
        records[0]["body"]["theta_count"] = 1
    refused = is_problem(sent(plain, f"{sets} 2"), 403, "import-settings")
    assert "scope admin" in refused["detail"]
    job = sent(plain, f"{sets} 2", Prefer="respond-async").headers["location"]
    wait_until(lambda: plain.get(job).json()["status"] == "failed")
    assert plain.get(job).json()["error"]["type"] == refused["type"]
    is_problem(client.get(at(f"{sets} 2", "/stats")), 404, "unknown-tenant")
    assert "refused" in audited(running, "import")
    assert sent(client, f"{sets} 2").status_code == 200
    assert audited(running, "import")[-2:] == ["begun", "done"]


def test_refused_acts_have_a_share_and_one_line_a_minute(tmp_path: Path) -> None:
    with serving(tmp_path, max_tenant_requests=1, max_key_requests=1) as running:
        key, other = running.key(Scope.WRITE), running.client(Scope.READ, tenants=("bob",))
        for _ in range(5):
            is_problem(other.delete(at("ann")), 403, "forbidden")
        assert audited(running, "erase") == ["refused"]
        with Wire(running) as wire:
            wire.head(key, "Content-Length: 100")
            wait_until(lambda: running.service.load.under_way == 1)
            is_problem(running.client_of(key).delete(at("bob")), 429, "key-busy")
            is_problem(running.client(Scope.READ).delete(at("ann")), 429, "tenant-busy")
            is_problem(other.delete(at("ann")), 403, "forbidden")


def test_messages_of_an_add_are_bounded(client: httpx2.Client) -> None:
    one = {"role": "user", "content": "x"}
    whole = client.post(at("new", "/memories"), json={"messages": [one] * 2_049})
    assert is_problem(whole, 422, "input")["errors"][0]["field"] == "messages"
    items = client.post(at("new", "/memories"), json={"items": [{"messages": [one] * 700}] * 3})
    assert "2,100 messages; give at most 2,048" in is_problem(items, 422, "input")["detail"]


def test_a_tenant_and_a_key_have_their_shares_of_the_turns_that_are_stored(tmp_path: Path) -> None:
    go, begun = threading.Event(), threading.Event()

    def held(memories: AsyncMemories) -> AsyncMemories:
        add = memories.add

        async def wait(turns: Sequence[Turn]) -> Receipts:
            if turns[0].tenant == "ann":
                begun.set()
                await asyncio.to_thread(go.wait, SOON_S)
            return await add(turns)

        memories.add = wait  # type: ignore[method-assign]
        return memories

    body = {"messages": [*said("one"), *said("two"), *said("three")]}
    service = serving(tmp_path, wrap=held, max_tenant_turns=2, max_key_turns=5)
    with ThreadPoolExecutor(1) as pool, service as running:
        client, other = running.client(), running.client()
        try:
            first = pool.submit(client.post, at("ann", "/memories"), json=body)
            assert begun.wait(SOON_S)
            refused = client.post(at("ann", "/memories"), json={"messages": said("four")})
            is_problem(refused, 429, "tenant-queue")
            is_problem(client.post(at("bob", "/memories"), json=body), 429, "key-queue")
            assert client.post(at("bob", "/memories"), json={"messages": said("one")}).status_code == 200
            assert other.post(at("bob", "/memories"), json=body).status_code == 200
        finally:
            go.set()
        assert first.result(SOON_S).status_code == 200, "larger than the share, and alone"
        assert client.post(at("ann", "/memories"), json=body).status_code == 200


def test_imports_have_shares(running: Running) -> None:
    keys = [running.key() for _ in range(2)]
    with Wire(running) as one, Wire(running) as two:
        for wire, tenant in ((one, "cat"), (two, "bob")):
            wire.head(keys[0], "Content-Length: 1000000", path=at(tenant, "/import"))
        wait_until(lambda: running.service.load.under_way == 2)
        for key, tenant in ((keys[0], "cy"), (keys[1], "cat")):
            is_problem(running.client_of(key).post(at(tenant, "/import"), content=b"{}"), 429, "imports")
        is_problem(running.client_of(keys[1]).post(at("cy", "/import"), content=b"{}"), 422, "input")
    wait_until(lambda: running.service.load.under_way == 0)


def test_a_slow_import_loses_its_place(tmp_path: Path) -> None:
    with serving(tmp_path, body_timeout_s=0.2) as running, Wire(running) as wire:
        wire.head(running.key(), "Content-Length: 1000000", path=at("ann", "/import"))
        status, problem = wire.heard()
        assert (status, problem["type"]) == (408, "urn:undertow:error:slow")
        wait_until(lambda: running.service.load.under_way == 0)


def test_a_request_with_two_lengths_is_refused(running: Running) -> None:
    with Wire(running) as wire:
        head = request_head(running.key(), "Content-Length: 4", "Transfer-Encoding: chunked")
        wire.socket.sendall(head + b"0\r\n\r\n")  # at once: what comes after the end resets the connection
        status, problem = wire.heard()
    assert status == 400 and "no HTTP/1.1 request" in problem["detail"]


@pytest.mark.parametrize(
    "host", ["[::1]evil.example", "[::1]:80evil", "localhost:80:80", "localhost/", "[::1"]
)
def test_a_host_is_parsed_whole(host: str) -> None:
    with pytest.raises(Problem):
        OpenGuard().admit(Headers({"host": host}))
    for good in ("[::1]:8080", "[::1]", "LOCALHOST:80", "127.0.0.1"):
        OpenGuard().admit(Headers({"host": good}))


def test_true_is_no_timestamp(client: httpx2.Client) -> None:
    body = {"messages": said("the boat"), "timestamp": True}
    document = is_problem(client.post(at("ann", "/memories"), json=body), 422, "input")
    assert {error["field"] for error in document["errors"]} == {"timestamp"}
    for moment in (1_700_000_000, 1_700_000_000.5, "2023-05-08"):
        assert client.post(at("ann", "/memories"), json=body | {"timestamp": moment}).status_code == 200


def test_the_page_loads_nothing_from_elsewhere(running: Running) -> None:
    client = running.client_of(None)
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
    assert "//" not in page.text.replace("<!DOCTYPE html>", "")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3
    files = {path: client.get(path) for path in loaded}
    assert {file.status_code for file in files.values()} == {200}
    assert [file.headers["content-type"].partition(";")[0] for file in files.values()] == [
        "text/css",
        *["text/javascript"] * 2,
    ]
    assert "/openapi.json" in files["/docs/start.js"].text
    assert "SwaggerUIBundle" in files["/docs/swagger-ui-bundle.js"].text[:10_000]
    for other in ("/docs/x.js", "/docs/../keys.json", "/docs/%2e%2e%2fopenapi.py"):
        assert client.get(other).status_code == 401, "a route like any other"


SAID = {"messages": [{"role": "user", "content": "The otters are back."}]}
REPEATS = 20


async def ask(app: Any, method: str, path: str, body: object = None) -> int:
    """The status of a request to the application."""
    data = b"" if body is None else json.dumps(body).encode()
    headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "method", "path", "body"),
    [
        (200, "POST", "ann/memories", SAID),
        (200, "POST", "ann/search", {"query": "otters"}),
        (200, "GET", "ann/memories", None),
        (200, "GET", "ann/stats", None),
        (404, "POST", "nobody/search", {"query": "otters"}),
        (404, "GET", "nobody/stats", None),
        (422, "POST", "ann/search", {"query": ""}),
    ],
)
async def test_a_request_is_freed_with_its_response_as_the_collector_holds_the_loop(
    tmp_path: Path, status: int, method: str, path: str, body: object
) -> None:
    store = tmp_path / "store"
    async with opened(store, theta_count=1_000) as memories:  # no add calls the LLM
        files = Files.beside(Location.of(store), None, None, open_to_all=True)
        with (
            closing(StateDb(files.state)) as state,
            hosted(memories, state, files, ServiceSettings(), settings()) as app,
        ):
            assert await ask(app, "POST", "/v1/tenants/ann/memories", SAID) == 200
            for _ in range(REPEATS):  # what is made once is made now
                assert await ask(app, method, f"/v1/tenants/{path}", body) == status
            gc.collect()
            gc.disable()
            try:
                for _ in range(REPEATS):
                    await ask(app, method, f"/v1/tenants/{path}", body)
                assert gc.collect() < REPEATS
            finally:
                gc.enable()


def test_a_large_add_without_room_is_refused_before_its_body_is_read(
    running: Running, client: httpx2.Client
) -> None:
    assert running.server is not None and running.server._service is not None
    load = running.server._service.load
    with load.storing("another", "full", load._settings.max_tenant_turns), Wire(running) as wire:
        wire.head(running.key(), f"Content-Length: {1 << 20}", path=at("full", "/memories"))
        assert wire.answer().status == 429
    body = {"messages": said("the boat " * 8_000)}
    assert client.post(at("full", "/memories"), json=body).status_code == 200


@pytest.mark.anyio
async def test_many_refusals_of_one_sender_are_spaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_turns, "LONGEST_REST_S", 0.05)
    world, told = World(), list[str]()

    async def refuse(sender: str) -> None:
        await world.turns.refusal(sender)
        told.append(sender)

    many = [asyncio.create_task(refuse("ann")) for _ in range(300)]
    await asyncio.sleep(0)
    assert world.turns._resting == pytest.approx(300 - BURST_S / fair_turns.REFUSAL_S, abs=2)
    await asyncio.gather(*many)
    assert told == ["ann"] * 300 and not world.turns._resting, "each is refused in the end"
    others = [asyncio.create_task(refuse(f"other {n}")) for n in range(100)]
    await asyncio.sleep(0)
    assert not world.turns._resting
    await asyncio.gather(*others)


@pytest.mark.anyio
async def test_refusals_that_would_take_memory_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_turns, "MOST_RESTING", 10)
    world = World()
    refusals = [asyncio.create_task(world.turns.refusal("ann")) for _ in range(300)]
    await asyncio.sleep(0)
    assert world.turns._resting == 10
    await asyncio.gather(*refusals)


@pytest.mark.anyio
async def test_large_bodies_of_who_sent_many_are_read_after_those_of_others() -> None:
    world, order = World(), list[str]()

    async def read(tenant: str, seconds: float) -> None:
        def work() -> None:
            world.now_s += seconds
            order.append(tenant)

        await world.turns.aside(tenant, work)

    await world.request("cy")
    tasks = [asyncio.create_task(read(*one)) for one in (("ann", 0.5), ("ann", 0.0), ("bob", 0.0))]
    await tasks[2]
    assert order == ["ann", "bob"]
    world.now_s += 60.0
    await asyncio.gather(*tasks)
    assert order == ["ann", "bob", "ann"]


def test_every_refused_request_waits_as_one_of_its_tenant(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = AsyncMock()
    monkeypatch.setattr(FairTurns, "refusal", told)
    monkeypatch.setitem(running.service.load._counts, ("tenant", "ann"), 32)
    client = running.client()
    for response in (
        client.get(at("ann", "/memories")),
        client.get(at("ann", "/export")),
        client.post(at("ann", "/flush")),
        client.post(at("ann", "/search"), json={"query": "boat"}),
    ):
        is_problem(response, 429, "tenant-busy")
    senders = [call.args[0] for call in told.await_args_list]
    assert len(set(senders)) == 1 and senders[0].endswith(" ann") and len(senders) == 4
    with running.client_of(None) as nobody:
        is_problem(nobody.get(at("ann", "/memories")), 401, "no-key")
    assert told.await_args_list[4].args == ("",), "nothing counts as the tenant's without a key"
    with running.client_of(running.key(tenants=("bob",))) as other:
        is_problem(other.get(at("ann", "/memories")), 403, "forbidden")
    assert told.await_args_list[5].args[0].endswith(" "), "nor with one that does not cover it"
