"""The messages format: good lines around bad ones, pairing, resuming, bounded memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from datetime import UTC, date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from undertow.engine.base.model import InputError, Message, Turn, time_key
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.cluster.wire import pack
from undertow.engine.readers import Format, jsonl, pair_chat, pair_dialogue, parse_messages, plain_rows, read
from undertow.engine.readers import blocks as readers_blocks
from undertow.engine.readers.messages import LineParser
from undertow.engine.readers.record import OrderWatch

from ...support.readers import GOOD, LIMIT, compare_blocks, line, records, write

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["tenant", "messages", "role", "content", "name", "timestamp", "type", "text", "x"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)
near_line = st.fixed_dictionaries(
    {
        "tenant": st.just("t") | any_json,
        "messages": st.lists(st.just(GOOD["messages"][0]) | any_json, max_size=3),
    },
    optional={"session": any_json, "timestamp": any_json, "metadata": any_json, "idempotency_key": any_json},
)
# An exchange in plain text, but for one or two fields.
word = st.sampled_from(["ada", " ", "", "é", "ééé", "a\x00", "x" * 12, "\n", "\ud800"]) | st.text(max_size=6)
said_by = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "user", "system"]), "content": word | any_json},
    optional={"name": word, "timestamp": word | st.none()},
)
plain_pair = st.tuples(word, word).map(
    lambda pair: [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
)
changes = {
    "tenant": word | any_json,
    "messages": plain_pair | st.lists(said_by, max_size=3),
    "session": word | st.none() | any_json,
    "timestamp": st.sampled_from([None, "2026-03-01", "8:05 pm on 1 June, 2026", 17, "soon", [], True]),
    "metadata": st.none() | st.dictionaries(word, any_json, max_size=2) | any_json,
    "idempotency_key": st.none() | word | any_json,
    "other": any_json,
}
change = st.sampled_from(sorted(changes)).flatmap(lambda name: st.tuples(st.just(name), changes[name]))
exchange = st.lists(change, max_size=2).map(lambda fields: {**GOOD, **dict(fields)})
some_line = st.one_of(
    st.binary(max_size=30).map(lambda b: b.replace(b"\n", b" ")),
    (any_json | near_line).map(lambda value: json.dumps(value).encode()),
    st.just(json.dumps(GOOD).encode()),
)


def said(pairs: list[tuple[Message, ...]]) -> list[list[str]]:
    return [[m.content for m in pair] for pair in pairs]


# --- pairing ---


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("u a u a", ["u a", "u a"]),
        ("a u a a u", ["a", "u a a", "u"]),
        ("a a u a", ["a", "a", "u a"]),
        ("u u a", ["u", "u a"]),
        ("s u a u a", ["s u a", "u a"]),
        ("u a t a u", ["u a t a", "u"]),
        ("u s a", ["u s a"]),
        ("u a s u a", ["u a", "s u a"]),
        ("u a s a", ["u a s a"]),
        ("u a s", ["u a s"]),
        ("u a s t u", ["u a", "s t u"]),
        ("s t", ["s t"]),
        ("A B A B A", ["A B", "A B", "A"]),
        ("A A B B A", ["A", "A B", "B A"]),
        ("u u", ["u", "u"]),
        ("A B a", ["A", "B a"]),
        ("A s B B", ["A s B", "B"]),
    ],
)
def test_pairing(roles: str, expected: list[str]) -> None:
    kinds = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    messages = [Message(kinds.get(r, "user"), r, r if r.isupper() else None) for r in roles.split()]
    assert [" ".join(pair) for pair in said(pair_chat(messages))] == expected


@given(st.lists(st.sampled_from(["user", "assistant", "system", "tool", "Ann", "Bob"]), max_size=12))
def test_pairing_takes_every_message_once_and_every_turn_has_one_opener(roles: list[str]) -> None:
    messages = [Message(role, str(i)) for i, role in enumerate(roles)]
    for pairs in (pair_chat(messages), pair_dialogue(messages)):
        assert [m for pair in pairs for m in pair] == messages
        assert all(pairs)
    assert all(len(pair) == 2 for pair in pair_dialogue(messages)[:-1])


# --- the messages format ---


def test_a_line_becomes_turns_with_times_and_stable_keys(tmp_path: Path) -> None:
    messages = [
        *GOOD["messages"],
        {"role": "user", "content": "And?", "name": "Ada", "timestamp": 1772355660},
    ]
    path = write(tmp_path, line(messages=messages, metadata={"app": "x"}))
    (record,) = records(path)
    first, second = record.turns
    assert (first.tenant, first.session_id, first.timestamp) == ("ada", "s1", "2026-03-01T09:00:00+00:00")
    assert second.timestamp == "2026-03-01T09:01:00+00:00"
    assert second.text == "Ada: And?" and second.metadata == {"app": "x"}
    assert first.dedupe_key != second.dedupe_key
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    assert records(write(moved, line(messages=messages, metadata={"app": "x"})))[0] == record
    (keyed,) = records(write(tmp_path, line(messages=messages, idempotency_key="k1")))
    assert [t.dedupe_key for t in keyed.turns] == ["k1:0", "k1:1"]


def test_absent_optional_fields_stay_absent(tmp_path: Path) -> None:
    path = write(tmp_path, line(session=None, timestamp=None))
    (turn,) = records(path)[0].turns
    assert (turn.session_id, turn.timestamp, turn.metadata) == ("", None, {})


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url"}]},
            "See\n[image_url]",
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
            "[tool call: f]",
        ),
        ({"role": "assistant", "content": None, "refusal": "I cannot."}, "I cannot."),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    ],
)
def test_openai_content_forms(message: dict[str, Any], text: str) -> None:
    assert parse_messages([message], source="api")[0].content == text


U: dict[str, Any] = {"role": "user", "content": "x"}


def nested(depth: int) -> dict[str, Any]:
    """Objects in objects, so deep."""
    return {} if depth == 1 else {"in": nested(depth - 1)}


@pytest.mark.parametrize(
    ("bad", "field", "reason"),
    [
        ("{broken", None, "is not JSON"),
        (b'{"tenant": "\xff"}', None, "is not JSON"),
        ("[1]", None, "must be a JSON object, not a list"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "tenant"}), "tenant", "missing"),
        (line(tenant=" "), "tenant", "empty"),
        (line(tenant=7), "tenant", "must be text, not a number"),
        (line(tenant="a\x00"), "tenant", "NUL"),
        (line(tenant="a" * 1025), "tenant", "longer than 1,024"),
        (line(session=[1]), "session", "must be text, not a list"),
        (line(timestamp="yesterday"), "timestamp", "is not a timestamp"),
        (line(timestamp=True), "timestamp", "is not a timestamp"),
        (line(metadata=3), "metadata", "must be an object"),
        (line(metadata=nested(254)), "metadata", "cannot be stored as JSON"),
        (line(idempotency_key=3), "idempotency_key", "must be text"),
        (line(messages=None), "messages", "missing"),
        (line(messages={}), "messages", "must be a list"),
        (line(messages=[]), "messages", "is empty"),
        (line(messages=[U, 5]), "messages[1]", "must be an object"),
        (line(messages=[U, {"content": "x"}]), "messages[1].role", "missing"),
        (line(messages=[U, U, {"role": "user", "content": " \n"}]), "messages[2].content", "is empty"),
        (line(messages=[{"role": "user"}]), "messages[0].content", "missing"),
        (line(messages=[{**U, "content": 5}]), "messages[0].content", "must be text or a list"),
        (line(messages=[{**U, "content": [{}]}]), "messages[0].content[0]", "with a type"),
        (line(messages=[{**U, "content": "a\x00b"}]), "messages[0].content", "NUL"),
        (line(messages=[{**U, "timestamp": "2023-02-30"}]), "messages[0].timestamp", "no moment"),
        (line(messages=[{**U, "name": 1}]), "messages[0].name", "must be text"),
        (line(messages=[{**U, "content": "é" * (LIMIT // 2 + 1)}]), "messages[0].content", "1,000,002 bytes"),
    ],
)
def test_a_bad_line_is_named_and_its_neighbours_are_read(
    tmp_path: Path, bad: str | bytes, field: str | None, reason: str
) -> None:
    path = write(tmp_path, line(), bad, line())
    before, refused, behind = records(path)
    assert len(before.turns) == len(behind.turns) == 1
    assert refused.turns == () and refused.position == 2
    (problem,) = refused.errors
    assert (problem.source, problem.line, problem.field) == (str(path), 2, field)
    assert reason in problem.reason and problem.cure


def test_api_messages_raise_the_same_error_and_know_surrogates() -> None:
    with pytest.raises(InputError, match="half of a surrogate") as caught:
        parse_messages([U, {**U, "content": "\ud800"}], source="add")
    assert caught.value.problem.field == "messages[1].content"
    with pytest.raises(InputError, match="2 are allowed"):
        parse_messages([{**U, "content": "abc"}], source="add", max_message_bytes=2)
    assert parse_messages([{**U, "content": "abc"}], source="add", max_message_bytes=3)[0].content == "abc"


def test_unknown_fields_are_named_once_a_file(tmp_path: Path) -> None:
    odd = line(model="m", messages=[{**U, "id": 1}])
    first, second = records(write(tmp_path, odd, odd))
    assert [w.split("field ")[1] for w in first.warnings] == [
        "'messages[].id' is not known and is ignored",
        "'model' is not known and is ignored",
    ]
    assert second.warnings == () and len(second.turns) == 1


def test_time_running_backwards_is_one_warning_and_keeps_order(tmp_path: Path) -> None:
    days = ["2026-03-02", "2026-03-01", "2026-03-05", "2099-01-01", "2026-03-06", "2026-03-07"]
    found = records(write(tmp_path, *[line(timestamp=day) for day in days], line(session="s2")))
    assert [len(r.warnings) for r in found] == [0, 1, 0, 0, 1, 0, 0]
    assert [r.turns[0].timestamp for r in found[:6]] == days


def watched(watch: OrderWatch, turns: list[Turn]) -> list[tuple[int, str]]:
    return list(watch.check_block(pack(turns), np.arange(len(turns))))


def test_order_is_watched_in_bounded_memory(tmp_path: Path) -> None:
    path = write(tmp_path, *[line(session=f"s{i}", timestamp=f"2026-03-0{9 - i % 9}") for i in range(9)])
    watch = OrderWatch(capacity=2)
    turns = [t for r in records(path) for t in r.turns]
    assert watched(watch, turns) == []
    assert watched(watch, turns[-2:-1]) == [] and len(watch._latest) == 2


def test_blank_lines_bom_and_crlf_are_no_errors(tmp_path: Path) -> None:
    path = write(tmp_path, b"\xef\xbb\xbf" + line().encode() + b"\r", b"", b"  \r", line())
    assert [(r.position, len(r.turns)) for r in records(path)] == [(1, 1), (4, 1)]


def test_a_line_too_long_to_hold_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 400)
    monkeypatch.setattr(jsonl, "_SKIP_BYTES", 64)
    exact = line(session="x" * (400 - len(line(session=""))))
    assert len(exact) == 400
    found = records(write(tmp_path, line(), exact, line(session="x" * 999), line()))
    assert [len(r.turns) for r in found] == [1, 1, 0, 1]
    assert "longer than 400" in found[2].errors[0].reason


def test_gzip_is_read_and_a_cut_off_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl.gz"
    whole = gzip.compress("\n".join(line(session=str(i)) for i in range(2000)).encode())
    path.write_bytes(whole)
    assert len(records(path)) == 2000
    path.write_bytes(whole[: len(whole) // 2])
    cut = records(path)
    assert 0 < len(cut) < 2000 and "cannot be read beyond" in cut[-1].errors[0].reason


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lines=st.lists(some_line, max_size=6), after=st.integers(0, 7))
def test_garbage_never_raises_and_resuming_drops_what_was_taken(
    tmp_path: Path, lines: list[bytes], after: int
) -> None:
    path = write(tmp_path, *lines)
    found = records(path)
    assert all(bool(r.turns) != bool(r.errors) for r in found)
    good = [i for i, x in enumerate(lines, 1) if x == json.dumps(GOOD).encode()]
    assert set(good) <= {r.position for r in found if len(r.turns) == 1}
    assert [(r.position, r.turns, r.errors) for r in records(path, after)] == [
        (r.position, r.turns, r.errors) for r in found if r.position > after
    ]


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(exchange.map(json.dumps) | some_line | st.just(""), min_size=1, max_size=6),
    limit=st.sampled_from([3, 30, LIMIT]),
    after=st.integers(0, 3),
    least=st.sampled_from([1, 2, 9]),
)
@example([line(messages=[{**m, "content": "a\x00"} for m in GOOD["messages"]])], LIMIT, 0, 9)
@example(
    [line(), "{broken}", line(timestamp="2026-02-01"), '{"tenant": "a"}{"tenant": "b"}', line()], 30, 0, 1
)
@example([line(), line(model="m"), line(x=None), line(y=[1]), line()], 30, 0, 1)
def test_blocks_are_the_records(
    tmp_path: Path, lines: list[str | bytes], limit: int, after: int, least: int
) -> None:
    """Byte for byte, by columns, by LineParser's short cut (from 9 rows on no row is plain), and without."""
    path = write(tmp_path, *lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "LEAST_ROWS", least)
        patch.setattr(readers_blocks, "LEAST_ROWS", least)
        compare_blocks(path, limit, after)


