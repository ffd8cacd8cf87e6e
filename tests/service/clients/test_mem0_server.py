"""The routes of mem0's self-hosted server, and what its client reads of errors of the front."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest

from undertow.serving.auth.principal import KeyLimits, Scope
from undertow.serving.http.routes.mem0.face import ROUTES

from ...support.service.http import SOON_S, Running, at, serving


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def client(running: Running) -> httpx2.Client:
    """Sends its key as users of that server do."""
    return httpx2.Client(base_url=running.url, headers={"X-API-Key": running.key()}, timeout=30)


def test_a_memory_lives_and_dies(client: httpx2.Client) -> None:
    whose = {"user_id": "own-ann"}
    body = {"messages": user("the boat needs new planks"), "metadata": {"topic": "boat", "n": 3}}
    (added,) = client.post("/memories", json={**body, **whose}).json()["results"]
    client.post("/memories", json={"messages": user("my knee hurts"), **whose})
    path = f"/memories/{added['id']}"
    one = client.get(path).json()
    assert (one["memory"], one["metadata"]) == ("user: the boat needs new planks", {"topic": "boat", "n": 3})
    listed = client.get("/memories", params=whose).json()["results"]
    assert [memory["memory"] for memory in listed] == [one["memory"], "user: my knee hurts"]
    assert client.get("/memories", params={**whose, "top_k": 1}).json()["results"] == listed[:1]
    assert client.get("/memories", params={"user_id": "own-nobody"}).json() == {"results": []}

    for name, text in (("text", "the boat has new planks"), ("data", "the boat has a new mast")):
        path = f"/memories/{client.put(path, json={name: text}).json()['id']}"
        assert client.get(path).json()["memory"] == f"user: {text}"
    assert [version["event"] for version in client.get(f"{path}/history").json()] == ["ADD"]
    assert client.delete(path).json()["event"] == "DELETE"
    assert client.get(path).status_code == 404
    assert client.delete("/memories", params=whose).json()["message"] == "Memories deleted successfully!"
    assert client.get("/memories", params=whose).json() == {"results": []}


def test_a_search_filters_by_metadata_and_finds_what_our_own_routes_added(
    client: httpx2.Client, running: Running
) -> None:
    ours = running.client()
    for n, topic in enumerate(("boat", "knee", "boat")):
        body = {"messages": user(f"word{n} about it"), "metadata": {"topic": topic, "run_id": f"r{n}"}}
        ours.post(at("own-bob", "/memories"), json=body)

    def hits(**more: Any) -> list[dict[str, Any]]:
        told = client.post("/search", json={"query": "word about", "user_id": "own-bob", **more})
        assert told.status_code == 200, told.text
        results: list[dict[str, Any]] = told.json()["results"]
        return results

    def found(**more: Any) -> list[str]:
        return sorted(hit["memory"] for hit in hits(**more) if hit["kind"] == "turn")

    assert found() == [f"user: word{n} about it" for n in range(3)]
    assert found(filters={"topic": "boat"}) == ["user: word0 about it", "user: word2 about it"]
    assert found(filters={"topic": "boat"}, run_id="r2") == ["user: word2 about it"]
    assert found(filters={"topic": {"ne": "boat"}}) == ["user: word1 about it"]
    assert len(hits(limit=1)) == len(hits(top_k=1)) == 1
    assert found(filters={"user_id": "own-bob"}) == found()
    both = {"AND": [{"topic": "boat"}, {"user_id": "own-bob"}, {"run_id": "r0"}]}
    assert found(filters=both) == ["user: word0 about it"]


@pytest.mark.parametrize(
    ("verb", "path", "body", "status", "words"),
    [
        ("POST", "/search", {"query": "x"}, 422, "user_id: is missing"),
        ("POST", "/search", {"query": "x", "user_id": "a", "filters": {"user_id": "b"}}, 422, "given twice"),
        ("POST", "/search", {"query": "x", "user_id": "a", "filters": {"OR": []}}, 422, "OR"),
        ("POST", "/search", {"query": "x", "user_id": "a", "filters": ["x"]}, 422, "must be an object"),
        ("POST", "/memories", {"messages": user("x")}, 422, "user_id: is missing"),
        ("POST", "/memories", {"messages": user("x"), "user_id": "a", "infer": False}, 422, "word for word"),
        ("GET", "/memories", None, 422, "user_id: is missing"),
        ("GET", "/memories?user_id=a&page=2", None, 422, "page"),
        ("GET", "/memories?user_id=a&top_k=2000", None, 422, "top_k: is 2000"),
        ("GET", "/memories?user_id=..", None, 422, "user_id: must not be .., which"),
        ("DELETE", "/v2/entities/agent/%2E%2E/", None, 422, "agent_id: must not be .., which"),
        ("DELETE", "/v2/entities/user/acme%2Fnobody/", None, 404, "no memories"),
        ("DELETE", "/memories", None, 422, "user_id"),
        ("PUT", "/memories/x", {"text": "x"}, 404, "no id of a memory"),
        ("PUT", "/memories/x", {"text": "x", "data": "y"}, 422, "Give one of both"),
        ("POST", "/search", {"query": "x", "user_id": "a", "limit": 1, "top_k": 5}, 422, "Give one of both"),
        ("GET", "/memories?user_id=a&limit=1&top_k=5", None, 422, "Give one of both"),
        ("POST", "/reset", {}, 501, "DELETE /memories?user_id="),
        ("POST", "/configure", {}, 501, "where it is started"),
        ("GET", "/entities", None, 501, "/v1/tenants"),
    ],
)
def test_what_is_refused_says_why(
    client: httpx2.Client, verb: str, path: str, body: object, status: int, words: str
) -> None:
    told = client.request(verb, path, json=body)
    assert (told.status_code, told.headers["content-type"]) == (status, "application/json")
    assert words in told.json()["detail"]
    assert "filters.user_id" not in told.text


@pytest.mark.parametrize("depth", [2, 480, 2_000])
def test_filters_within_filters_are_refused_however_deep(client: httpx2.Client, depth: int) -> None:
    filters = '{"AND": [' * depth + '{"topic": "boat"}' + "]}" * depth
    body = f'{{"query": "x", "user_id": "a", "filters": {filters}}}'
    told = client.post("/search", content=body, headers={"Content-Type": "application/json"})
    assert (told.status_code, told.headers["content-type"]) == (422, "application/json"), told.text


def test_a_list_without_a_size_is_no_longer_than_the_service_allows(tmp_path: Path) -> None:
    with serving(tmp_path, max_page=2) as running:
        client = running.client()
        client.post("/memories", json={"messages": user("hello"), "user_id": "ann"})
        for told in (
            client.post("/v3/memories/", json={"filters": {"user_id": "ann"}}),
            client.get("/memories", params={"user_id": "ann"}),
        ):
            assert [one["memory"] for one in told.json()["results"]] == ["user: hello"]


@pytest.mark.parametrize("length", [253, 254, 255, 256])
def test_a_batch_takes_any_idempotency_key(client: httpx2.Client, length: int) -> None:
    told = client.post("/memories", json={"messages": user("x"), "user_id": f"own-{length}"}).json()
    body, key = {"memories": [{"memory_id": told["results"][0]["id"]}]}, {"Idempotency-Key": "k" * length}
    deleted = [client.request("DELETE", "/v1/batch/", json=body, headers=key) for _ in range(2)]
    assert [one.status_code for one in deleted] == [200 if length <= 255 else 422] * 2


def test_keys_hold(running: Running, client: httpx2.Client) -> None:
    (theirs,) = client.post("/memories", json={"messages": user("a secret"), "user_id": "own-cy"}).json()[
        "results"
    ]
    key = running.key(Scope.READ, tenants=("own-di",))
    other = httpx2.Client(base_url=running.url, headers={"X-API-Key": key}, timeout=SOON_S)
    attempts = (
        ("GET", f"/memories/{theirs['id']}", None),
        ("GET", f"/memories/{theirs['id']}/history", None),
        ("PUT", f"/memories/{theirs['id']}", {"text": "x"}),
        ("DELETE", f"/memories/{theirs['id']}", None),
        ("GET", "/memories?user_id=own-cy", None),
        ("DELETE", "/memories?user_id=own-cy", None),
        ("POST", "/search", {"query": "secret", "user_id": "own-cy"}),
        ("POST", "/memories", {"messages": user("x"), "user_id": "own-di"}),
    )
    for verb, path, body in attempts:
        refused = other.request(verb, path, json=body)
        assert refused.status_code == 403, path
        assert "secret" not in refused.text
    assert client.get(f"/memories/{theirs['id']}").json()["memory"] == "user: a secret"


def test_every_route_needs_a_key(running: Running) -> None:
    client = running.client_of(None)
    for route in ROUTES:
        path = route.path.replace("*", "x").format(id="x", type="user", name="x")
        told = client.request(route.verb or "GET", path, content=b"not read")
        assert (told.status_code, told.headers["content-type"]) == (401, "application/json")
        assert "Send your key" in told.json()["detail"]


def test_the_client_tells_what_the_front_refuses(
    running: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEM0_TELEMETRY", "False")
    monkeypatch.setenv("MEM0_DIR", str(tmp_path))
    mem0 = pytest.importorskip("mem0")
    key = running.key(limits=KeyLimits(requests_per_s=1))
    with pytest.raises(Exception, match="sends more requests than it may") as refused:
        client = mem0.MemoryClient(key, host=running.url)
        for _ in range(10):
            client.search("x", filters={"user_id": "own-ann"})
    assert "urn:undertow" not in str(refused.value)
