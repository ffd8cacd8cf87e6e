"""Messages of a request as turns, and what their sender is told of them."""

from __future__ import annotations

import secrets

from undertow.engine.base.model import Turn, dedupe_key
from undertow.engine.readers import pair_chat, parse_messages
from undertow.engine.step.admission import check_turn
from undertow.serving.http.schemas.add import Lot


def turns_of(tenant: str, lot: Lot, call: str, max_message_bytes: int) -> list[Turn]:
    """The turns that messages make, as Engine.add makes them. InputError.

    `call` makes their dedupe keys: a repeat of one with the same `call` stores nothing.
    """
    turns = []
    when = None if lot.timestamp is None else str(lot.timestamp)
    parsed = parse_messages(lot.messages, source="add", max_message_bytes=max_message_bytes)
    for n, pair in enumerate(pair_chat(parsed)):
        own = next((m.timestamp for m in pair if m.timestamp), when)
        key = dedupe_key("add", "", f"{call}:{n}", ())
        turn = Turn(tenant, tuple(pair), key, lot.session_id, own, lot.metadata)
        check_turn(turn)
        turns.append(turn)
    return turns


def call_of(key_id: str, key: str | None) -> str:
    """What makes the dedupe keys of one call: the caller's Idempotency-Key, apart for each API key.

    The journal keeps them by tenant, so tenants are apart anyhow. Without a key each call is new.
    """
    return secrets.token_hex(12) if key is None else f"{key_id}\x1f{key}"
