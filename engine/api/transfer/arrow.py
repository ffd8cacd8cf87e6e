"""A tenant's export as Arrow tables and Parquet files: its turns, and every version of its memories.

The turns have the columns of the `messages` format, so that `ingest` and `add_table` take them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from undertow.engine.base.results import Report
from undertow.engine.readers.vectors import COLUMN, ENCODER_KEY

_SEQS, _NAMES = pa.list_(pa.int64()), pa.list_(pa.string())
_MESSAGE = pa.struct([("role", pa.string()), ("name", pa.string()), ("content", pa.string())])
_VECTOR = pa.field(COLUMN, pa.list_(pa.float16()))
SCHEMAS: Mapping[str, pa.Schema] = {
    "turns": pa.schema(
        [
            ("tenant", pa.string()),
            ("session", pa.string()),
            ("timestamp", pa.string()),
            ("timestamp_from", pa.string()),
            ("messages", pa.list_(_MESSAGE)),
            ("metadata", pa.string()),
            ("idempotency_key", pa.string()),
            ("id", pa.string()),
            ("seq", pa.int64()),
        ]
    ),
    "memories": pa.schema(
        [
            ("tenant", pa.string()),
            ("id", pa.string()),
            ("kind", pa.string()),
            ("fact_kind", pa.string()),
            ("text", pa.string()),
            ("timestamp", pa.string()),
            ("version", pa.int64()),
            ("generation", pa.int64()),
            ("born_at_seq", pa.int64()),
            ("made_at_seq", pa.int64()),
            ("superseded_at_seq", pa.int64()),
            ("deleted", pa.bool_()),
            ("source_seqs", _SEQS),
            ("episode_id", pa.string()),
            ("supersedes", _NAMES),
            ("prompt_version", pa.string()),
            ("model", pa.string()),
        ]
    ),
}
ROW_GROUP = 8_192


def export_tables(records: Iterable[Report], encoder: str | None = None) -> dict[str, pa.Table]:
    """The turns and the memories of an export's records (`Reports.export`, `Client.export`), in memory.

    `turns.seq` is what `memories.source_seqs` names. A memory is current if its `superseded_at_seq` is null,
    it is not `deleted`, and its `generation` is the tenant's latest. Times are ISO 8601 text; `metadata` is
    JSON text. Vectors, where the records have them, are a column `vectors`, list<float16>. `encoder`: the
    digest of what made them.
    """
    batches: dict[str, list[pa.RecordBatch]] = {"turns": [], "memories": []}
    for name, batch in _batches(records, encoder):
        batches[name].append(batch)
    return {
        name: pa.Table.from_batches(found, None if found else SCHEMAS[name])
        for name, found in batches.items()
    }


def export_parquet(
    tenants: Iterable[Iterable[Report]], folder: Path, encoder: str | None = None
) -> dict[str, int]:
    """Write the exports of some tenants as turns.parquet and memories.parquet; how many rows each has.

    The columns are those of `export_tables`; all exports have vectors, or none. Files appear once they are
    whole. OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, int] = dict.fromkeys(SCHEMAS, 0)
    made = Path(mkdtemp(prefix=".export-", dir=folder))
    parts = {name: made / f"{name}.parquet" for name in SCHEMAS}
    with ExitStack() as files:
        files.callback(rmtree, made, ignore_errors=True)
        writers: dict[str, pq.ParquetWriter] = {}
        for records in tenants:
            for name, batch in _batches(records, encoder):
                if name not in writers:
                    writers[name] = files.enter_context(pq.ParquetWriter(parts[name], batch.schema))
                writers[name].write_batch(batch)
                rows[name] += batch.num_rows
        for name in SCHEMAS:
            (writers.get(name) or pq.ParquetWriter(parts[name], SCHEMAS[name])).close()
        for part in parts.values():
            part.rename(folder / part.name)
    return rows


def _batches(records: Iterable[Report], encoder: str | None) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of some records at a time, in their order."""
    left = iter(records)
    while some := list(islice(left, ROW_GROUP)):
        turns = [_turn(record) for record in some if record["kind"] == "turn"]
        memories = [record for record in some if record["kind"] in ("episode", "fact")]
        for name, rows in (("turns", turns), ("memories", memories)):
            if rows:
                yield name, _batch(rows, SCHEMAS[name], encoder)


def _batch(rows: list[Report], schema: pa.Schema, encoder: str | None) -> pa.RecordBatch:
    if "vector" in rows[0]:
        schema = schema.append(_VECTOR).with_metadata({ENCODER_KEY: encoder} if encoder else None)
        rows = [{**row, COLUMN: row["vector"]} for row in rows]
    return pa.RecordBatch.from_pylist(rows, schema)


def _turn(record: Report) -> Report:
    metadata = orjson.dumps(record["metadata"]).decode()
    return {**record, "metadata": metadata, "idempotency_key": record["dedupe_key"]}
