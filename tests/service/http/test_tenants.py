"""Whole tenants over HTTP: policy, export and import, explanations."""

from __future__ import annotations

from pathlib import Path

import httpx2
import orjson
import pytest

from undertow.serving.async_memories import AsyncMemories
from undertow.serving.auth.principal import Scope

from ...support.cli import conversation
from ...support.service.http import Running, at, is_problem, said, serving


@pytest.fixture(scope="module")
def client(running: Running) -> httpx2.Client:
    """Of a service that has a tenant, ann, with episodes and facts."""
    client = running.client()
    items = [
        {"messages": line["messages"], "session_id": "s", "timestamp": line["timestamp"]}
        for line in conversation("ann", 24)
    ]
    assert client.post(at("ann", "/memories"), json={"items": items}).status_code == 200
    assert client.post(at("ann", "/flush")).json() == {"decided": True}
    return client


def exported(client: httpx2.Client, tenant: str, **how: object) -> list[dict[str, object]]:
    response = client.get(at(tenant, "/export"), params=how)  # type: ignore[arg-type]
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(line) for line in response.content.splitlines()]


def test_a_tenant_is_given_another_policy(running: Running, client: httpx2.Client) -> None:
    path = at("changed", "/policy")
    is_problem(client.get(path), 404, "unknown-tenant")
    assert client.put(path, json={"policy": "recmem"}).json()["generation"] == 1, "before its first turn"
    items = [{"messages": said(f"the old wooden boat in the harbour needs planks {n}")} for n in range(8)]
    assert client.post(at("changed", "/memories"), json={"items": items}).status_code == 200
    is_problem(running.client(Scope.WRITE, Scope.READ).put(path, json={"policy": "eager"}), 403, "forbidden")
    is_problem(client.put(path, json={"policy": "lazy"}), 422, "input")
    is_problem(client.put(path, json={"name": "eager"}), 422, "input")
    assert client.put(path, json={"policy": "eager"}).status_code == 200
    assert client.post(at("changed", "/flush")).json() == {"decided": True}
    done = {"tenant": "changed", "policy": "eager", "generation": 2, "change": None}
    assert client.get(path).json() == done
    assert client.put(path, json={"policy": "eager"}).json() == done, "no change"
    facts = client.get(at("changed", "/memories"), params={"kind": "fact"}).json()["results"]
    assert client.put(at("changed", f"/memories/{facts[0]['id']}"), json={"text": "mine"}).status_code == 200
    problem = is_problem(client.put(path, json={"policy": "recmem"}), 409, "policy")
    assert "drop_edits" in problem["detail"]
    answer = client.put(path, json={"policy": "recmem", "drop_edits": True}).json()
    assert answer["change"] is None or answer["change"]["policy"] == "recmem"
    acts = [orjson.loads(line) for line in (running.folder / "audit.jsonl").read_bytes().splitlines()]
    outcomes = [act["outcome"] for act in acts if act["act"] == "policy"]
    assert outcomes.count("done") == 4 and {"refused", "failed"} <= set(outcomes)


@pytest.mark.parametrize("body", [b"", b"{", b"[1]\n", b'{"kind": "export"}\n'])
def test_an_invalid_export_is_refused(client: httpx2.Client, body: bytes) -> None:
    is_problem(client.post(at("nothing", "/import"), content=body), 422, "input")
    is_problem(client.get(at("nothing", "/stats")), 404, "unknown-tenant")


def test_an_error_in_an_export_names_the_line_and_no_file(client: httpx2.Client) -> None:
    first, *rest = exported(client, "ann", vectors=True)
    assert any(record.get("vector") for record in rest)
    turn = next(record for record in rest if record["kind"] == "turn")
    turn["seq"] = -5
    line = 2 + rest.index(turn)
    body = b"\n".join(orjson.dumps(record) for record in (first, *rest))
    problem = is_problem(client.post(at("nothing", "/import"), content=body), 422, "input")
    assert problem["errors"][0]["field"] == f"line {line}, seq"
    assert "file" not in problem["detail"] and "the rest is read" not in problem["detail"]
    assert "leave the line out" not in problem["detail"]
    wrong = {"messages": [{"role": "user", "content": 5}]}
    told = is_problem(client.post(at("nothing", "/memories"), json=wrong), 422, "input")["detail"]
    assert told.endswith("Correct it.")
    broken = is_problem(client.post(at("nothing", "/import"), content=b'{"kind": "export"}\n{'), 422, "input")
    assert broken["errors"][0]["field"] == "line 2"


def test_every_turn_is_explained(client: httpx2.Client) -> None:
    whole = client.get(at("ann", "/explain")).json()
    assert [record["seq"] for record in whole["results"]] == list(range(24))
    assert whole["next_after_seq"] is None
    page = client.get(at("ann", "/explain"), params={"limit": 10, "after_seq": 3}).json()
    assert page == {"results": whole["results"][4:14], "next_after_seq": 13}


def test_an_export_that_breaks_off_has_no_end(tmp_path: Path) -> None:
    def breaking(memories: AsyncMemories) -> AsyncMemories:
        async def export(tenant: str, *, vectors: bool = False):  # type: ignore[no-untyped-def]
            for n in range(3):
                yield {"kind": "turn", "text": f"secret {n}" * 20_000}
            raise RuntimeError("secret")

        memories.export = export  # type: ignore[method-assign]
        return memories

    with serving(tmp_path, wrap=breaking) as running:
        with pytest.raises(httpx2.RemoteProtocolError):
            running.client().get(at("ann", "/export"))
        assert running.service.load.under_way == 0