def test_a_plain_exchange_takes_the_short_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = LineParser("log", "log", LIMIT)
    expected = parser._parsed(1, GOOD)
    monkeypatch.setattr(LineParser, "_parsed", None)
    whole = {**GOOD, "messages": GOOD["messages"], "idempotency_key": "k", "metadata": {"a": 1}}
    assert parser.record(1, GOOD) == expected
    assert parser.record(2, whole).turns[0].dedupe_key == "k:0"


moment = st.datetimes(
    datetime(1970, 1, 1),
    datetime(1970, 1, 3),
    timezones=st.none() | st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30))]),
)
times = (moment | st.dates(date(1970, 1, 1), date(1970, 1, 3))).map(
    lambda time: parse_timestamp(time.isoformat())
)


@given(times, times)
def test_of_two_times_the_earlier_is_known(first: str, second: str) -> None:
    turns = [Turn("ann", (), "", timestamp=timestamp) for timestamp in (first, second)]
    assert bool(watched(OrderWatch(), turns)) == (time_key(second) < time_key(first))


forms = st.sampled_from(["{}", "{}Z", "{}+00:00", "{}+05:30", " {}", "{}:00", "T{}"])
written = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31)) | st.dates(
    date(1899, 1, 1), date(2101, 1, 1)
)
some_day = st.builds(
    "{}-{:02}-{:02}T{:02}:00:00".format,
    st.sampled_from([1900, 2023, 2024]),
    st.integers(0, 13),
    st.integers(27, 32),
    st.integers(22, 25),
)
time_text = st.builds(str.format, forms, written.map(lambda time: time.isoformat()) | some_day) | st.text(
    max_size=4
)


