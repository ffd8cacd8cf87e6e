"""Plain exchanges as columns: the turns that LineParser makes of them, a record batch at a time.

A row is plain if it holds a question and its answer in text, with or without names, and no metadata. Each
check here may refuse a row that LineParser takes, but takes none that it refuses: the caller hands all other
rows to LineParser, which decides about them alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.model import key_digests
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.readers.messages import MAX_NAME_CHARS, name_of
from undertow.engine.readers.record import BadField
from undertow.engine.storage.row_codec import TURNS

Mask = NDArray[np.bool_]
Columns = Mapping[str, Any]

# Text as `parse_timestamp` returns it; other forms are parsed one by one.
_DAY = "(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_MICROS = "(?:[1-9][0-9]{5}|0[1-9][0-9]{4}|00[1-9][0-9]{3}|000[1-9][0-9]{2}|0000[1-9][0-9]|00000[1-9])"
_NORMAL_TIME = (
    rf"^(?:19|20)[0-9][0-9]-{_DAY}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.{_MICROS})?(?:\+00:00)?$"
)
_PLAIN_NAME = "^[!-~][ -~]*$"
_VISIBLE = r"[!-~]|\pL"
# Control characters that JSON writes as \u00XX, \b or \f; such text is rare.
_RARE_CONTROLS = r"[\x00-\x08\x0b\x0c\x0e-\x1f]"
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))
# The strings that make a message, in the order of the payload.
_SPOKEN = ("role", "name", "content")


class PlainRows(NamedTuple):
    """The plain rows of a batch: `rows` int64 [n], ascending; `turns`: their turns, a table of TURNS [n]."""

    rows: NDArray[np.int64]
    turns: pa.Table


def plain_turns(
    rows: pa.Table, lines: NDArray[np.int64], file_name: str, max_message_bytes: int
) -> PlainRows:
    """The turns of the plain ones among `rows`.

    `rows`: columns of the `messages` format, each in one chunk or more. `lines` int64 [rows]: the line or row
    number of each in its file, which enters dedupe keys as `file_name` does.
    """
    columns = _candidates(rows, lines)
    if columns is not None:
        columns = _kept(columns, _are_spoken(columns, max_message_bytes))
        times, are_times = _normal_times(columns["timestamp"])
        columns = {**columns, "timestamp": times}
        names = _are_names(columns["tenant"]) & _are_names(columns["session"], may_be_empty=True)
        columns = _kept(columns, are_times & names & _are_names(columns["idempotency_key"]))
    if columns is None or not len(columns["row"]):
        return PlainRows(np.empty(0, np.int64), TURNS.empty_table())
    return PlainRows(columns["row"].to_numpy(), _turns(columns, file_name))


def _kept(columns: Columns, mask: Mask) -> Columns:
    if mask.all():
        return columns
    kept = pa.array(mask)
    return {name: column.filter(kept) for name, column in columns.items()}


# ---- which rows are plain


def _candidates(rows: pa.Table, lines: NDArray[np.int64]) -> Columns | None:
    """The columns of the rows with a tenant, two messages and no metadata. None: no row is plain."""
    texts = {name: _strings(rows, name) for name in ("tenant", "session", "idempotency_key")}
    messages = _one_chunk(rows, "messages")
    if any(column is None for column in texts.values()) or not _is_list_of_messages(messages.type):
        return None
    lengths = pc.fill_null(pc.list_value_length(messages), 0).to_numpy(zero_copy_only=False)
    mask = (lengths == 2) & _valid(texts["tenant"])
    for name in set(rows.column_names) - {*texts, "messages", "timestamp"}:
        mask &= _is_harmless(_one_chunk(rows, name), known=name == "metadata")
    columns = {**texts, "timestamp": _one_chunk(rows, "timestamp"), "line": pa.array(lines)}
    columns["row"] = pa.array(np.arange(len(lines)))
    firsts = messages.offsets.to_numpy()[:-1][mask]
    extra = _has_more_fields(messages.values)
    said = {
        f"{field}{n}": (
            pa.nulls(len(firsts), pa.string())
            if (column := _field(messages.values, field)) is None
            else column.take(pa.array(firsts + n))
        )
        for n in (0, 1)
        for field in _SPOKEN
    }
    columns = {**_kept(columns, mask), **said}
    return columns if extra is None else _kept(columns, ~(extra[firsts] | extra[firsts + 1]))


def _one_chunk(rows: pa.Table, name: str) -> Any:
    """A column as one array; null where the table lacks it."""
    if name not in rows.column_names:
        return pa.nulls(rows.num_rows, pa.string())
    column = rows.column(name)
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _strings(rows: pa.Table, name: str) -> Any:
    """A column as strings; None if it has another type."""
    column = _one_chunk(rows, name)
    return column.cast(pa.string()) if _is_text(column.type) else None


def _is_text(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _is_list_of_messages(kind: Any) -> bool:
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(
        kind.value_type
    ):
        return False
    types = {field.name: field.type for field in kind.value_type}
    return {"role", "content"} <= types.keys() and all(_is_text(types.get(n, pa.null())) for n in _SPOKEN)


def _field(messages: Any, name: str) -> Any:
    """A field of an array of messages as strings, null where the message is; None if it is missing."""
    at = messages.type.get_field_index(name)
    return None if at < 0 else messages.flatten()[at].cast(pa.string())


def _has_more_fields(messages: Any) -> Mask | None:
    """Of each message, whether it has a value in a field beyond _SPOKEN. None: no message has."""
    others = [n for n, field in enumerate(messages.type) if field.name not in _SPOKEN]
    columns = messages.flatten()
    masks = [_valid(columns[n]) for n in others if columns[n].null_count < len(columns[n])]
    return np.logical_or.reduce(masks) if masks else None


def _valid(column: Any) -> Mask:
    mask: Mask = column.is_valid().to_numpy(zero_copy_only=False)
    return mask


def _is_harmless(column: Any, *, known: bool) -> Mask:
    """Of each value of a column that makes no turn, whether LineParser takes the row whatever the value is.

    Nested values and floats may be no JSON.
    """
    kind = column.type
    flat = not pa.types.is_nested(kind) and not pa.types.is_floating(kind)
    return np.ones(len(column), bool) if flat and not known else ~_valid(column)


def _are_spoken(columns: Columns, max_message_bytes: int) -> Mask:
    """Whether the two messages are a question and its answer, in text that can be stored."""
    roles = [columns["role0"], columns["role1"]]
    speakers = [_speaker(columns, n) for n in (0, 1)]
    answers = pc.or_kleene(
        pc.equal(roles[1], "assistant"),
        pc.and_kleene(pc.equal(roles[1], "user"), pc.not_equal(speakers[0], speakers[1])),
    )
    mask = _true(pc.and_kleene(pc.equal(roles[0], "user"), answers))
    for n in (0, 1):
        content = columns[f"content{n}"]
        mask &= _true(pc.less_equal(pc.binary_length(content), max_message_bytes))
        mask &= _true(pc.match_substring_regex(content, _VISIBLE))
        mask &= _are_names(columns[f"name{n}"])
        for column in (content, columns[f"name{n}"]):
            if _has_rare_controls(column):
                mask &= ~_true(pc.match_substring_regex(column, _RARE_CONTROLS))
    return mask


def _true(values: Any) -> Mask:
    mask: Mask = pc.fill_null(values, False).to_numpy(zero_copy_only=False)
    return mask


def _has_rare_controls(column: Any) -> bool:
    data = _bytes_of(column)
    return bool(((data < 32) & (data != 10) & (data != 13) & (data != 9)).any())


def _bytes_of(column: Any) -> NDArray[np.uint8]:
    """The bytes of a column's strings, one after another. uint8."""
    _, offsets, data = column.buffers()
    if data is None or not len(column):
        return np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def _are_names(column: Any, *, may_be_empty: bool = False) -> Mask:
    """Whether each value is null or a name as `name_of` takes it."""
    if column.null_count == len(column):
        return np.ones(len(column), bool)
    encoded = column.dictionary_encode()
    distinct = encoded.dictionary
    short = pc.less_equal(pc.binary_length(distinct), MAX_NAME_CHARS)
    good = _true(pc.and_(pc.match_substring_regex(distinct, _PLAIN_NAME), short)).copy()
    for n in np.flatnonzero(~good).tolist():
        good[n] = _is_name(distinct[n].as_py(), may_be_empty)
    if good.all():
        return np.ones(len(column), bool)
    known: Mask = good[pc.fill_null(encoded.indices, 0).to_numpy()]
    return known | ~_valid(column)


