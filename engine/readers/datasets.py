"""Readers of the two benchmark formats, streamed one sample at a time.

LoCoMo (Maharana et al., 2024): samples with numbered sessions of two people's messages. LongMemEval
(Wu et al., 2025): questions, each with dated user-assistant sessions that contain its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ijson
import numpy as np

from undertow.engine.base.model import BadInput, Message, Turn, dedupe_key, time_key
from undertow.engine.readers.messages import check_text, messages_of, name_of, text_of, time_of
from undertow.engine.readers.pairing import pair_chat, pair_dialogue
from undertow.engine.readers.record import BadField, OrderWatch, PackedRecord
from undertow.engine.readers.source import DAMAGED, Log
from undertow.engine.storage.row_codec import pack_turn, turns_table

_SESSION_KEY = re.compile(r"session_([0-9]{1,9})")
_SCHEMA = "Compare with the published schema of the data set."
_Json = type[list[Any]] | type[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Session:
    """A session: its id, date, turns, and the stable position of each turn."""

    id: str
    timestamp: str | None
    pairs: list[tuple[Message, ...]]
    positions: list[str]


# A sample's tenant, its valid sessions in order, and the errors of the others.
_Sample = tuple[str, list[_Session], list[BadField]]


def read_samples(
    parse: Callable[[Any, int], _Sample], log: Log, *, after: int, max_message_bytes: int
) -> Iterator[PackedRecord]:
    """One record per sample; `parse` is `locomo` or `longmemeval`.

    A bad message or date rejects only its session.
    """
    position = 0
    try:
        for position, raw in enumerate(raw_samples(log), 1):
            if position > after:
                yield _record(log, position, raw, parse, max_message_bytes)
    except (ijson.JSONError, UnicodeDecodeError, *DAMAGED) as problem:
        reason = f"cannot be read after {position} samples: {problem}"
        cure = "Mend the file from there on; the samples before it were taken."
        yield PackedRecord(max(position, after), errors=(BadInput(str(log), None, None, reason, cure),))


def raw_samples(log: Log) -> Iterator[Any]:
    """The samples as their file has them: an array of them, or one alone."""
    with log.unpacked() as file:
        is_array = file.read(64).lstrip()[:1] == b"["
        file.seek(0)
        yield from ijson.items(file, "item" if is_array else "", use_float=True)


def _record(
    log: Log, position: int, raw: Any, parse: Callable[[Any, int], _Sample], max_message_bytes: int
) -> PackedRecord:
    source = str(log)
    try:
        tenant, sessions, errors = parse(raw, max_message_bytes)
    except BadField as bad:
        return PackedRecord(position, errors=(bad.at(source, position),))
    turns = tuple(
        pack_turn(Turn(tenant, pair, dedupe_key(log.name, s.id, where, pair), s.id, s.timestamp))
        for s in sessions
        for pair, where in zip(s.pairs, s.positions, strict=True)
    )
    late = OrderWatch().check_block(turns_table(turns), np.full(len(turns), position))
    warnings = tuple(f"{source}:{position}: {warning}" for _, warning in late)
    return PackedRecord(position, turns, tuple(bad.at(source, position) for bad in errors), warnings)


def locomo(raw: Any, max_bytes: int) -> _Sample:
    """Sessions by number, messages in pairs, captions within the text. BadField.

    The tenant is the sample's id, the session its key (`session_3`), the timestamp that of the session.
    """
    tenant = _required_name(raw, "sample_id")
    conversation = _required(raw, "conversation", dict)
    numbered = sorted((int(m[1]), key) for key in conversation if (m := _SESSION_KEY.fullmatch(key)))
    sessions: list[_Session] = []
    errors: list[BadField] = []
    for _, key in numbered:
        try:
            sessions.append(_locomo_session(conversation, key, max_bytes))
        except BadField as bad:
            errors.append(bad.within("conversation"))
    return tenant, sessions, errors


def _locomo_session(conversation: dict[str, Any], key: str, max_bytes: int) -> _Session:
    raw = conversation[key]
    if not isinstance(raw, list):
        raise BadField(key, "must be a list", _SCHEMA)
    timestamp = time_of(conversation, f"{key}_date_time")
    messages: list[Message] = []
    try:
        for item in raw:
            messages.append(_uttered(item, max_bytes))
    except BadField as bad:
        raise bad.within(f"{key}[{len(messages)}]") from None
    pairs = pair_dialogue(messages)
    ids = [item.get("dia_id") for item in raw[::2]]
    if not all(isinstance(i, str) for i in ids) or len(set(ids)) < len(ids):
        ids = [str(ordinal) for ordinal in range(len(pairs))]
    return _Session(key, timestamp, pairs, ids)


def _uttered(raw: Any, max_bytes: int) -> Message:
    """One LoCoMo message: the speaker as name, an image as its caption in brackets after the text."""
    speaker = _required_name(raw, "speaker")
    text = text_of(raw, "text") or ""
    if caption := text_of(raw, "blip_caption"):
        text = f"{text} [image: {caption}]".lstrip()
    check_text(text, "text", max_bytes)
    return Message("user", text, speaker)


def longmemeval(raw: Any, max_bytes: int) -> _Sample:
    """A question's sessions by date (equal dates in file order), paired as chat. BadField.

    The tenant is the question's id, the session its haystack id, the timestamp its haystack date.
    """
    tenant = _required_name(raw, "question_id")
    columns = [_required(raw, f"haystack_{c}", list) for c in ("sessions", "dates", "session_ids")]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(str(len(column)) for column in columns)
        raise BadField("haystack_sessions", f"sessions, dates and ids do not match: {lengths}", _SCHEMA)
    sessions: list[_Session] = []
    errors: list[BadField] = []
    for i, (messages, date, session_id) in enumerate(zip(*columns, strict=True)):
        named = {f"haystack_session_ids[{i}]": session_id, f"haystack_dates[{i}]": date}
        try:
            found_id = _required_name(named, f"haystack_session_ids[{i}]")
            timestamp = time_of(named, f"haystack_dates[{i}]")
            pairs = pair_chat(messages_of(messages, f"haystack_sessions[{i}]", max_bytes)) if messages else []
        except BadField as bad:
            errors.append(bad)
            continue
        positions = [f"{i}:{ordinal}" for ordinal in range(len(pairs))]
        sessions.append(_Session(found_id, timestamp, pairs, positions))
    return tenant, sorted(sessions, key=lambda s: time_key(s.timestamp)), errors


def _required(raw: Any, field: str, kind: _Json) -> Any:
    if not isinstance(raw, dict) or not isinstance(raw.get(field), kind):
        wanted = "a list" if kind is list else "an object"
        raise BadField(field, f"is missing or not {wanted}", _SCHEMA)
    return raw[field]


def _required_name(raw: Any, field: str) -> str:
    name = name_of(raw, field) if isinstance(raw, dict) else None
    if name is None:
        raise BadField(field, "is missing", _SCHEMA)
    return name
