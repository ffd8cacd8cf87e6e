"""The `messages` format: OpenAI-style messages of one session. Checked by hand, which is cheap.

A line (or Parquet row) is

    {"tenant": str, "session"?: str, "timestamp"?: str | number, "idempotency_key"?: str,
     "metadata"?: object, "messages": [{"role": str, "content": str | parts, "name"?: str,
                                        "timestamp"?: str | number}]}

where `null` counts as absent. Content parts are joined by newlines: text verbatim, any other part (and a tool
call) as its name in brackets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from undertow.engine.base.model import InputError, Message, PackedTurn, Turn, dedupe_key, key_digest
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.readers.pairing import own_time, pair_chat
from undertow.engine.readers.record import BadField, PackedRecord
from undertow.engine.storage.row_codec import pack_turn, payload_of

LINE_FIELDS = frozenset({"tenant", "session", "timestamp", "messages", "idempotency_key", "metadata"})
# The fields of a message that is nothing but text.
PLAIN = ("role", "content")
MESSAGE_FIELDS = frozenset({"role", "name", "content", "timestamp", "tool_calls", "tool_call_id", "refusal"})
# Those of OpenAI's API. Any other is stored as it is: some logs have speakers' names there.
ROLES = frozenset({"user", "assistant", "system", "developer", "tool", "function"})
# The length of a tenant, session, role, speaker or idempotency key.
MAX_NAME_CHARS = 1_024
# Warnings name at most this many unknown fields and roles of a file.
MAX_NAMED = 64


class LineParser:
    """Turns the decoded lines of one file into records, and issues each warning once."""

    def __init__(self, source: str, file_name: str, max_message_bytes: int) -> None:
        self.source = source
        self.file_name = file_name
        self.max_message_bytes = max_message_bytes
        self._named: set[str] = set()

    def record(self, line: int, raw: object) -> PackedRecord:
        """The record of one decoded line. Bad content becomes an error in the record.

        Most lines of a log take a short cut, which makes the same turns.
        """
        try:
            turn = self._plain_exchange(line, raw)
        except (KeyError, TypeError, ValueError):
            turn = None
        return self._parsed(line, raw) if turn is None else PackedRecord(line, (turn,))

    def _parsed(self, line: int, raw: object) -> PackedRecord:
        try:
            turns = tuple(map(pack_turn, self._turns(line, raw)))
        except BadField as bad:
            return PackedRecord(line, errors=(bad.at(self.source, line),))
        return PackedRecord(line, turns, (), self._unknown_names(line, raw))

    def _plain_exchange(self, line: int, raw: Any) -> PackedTurn | None:
        """The turn of a line with a question and its answer in plain text, if there is nothing to refuse.

        None, KeyError, TypeError, ValueError: read the line as any other.
        """
        messages, session, timestamp = raw["messages"], raw.get("session"), raw.get("timestamp")
        key, metadata = raw.get("idempotency_key"), raw.get("metadata")
        asked, answered = messages
        if not (tuple(asked) == tuple(answered) == PLAIN and asked["role"] == "user"):
            return None
        if not (answered["role"] == "assistant" and LINE_FIELDS.issuperset(raw) and type(messages) is list):
            return None
        if not (metadata is None or type(metadata) is dict):
            return None
        question, answer, tenant = asked["content"], answered["content"], raw["tenant"]
        if not (self._is_plain_text(question) and self._is_plain_text(answer) and _is_plain_name(tenant)):
            return None
        session = "" if session is None else session
        if not ((session == "" or _is_plain_name(session)) and (key is None or _is_plain_name(key))):
            return None
        if timestamp is not None:
            timestamp = parse_timestamp(timestamp)
        if key is None:
            said = f"user\x1e{question}\x1eNone\x1fassistant\x1e{answer}\x1eNone"
            turn_key = key_digest(f"{self.file_name}\x1f{session}\x1f{line}:0\x1f{said}")
        else:
            turn_key = f"{key}:0"
        body = {"key": turn_key, "session": session, "messages": messages}
        if timestamp is not None:
            body["timestamp"] = timestamp
        if metadata:
            body["metadata"] = metadata
        text = f"user: {question}\nassistant: {answer}"
        return PackedTurn(tenant, turn_key, session, timestamp, text, payload_of(body))

    def _is_plain_text(self, text: object) -> bool:
        if type(text) is not str or not text or 4 * len(text) > self.max_message_bytes:
            return False
        return not text.isspace() and "\x00" not in text

    def _turns(self, line: int, raw: object) -> tuple[Turn, ...]:
        if not isinstance(raw, dict):
            reason = f"a line must be a JSON object, not {_kind(raw)}"
            raise BadField(None, reason, "Write one object a line.")
        tenant = name_of(raw, "tenant")
        if tenant is None:
            raise BadField("tenant", "is missing", "Name the owner of these messages.")
        session = name_of(raw, "session", may_be_empty=True) or ""
        key = name_of(raw, "idempotency_key")
        metadata = raw.get("metadata")
        if metadata is not None:
            check_metadata(metadata)
        line_time = time_of(raw, "timestamp")
        turns = []
        messages = messages_of(raw.get("messages"), "messages", self.max_message_bytes)
        for ordinal, pair in enumerate(pair_chat(messages)):
            position = f"{line}:{ordinal}"
            turn_key = f"{key}:{ordinal}" if key else dedupe_key(self.file_name, session, position, pair)
            turns.append(Turn(tenant, pair, turn_key, session, own_time(pair) or line_time, metadata or {}))
        return tuple(turns)

    def _unknown_names(self, line: int, raw: Any) -> tuple[str, ...]:
        """One warning for each unknown field and role not yet named in this file."""
        unknown: list[str] = []
        if not LINE_FIELDS.issuperset(raw):
            unknown = [_unknown_field(name) for name in raw if name not in LINE_FIELDS]
        for message in raw["messages"]:
            if not MESSAGE_FIELDS.issuperset(message):
                unknown += [_unknown_field(n, "messages[].") for n in message if n not in MESSAGE_FIELDS]
            if message["role"] not in ROLES:
                unknown.append(f"role {message['role']!r:.80} is not known and is taken as a speaker's name")
        return self._name_once(line, unknown) if unknown else ()

    def knows(self, fields: Iterable[str], message_fields: Iterable[str]) -> bool:
        """Whether no warning is due about these fields of lines and of their messages."""
        unknown = {_unknown_field(name, "messages[].") for name in set(message_fields) - MESSAGE_FIELDS}
        return unknown | set(map(_unknown_field, set(fields) - LINE_FIELDS)) <= self._named

    def _name_once(self, line: int, unknown: Iterable[str]) -> tuple[str, ...]:
        fresh = sorted(set(unknown) - self._named)[: MAX_NAMED - len(self._named)]
        self._named.update(fresh)
        return tuple(f"{self.source}:{line}: {what}" for what in fresh)


def _unknown_field(name: str, within: str = "") -> str:
    return f"field {within + name!r:.80} is not known and is ignored"


def _is_plain_name(name: object) -> bool:
    if type(name) is not str or not 0 < len(name) <= MAX_NAME_CHARS:
        return False
    return name.isascii() and name.isprintable() and not name.isspace()


def parse_messages(
    raw: Sequence[Mapping[str, Any]],
    *,
    source: str,
    line: int | None = None,
    max_message_bytes: int | None = None,
) -> list[Message]:
    """OpenAI-style dicts as `Message`s; `max_message_bytes` (UTF-8, None: no limit) bounds each.

    Raises InputError naming the field, as in messages[2].content, for the first message that is not
    an object with a role and some text.
    """
    try:
        return messages_of(raw, "messages", max_message_bytes)
    except BadField as bad:
        raise InputError(bad.at(source, line)) from None


def messages_of(raw: object, field: str, max_bytes: int | None) -> list[Message]:
    """The messages of a list in `field`. BadField."""
    if raw is None:
        raise BadField(field, "is missing", "Give a list of at least one message.")
    if not isinstance(raw, (list, tuple)):
        raise BadField(field, f"must be a list, not {_kind(raw)}")
    if not raw:
        raise BadField(field, "is empty", "Give at least one message, or leave it out.")
    messages: list[Message] = []
    try:
        for item in raw:
            messages.append(_message(item, max_bytes))
    except BadField as bad:
        raise bad.within(f"{field}[{len(messages)}]") from None
    return messages


def _message(raw: object, max_bytes: int | None) -> Message:
    if not isinstance(raw, (dict, Mapping)):
        raise BadField(None, f"must be an object, not {_kind(raw)}")
    role = name_of(raw, "role")
    if role is None:
        raise BadField("role", "is missing", "Say who speaks: user, assistant, system or tool.")
    content = raw.get("content")
    if not isinstance(content, str):
        content = _flatten(raw)
    check_text(content, "content", max_bytes)
    return Message(role, content, name_of(raw, "name", may_be_empty=True) or None, time_of(raw, "timestamp"))


def check_text(text: str, field: str, max_bytes: int | None) -> None:
    """BadField for text that is empty, too long, or not valid Unicode."""
    if not text or text.isspace():
        raise BadField(field, "is empty", "Give the message some text, or leave it out.")
    _check_storable(text, field)
    # UTF-8 has at most 4 bytes a character, so most text need not be encoded for its size.
    if max_bytes is not None and 4 * len(text) > max_bytes and (size := len(text.encode())) > max_bytes:
        reason = f"is {size:,} bytes long, {max_bytes:,} are allowed"
        raise BadField(field, reason, "Split the message, or raise max_message_bytes.")


def check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict):
        raise BadField("metadata", f"must be an object, not {_kind(metadata)}")
    try:
        orjson.dumps({"metadata": metadata})  # nested as in the turn: orjson writes less deeply than it reads
    except TypeError as error:
        cure = "Give plain JSON values, nested less deeply."
        raise BadField("metadata", f"cannot be stored as JSON ({error})", cure) from None


def _check_storable(text: str, field: str) -> None:
    if "\x00" in text:
        raise BadField(field, "holds a NUL character", "Remove that character.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            reason = "holds half of a surrogate pair, which is no character"
            raise BadField(field, reason, "Remove that character.") from None


def _flatten(raw: Mapping[str, Any]) -> str:
    """The text of content that is a list of parts, or that is absent because of a tool call or a refusal."""
    content = raw.get("content")
    if content is None:
        lines = [raw["refusal"]] if isinstance(raw.get("refusal"), str) else []
        calls = raw.get("tool_calls")
        if isinstance(calls, (list, tuple)):
            lines.extend(f"[tool call: {_called(call)}]" for call in calls)
        if not lines:
            raise BadField("content", "is missing", "Give the message some text, or leave it out.")
        return "\n".join(lines)
    if not isinstance(content, (list, tuple)):
        raise BadField("content", f"must be text or a list of parts, not {_kind(content)}")
    return "\n".join(_part(part, f"content[{i}]") for i, part in enumerate(content))


def _called(call: object) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else "unnamed"


def _part(part: object, field: str) -> str:
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise BadField(field, "is not an object with a type", 'Write {"type": "text", "text": ...}.')
    kind: str = part["type"]
    carrier = "refusal" if kind == "refusal" else "text"
    if kind not in ("text", "input_text", "output_text", "refusal"):
        return f"[{kind}]"
    if not isinstance(part.get(carrier), str):
        raise BadField(f"{field}.{carrier}", f"must be text, not {_kind(part.get(carrier))}")
    return str(part[carrier])


def name_of(raw: Mapping[str, Any], field: str, *, may_be_empty: bool = False) -> str | None:
    """A field of at most MAX_NAME_CHARS; None if absent or null. BadField."""
    value = text_of(raw, field)
    if value is None:
        return None
    if len(value) > MAX_NAME_CHARS:
        raise BadField(field, f"is longer than {MAX_NAME_CHARS:,} characters", "Shorten it.")
    if value.isalnum() and value.isascii():
        return value  # nearly every role and name, for two scans
    if not may_be_empty and not value.strip():
        raise BadField(field, "is empty")
    _check_storable(value, field)
    return value


def text_of(raw: Mapping[str, Any], field: str) -> str | None:
    """A text field; None if absent or null. BadField."""
    value = raw.get(field)
    if value is not None and not isinstance(value, str):
        raise BadField(field, f"must be text, not {_kind(value)}")
    return value


def time_of(raw: Mapping[str, Any], field: str) -> str | None:
    """A normalised timestamp field; None if absent or null. BadField."""
    value = raw.get(field)
    if value is None:
        return None
    try:
        return parse_timestamp(value)
    except ValueError as problem:
        cure = "Write the time in one of these forms, or leave the field out."
        raise BadField(field, str(problem), cure) from None


def _kind(value: object) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)
