"""Reads the conversations of a Claude account export.

Format: "Claude Conversation Export Format: Field Reference",
https://whychose.com/seo/claude-conversation-export-format; "Anthropic / Claude",
https://portable-ai-memory.org/providers/anthropic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from undertow.engine.base.model import PackedTurn
from undertow.engine.readers.exports.turns import Export, Said, branch, dict_of, dicts_of, first_name, owner
from undertow.engine.readers.messages import text_of, time_of
from undertow.engine.readers.record import BadField

_ROLES = {"human": "user"}


def claude(export: Export, raw: Any) -> Iterator[PackedTurn]:
    """A conversation, along the branch that the app shows if the export names it. BadField.

    The session is the conversation's id; its name goes to the metadata as title.
    """
    session = first_name(dict_of(raw), "uuid")
    messages = dicts_of(raw, "chat_messages")
    nodes = {first_name(message, "uuid"): message for message in messages}
    shown = branch(nodes, raw.get("current_leaf_message_uuid"), "parent_message_uuid")
    if len(shown) < 2:  # without links between the messages the list is the conversation
        shown = list(nodes.items())
    export.left_out["messages on replaced branches"] += len(nodes) - len(shown)
    said = []
    for id, message in shown:
        try:
            found = _said(export, id, message)
        except BadField as bad:
            raise bad.within(f"chat_messages[{list(nodes).index(id)}]") from None
        said += [found] if found else []
    yield from export.turns(owner(export, {}), session, said, {"title": text_of(raw, "name")})


def _said(export: Export, id: str, message: dict[str, Any]) -> Said | None:
    sender = first_name(message, "sender")
    lines = list(_lines(export, message))
    for kind in ("attachments", "files"):
        for file in dicts_of(message, kind):
            lines.append(f"[file: {text_of(file, 'file_name') or 'unnamed'}]")
    text = "\n".join(lines)
    if text.strip():
        return export.said(id, _ROLES.get(sender, sender), text, at=time_of(message, "created_at"))
    export.left_out["empty messages"] += 1
    return None


def _lines(export: Export, message: dict[str, Any]) -> Iterator[str]:
    """The text of each block: what was said, and the names of called tools."""
    blocks = dicts_of(message, "content") or [{"type": "text", "text": message.get("text")}]
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            yield f"[tool call: {text_of(block, 'name') or 'unnamed'}]"
        elif kind in ("thinking", "tool_result"):
            export.left_out["thoughts" if kind == "thinking" else "results of tools"] += 1
        elif text := text_of(block, "text"):
            yield text
