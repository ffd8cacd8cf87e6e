"""Memories of mem0, messages and episodes of Zep and Graphiti, items of a LangGraph store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.base.model import BadInput
from undertow.engine.readers import Format, detect_format
from undertow.engine.readers.exports.mem0 import PREFIXES
from undertow.serving.http.routes.mem0.entities import PREFIXES as OF_ROUTES

from .samples import read_export, texts, turns, write_json

MEMORY = {
    "id": "m-1",
    "memory": "Ann likes herring.",
    "user_id": "ann",
    "run_id": "r1",
    "created_at": "2024-01-05T10:00:00-08:00",
    "updated_at": "2024-01-06T10:00:00-08:00",
    "metadata": {"stars": 5},
    "categories": ["food"],
}
ITEM = {
    "namespace": ["memories", "ann"],
    "key": "fish",
    "value": {"kind": "Memory", "content": {"content": "Ann likes herring."}},
    "created_at": "2024-01-05T10:00:00+00:00",
    "updated_at": "2024-01-05T10:00:00+00:00",
}


def errors(path: Path, tenant: str | None = None, format: Format = "auto") -> list[BadInput]:
    return [error for record in read_export(path, tenant, format) for error in record.errors]


@pytest.mark.parametrize("document", [[MEMORY], {"count": 1, "results": [MEMORY]}])
def test_a_memory_of_mem0_is_a_turn_with_its_metadata(tmp_path: Path, document: Any) -> None:
    path = write_json(tmp_path / "memories.json", document)
    assert detect_format(path) == "mem0"
    (turn,) = turns(path, tenant=None)
    assert (turn.tenant, turn.session_id, turn.text) == ("ann", "r1", "user: Ann likes herring.")
    assert turn.timestamp == "2024-01-06T10:00:00-08:00"
    own = {"stars": 5, "categories": ["food"], "id": "m-1", "imported_from": "mem0"}
    assert turn.metadata == {**own, "run_id": "r1"}
    assert turns(path, tenant="other")[0].tenant == "other"
    named_so = write_json(tmp_path / "agents.json", [{**MEMORY, "user_id": "agent:a"}])
    assert turns(named_so, tenant="agent:a")[0].tenant == "agent:a"


@pytest.mark.parametrize(
    ("named", "tenant", "others"),
    [
        ({"agent_id": "a"}, "agent:a", {}),
        ({"app_id": "x", "run_id": "r"}, "app:x", {"run_id": "r"}),
        ({"run_id": "r", "agent_id": ""}, "run:r", {}),
        ({"user_id": "u", "agent_id": "a"}, "u", {"agent_id": "a"}),
    ],
)
def test_a_memory_of_mem0_gets_the_tenant_that_its_routes_would_give_it(
    tmp_path: Path, named: dict[str, str], tenant: str, others: dict[str, str]
) -> None:
    path = write_json(tmp_path / "memories.json", [{"id": "1", "memory": "x", "metadata": None, **named}])
    (turn,) = turns(path, tenant=None)
    given = {name: turn.metadata[name] for name in PREFIXES if name in turn.metadata}
    assert (turn.tenant, given) == (tenant, others)
    assert {"user_id": "", **{field: kind for kind, field in OF_ROUTES.items()}} == {**PREFIXES}


def test_a_changed_memory_is_new_and_the_same_one_is_not(tmp_path: Path) -> None:
    a = turns(write_json(tmp_path / "a.json", [MEMORY]), None)[0]
    later = {**MEMORY, "updated_at": "2024-03-01", "metadata": None}
    b, c = turns(write_json(tmp_path / "b.json", [later, {**later, "memory": "Ann likes cod."}]), None)
    assert a.dedupe_key == b.dedupe_key != c.dedupe_key


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"user_id": None, "run_id": None}, "user_id"),
        ({"user_id": "agent:a"}, "user_id"),
        ({"user_id": " "}, "user_id"),
        ({"memory": ""}, "memory"),
        ({"memory": 3}, "memory"),
        ({"id": None}, "id"),
        ({"created_at": "soon", "updated_at": None}, "created_at"),
        ({"metadata": [1]}, "metadata"),
    ],
)
def test_a_bad_memory_is_named(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    path = write_json(tmp_path / "m.json", [MEMORY, {**MEMORY, **change}])
    (error,) = errors(path)
    assert (error.line, error.field) == (2, field)


@pytest.mark.parametrize("document", [[ITEM], {"items": [ITEM]}])
def test_an_item_of_langgraph_is_a_turn_of_its_namespace(tmp_path: Path, document: Any) -> None:
    path = write_json(tmp_path / "store.json", document)
    assert detect_format(path) == "langgraph"
    (turn,) = turns(path, tenant=None)
    assert (turn.tenant, turn.text) == ("memories/ann", "user: Ann likes herring.")
    assert turn.metadata == {"namespace": "memories/ann", "id": "fish", "imported_from": "langgraph"}


def test_an_item_without_text_is_its_value_and_lines_of_items_are_read(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    items = [ITEM, {**ITEM, "key": "soup", "value": {"likes": "soup", "stars": 1}}]
    path.write_text("\n".join(map(json.dumps, items)))
    assert detect_format(path) == "langgraph"
    assert texts(path, None, "langgraph") == ["user: Ann likes herring.", 'user: {"likes":"soup","stars":1}']
    (error,) = errors(write_json(tmp_path / "bad.json", [{**ITEM, "namespace": "ann"}]))
    assert error.field == "namespace"


def zep_message(id: str, role: str | None, text: str, **more: Any) -> dict[str, Any]:
    return {"uuid": id, "role": role, "content": text, "created_at": f"2024-01-05T10:0{id}:00Z", **more}


def test_the_messages_of_a_zep_thread_are_paired_in_order_of_time(tmp_path: Path) -> None:
    messages = [
        zep_message("2", "assistant", "Herring."),
        zep_message("1", "user", "Which fish?", name="Ann Example"),
    ]
    path = write_json(tmp_path / "t.json", {"messages": messages, "row_count": 2, "user_id": "ann"})
    assert detect_format(path) == "messages"  # of several formats the older one; so name it
    (turn,) = turns(path, None, "zep")
    assert (turn.tenant, turn.text) == ("ann", "Ann Example: Which fish?\nassistant: Herring.")
    assert turn.timestamp == "2024-01-05T10:01:00+00:00"


def test_threads_that_follow_each_other_do_not_share_an_owner(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    threads = [{"messages": [zep_message("1", "user", u)], "user_id": u} for u in ("ann", "bo")]
    path.write_text("\n".join(map(json.dumps, threads)))
    found = read_export(path, None, "zep")
    assert [(t.tenant, t.text) for r in found for t in r.turns] == [("ann", "user: ann")]
    assert [e.line for r in found for e in r.errors] == [1]


def test_episodes_of_zep_and_graphiti(tmp_path: Path) -> None:
    spoken = {"role_type": "assistant", "role": "Helper", "session_id": "s"}
    episodes = [
        zep_message("1", None, "{}", source="json", group_id="g", valid_at="2023-01-01"),
        {**zep_message("2", None, "Hello.", group_id="g"), **spoken},
        zep_message("3", None, "x"),
    ]
    path = write_json(tmp_path / "e.json", {"episodes": episodes})
    assert detect_format(path) == "zep"
    found = [turn for record in read_export(path, None) for turn in record.turns]
    assert [(t.tenant, t.session_id, t.text, t.timestamp) for t in found] == [
        ("g", "", "user: {}", "2023-01-01"),
        ("g", "s", "Helper: Hello.", "2024-01-05T10:02:00+00:00"),
    ]
    assert [(e.line, e.field) for e in errors(path)] == [(3, "user_id")]
    nodes = [{**episodes[0], "source_description": "podcast"}]
    assert detect_format(write_json(tmp_path / "g.json", nodes)) == "zep"
