"""Turns as columns: the same memories as one by one, given vectors, and bad tables and files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.bench.mock.replies import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.base.model import BadInput, InputError
from undertow.engine.readers import blocks, jsonl, read
from undertow.engine.readers.vectors import ENCODER_KEY
from undertow.engine.step import scheduler

from ...support.cluster.in_process import FailingEncoder
from ...support.engine import (
    ENCODER,
    NEVER,
    RecordingLLM,
    Run,
    assert_same,
    opened,
    read_back,
    rows_of,
    settings_of,
)
from ...support.readers import GOOD, LIMIT

REPLIES = MockReplies(1, refusal_rate=0.3)
THETA: dict[str, Any] = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 2}
Row = dict[str, Any]


def exchange(question: str, answer: str = "I see.") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


words = st.lists(
    st.sampled_from(["boat", "harbour", "violin", "Ärger\n", '"tea"']), min_size=1, max_size=4
).map(" ".join)
plain = st.builds(exchange, words, words)
unusual = st.one_of(
    words.map(lambda text: [{"role": "user", "content": text}]),
    words.map(lambda text: [*exchange(text), *exchange(text + " again")]),
    words.map(lambda text: [{"role": "system", "content": "Be kind."}, *exchange(text)]),
    words.map(
        lambda text: [*exchange(text)[:1], {"role": "assistant", "content": [{"type": "text", "text": text}]}]
    ),
)
rows = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["ann", "bob", "Zoë"]),
        "session": st.sampled_from(["s", "t", None]),
        "timestamp": st.sampled_from(
            [None, None, "2026-03-01T09:00:00Z", "2026-03-02", "8:05 pm on 1 June, 2026"]
        ),
        "messages": plain | plain | plain | unusual,
    },
    optional={
        "idempotency_key": st.sampled_from(["k1", "k2", "k3", "k4"]),
        "metadata": st.sampled_from([None, {"app": "x"}]),
    },
)


def write_lines(path: Path, lines: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def outcome(store: Path, llm: RecordingLLM) -> tuple[Run, list[Any]]:
    """The decisions and memories of a store, and its turns."""
    turns = rows_of(store, "turn")
    stored = [
        (r.tenant, r.seq, r.id, r.timestamp, r.payload, None if r.vector is None else r.vector.tobytes())
        for r in turns
    ]
    return read_back(store, llm.prompts), sorted(stored)


def store_of(folder: Path, add: Any, **options: Any) -> tuple[Run, list[Any]]:
    llm = RecordingLLM(REPLIES)
    with opened(folder, settings_of(**THETA, **options), ENCODER, llm) as engine:
        add(engine)
        assert engine.drain()
    return outcome(folder, llm)


@pytest.fixture
def columns_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even one row is read as columns."""
    monkeypatch.setattr(blocks, "LEAST_ROWS", 1)
    monkeypatch.setattr(jsonl, "LEAST_ROWS", 1)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(rows, min_size=1, max_size=25),
    batch=st.sampled_from([1, 3, 8, 64]),
    cut=st.integers(0, 25),
    least_ahead=st.sampled_from([1, 1, 1_000]),
    embed_timestamp=st.booleans(),
)
def test_columns_rows_and_single_turns_make_the_same_memories(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[Row],
    batch: int,
    cut: int,
    least_ahead: int,
    embed_timestamp: bool,
) -> None:
    folder = tmp_path_factory.mktemp("same")
    path = write_lines(folder / "log.jsonl", lines)
    turns = [turn for record in read(path, max_message_bytes=LIMIT) for turn in record.turns]

    def one_by_one(engine: Engine) -> None:
        for turn in turns:
            engine.add_batch([turn])

    def fed(engine: Engine) -> None:
        Ingest(engine).feed([path])

    def mixed(engine: Engine) -> None:
        """Some rows one by one, then all of the file: what is known is a duplicate."""
        engine.add_batch(turns[:cut])
        Ingest(engine).feed([path])
        Ingest(engine).feed([path])

    expected = store_of(folder / "single", one_by_one, embed_timestamp=embed_timestamp)
    for least in (1, 1_000_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "LEAST_ROWS", least)
            patch.setattr(jsonl, "LEAST_ROWS", 1)
            patch.setattr(scheduler, "LEAST_AHEAD", least_ahead)
            for name, add in (("fed", fed), ("mixed", mixed)):
                options = {"batch_turns": batch, "embed_timestamp": embed_timestamp}
                run, stored = store_of(folder / f"{name}{least}", add, **options)
                assert stored == expected[1]
                assert_same(run, expected[0])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(tmp_path / "store", settings_of(**NEVER), ENCODER) as opened_engine:
        yield opened_engine


