"""What users write in the place of a memory: their words, checked, and the turn that replaces another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import orjson

from undertow.engine.base.model import (
    INSTRUCTIONS,
    BadInput,
    InputError,
    MemoryKind,
    Message,
    Turn,
    dedupe_key,
)
from undertow.engine.base.results import Wording
from undertow.engine.readers import pair_chat, parse_messages
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import messages_of
from undertow.prompts.reply_schemas import EPISODE_CHARS, FACT_CHARS

# What the LLM may write; more would crowd out what its prompts show beside it.
MAX_CHARS: Mapping[MemoryKind, int] = {"episode": EPISODE_CHARS, "fact": FACT_CHARS}


def memory_text(kind: MemoryKind, wording: Wording) -> str:
    """The words for an episode or a fact, stripped. InputError."""
    if not isinstance(wording, str):
        _refuse("text", f"of {kind} must be text", "Messages are for turns.")
    text = wording.strip()
    if not text:
        _refuse("text", "is empty", "Give the memory some words, or delete it.")
    if len(text) > MAX_CHARS[kind]:
        reason = f"has {len(text):,} characters, {MAX_CHARS[kind]:,} are allowed in {kind}s"
        _refuse("text", reason, "Shorten it.")
    try:
        text.encode()
    except UnicodeEncodeError:
        _refuse("text", "holds half a surrogate pair", "Send valid Unicode.")
    if "\x00" in text:
        _refuse("text", "holds a NUL character", "Remove that character.")
    return text


def replacement(row: Row, wording: Wording, max_message_bytes: int) -> Turn:
    """The turn in the place of that in `row`: its session, time and metadata with other messages.

    Plain words become the turn's one message, by its first speaker. InputError.
    """
    body = orjson.loads(row.payload)
    given = _one_message(messages_of(body), wording) if isinstance(wording, str) else wording
    pairs = pair_chat(parse_messages(given, source="update", max_message_bytes=max_message_bytes))
    if len(pairs) != 1:
        _refuse("messages", f"make {len(pairs)} turns", "Give those of one exchange; `add` takes others.")
    messages = pairs[0]
    own = next((m.timestamp for m in messages if m.timestamp), row.timestamp)
    key = dedupe_key("update", body["session"], row.id or "", messages)
    return Turn(row.tenant, messages, key, body["session"], own, body.get("metadata", {}))


def _one_message(old: Sequence[Message], words: str) -> list[dict[str, Any]]:
    first = next((m for m in old if m.role not in INSTRUCTIONS), old[0])
    return [{"role": first.role, "name": first.name, "content": words}]


def _refuse(field: str, reason: str, cure: str) -> NoReturn:
    raise InputError(BadInput("update", None, field, reason, cure))
