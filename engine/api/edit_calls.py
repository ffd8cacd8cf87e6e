"""The engine's commands on single memories: update and delete. MemoryApi documents them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from undertow.engine.api.policy_change import check_editable
from undertow.engine.api.search_calls import SearchCalls
from undertow.engine.base.model import INSTRUCTIONS, InputError, MemoryKind, Message, Turn, dedupe_key
from undertow.engine.base.queries import DeleteCommand, UpdateCommand
from undertow.engine.base.results import Updated, Wording
from undertow.engine.readers import own_time, pair_chat, parse_messages
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import memory_of, messages_of
from undertow.engine.tenants.generations import is_change
from undertow.engine.tenants.registry import ArenaFull
from undertow.prompts.reply_schemas import EPISODE_CHARS, FACT_CHARS

# What the LLM may write; more would crowd out what its prompts show beside it.
MAX_CHARS: Mapping[MemoryKind, int] = {"episode": EPISODE_CHARS, "fact": FACT_CHARS}


class EditCalls(SearchCalls):
    """A part of Engine."""

    def _update(self, command: UpdateCommand) -> Updated:
        self._check_sound()
        memory_id = command.memory_id
        row = self._reports.row(memory_id, self._stored(memory_id, command.tenant).tenant_key)
        if row.kind == "turn":
            return self._replace_turn(row, command.text)
        self._check_editable(row)
        kind: MemoryKind = "episode" if row.kind == "episode" else "fact"
        words = _memory_text(kind, command.text)
        self._log(row.tenant, "update", [{"memory_id": memory_id, "kind": kind, "text": words}])
        return Updated(memory_id, kind)

    def _replace_turn(self, row: Row, text: Wording) -> Updated:
        turn = _replacement(row, text, self.settings.max_message_bytes)
        tenant = self._tenant(row.tenant)
        receipt = self.scheduler.replace(tenant, _deletion(row), turn)
        tenant.redact_turn(row.seq)
        self._delete_rows_of(row)
        assert receipt.id is not None, "no turn had its key, which is made of the old turn's id"
        return Updated(receipt.id, "turn")

    def _delete(self, command: DeleteCommand) -> str:
        self._check_sound()
        row = self._stored(command.memory_id, command.tenant)
        if row.kind == "turn":
            self._delete_turn(row)
        else:
            self._check_editable(row)
            self._log(row.tenant, "delete", [{"memory_id": command.memory_id, "kind": row.kind}])
        return row.kind

    def _check_editable(self, row: Row) -> None:
        """PolicyConflict for an episode or fact that a change of policy replaces or has replaced."""
        try:
            tenant = self._tenant(row.tenant)
        except ArenaFull:
            if any(is_change(control) for control in self.tenants.stored(row.tenant, "control")):
                raise
            return
        check_editable(tenant, memory_of(row))

    def _delete_turn(self, row: Row) -> None:
        tenant = self._log(row.tenant, "delete", [_deletion(row)])
        if tenant is not None:
            tenant.redact_turn(row.seq)
        self._delete_rows_of(row)

    def _delete_rows_of(self, turn: Row) -> None:
        """The turn's own row, and that of a vector which came later."""
        assert turn.id is not None, "a turn's row always has its id"
        kinds = ["turn", "vector"]
        rows = self.journal.read(tenant_keys=[turn.tenant_key], ids=[turn.id], kinds=kinds, vectors=False)
        self.journal.delete_rows([row.lsn for row in rows])


def _deletion(row: Row) -> dict[str, Any]:
    """What the log keeps of a deleted turn: its dedupe key, and the time that later turns inherit."""
    turn = orjson.loads(row.payload)
    kept = {"key": turn["key"], "session": turn["session"], "timestamp": row.timestamp}
    return {"turn_seq": row.seq, "id": row.id, **kept}


def _refusal(field: str, reason: str, cure: str) -> InputError:
    return InputError.of("update", field, reason, cure)


def _memory_text(kind: MemoryKind, wording: Wording) -> str:
    """The words for an episode or a fact, stripped. InputError."""
    if not isinstance(wording, str):
        raise _refusal("text", f"of {kind} must be text", "Messages are for turns.")
    text = wording.strip()
    if not text:
        raise _refusal("text", "is empty", "Give the memory some words, or delete it.")
    if len(text) > MAX_CHARS[kind]:
        reason = f"has {len(text):,} characters, {MAX_CHARS[kind]:,} are allowed in {kind}s"
        raise _refusal("text", reason, "Shorten it.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refusal("text", "holds half a surrogate pair", "Send valid Unicode.") from None
    if "\x00" in text:
        raise _refusal("text", "holds a NUL character", "Remove that character.")
    return text


def _replacement(row: Row, wording: Wording, max_message_bytes: int) -> Turn:
    """The turn that replaces the one in `row`: other messages with its session, time and metadata.

    A plain text becomes the turn's only message, by its first speaker. InputError.
    """
    body = orjson.loads(row.payload)
    given = _one_message(messages_of(body), wording) if isinstance(wording, str) else wording
    pairs = pair_chat(parse_messages(given, source="update", max_message_bytes=max_message_bytes))
    if len(pairs) != 1:
        raise _refusal(
            "messages", f"make {len(pairs)} turns", "Give those of one exchange; `add` takes others."
        )
    messages = pairs[0]
    key = dedupe_key("update", body["session"], row.id or "", messages)
    said_at, metadata = own_time(messages), body.get("metadata", {})
    arrived = said_at is None and body.get("arrived", False)
    return Turn(row.tenant, messages, key, body["session"], said_at or row.timestamp, metadata, arrived)


def _one_message(old: Sequence[Message], words: str) -> list[dict[str, Any]]:
    first = next((m for m in old if m.role not in INSTRUCTIONS), old[0])
    return [{"role": first.role, "name": first.name, "content": words}]