def _is_name(value: str, may_be_empty: bool) -> bool:
    """Control characters in names are left to the row path, as they are in text."""
    try:
        name_of({"name": value}, "name", may_be_empty=may_be_empty)
    except BadField:
        return False
    return all(char >= " " for char in value)


# ---- timestamps


def _normal_times(column: Any) -> tuple[Any, Mask]:
    """Timestamps as `parse_timestamp` returns them, and which of them are times, or null."""
    kind = column.type
    if pa.types.is_timestamp(kind) and kind.tz in (None, "UTC"):
        micros = column.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.timestamp("us"))
        text = pc.strftime(micros, "%Y-%m-%dT%H:%M:%S")
        text = pc.replace_substring_regex(text, r"\.000000$", "")
        return _parsed(text if kind.tz is None else pc.binary_join_element_wise(text, "+00:00", ""))
    if not _is_text(kind):
        return pa.nulls(len(column), pa.string()), ~_valid(column)
    return _parsed(column.cast(pa.string()))


def _parsed(texts: Any) -> tuple[Any, Mask]:
    """The texts, those in another form parsed; and which of them are times, or null."""
    given = texts
    if pc.any(pc.ends_with(texts, "Z")).as_py():
        texts = pc.replace_substring_regex(texts, "Z$", "+00:00")
    normal = pc.fill_null(pc.match_substring_regex(texts, _NORMAL_TIME), True)
    mask: Mask = normal.to_numpy(zero_copy_only=False)
    if mask.all():
        return texts, mask
    rest = pc.invert(normal)
    parsed = [_time_or_none(text) for text in given.filter(rest).to_pylist()]
    texts = pc.replace_with_mask(texts, rest, pa.array(parsed, pa.string()))
    mask = mask.copy()
    mask[~mask] = [text is not None for text in parsed]
    return texts, mask


