"""Account exports of ChatGPT and Claude: the branch that is shown, tools, files, order and growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.readers import detect_format

from .samples import (
    LIMIT,
    boat_chat,
    claude_chat,
    claude_message,
    gpt_chat,
    gpt_node,
    read_export,
    tea_chat,
    texts,
    turns,
    warnings,
    write_json,
    write_zip,
)


def keys(path: Path) -> set[str]:
    return {turn.dedupe_key for turn in turns(path)}


def test_a_chatgpt_conversation_is_read_along_the_branch_that_is_shown(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "export.zip", {"conversations.json": [boat_chat()], "user.json": {"id": "u"}})
    assert detect_format(path) == "chatgpt"
    first, second = turns(path)
    assert (
        first.text
        == "user: Which paint for my boat?\nassistant: [tool call: web]\nassistant: Marine varnish."
    )
    assert second.text == "user: [image]\nLike this?\nassistant: Yes."
    assert (first.tenant, first.session_id, first.timestamp) == (
        "me",
        "c-boat",
        "2024-01-05T09:01:00.500000+00:00",
    )
    assert first.metadata == {"title": "Varnish", "imported_from": "chatgpt"}
    assert warnings(path).endswith(
        "left out: 1 messages on replaced branches, 1 hidden messages, 1 results of tools"
    )


def test_conversations_come_in_order_of_time_and_resuming_skips_the_first(tmp_path: Path) -> None:
    path = write_json(tmp_path / "conversations.json", [boat_chat(), tea_chat()])
    found = read_export(path)
    assert [(r.position, [t.session_id for t in r.turns]) for r in found if r.turns] == [
        (1, ["c-tea"]),
        (2, ["c-boat", "c-boat"]),
    ]
    assert [r.turns for r in read_export(path, after=1) if r.turns] == [found[1].turns]


def test_an_export_in_several_files_is_one(tmp_path: Path) -> None:
    files = {"x/conversations-000.json": [boat_chat()], "x/conversations-001.json": [tea_chat()]}
    whole = write_json(tmp_path / "conversations.json", [boat_chat(), tea_chat()])
    assert turns(write_zip(tmp_path / "parts.zip", files)) == turns(whole)


def test_a_later_export_under_another_name_adds_what_is_new(tmp_path: Path) -> None:
    old = write_json(tmp_path / "conversations.json", [tea_chat(), boat_chat()])
    grown = tea_chat()
    more = gpt_node("q2", "r", "user", "And black tea?", 1705000000.0)
    again = gpt_node("r2", "q2", "assistant", "Four.", 1705000001.0)
    grown["mapping"] |= {"q2": more, "r2": again}
    grown["current_node"] = "r2"
    new = write_zip(tmp_path / "newer.zip", {"conversations.json": [grown, boat_chat()]})
    assert keys(old) < keys(new)
    (added,) = [turn.text for turn in turns(new) if turn.dedupe_key not in keys(old)]
    assert added == "user: And black tea?\nassistant: Four."


def test_a_claude_conversation_with_a_tool_a_thought_and_a_file(tmp_path: Path) -> None:
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "hm"},
        {"type": "tool_use", "name": "web_search", "input": {}},
        {"type": "tool_result", "content": []},
        {"type": "text", "text": "Rye."},
    ]
    chat = claude_chat(
        "k",
        claude_message("m1", "human", "Which flour?", attachments=[{"file_name": "list.txt"}]),
        claude_message("m2", "assistant", "", content=blocks),
        claude_message("m3", "human", ""),
    )
    path = write_zip(tmp_path / "data.zip", {"conversations.json": [chat], "users.json": []})
    assert detect_format(path) == "claude"
    (turn,) = turns(path)
    assert turn.text == "user: Which flour?\n[file: list.txt]\nassistant: [tool call: web_search]\nRye."
    assert (turn.session_id, turn.timestamp) == ("k", "2024-02-01T10:00:01+00:00")
    assert warnings(path).endswith("left out: 1 thoughts, 1 results of tools, 1 empty messages")


def test_claude_branches_are_followed_where_they_are_named(tmp_path: Path) -> None:
    messages = [
        claude_message("m1", "human", "Hi", parent_message_uuid="none"),
        claude_message("m2", "assistant", "Old answer", parent_message_uuid="m1"),
        claude_message("m3", "assistant", "New answer", parent_message_uuid="m1"),
    ]
    linked = claude_chat("k", *messages, current_leaf_message_uuid="m3")
    assert texts(write_json(tmp_path / "a.json", [linked])) == ["user: Hi\nassistant: New answer"]
    assert len(turns(write_json(tmp_path / "b.json", [claude_chat("k", *messages)]))[0].messages) == 3


def broken(where: str) -> list[Any]:
    chat = tea_chat()
    message = chat["mapping"]["q"]["message"]
    match where:
        case "mapping":
            chat["mapping"] = None
        case "conversation_id":
            del chat["conversation_id"]
        case "mapping.q.message.create_time":
            message["create_time"] = "soon"
        case "mapping.q.message.content":
            message["content"]["parts"] = ["x" * (LIMIT + 1)]
        case "mapping.q.message.author":
            message["author"] = None
        case "mapping.q.message.content.parts":
            message["content"]["parts"] = "text"
    return [chat, boat_chat()]


@pytest.mark.parametrize(
    "where",
    [
        "mapping",
        "conversation_id",
        *(f"mapping.q.message.{f}" for f in ("create_time", "content", "author", "content.parts")),
    ],
)
def test_a_bad_conversation_is_named_and_the_others_are_read(tmp_path: Path, where: str) -> None:
    path = write_json(tmp_path / "conversations.json", broken(where))
    found = read_export(path, format="chatgpt")
    (error,) = [error for record in found for error in record.errors]
    assert (error.source, error.line, error.field) == (str(path), 1, where)
    assert error.cure
    assert [t.session_id for r in found for t in r.turns] == ["c-boat"] * 2


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    chat = gpt_chat("c", "t", gpt_node("a", "b", "user", "one"), gpt_node("b", "a", "user", "two"))
    assert texts(write_json(tmp_path / "c.json", [chat])) == ["user: one", "user: two"]


def test_a_cut_off_export_gives_what_stands_before_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    path.write_text(json.dumps([tea_chat(), boat_chat()])[:-200])
    found = read_export(path)
    assert [t.session_id for r in found for t in r.turns] == ["c-tea"]
    (error,) = [error for record in found for error in record.errors]
    assert "cannot be read after record 1" in error.reason
