"""Readers: real data sets as published, good lines around bad ones, resuming, bounded memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from obstore.store import S3Store

from undertow.engine.base.model import InputError, Message
from undertow.engine.readers import (
    Format,
    Log,
    Record,
    detect_format,
    find_logs,
    jsonl,
    pair_chat,
    pair_dialogue,
    parse_messages,
    read,
    source,
)
from undertow.engine.readers.record import OrderWatch
from undertow.serving import demo

LIMIT = 1_000_000
GOOD: dict[str, Any] = {
    "tenant": "ada",
    "session": "s1",
    "timestamp": "2026-03-01T09:00:00Z",
    "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}],
}

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
some_line = st.one_of(
    st.binary(max_size=30).map(lambda b: b.replace(b"\n", b" ")),
    (any_json | near_line).map(lambda value: json.dumps(value).encode()),
    st.just(json.dumps(GOOD).encode()),
)


def line(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def write(folder: Path, *lines: str | bytes, name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join((x.encode() if isinstance(x, str) else x) + b"\n" for x in lines))
    return path


def records(path: Path, after: int = 0, format: Format = "auto") -> list[Record]:
    return list(read(path, format, after=after, max_message_bytes=LIMIT))


def said(pairs: list[tuple[Message, ...]]) -> list[list[str]]:
    return [[m.content for m in pair] for pair in pairs]


@pytest.fixture(scope="module")
def data() -> Path:
    folder = Path(__file__).resolve().parents[3].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the data sets are not shipped with the project: no ../shared/data")
    return folder


# --- the published data sets ---


def test_locomo_samples_are_read_whole_and_in_session_order(data: Path) -> None:
    path = data / "locomo_dev.json"
    assert detect_format(path) == "locomo"
    found = records(path)
    assert [r.turns[0].tenant for r in found] == ["conv-26", "conv-30", "conv-41", "conv-42", "conv-43"]
    assert [r.position for r in found] == [1, 2, 3, 4, 5]
    assert not any(r.errors or r.warnings for r in found)
    assert [sum(len(t.messages) for t in r.turns) for r in found] == [419, 369, 663, 629, 680]
    for record, raw in zip(found, json.loads(path.read_text()), strict=True):
        sessions = list(dict.fromkeys(t.session_id for t in record.turns))
        assert sessions == [f"session_{n}" for n in range(1, len(sessions) + 1)]
        sizes = {k: len(v) for k, v in raw["conversation"].items() if isinstance(v, list)}
        assert Counter(t.session_id for t in record.turns) == {k: (n + 1) // 2 for k, n in sizes.items()}
        assert len({t.dedupe_key for t in record.turns}) == len(record.turns)
    first = found[0].turns[0]
    assert first.timestamp == "2023-05-08T13:56:00"
    assert [m.speaker for m in first.messages] == ["Caroline", "Melanie"]


def test_locomo_captions_are_part_of_the_text(data: Path) -> None:
    path = data / "locomo_dev.json"
    captions = [
        m["blip_caption"]
        for sample in json.loads(path.read_text())
        for session in sample["conversation"].values()
        if isinstance(session, list)
        for m in session
        if m.get("blip_caption")
    ]
    text = "\n".join(t.text for r in records(path) for t in r.turns)
    assert len(captions) > 100
    assert all(f"[image: {caption}]" in text for caption in captions)


def test_longmemeval_item_is_read_whole_and_by_date(data: Path) -> None:
    path = data / "longmemeval_one.json"
    assert detect_format(path) == "longmemeval"
    (record,) = records(path)
    assert not record.errors and not record.warnings
    assert {t.tenant for t in record.turns} == {"e47becba"}
    assert len({t.session_id for t in record.turns}) == 53
    assert sum(len(t.messages) for t in record.turns) == 550
    dates = [t.timestamp or "" for t in record.turns]
    assert dates[0] == "2023-05-20T02:21:00" and dates == sorted(dates)
    shapes = Counter(tuple(m.role for m in t.messages) for t in record.turns)
    assert set(shapes) == {("user", "assistant"), ("assistant",)} | (shapes.keys() & {("user",)})


def test_locomo_streams_from_a_made_up_file(tmp_path: Path) -> None:
    """Number order, an odd last message, an empty session, a bad session, a second sample."""

    def spoken(n: int) -> dict[str, Any]:
        return {"speaker": "Ann" if n % 2 else "Bob", "dia_id": f"D:{n}", "text": f"text {n}"}

    conversation = {
        "session_10": [spoken(10)],
        "session_10_date_time": "9:00 am on 2 March, 2026",
        "session_2": [spoken(1), {**spoken(2), "text": "", "blip_caption": "a red boat"}, spoken(3)],
        "session_2_date_time": "9:00 am on 1 March, 2026",
        "session_3": [],
        "session_4": [spoken(1), {"speaker": "Bob", "text": " "}],
        "session_5": [spoken(1)],
        "session_5_date_time": "soon",
    }
    sample = {"sample_id": "c1", "conversation": conversation}
    path = tmp_path / "l.json"
    path.write_text(json.dumps([sample, {"sample_id": "c2"}, {**sample, "sample_id": "c3"}]))
    first, second, third = records(path)
    assert [(t.session_id, len(t.messages)) for t in first.turns] == [
        ("session_2", 2),
        ("session_2", 1),
        ("session_10", 1),
    ]
    assert first.turns[0].text == "Ann: text 1\nBob: [image: a red boat]"
    assert [e.field for e in first.errors] == [
        "conversation.session_4[1].text",
        "conversation.session_5_date_time",
    ]
    assert second.turns == () and [e.field for e in second.errors] == ["conversation"]
    assert third.turns[0].tenant == "c3"
    assert records(path, after=1) == [second, third]


def test_longmemeval_sessions_are_sorted_by_date_and_matched(tmp_path: Path) -> None:
    item = {
        "question_id": "q",
        "haystack_sessions": [GOOD["messages"], [{"role": "user", "content": "earlier"}], [{"role": "user"}]],
        "haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/05/19 (Fri) 02:21", "2023/05/21 (Sun) 02:21"],
        "haystack_session_ids": ["late", "early", "bad"],
    }
    path = tmp_path / "q.json"
    path.write_text(json.dumps(item))
    (record,) = records(path)
    assert [t.session_id for t in record.turns] == ["early", "late"]
    assert [e.field for e in record.errors] == ["haystack_sessions[2][0].content"]
    path.write_text(json.dumps([{**item, "haystack_dates": []}]))
    (record,) = records(path)
    assert record.errors[0].field == "haystack_sessions"


def test_broken_array_keeps_the_samples_before_the_break(tmp_path: Path) -> None:
    sample = {"sample_id": "c", "conversation": {"session_1": [{"speaker": "A", "text": "hi"}]}}
    path = tmp_path / "x.json"
    path.write_text("[" + json.dumps(sample) + ", {broken")
    first, last = records(path)
    assert len(first.turns) == 1
    assert last.turns == () and last.position == 1 and "after 1 samples" in last.errors[0].reason


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


def test_order_is_watched_in_bounded_memory(tmp_path: Path) -> None:
    path = write(tmp_path, *[line(session=f"s{i}", timestamp=f"2026-03-0{9 - i % 9}") for i in range(9)])
    watch = OrderWatch(capacity=2)
    turns = [t for r in records(path) for t in r.turns]
    assert watch.check(turns) is None
    assert watch.check(turns[-2:-1]) is None and len(watch._latest) == 2


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
    resumed = records(path, after)
    assert [(r.position, r.turns, r.errors) for r in resumed] == [
        (r.position, r.turns, r.errors) for r in found if r.position > after
    ]


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
    assert peak < 4_000_000


# --- Parquet ---


def parquet(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = folder / "log.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_parquet_rows_are_lines(tmp_path: Path) -> None:
    rows = 25
    moments = [datetime(2026, 3, 1, 9, i, tzinfo=UTC) for i in range(rows)]
    path = parquet(
        tmp_path,
        {
            "tenant": ["ada"] * rows,
            "timestamp": pa.array(moments, pa.timestamp("ns", "UTC")),
            "messages": [[{"role": "user", "content": f"row {i}", "name": None}] for i in range(rows)],
            "extra": list(range(rows)),
        },
        row_group_size=10,
    )
    assert detect_format(path) == "parquet"
    found = records(path)
    assert [r.position for r in found] == list(range(1, rows + 1))
    assert [t.text for r in found for t in r.turns] == [f"user: row {i}" for i in range(rows)]
    assert found[3].turns[0].timestamp == "2026-03-01T09:03:00+00:00"
    assert [len(r.warnings) for r in found[:3]] == [1, 0, 0] and "'extra'" in found[0].warnings[0]
    for after in (0, 1, 9, 10, 11, 24, 25, 99):
        assert [(r.position, r.turns) for r in records(path, after)] == [
            (r.position, r.turns) for r in found if r.position > after
        ]


def test_parquet_messages_may_be_json_and_bad_rows_are_named(tmp_path: Path) -> None:
    messages = [json.dumps(GOOD["messages"]), "{broken", "[]", None, json.dumps(GOOD["messages"])]
    found = records(parquet(tmp_path, {"tenant": ["a"] * 4 + [None], "messages": messages}))
    assert [len(r.turns) for r in found] == [1, 0, 0, 0, 0]
    assert [(e.line, e.field) for r in found for e in r.errors] == [
        (2, "messages"),
        (3, "messages"),
        (4, "messages"),
        (5, "tenant"),
    ]


def test_parquet_with_missing_columns_wrong_types_or_no_parquet_at_all(tmp_path: Path) -> None:
    (record,) = records(parquet(tmp_path, {"tenant": ["a"]}))
    assert record.position == 0 and "column messages is missing" in record.errors[0].reason
    (record,) = records(parquet(tmp_path, {"tenant": [1], "messages": [3]}))
    assert record.errors[0].field == "tenant" and "a number" in record.errors[0].reason
    path = tmp_path / "no.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    (record,) = records(path)
    assert "cannot be read" in record.errors[0].reason


def test_parquet_rows_that_cannot_be_decoded_leave_the_others(tmp_path: Path) -> None:
    text = [json.dumps(GOOD["messages"])] * 3
    tenants = pa.array([b"ok", b"\xff", b"ok"]).view(pa.string())
    extra = pa.array([None, None, {"raw": b"\x00"}], pa.struct([("raw", pa.binary())]))
    found = records(parquet(tmp_path, {"tenant": tenants, "messages": text, "metadata": extra}))
    assert [len(r.turns) for r in found] == [1, 0, 0]
    assert "cannot be decoded" in found[1].errors[0].reason
    assert found[2].errors[0].field == "metadata"


# --- which files ---


def test_paths_are_sorted_recursive_and_unique(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/z.jsonl", "b/a.parquet", "c.json", "b/notes.txt", "a.ndjson"):
        (tmp_path / name).touch()
    found = [
        Path(log.uri).relative_to(tmp_path).as_posix() for log in find_logs([tmp_path / "c.json", tmp_path])
    ]
    assert found == ["a.ndjson", "b/a.parquet", "b/z.jsonl", "c.json"]
    with pytest.raises(InputError, match="does not exist"):
        list(find_logs([tmp_path / "nowhere"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no log"):
        list(find_logs([tmp_path / "empty"]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "not of a known format"),
        ("{}", "none of the fields"),
        ('[{"messages": []}]', "JSON array of"),
    ],
)
def test_an_unknown_format_says_which_there_are(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        detect_format(path)
    (record,) = records(path)
    assert reason in record.errors[0].reason


def test_a_file_that_is_gone_is_an_error_record(tmp_path: Path) -> None:
    for name in ("gone.jsonl", "gone.parquet", "gone.json"):
        (record,) = records(tmp_path / name, after=3)
        assert record.position == 3 and "cannot be read" in record.errors[0].reason


def test_the_shipped_conversation_is_well_formed() -> None:
    folder = Path(demo.__path__[0])
    found = records(folder / "conversation.jsonl")
    assert not any(r.errors or r.warnings for r in found)
    turns = [t for r in found for t in r.turns]
    assert (len(found), len(turns)) == (12, 60)
    assert all([m.speaker for m in t.messages] == ["Nora", "Pilot"] and t.timestamp for t in turns)
    questions = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    assert len(questions) == 3 and all(
        q["question"] and q["gist"] and q["tenant"] == "nora" for q in questions
    )


# --- on S3 ---

BUCKET = "readers-logs"


@pytest.fixture(scope="module")
def bucket(s3: dict[str, str]) -> S3Store:
    return S3Store(BUCKET)


@pytest.fixture
def copied(tmp_path: Path, bucket: S3Store, request: pytest.FixtureRequest) -> Callable[[], str]:
    """Copies tmp_path to a folder of the bucket; gives its address."""
    folder = f"{request.node.name}/deep"

    def copy() -> str:
        for path in tmp_path.rglob("*"):
            if path.is_file():
                key = f"{folder}/{path.relative_to(tmp_path).as_posix()}"
                obstore.put(bucket, key, path.read_bytes())
        return f"s3://{BUCKET}/{folder}"

    return copy


def test_logs_on_s3_are_read_as_from_a_folder(tmp_path: Path, copied: Callable[[], str]) -> None:
    for name in ("a-b", "a", "c"):
        (tmp_path / name).mkdir()
    lines = [line(session=str(i)) for i in range(300)]
    write(tmp_path / "a", *lines[:5], "{broken", *lines[5:9])
    (tmp_path / "a-b" / "x.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "c" / "cut.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode())[:-200])
    parquet(
        tmp_path / "c",
        {"tenant": ["ada"] * 90, "messages": [json.dumps(GOOD["messages"])] * 89 + ["{"]},
        row_group_size=20,
    )
    (tmp_path / "c" / "other.json").write_text('{"conversation": {}}')
    (tmp_path / "c" / "notes.txt").write_text("no log")
    address = copied()
    here, there = list(find_logs([tmp_path])), list(find_logs([address]))
    assert [log.uri.removeprefix(address) for log in there] == [
        log.uri.removeprefix(str(tmp_path)) for log in here
    ]
    for mine, theirs in zip(here, there, strict=True):
        assert (theirs.name, theirs.size_bytes, theirs.head()) == (mine.name, mine.size_bytes, mine.head())
        assert detect_format(theirs) == detect_format(mine)
        for after in (0, 7, 88):
            local = list(read(mine, after=after, max_message_bytes=LIMIT))
            remote = list(read(theirs, after=after, max_message_bytes=LIMIT))
            assert [(r.position, r.turns) for r in remote] == [(r.position, r.turns) for r in local]
            told = [str(e).replace(theirs.shown, mine.shown) for r in remote for e in r.errors]
            assert told == [str(e) for r in local for e in r.errors]
    one = f"{address}/a/log.jsonl"
    assert [log.uri for log in find_logs([one, address])][:2] == [one, f"{address}/a-b/x.jsonl.gz"]


def test_stores_and_roots_on_s3_are_passed_over(tmp_path: Path, copied: Callable[[], str]) -> None:
    for name in ("log.jsonl", "s/store.json", "s/x.json", "root/map/00000001.json", "root/jobs/y.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line())
    address = copied()
    assert [log.shown for log in find_logs([address])] == [f"{address}/log.jsonl"]
    with pytest.raises(InputError, match="holds no log"):
        list(find_logs([f"{address}/s"]))


def test_what_is_wrong_with_an_address_is_said(bucket: S3Store) -> None:
    with pytest.raises(InputError, match="does not exist"):
        list(find_logs([f"s3://{BUCKET}/nothing/here"]))
    with pytest.raises(InputError, match="AWS_"):
        list(find_logs(["s3://no-such-bucket-at-all/logs"]))
    for name in ("gone.jsonl", "gone.parquet", "gone.json"):
        (record,) = read(Log.of(f"s3://{BUCKET}/{name}"), after=3, max_message_bytes=LIMIT)
        assert record.position == 3 and "cannot be read" in record.errors[0].reason


def test_an_object_that_is_replaced_while_it_is_read_is_an_error(
    bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_REQUEST_BYTES", 1 << 10)
    obstore.put(bucket, "changing.jsonl", "\n".join([line()] * 100).encode())
    records = read(Log.of(f"s3://{BUCKET}/changing.jsonl"), max_message_bytes=LIMIT)
    next(records)
    obstore.put(bucket, "changing.jsonl", "\n".join([line(tenant="eve")] * 100).encode())
    rest = list(records)
    assert {turn.tenant for r in rest for turn in r.turns} <= {"ada"}
    assert "cannot be read beyond this line" in rest[-1].errors[0].reason


def test_a_root_of_a_cluster_in_a_folder_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, line())
    for name in ("root/map", "root/shards/s1", "root/jobs"):
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path / "root" / "jobs", line())
    assert [log.name for log in find_logs([tmp_path])] == ["log.jsonl"]
    with pytest.raises(InputError, match="is an Undertow store"):
        list(find_logs([tmp_path / "root"]))
