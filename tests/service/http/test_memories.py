"""The memories of a tenant over HTTP: added, found, changed and deleted in a real store."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from undertow.engine.api.message_turns import utc_now
from undertow.engine.base.queries import TurnsByKeyQuery
from undertow.serving.auth.principal import Scope
from undertow.serving.http.routes import add_batches

from ...support.service.http import Running, at, intercepted, is_problem, said, serving

BOUNDS = {"max_items": 4, "max_body_bytes": 20_000}


def added(client: httpx2.Client, tenant: str, text: str, **more: object) -> dict[str, Any]:
    response = client.post(at(tenant, "/memories"), json={"messages": said(text), **more})
    assert response.status_code == 200, response.text
    (result,) = response.json()["results"]
    return dict(result)


def found(client: httpx2.Client, tenant: str, query: str, **more: object) -> list[dict[str, Any]]:
    response = client.post(at(tenant, "/search"), json={"query": query, **more})
    assert response.status_code == 200, response.text
    results: list[dict[str, Any]] = response.json()["results"]
    return results


def test_what_a_memory_is_called_on_the_wire(client: httpx2.Client) -> None:
    made = added(client, "cyd", "the meeting is on monday", session_id="s", metadata={"a": 1}, timestamp=0)
    one = at("cyd", f"/memories/{made['id']}")
    seen = client.get(one).json()
    assert (seen["id"], seen["kind"], seen["memory"]) == (made["id"], "turn", made["memory"])
    assert (seen["session_id"], seen["metadata"], "tenant" in seen) == ("s", {"a": 1}, False)
    updated = client.put(one, json={"text": "the meeting is on friday"}).json()
    assert updated["event"] == "UPDATE"
    other = at("cyd", f"/memories/{updated['id']}")
    (version,) = client.get(other + "/history").json()["results"]
    assert version["memory"] == "user: the meeting is on friday"
    assert client.delete(other).json() == {"id": updated["id"], "kind": "turn", "event": "DELETE"}


def test_without_a_timestamp_a_turn_has_the_time_of_its_arrival_and_says_so(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(add_batches, "utc_now", utc_now)
    began = datetime.now(UTC).replace(microsecond=0)
    added(client, "ada", "the first", session_id="s", timestamp="2026-05-08")
    keyed = {"Idempotency-Key": "one"}
    body = {"messages": said("the second"), "session_id": "s"}
    first = client.post(at("ada", "/memories"), json=body, headers=keyed).json()["results"][0]
    one = client.get(at("ada", f"/memories/{first['id']}")).json()
    assert began <= datetime.fromisoformat(one["timestamp"]) <= datetime.now(UTC)
    assert one["timestamp_from"] == "arrival"
    monkeypatch.setattr(add_batches, "utc_now", lambda: "2099-01-01T00:00:00+00:00")
    again = client.post(at("ada", "/memories"), json=body, headers=keyed).json()["results"][0]
    assert (again["event"], again["id"]) == ("DUPLICATE", first["id"])
    exported = client.get(at("ada", "/export"))
    assert client.post(at("copy", "/import"), content=exported.content).status_code == 200
    copies = client.get(at("copy", "/memories")).json()["results"]
    assert [(c["timestamp"], c.get("timestamp_from")) for c in copies] == [
        ("2026-05-08", None),
        (one["timestamp"], "arrival"),
    ]
    updated = client.put(at("ada", f"/memories/{one['id']}"), json={"text": "reworded"}).json()
    reworded = client.get(at("ada", f"/memories/{updated['id']}")).json()
    assert (reworded["timestamp"], reworded["timestamp_from"]) == (one["timestamp"], "arrival")


def test_names_of_tenants_may_hold_anything(client: httpx2.Client) -> None:
    names = ["acme/bob", "acme", "a b", "ünï/%2F", "x?y#z", "acme%2Fbob"]
    for name in names:
        added(client, name, f"this is {name}")
    for name in names:
        (hit,) = found(client, name, "this")
        assert hit["memory"].startswith(f"user: this is {name}\n")
    prefixed = client.get("/v1/tenants", params={"prefix": "acme", "limit": 2})
    assert prefixed.json() == {"results": ["acme", "acme%2Fbob"], "next": "acme%2Fbob"}
    last = client.get("/v1/tenants", params={"prefix": "acme", "limit": 3})
    assert last.json() == {"results": ["acme", "acme%2Fbob", "acme/bob"], "next": None}


@pytest.mark.parametrize("name", ["%zz", "%ff%fe", "a%00b", "a%", "a%2"])
def test_invalid_tenant_names_in_paths_are_refused(client: httpx2.Client, name: str) -> None:
    request = client.build_request("POST", "/", json={"messages": said("hello")})
    request.url = request.url.copy_with(raw_path=f"/v1/tenants/{name}/memories".encode())
    document = is_problem(client.send(request), 422, "input")
    assert [error["field"] for error in document["errors"]] == ["tenant"]


@pytest.mark.parametrize(
    ("route", "field", "cure"),
    [
        ("/search", "limit", "did you mean top_k"),
        ("/search", "user_id", "in the path"),
        ("/search", "treshold", "did you mean threshold?"),
        ("/search", "xyzzy", "Leave it out."),
        ("/memories", "infer", "kept as it is"),
        ("/memories", "run_id", "did you mean session_id"),
    ],
)
def test_an_unknown_field_is_told_with_its_cure(
    client: httpx2.Client, route: str, field: str, cure: str
) -> None:
    given = {"query": "x"} if route == "/search" else {"messages": said("hello")}
    document = is_problem(client.post(at("ann", route), json={**given, field: "x"}), 422, "input")
    assert document["errors"] == [{"field": field, "detail": document["errors"][0]["detail"]}]
    assert cure in document["detail"]


def test_items_are_taken_or_refused_one_by_one(client: httpx2.Client) -> None:
    items = [
        {"messages": said("first of many")},
        {"messages": [{"role": "user"}]},
        {"messages": said("second of many"), "topk": 3},
        {"messages": said("third of many"), "metadata": {"n": 1}},
    ]
    told = client.post(at("fay", "/memories"), json={"items": items}).json()["items"]
    assert [item["status"] for item in told] == [200, 422, 422, 200]
    assert [told[0]["results"][0]["seq"], told[3]["results"][0]["seq"]] == [0, 1]
    assert told[1]["errors"][0]["field"] == "messages[0].content"
    assert told[2]["errors"][0]["field"] == "topk"
    document = is_problem(client.post(at("fay", "/memories"), json={"items": items * 2}), 422, "input")
    assert document["errors"][0]["field"] == "items"


def test_repeating_many_adds_stores_what_is_new(client: httpx2.Client) -> None:
    first: list[dict[str, Any]] = [
        {"messages": said("one of them")},
        {"messages": said("own key"), "idempotency_key": "own"},
    ]
    more = [first[0], {"messages": said("changed")}, {**first[1], "messages": said("own key")}]

    def add(items: object) -> list[dict[str, Any]]:
        body, headers = {"items": items}, {"Idempotency-Key": "lot"}
        told: list[dict[str, Any]] = client.post(at("gil", "/memories"), json=body, headers=headers).json()[
            "items"
        ]
        return told

    assert [item["results"][0]["event"] for item in add(first)] == ["ADD", "ADD"]
    assert [item["results"][0]["event"] for item in add(more)] == ["DUPLICATE", "ADD", "DUPLICATE"]
    told = add([{"messages": said("not that one")}, more[1]])
    assert [item["status"] for item in told] == [422, 200]
    assert told[1]["results"][0]["event"] == "DUPLICATE"
    assert client.get(at("gil", "/stats")).json()["turns"] == 3


BAD = [
    ({}, "body"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": " "}]}, "messages[0].content"),
    ({"messages": said("a"), "items": []}, "body"),
    ({"messages": said("a"), "timestamp": "soon"}, "timestamp"),
    ({"messages": said("a"), "metadata": 3}, "metadata"),
    ({"messages": said("a"), "user": "ann"}, "user"),
    ([], "body"),
]


@pytest.mark.parametrize(("body", "field"), BAD)
def test_bad_input_names_its_field(client: httpx2.Client, body: object, field: str) -> None:
    document = is_problem(client.post(at("gus", "/memories"), json=body), 422, "input")
    assert {error["field"] for error in document["errors"]} == {field}
    is_problem(client.get(at("gus", "/stats")), 404, "unknown-tenant")


@pytest.mark.parametrize(
    "raw", [b"{", b'{"query": NaN}', b'{"query": "\\ud800"}', b'{"query": "\xff"}', b"[" * 5_000, b""]
)
def test_bodies_that_are_no_json(client: httpx2.Client, raw: bytes) -> None:
    headers = {"content-type": "application/json"}
    is_problem(client.post(at("ann", "/search"), content=raw, headers=headers), 422, "input")


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"content": b'{"query": "x"}'}, "Content-Type: application/json"),
        (
            {"content": b'{"query": ', "headers": {"content-type": "application/json"}},
            "is no JSON, at character ",
        ),
        ({"json": {"query": "x", "since": "one day"}}, "since: 'one day' is not a timestamp"),
    ],
)
def test_a_problem_of_a_bad_body_says_what_to_do(
    client: httpx2.Client, sent: dict[str, Any], words: str
) -> None:
    document = is_problem(client.post(at("ann", "/search"), **sent), 422, "input")
    assert words in document["detail"]


def test_repeating_an_add_gives_its_first_answer(running: Running, client: httpx2.Client) -> None:
    body = {"messages": [*said("said once"), *said("and once more")]}

    def add(client: httpx2.Client, body: object, key: str = "k-1") -> httpx2.Response:
        return client.post(at("hal", "/memories"), json=body, headers={"Idempotency-Key": key})

    first = add(client, body).json()["results"]
    assert [result["event"] for result in first] == ["ADD", "ADD"]
    again = add(client, body).json()["results"]
    assert [result["event"] for result in again] == ["DUPLICATE", "DUPLICATE"]
    assert [r | {"event": "ADD"} for r in again] == first
    other = {"messages": [*said("said otherwise"), *said("and once more"), *said("a third")]}
    is_problem(add(client, other), 422, "idempotency-key-reused")
    assert client.get(at("hal", "/stats")).json()["turns"] == 2
    elsewhere = add(running.client(Scope.WRITE), other).json()["results"]
    assert [result["event"] for result in elsewhere] == ["ADD"] * 3


def test_a_repeated_add_whose_turn_is_gone_has_null_for_its_id(tmp_path: Path) -> None:
    async def gone(*_: object) -> dict[str, Any]:
        return {}

    with serving(tmp_path, wrap=lambda memories: intercepted(memories, TurnsByKeyQuery, gone)) as running:
        client, body, key = running.client(), {"messages": said("said once")}, {"Idempotency-Key": "k"}
        first, again = (client.post(at("ann", "/memories"), json=body, headers=key).json() for _ in range(2))
    (turn,) = first["results"]
    assert again == {"results": [{**turn, "id": None, "event": "DUPLICATE", "seq": None}]}


def test_repeating_an_add_does_not_bring_a_deleted_turn_back(client: httpx2.Client) -> None:
    """The answer is the first one, word for word, of the turn that is gone too."""
    body = {"messages": [*said("the code is 4711"), *said("and the shed")]}

    def add(body: object, key: str) -> list[dict[str, Any]]:
        response = client.post(at("hugo", "/memories"), json=body, headers={"Idempotency-Key": key})
        assert response.status_code == 200, response.text
        results: list[dict[str, Any]] = response.json()["results"]
        return results

    first = add(body, "k")
    deleted = at("hugo", f"/memories/{first[0]['id']}")
    client.delete(deleted)
    assert [r | {"event": "ADD"} for r in add(body, "k")] == first
    is_problem(client.get(deleted), 404, "unknown-memory")
    found = client.post(at("hugo", "/search"), json={"query": "the code is 4711", "kinds": ["turn"]}).json()
    assert [r["id"] for r in found["results"]] == [first[1]["id"]]
    # nothing is left of the words to compare with: the key alone answers; only a new key adds them anew
    reworded = {"messages": [*said("the code is 1234"), *said("and the shed")]}
    assert [(r["id"], r["event"]) for r in add(reworded, "k")] == [(r["id"], "DUPLICATE") for r in first]
    assert client.get(at("hugo", "/stats")).json()["turns"] == 1
    anew = add(body, "k-2")
    assert [r["event"] for r in anew] == ["ADD", "ADD"] and anew[0]["id"] != first[0]["id"]
    # erased with its tenant, a key begins anew: it is nobody's any more
    client.delete(at("hugo"))
    assert [r["event"] for r in add(body, "k")] == ["ADD", "ADD"]


def test_unknown_tenants_paths_and_methods_are_problems(client: httpx2.Client) -> None:
    is_problem(client.post(at("nobody", "/search"), json={"query": "x"}), 404, "unknown-tenant")
    is_problem(client.get(at("nobody", "/memories/0123")), 404)
    unescaped = is_problem(client.get("/v1/tenants/acme/bob/memories"), 404)
    assert "acme%2Fbob" in unescaped["detail"]
    wrong = client.patch(at("ann", "/memories"))
    is_problem(wrong, 405)
    assert wrong.headers["allow"] == "DELETE, GET, POST"
