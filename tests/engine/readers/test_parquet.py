"""Parquet logs: rows as lines, bad rows, files that are no Parquet."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.engine.readers import blocks, detect_format

from ...support.readers import GOOD, compare_blocks, parquet, records


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


TIMES = (
    pa.timestamp("us"),
    pa.timestamp("ns", "UTC"),
    pa.timestamp("s", "+05:30"),
    pa.date32(),
    pa.float64(),
)
SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("tenant", "session", "idempotency_key")),
        ("timestamp", pa.timestamp("us")),
        ("messages", pa.list_(pa.struct([(name, pa.string()) for name in ("role", "content", "name")]))),
        ("metadata", pa.struct([("app", pa.string())])),
    ]
)
NAMES = st.sampled_from(["ann", "Zoë", "", None, " ", "x\ty", "n" * 1_025])
TEXTS = st.sampled_from(['a "b"\n', "\\ é\r\t", "\x01", "", " ", None, "a\x00", "x"])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "user", "assistant", "system", None]), "content": TEXTS, "name": NAMES}
)
MESSAGES = st.lists(st.none() | MESSAGE, max_size=3) | st.tuples(TEXTS, TEXTS, NAMES).map(
    lambda said: [
        {"role": "user", "content": said[0], "name": said[2]},
        {"role": "assistant", "content": said[1], "name": None},
    ]
)
ROW = st.fixed_dictionaries(
    {
        "tenant": st.just("ann") | NAMES,
        "session": NAMES,
        "idempotency_key": st.none() | NAMES,
        "timestamp": st.none() | st.datetimes(datetime(1969, 1, 1), datetime(2027, 1, 1)),
        "messages": st.none() | MESSAGES,
        "metadata": st.none() | st.just({"app": "x"}),
    }
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=6),
    kind=st.sampled_from(TIMES),
    after=st.integers(0, 3),
    group=st.sampled_from([2, 10]),
)
def test_blocks_of_columns_are_the_packed_records(
    tmp_path: Path, rows: list[dict[str, Any]], kind: pa.DataType, after: int, group: int
) -> None:
    whole = pa.Table.from_pylist(rows, schema=SCHEMA)
    times = whole.column("timestamp")
    if kind == pa.float64():
        times = times.cast(pa.int64())
    elif kind == pa.timestamp("s", "+05:30"):
        times = times.cast(pa.timestamp("s"), safe=False)
    columns = dict(zip(whole.column_names, whole.columns, strict=True))
    path = parquet(tmp_path, {**columns, "timestamp": times.cast(kind, safe=False)}, row_group_size=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LEAST_ROWS", 1)
        compare_blocks(path, after=after)
