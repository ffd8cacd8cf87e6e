"""Legal requests that would cost everyone else: each is bounded, and says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from undertow.engine.api.transfer.export import ExportTrailer
from undertow.serving.auth.principal import Scope

from ...support.llm_servers import wait_until
from ...support.service.http import Running, at, is_problem, said, serving
from ...support.service.wire import Wire


@pytest.fixture(scope="module", autouse=True)
def ann(client: httpx2.Client) -> None:
    """A tenant that exists."""
    client.post(at("ann", "/memories"), json={"messages": said("the boat"), "metadata": {"n": 5}})


KEYS: dict[str, Any] = {f"key {n}": n for n in range(17)}
VALUES: dict[str, Any] = {"n": list(range(65))}


@pytest.mark.parametrize(("filters", "words"), [(KEYS, "at most 16"), (VALUES, "at most 64")])
def test_filters_are_bounded_in_bodies_and_in_query_strings(
    client: httpx2.Client, filters: dict[str, Any], words: str
) -> None:
    asked = {"query": "boat", "filters": filters}
    for response in (
        client.post(at("ann", "/search"), json=asked),
        client.get(
            at("ann", "/memories"), params={f"filter.{key}": values for key, values in filters.items()}
        ),
    ):
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
