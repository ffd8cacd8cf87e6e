"""The rows of the journal: their schema, their form in Arrow, and SQL filters over their columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Kind = Literal[
    "turn",
    "vector",
    "episode",
    "fact",
    "note",
    "decision",
    "job",
    "control",
    "usage",
    "source_offset",
    "tombstone",
    "move",
    "epoch",
]

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("tenant", pa.string()),
        ("tenant_key", pa.string()),
        ("seq", pa.int64()),
        ("lsn", pa.int64()),
        ("epoch", pa.int64()),
        ("id", pa.string()),
        ("timestamp", pa.string()),
        ("vector", pa.binary()),
        ("payload", pa.binary()),
    ]
)

_LSN, _EPOCH = map(SCHEMA.get_field_index, ("lsn", "epoch"))

_ROW = pa.struct(list(SCHEMA))
_others = attrgetter(*(name for name in SCHEMA.names if name not in ("vector", "payload")))

KEYS_PER_FILTER = 512
ROWS_PER_BATCH = 4_096


@dataclass(slots=True)
class Row:
    """One row. `vector` is fp16 [dim] or None; `payload` is JSON bytes; `lsn` is set on append."""

    kind: Kind
    tenant: str
    tenant_key: str
    seq: int
    payload: bytes
    id: str | None = None
    timestamp: str | None = None
    vector: NDArray[np.float16] | None = None
    lsn: int = -1
    epoch: int = 0


Rows: TypeAlias = Row | pa.RecordBatch
"""One row, or several as a batch with the columns of SCHEMA, whose lsn and epoch are set on append."""
R = TypeVar("R", pa.RecordBatch, pa.Table)


class RowStream:
    """Record batches of rows with lsns and an epoch added; `error` is what their source raised."""

    def __init__(self, rows: Iterable[Rows], next_lsn: int, epoch: int) -> None:
        self.next_lsn = next_lsn
        self.error: BaseException | None = None
        self._epoch = epoch
        self._batches = in_batches(rows)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error  # Arrow, between here and the caller, keeps the message alone
            raise
        first, self.next_lsn = self.next_lsn, self.next_lsn + batch.num_rows
        return numbered(batch, first, self._epoch)


def numbered(rows: R, first_lsn: int, epoch: int) -> R:
    """The rows with lsns from `first_lsn` on, and an epoch."""
    lsns, columns = np.arange(first_lsn, first_lsn + rows.num_rows), rows.columns
    columns[_LSN], columns[_EPOCH] = pa.array(lsns), pa.array(np.full_like(lsns, epoch))
    return type(rows).from_arrays(columns, schema=SCHEMA)


def in_batches(rows: Iterable[Rows]) -> Iterator[pa.RecordBatch]:
    """Single rows gathered into record batches of at most ROWS_PER_BATCH; given batches pass as they are."""
    waiting: list[Row] = []
    for row in rows:
        if isinstance(row, Row):
            waiting.append(row)
        if waiting and (len(waiting) == ROWS_PER_BATCH or not isinstance(row, Row)):
            yield to_batch(waiting)
            waiting = []
        if not isinstance(row, Row):
            yield row
    if waiting:
        yield to_batch(waiting)


def row_count(rows: Iterable[Rows]) -> int:
    return sum(1 if isinstance(row, Row) else row.num_rows for row in rows)


def to_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """The rows as a record batch with SCHEMA."""
    values = [
        (*_others(row), None if row.vector is None else row.vector.tobytes(), row.payload) for row in rows
    ]
    # one array of structs takes a third of the time of ten columns, for a few rows
    return pa.RecordBatch.from_struct_array(pa.array(values, _ROW))


def to_table(rows: Sequence[Row]) -> pa.Table:
    """The rows as a table with SCHEMA."""
    return pa.Table.from_batches([to_batch(rows)])


def binary_vectors(vectors: NDArray[np.float16], missing: NDArray[np.bool_] | None = None) -> pa.Array:
    """One binary value a row of [n, dim], without a copy of the bytes; null where `missing`, bool [n]."""
    count, width = len(vectors), vectors.shape[1] * vectors.itemsize
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    data = np.ascontiguousarray(vectors, dtype="<f2")
    held = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return held if missing is None else pc.if_else(pa.array(missing), None, held)


def to_rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """The rows of a batch, which may lack the column `vector`."""
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    vectors = columns.pop("vector", None)
    for i, values in enumerate(zip(*columns.values(), strict=True)):
        row = Row(**dict(zip(columns, values, strict=True)))
        if vectors is not None and vectors[i] is not None:
            row.vector = np.frombuffer(vectors[i], dtype="<f2")
        yield row


def key_groups(tenant_keys: Sequence[str] | None) -> Iterator[Sequence[str] | None]:
    """The keys in groups small enough for a filter. None, which means all tenants, is one group."""
    if tenant_keys is None:
        yield None
        return
    for i in range(0, len(tenant_keys), KEYS_PER_FILTER):
        yield tenant_keys[i : i + KEYS_PER_FILTER]


def any_of(column: str, values: Sequence[str] | None) -> str | None:
    """SQL filter for `column IN values`; None when there is nothing to filter by."""
    if values is None:
        return None
    quoted = ", ".join("'" + v.replace("'", "''") + "'" for v in values)
    return f"{column} IN ({quoted})" if quoted else "false"


def all_of(*terms: str | None) -> str | None:
    """SQL filter for all terms; None when there is none."""
    return " AND ".join(term for term in terms if term) or None
