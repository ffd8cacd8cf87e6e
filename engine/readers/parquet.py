"""Parquet files whose rows are lines of the `messages` format, read in record batches."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from undertow.engine.base.model import BadInput, InputError
from undertow.engine.readers.blocks import BlockBuilder, block_of_error
from undertow.engine.readers.messages import LINE_FIELDS, LineParser
from undertow.engine.readers.record import PackedRecord, TurnBlock
from undertow.engine.readers.source import Log
from undertow.engine.readers.vectors import COLUMN, StoreEncoder

_REQUIRED = ("tenant", "messages")
_BATCH_ROWS = 4_096
_Row = dict[str, Any] | ValueError | OverflowError
_JSON_COLUMNS = ("messages", "metadata")
# Columns of an export that an import makes anew (engine/api/transfer/arrow.py).
_MADE_ANEW = frozenset({"id", "seq", "timestamp_from"})


def parquet_blocks(
    log: Log, *, after: int, max_message_bytes: int, encoder: StoreEncoder | None = None
) -> Iterator[TurnBlock]:
    """The records of a Parquet file after row `after`.

    The columns are the fields of the `messages` format. `messages` is a list of structs or JSON text,
    `metadata` a struct or JSON text; timestamps are text, numbers or Arrow timestamps; `vectors` is read for
    `encoder`, that of the store, which they must be of. Unknown columns are not read; the first block names
    them.
    """
    file = _File(log, LINE_FIELDS | {COLUMN} if encoder else LINE_FIELDS, encoder)
    builder = BlockBuilder(LineParser(str(log), log.name, max_message_bytes))
    for first, rows in file.batches(after):
        block = _block(builder, rows, first, encoder)
        problems = tuple(replace(r, errors=file.placed(r.errors)) for r in block.problems)
        if file.warnings:
            problems = (PackedRecord(first, warnings=file.warnings), *problems)
            file.warnings = ()
        yield replace(block, problems=problems)
    yield from (block_of_error(file.row, error) for error in file.errors)


def turns_of_rows(
    table: pa.Table | pa.RecordBatchReader,
    source: str | None,
    max_message_bytes: int,
    encoder: StoreEncoder,
    most_rows: int = 8_192,
) -> Iterator[pa.Table]:
    """The turns of rows of the `messages` format: a table of TURNS for each record batch.

    `source`: where the rows are from, for their dedupe keys; None: all are new. A table comes in batches of
    at most `most_rows` rows. InputError names the row that is refused; none of its batch and later ones come.
    """
    if refusal := _refusal(table.schema, "add_table", encoder):
        raise InputError(refusal)
    name = secrets.token_hex(12) if source is None else source
    builder = BlockBuilder(LineParser("add_table", name, max_message_bytes))
    first = 1
    for batch in table.to_batches(most_rows) if isinstance(table, pa.Table) else table:
        if batch.num_rows:
            block = _block(builder, pa.Table.from_batches([batch]), first, encoder)
            if errors := [error for record in block.problems for error in record.errors]:
                raise InputError(errors[0])
            yield block.turns
            first += batch.num_rows


def _block(builder: BlockBuilder, rows: pa.Table, first: int, encoder: StoreEncoder | None) -> TurnBlock:
    """The block of some rows, at least one, the first of which has the number `first`."""
    lines = np.arange(first, first + rows.num_rows)
    columns = rows.select([name for name in rows.column_names if name in LINE_FIELDS])

    def odd(places: NDArray[np.int64]) -> Iterator[PackedRecord]:
        values = _values(columns.take(pa.array(places)) if len(places) < len(lines) else columns)
        for row, raw in zip(lines[places].tolist(), values, strict=True):
            yield _record(builder.parser, row, raw)

    vectors = None
    if encoder is not None and COLUMN in rows.column_names:
        vectors = encoder.read(rows.column(COLUMN).combine_chunks())
    return builder.block(columns, lines, odd, vectors)


class _File:
    """One Parquet file. `row`: the last that was read; `errors`: why no more were; `warnings`: of it all."""

    def __init__(self, log: Log, known: Collection[str], encoder: StoreEncoder | None = None) -> None:
        """`known`: the columns to read."""
        self.row = 0
        self.errors: list[BadInput] = []
        self._log = log
        self._known = frozenset(known)
        self._encoder = encoder
        self._ends: NDArray[np.int64] = np.empty(0, np.int64)
        self.warnings: tuple[str, ...] = ()

    def batches(self, after: int) -> Iterator[tuple[int, pa.Table]]:
        """Rows after row `after`, at least one at a time, with the number of the first, from 1 on."""
        self.row = after
        try:
            with pq.ParquetFile(self._log.seekable()) as table:
                if refusal := _refusal(table.schema_arrow, str(self._log), self._encoder):
                    self.errors.append(refusal)
                    return
                names = table.schema_arrow.names
                self.warnings = tuple(
                    f"{self._log}: column {n!r} is not known and is ignored"
                    for n in names
                    if n not in self._known | _MADE_ANEW
                )
                sizes = [table.metadata.row_group(i).num_rows for i in range(table.metadata.num_row_groups)]
                self._ends = np.cumsum(sizes, dtype=np.int64)
                for rows in _rows(table, [n for n in names if n in self._known], sizes, after):
                    first, self.row = self.row + 1, self.row + rows.num_rows
                    yield first, rows
        except (pa.ArrowException, OSError) as problem:
            cure = "Check that it is a complete Parquet file and that it may be read."
            reason = f"cannot be read: {problem}"
            problem_at = BadInput(str(self._log), self.row or None, None, reason, cure)
            self.errors.append(replace(problem_at, row_group=self._group(self.row + 1)))

    def placed(self, errors: Iterable[BadInput]) -> tuple[BadInput, ...]:
        """The errors of rows, with their row groups."""
        return tuple(replace(e, row_group=self._group(e.line)) for e in errors)

    def _group(self, row: int | None) -> int | None:
        if row is None or not len(self._ends) or row > self._ends[-1]:
            return None
        return int(np.searchsorted(self._ends, row))


def _refusal(schema: pa.Schema, source: str, encoder: StoreEncoder | None) -> BadInput | None:
    """Why nothing of a file or table with this schema can be read."""
    names = schema.names
    if missing := [name for name in _REQUIRED if name not in names]:
        reason = f"column {', '.join(missing)} is missing, given are {', '.join(names) or 'none'}"
        cure = f"Name the columns {', '.join(sorted(LINE_FIELDS))}."
        return BadInput(source, None, missing[0], reason, cure)
    return encoder.refusal(schema, source) if encoder is not None else None


def _rows(table: pq.ParquetFile, columns: list[str], sizes: list[int], after: int) -> Iterator[pa.Table]:
    """The rows after row `after`, some at a time. `sizes`: the rows of each row group."""
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
        row += batch.num_rows
        # Sliced after the cast: Arrow miscasts a slice of structs with a null-typed field.
        if taken < batch.num_rows:
            yield rows.slice(taken)


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


def _record(parser: LineParser, row: int, raw: _Row) -> PackedRecord:
    if not isinstance(raw, dict):
        problem = BadInput(parser.source, row, None, f"cannot be decoded: {raw}", "Correct the row.")
        return PackedRecord(row, errors=(problem,))
    try:
        for name in _JSON_COLUMNS:
            if isinstance(raw.get(name), str):
                raw[name] = orjson.loads(raw[name])
        # A round trip, so that stored metadata is valid JSON.
        name = "metadata"
        raw[name] = orjson.loads(orjson.dumps(raw.get(name)))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as broken:
        problem = BadInput(parser.source, row, name, f"is not JSON: {broken}", "Correct the row's JSON.")
        return PackedRecord(row, errors=(problem,))
    raw["timestamp"] = _time_text(raw.get("timestamp"))
    messages = raw["messages"]
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and "timestamp" in message:
            message["timestamp"] = _time_text(message["timestamp"])
    return parser.record(row, raw)


def _time_text(value: Any) -> Any:
    """Times and dates of Arrow as ISO 8601; text and numbers unchanged."""
    return value.isoformat() if hasattr(value, "isoformat") else value