@lru_cache(maxsize=4_096)
def _time_or_none(text: str) -> str | None:
    try:
        return parse_timestamp(text)
    except ValueError:
        return None


# ---- their turns


def _turns(columns: Columns, file_name: str) -> pa.Table:
    """The turns of plain rows as `row_codec.pack_turn` makes them: the same bytes."""
    session = pc.fill_null(columns["session"], "")
    said = [(_speaker(columns, n), columns[f"content{n}"]) for n in (0, 1)]
    keys = _keys(columns, session, said, file_name)
    times = columns["timestamp"]
    payload = _joined(
        '{"key":"',
        _escaped(keys),
        '","session":"',
        _escaped(session),
        '","messages":[',
        _message_json(columns, 0),
        ",",
        _message_json(columns, 1),
        "]",
        _optional(',"timestamp":"', times),
        "}",
    )
    text = _joined(said[0][0], ": ", said[0][1], "\n", said[1][0], ": ", said[1][1])
    unembedded = pa.nulls(len(keys), pa.binary())
    turns = [columns["tenant"], keys, session, times, text, payload.cast(pa.binary()), unembedded]
    return pa.table(turns, schema=TURNS)


def _speaker(columns: Columns, n: int) -> Any:
    return pc.coalesce(columns[f"name{n}"], columns[f"role{n}"])


def _keys(columns: Columns, session: Any, said: list[tuple[Any, Any]], file_name: str) -> Any:
    """The dedupe keys: `model.dedupe_key`, or that of the client with the place of the turn in its row."""
    given = columns["idempotency_key"]
    if given.null_count == 0:
        return _joined(given, ":0")
    (asker, question), (answerer, answer) = said
    place = _joined(f"{file_name}\x1f", session, "\x1f", columns["line"].cast(pa.string()), ":0\x1f")
    parts = (asker, "\x1e", question, "\x1eNone\x1f", answerer, "\x1e", answer, "\x1eNone")
    made = pa.array(key_digests(_joined(place, *parts).cast(pa.binary()).to_pylist()), pa.string())
    return made if given.null_count == len(given) else pc.coalesce(_joined(given, ":0"), made)


def _message_json(columns: Columns, n: int) -> Any:
    name, content = columns[f"name{n}"], columns[f"content{n}"]
    role = _joined('{"role":"', columns[f"role{n}"], '","content":"')
    return _joined(role, _escaped(content), '"', _optional(',"name":"', name), "}")


def _optional(before: str, values: Any) -> Any:
    """`before`, the value and a quotation mark; nothing for null."""
    if values.null_count == len(values):
        return ""
    return pc.coalesce(_joined(before, _escaped(values), '"'), "")


def _joined(*parts: Any) -> Any:
    return pc.binary_join_element_wise(*parts, "")


def _escaped(texts: Any) -> Any:
    """Strings as they stand in JSON, between the quotation marks."""
    data = _bytes_of(texts)
    for char, escape in _ESCAPES:
        if (data == ord(char)).any():
            texts = pc.replace_substring(texts, char, escape)
    return texts
