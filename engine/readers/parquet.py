"""Parquet files whose rows are lines of the `messages` format, read in record batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from undertow.engine.base.model import BadInput
from undertow.engine.readers.messages import LINE_FIELDS, LineParser, Parse
from undertow.engine.readers.record import PackedRecord, Record
from undertow.engine.readers.source import Log

_REQUIRED = ("tenant", "messages")
_BATCH_ROWS = 1_024
_Row = dict[str, Any] | ValueError | OverflowError
_JSON_COLUMNS = ("messages", "metadata")


def read_parquet(
    log: Log, *, after: int, max_message_bytes: int, packed: bool = False
) -> Iterator[Record | PackedRecord]:
    """The records of a Parquet file after row `after`.

    The columns are the fields of the `messages` format. `messages` is a list of structs or JSON text,
    `metadata` a struct or JSON text; timestamps are text, numbers or Arrow timestamps. Unknown columns are
    not read; the first record names them.
    """
    source = str(log)
    row = after
    try:
        with pq.ParquetFile(log.seekable()) as table:
            names = table.schema_arrow.names
            missing = [name for name in _REQUIRED if name not in names]
            if missing:
                yield Record(after, errors=(_missing(source, missing, names),))
                return
            parser = LineParser(source, log.name, max_message_bytes)
            parse = parser.packed if packed else parser.record
            warnings = tuple(
                f"{source}: column {n!r} is not known and is ignored" for n in names if n not in LINE_FIELDS
            )
            for row, raw in _rows(table, [n for n in names if n in LINE_FIELDS], after):
                record = _record(parse, source, row, raw)
                if warnings:
                    record = replace(record, warnings=(*warnings, *record.warnings))
                    warnings = ()
                yield record
    except (pa.ArrowException, OSError) as problem:
        cure = "Check that it is a complete Parquet file and that it may be read."
        yield Record(row, errors=(BadInput(source, row or None, None, f"cannot be read: {problem}", cure),))


def _missing(source: str, missing: list[str], names: list[str]) -> BadInput:
    reason = f"column {', '.join(missing)} is missing, the file has {', '.join(names) or 'none'}"
    return BadInput(source, None, missing[0], reason, f"Name the columns {', '.join(sorted(LINE_FIELDS))}.")


def _rows(table: pq.ParquetFile, columns: list[str], after: int) -> Iterator[tuple[int, _Row]]:
    """Row numbers from 1 with their values, starting after row `after`."""
    sizes = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
    row, first = 0, 0
    while first < len(sizes) and row + sizes[first] <= after:
        row += sizes[first]
        first += 1
    groups = list(range(first, len(sizes)))
    if not groups:
        return
    schema = pa.schema([(n, _microseconds(table.schema_arrow.field(n).type)) for n in columns])
    for batch in table.iter_batches(_BATCH_ROWS, row_groups=groups, columns=columns):
        taken = min(max(after - row, 0), batch.num_rows)
        rows = pa.Table.from_batches([batch]).select(columns).cast(schema, safe=False)
        row += taken
        # Sliced after the cast: Arrow miscasts a slice of structs with a null-typed field.
        for raw in _values(rows.slice(taken)):
            row += 1
            yield row, raw


def _values(rows: pa.Table) -> Iterator[_Row]:
    """Each row as Python values, or its error (invalid UTF-8, a time outside Python's range)."""
    try:
        whole = rows.to_pylist()
    except (ValueError, OverflowError):
        for i in range(rows.num_rows):
            try:
                yield rows.slice(i, 1).to_pylist()[0]
            except (ValueError, OverflowError) as problem:
                yield problem
        return
    yield from whole


def _microseconds(kind: Any) -> Any:
    """`kind` with nanosecond timestamps as microseconds, Python's resolution."""
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if pa.types.is_struct(kind):
        return pa.struct([(f.name, _microseconds(f.type)) for f in kind.fields])
    if pa.types.is_large_list(kind):
        return pa.large_list(_microseconds(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_microseconds(kind.value_type))
    return kind


def _record(parse: Parse, source: str, row: int, raw: _Row) -> Record | PackedRecord:
    if not isinstance(raw, dict):
        problem = BadInput(source, row, None, f"cannot be decoded: {raw}", "Correct the row.")
        return Record(row, errors=(problem,))
    try:
        for name in _JSON_COLUMNS:
            if isinstance(raw.get(name), str):
                raw[name] = orjson.loads(raw[name])
        # A round trip, so that stored metadata is valid JSON.
        name = "metadata"
        raw[name] = orjson.loads(orjson.dumps(raw.get(name)))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as broken:
        problem = BadInput(source, row, name, f"is not JSON: {broken}", "Correct the row's JSON.")
        return Record(row, errors=(problem,))
    raw["timestamp"] = _time_text(raw.get("timestamp"))
    messages = raw["messages"]
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and "timestamp" in message:
            message["timestamp"] = _time_text(message["timestamp"])
    return parse(row, raw)


def _time_text(value: Any) -> Any:
    """Times and dates of Arrow as ISO 8601; text and numbers unchanged."""
    return value.isoformat() if hasattr(value, "isoformat") else value
