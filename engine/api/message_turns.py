"""OpenAI-style messages of one call as turns."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from undertow.engine.base.model import InputError, Turn, dedupe_key
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.readers import own_time, pair_chat, parse_messages


def utc_now() -> str:
    """The time in the form in which timestamps are stored, to the second."""
    return parse_timestamp(datetime.now(UTC).isoformat(timespec="seconds"))


def turns_of(
    tenant: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    session_id: str = "",
    timestamp: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    call: str | None = None,
    max_message_bytes: int,
    arrived: str | None = None,
) -> list[Turn]:
    """The turns that messages make. A message's own time comes before `timestamp`.

    `arrived`: the time of turns that have neither, which are marked so; None: they get none.

    `call` makes their dedupe keys, so that a repeat with the same `call` stores nothing; without it each call
    is new. InputError names the message and field that is invalid.
    """
    parsed = parse_messages(messages, source="add", max_message_bytes=max_message_bytes)
    try:
        when = None if timestamp is None else parse_timestamp(timestamp)
    except ValueError as error:
        raise InputError.of("add", "timestamp", str(error), "Nothing was stored.") from None
    call = call or secrets.token_hex(12)
    turns = []
    for n, pair in enumerate(pair_chat(parsed)):
        key = dedupe_key("add", "", f"{call}:{n}", ())
        said_at = own_time(pair) or when
        marked = said_at is None and arrived is not None
        turns.append(Turn(tenant, pair, key, session_id, said_at or arrived, dict(metadata or {}), marked))
    return turns
