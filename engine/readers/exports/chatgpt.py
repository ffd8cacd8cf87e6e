"""Reads the conversations of a ChatGPT account export.

Format: "ChatGPT Data Export Format and Parsing", mitkury/chatgpt-export-parser,
docs/chatgpt-data-export-format.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from undertow.engine.base.model import PackedTurn
from undertow.engine.readers.exports.turns import Export, Said, branch, dict_of, first_name, owner
from undertow.engine.readers.messages import name_of, text_of, time_of
from undertow.engine.readers.record import BadField

# What the model thought, and what the account's settings tell it: nobody said that.
_UNSAID = ("thoughts", "reasoning_recap", "user_editable_context", "model_editable_context", "system_error")


def chatgpt(export: Export, raw: Any) -> Iterator[PackedTurn]:
    """A conversation, along the branch that the app shows. BadField.

    The session is the conversation's id; its title goes to the metadata.
    """
    session = first_name(dict_of(raw), "conversation_id", "id")
    nodes = dict_of(raw.get("mapping"), "mapping")
    leaf = text_of(raw, "current_node")
    shown = branch(nodes, leaf if leaf in nodes else next(reversed(nodes), None), "parent")
    with_message = [id for id, node in nodes.items() if dict_of(node, f"mapping.{id}").get("message")]
    export.left_out["messages on replaced branches"] += len(set(with_message) - dict(shown).keys())
    said = []
    for id, node in shown:
        if node.get("message") is not None:
            try:
                found = _said(export, id, dict_of(node["message"]))
            except BadField as bad:
                raise bad.within(f"mapping.{id}.message") from None
            said += [found] if found else []
    yield from export.turns(owner(export, {}), session, said, {"title": text_of(raw, "title")})


def _said(export: Export, id: str, message: dict[str, Any]) -> Said | None:
    role = first_name(dict_of(message.get("author"), "author"), "role")
    content = dict_of(message.get("content"), "content")
    hidden = dict_of(message.get("metadata") or {}, "metadata").get("is_visually_hidden_from_conversation")
    if role == "tool":
        export.left_out["results of tools"] += 1
    elif hidden or content.get("content_type") in _UNSAID:
        export.left_out["hidden messages"] += 1
    else:
        text = _text(content)
        if (
            role == "assistant"
            and (tool := name_of(message, "recipient", may_be_empty=True) or "all") != "all"
        ):
            text = f"[tool call: {tool}]"
        if text.strip():
            return export.said(id, role, text, at=time_of(message, "create_time"))
        export.left_out["empty messages"] += role != "system"  # nearly every conversation begins with one
    return None


def _text(content: dict[str, Any]) -> str:
    parts = content.get("parts")
    if parts is None:
        return text_of(content, "text") or ""
    if not isinstance(parts, list):
        raise BadField("content.parts", "must be a list")
    return "\n".join(filter(None, map(_part, parts)))


def _part(part: Any) -> str:
    """A part's text; of an image or a sound its kind in brackets."""
    if isinstance(part, str):
        return part
    part = dict_of(part, "content.parts")
    kind = (text_of(part, "content_type") or "attachment").removesuffix("_asset_pointer")
    return text_of(part, "text") or f"[{kind}]"