def texts_of(count: int) -> list[str]:
    return [f"user: word{n}\nassistant: I see." for n in range(count)]


def table_of(count: int, **changes: Any) -> pa.Table:
    columns = {"tenant": ["ann"] * count, "messages": [exchange(f"word{n}") for n in range(count)]}
    return pa.table({**columns, **changes})


def with_vectors(vectors: Any, digest: str = ENCODER.fingerprint.digest) -> pa.Table:
    return table_of(len(vectors), vectors=vectors).replace_schema_metadata({ENCODER_KEY: digest})


def test_a_table_is_stored_and_searchable(engine: Engine, columns_alone: None) -> None:
    report = engine.add_table(table_of(60))
    assert (report.turns, report.new_turns) == (60, 60)
    assert "word7" in engine.search("ann", "word7", k_sub=1).turns[0].memory
    assert engine.add_table(table_of(60)).new_turns == 60, "without keys and source each call is new"
    assert engine.add_table(table_of(60), source="chats").new_turns == 60
    reader = table_of(70).to_reader(max_chunksize=16)
    assert engine.add_table(reader, source="chats").new_turns == 10
    assert engine.add_table(table_of(2, idempotency_key=["a", "a"])).new_turns == 1


def test_a_bad_row_of_a_table_is_named_and_its_batch_is_not_stored(engine: Engine) -> None:
    table = table_of(60, tenant=["ann"] * 50 + [None] + ["ann"] * 9)
    with pytest.raises(InputError, match=r"add_table:51: field 'tenant': is missing"):
        engine.add_table(table)
    assert engine.stats()["turns"] == 0
    with pytest.raises(InputError, match="column messages is missing"):
        engine.add_table(pa.table({"tenant": ["ann"]}))


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.list_(pa.float16(), 64), pa.large_list(pa.float16())]
)
def test_given_vectors_take_the_place_of_the_encoder(
    tmp_path: Path, kind: pa.DataType, columns_alone: None
) -> None:
    vectors = ENCODER.encode(texts_of(20))
    table = with_vectors(pa.array(list(vectors), kind))
    pq.write_table(table, tmp_path / "log.parquet")
    with Engine(tmp_path / "given", settings_of(**NEVER), FailingEncoder([""], dim=64)) as engine:
        work = Ingest(engine)
        work.feed([tmp_path / "log.parquet"])
        assert (work.report.new_turns, work.report.errors) == (20, 0)
    assert np.array_equal(stored_vectors(tmp_path / "given"), vectors)


def test_rows_without_a_vector_are_embedded(engine: Engine, tmp_path: Path, columns_alone: None) -> None:
    vectors = ENCODER.encode(texts_of(6))
    given = vectors[::-1]
    some = [None if n % 2 else vector for n, vector in enumerate(given)]
    engine.add_table(with_vectors(pa.array(some, pa.list_(pa.float16()))))
    even = np.arange(6)[:, None] % 2 == 0
    assert np.array_equal(stored_vectors(tmp_path / "store"), np.where(even, given, vectors))


def stored_vectors(store: Path) -> Any:
    """The vectors of a store's turns in order, float16 [n, dim]."""
    return np.array([row.vector for row in sorted(rows_of(store, "turn"), key=lambda row: row.seq)])


def unit(n: int, size: int = 64, length: float = 1.0) -> list[float]:
    return [length if place == n else 0.0 for place in range(size)]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (unit(1, length=float("nan")), "holds NaN or infinity"),
        (unit(1, length=float("inf")), "holds NaN or infinity"),
        (unit(1, length=0.0), "is zero"),
        (unit(1, length=2.0), "has the length 2, not 1"),
        (unit(1, size=65), "has 65 values, and the store's encoder makes 64"),
        ([None, *unit(0)[1:]], "holds NaN or infinity"),
    ],
)
@pytest.mark.parametrize("least", [1, 1_000])
def test_a_bad_vector_is_named_by_file_row_and_row_group(
    engine: Engine, tmp_path: Path, bad: list[float], reason: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "LEAST_ROWS", least)
    vectors = pa.array([*(unit(n) for n in range(5)), bad, unit(7)], pa.list_(pa.float32()))
    path = tmp_path / "log.parquet"
    pq.write_table(with_vectors(vectors), path, row_group_size=3)
    (problem,) = ingest_problems(engine, path)
    assert (problem.source, problem.line, problem.field, problem.row_group) == (str(path), 6, "vectors", 1)
    assert reason in problem.reason and "null to have it embedded" in problem.cure
    assert f"{path}:6 (row group 1): field 'vectors'" in str(problem)
    assert engine.stats()["turns"] == 6


