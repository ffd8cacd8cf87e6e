"""Small exports of invented people, one of each format, and what is read from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from undertow.engine.base.model import Turn
from undertow.engine.readers import Format, Log, Record, read

LIMIT = 10_000
OWNER = "me"


def read_export(
    path: Path, tenant: str | None = OWNER, format: Format = "auto", after: int = 0
) -> list[Record]:
    log = replace(Log.of(path), tenant=tenant)
    return list(read(log, format, after=after, max_message_bytes=LIMIT))


def turns(path: Path, tenant: str | None = OWNER, format: Format = "auto") -> list[Turn]:
    """The turns of an export that has no errors."""
    found = read_export(path, tenant, format)
    assert [e for record in found for e in record.errors] == []
    return [turn for record in found for turn in record.turns]


def texts(path: Path, tenant: str | None = OWNER, format: Format = "auto") -> list[str]:
    return [turn.text for turn in turns(path, tenant, format)]


def warnings(path: Path, format: Format = "auto") -> str:
    return "\n".join(w for record in read_export(path, format=format) for w in record.warnings)


def write_json(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def write_zip(path: Path, files: dict[str, Any]) -> Path:
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content if isinstance(content, str) else json.dumps(content))
    return path


# ---- ChatGPT


def gpt_node(
    id: str, parent: str | None, role: str, text: str | list[Any], at: float | None = None, **more: Any
) -> dict[str, Any]:
    content = {"content_type": "text", "parts": text if isinstance(text, list) else [text]}
    message = {"id": id, "author": {"role": role}, "create_time": at, "content": content, **more}
    return {"id": id, "parent": parent, "message": message}


def gpt_chat(id: str, title: str, *nodes: dict[str, Any]) -> dict[str, Any]:
    root = {"id": "root", "parent": None, "message": None}
    mapping = {node["id"]: node for node in (root, *nodes)}
    return {"title": title, "conversation_id": id, "mapping": mapping, "current_node": nodes[-1]["id"]}


def boat_chat() -> dict[str, Any]:
    """A branch that was replaced, a hidden message, a tool, an image: of eight messages five are shown."""
    return gpt_chat(
        "c-boat",
        "Varnish",
        gpt_node("s0", "root", "system", ""),
        gpt_node("u0", "s0", "user", "Which pain for my boat?", 1704445200.0),
        gpt_node("u1", "s0", "user", "Which paint for my boat?", 1704445260.5),
        gpt_node("h1", "u1", "system", "Be brief.", metadata={"is_visually_hidden_from_conversation": True}),
        gpt_node("t1", "h1", "assistant", "search('paint')", 1704445261.0, recipient="web"),
        gpt_node("t2", "t1", "tool", "ten results"),
        gpt_node("a1", "t2", "assistant", "Marine varnish.", 1704445270.0),
        gpt_node("u2", "a1", "user", [{"content_type": "image_asset_pointer"}, "Like this?"], 1704445300.0),
        gpt_node("a2", "u2", "assistant", "Yes.", 1704445310.0),
    )


def tea_chat() -> dict[str, Any]:
    return gpt_chat(
        "c-tea",
        "Tea",
        gpt_node("q", "root", "user", "How long does green tea steep?", 1704000000.0),
        gpt_node("r", "q", "assistant", "Two minutes.", 1704000005.0),
    )


# ---- Claude


def claude_message(id: str, sender: str, text: str, **more: Any) -> dict[str, Any]:
    at = f"2024-02-01T10:00:{int(id[1:]):02d}.000000Z"
    content = [{"type": "text", "text": text}]
    return {"uuid": id, "sender": sender, "text": text, "content": content, "created_at": at, **more}


def claude_chat(id: str, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"uuid": id, "name": "Bread", "chat_messages": list(messages), **more}


# ---- WhatsApp

ANDROID = (
    "13/01/24, 21:58 - Messages and calls are end-to-end encrypted.\n"
    "13/01/24, 21:59 - Ann Example: Shall we sail tomorrow?\n"
    "If the wind is good: yes\n"
    "13/01/24, 22:01 - Bo: <Media omitted>\n"
    "13/01/24, 22:02 - Bo: At nine: harbour gate\n"
    "14/01/24, 08:00 - Bo added Cy\n"
    "14/01/24, 08:01 - Cy: This message was deleted\n"
    "14/01/24, 08:02 - Cy: I bring bread <This message was edited>\n"
)
IPHONE = (
    "[1/13/24, 9:58:00\u202fPM] Sailing: \u200eMessages and calls are end-to-end encrypted.\r\n"
    "[1/13/24, 9:59:30\u202fPM] Ann Example: Shall we sail tomorrow?\r\n"
    "If the wind is good: yes\r\n"
    "\u200e[1/13/24, 10:01:00\u202fPM] Bo: \u200eimage omitted\r\n"
    "[1/13/24, 10:02:09\u202fPM] ~\u202fBo: At nine: harbour gate\r\n"
)

# ---- Slack


def slack_message(ts: str, user: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "user": user, "text": text, "ts": ts, **more}


def slack_files() -> dict[str, Any]:
    users = [
        {"id": "U1", "name": "ann", "profile": {"display_name": "", "real_name": "Ann Example"}},
        {"id": "U2", "name": "bo", "profile": {"display_name": "bo.example"}},
    ]
    first = [
        slack_message("1704445200.000100", "U1", "has joined", subtype="channel_join"),
        slack_message("1704445260.000100", "U1", "<@U2> see <#C2|boats> &amp; <https://x.example|the plan>"),
        slack_message("1704445270.000100", "U2", "", files=[{"name": "plan.pdf"}]),
        slack_message("1704445280.000100", "U1", "Who paints?", thread_ts="1704445280.000100"),
        slack_message("1704445290.000100", "U2", "I do", thread_ts="1704445280.000100"),
    ]
    bot = {"type": "message", "subtype": "bot_message", "username": "deploys", "ts": "1704531600.000100"}
    return {
        "channels.json": [{"id": "C1", "name": "general"}],
        "users.json": users,
        "general/2024-01-05.json": first,
        "general/2024-01-06.json": [{**bot, "text": "v2 is out <!here>"}],
    }