@settings(max_examples=300)
@given(st.lists(st.none() | time_text, min_size=1, max_size=5))
def test_a_column_of_times_is_parsed_as_each_alone(texts: list[str | None]) -> None:
    def alone(text: str | None) -> tuple[str | None, bool]:
        try:
            return (text if text is None else parse_timestamp(text)), True
        except ValueError:
            return None, False

    times, are_times = plain_rows._normal_times(pa.array(texts, pa.string()))
    assert list(zip(times.to_pylist(), are_times.tolist(), strict=True)) == list(map(alone, texts))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    body=st.binary(max_size=30) | any_json.map(lambda value: json.dumps(value).encode()),
    format=st.sampled_from(["locomo", "longmemeval", "auto", "parquet"]),
)
def test_garbage_documents_never_raise(tmp_path: Path, body: bytes, format: Format) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(body)
    assert not any(r.turns for r in records(path, format=format))


@pytest.mark.parametrize("body", ["[" * 5_000, "[" * 5_000 + "]" * 5_000, "[1e999]", "[1" + "0" * 500 + "]"])
def test_hostile_documents_are_errors(tmp_path: Path, body: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(body)
    assert records(path)[0].errors
    assert records(path, format="locomo")[0].errors


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    body = line(messages=[{"role": "user", "content": "word " * 6_000}]) + "\n"
    with path.open("w") as out:
        for _ in range(1_000):  # 30 MB
            out.write(body)
    tracemalloc.start()
    try:
        turns = sum(len(r.turns) for r in read(path, max_message_bytes=LIMIT))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert turns == 1_000 and path.stat().st_size > 30_000_000
    assert peak < 8_000_000