def test_a_vector_is_for_one_turn(engine: Engine) -> None:
    table = with_vectors(pa.array([unit(0)], pa.list_(pa.float32())))
    table = table.set_column(1, "messages", pa.array([exchange("one") + exchange("two")]))
    with pytest.raises(InputError, match="is one vector for 2 turns"):
        engine.add_table(table)


def ingest_problems(engine: Engine, *paths: Path) -> list[BadInput]:
    found: list[BadInput] = []
    Ingest(engine, on_error=found.append).feed(paths)
    return found


@pytest.mark.parametrize(
    ("metadata", "kind", "reason"),
    [
        ({ENCODER_KEY: "other"}, pa.list_(pa.float32()), "holds vectors of the encoder other"),
        ({}, pa.list_(pa.float32()), "does not name its encoder"),
        ({ENCODER_KEY: ENCODER.fingerprint.digest}, pa.list_(pa.float64()), "has the type list"),
    ],
)
def test_vectors_of_another_encoder_are_refused(
    engine: Engine, tmp_path: Path, metadata: dict[bytes, str], kind: pa.DataType, reason: str
) -> None:
    table = with_vectors(pa.array([unit(0)], kind)).replace_schema_metadata(metadata)
    path = tmp_path / "log.parquet"
    pq.write_table(table, path)
    (problem,) = ingest_problems(engine, path)
    assert (problem.source, problem.field) == (str(path), "vectors")
    assert reason in problem.reason and "leave the column out" in problem.cure
    with pytest.raises(InputError, match=reason):
        engine.add_table(table)
    assert engine.stats()["turns"] == 0


def test_a_cut_file_and_another_schema_are_named_and_other_files_are_read(
    engine: Engine, tmp_path: Path
) -> None:
    paths = [tmp_path / f"{n}.parquet" for n in range(3)]
    pq.write_table(table_of(60), paths[0])
    whole = paths[0].read_bytes()
    paths[1].write_bytes(whole[: len(whole) // 2])
    table = table_of(60).set_column(0, "tenant", pa.array([*range(59), None]))
    pq.write_table(table, paths[2], row_group_size=50)
    problems = ingest_problems(engine, *paths)
    assert engine.stats()["turns"] == 60
    assert problems[0].source == str(paths[1]) and "cannot be read" in problems[0].reason and problems[0].cure
    assert [(p.line, p.row_group, p.field) for p in problems[1:]] == [
        (n, int(n > 50), "tenant") for n in range(1, 61)
    ]
    assert "must be text, not a number" in problems[1].reason and "is missing" in problems[-1].reason


def test_damage_within_a_file_names_its_row_group(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(table_of(120), path, row_group_size=60, compression="none", use_dictionary=False)
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    (problem,) = ingest_problems(engine, path)
    assert "cannot be read" in problem.reason and problem.row_group in (0, 1)


def test_good_rows_of_a_file_need_no_python(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that LineParser must not see: plain exchanges, with and without names, in all forms of times."""
    monkeypatch.setattr("undertow.engine.readers.messages.LineParser.record", None)
    lines = [
        {**GOOD, "session": None},
        {**GOOD, "timestamp": "2026-03-01 09:00"},
        {**GOOD, "idempotency_key": "k"},
    ]
    named = [{**message, "name": f"N{n}"} for n, message in enumerate(GOOD["messages"])]
    lines += [{**GOOD, "tenant": "Zoë"}, {**GOOD, "messages": named}, {**GOOD, "timestamp": None}]
    path = write_lines(tmp_path / "log.jsonl", lines * 10)
    pq.write_table(pa.Table.from_pylist(lines * 10), tmp_path / "log.parquet")
    assert ingest_problems(engine, path, tmp_path / "log.parquet") == []
    assert engine.stats()["turns"] > 60
