"""Lines of the messages format, files of them, and the records read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from undertow.engine.cluster import wire
from undertow.engine.readers import Format, PackedRecord, Record, read, read_blocks
from undertow.engine.readers.record import problems_of

LIMIT = 1_000_000


GOOD: dict[str, Any] = {
    "tenant": "ada",
    "session": "s1",
    "timestamp": "2026-03-01T09:00:00Z",
    "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}],
}


def line(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


def write(folder: Path, *lines: str | bytes, name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join((x.encode() if isinstance(x, str) else x) + b"\n" for x in lines))
    return path


def records(path: Path, after: int = 0, format: Format = "auto") -> list[Record]:
    return list(read(path, format, after=after, max_message_bytes=LIMIT))


def parquet(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = folder / "log.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


def compare_blocks(path: Path, limit: int = LIMIT, after: int = 0) -> None:
    """The blocks of a file hold the turns, errors and warnings of its records, in their places."""
    packed = [PackedRecord.of(r) for r in read(path, after=after, max_message_bytes=limit)]
    blocks = list(read_blocks(path, after=after, max_message_bytes=limit))
    turns = [turn for block in blocks for turn in wire.unpack(block.turns)]
    assert turns == [turn for record in packed for turn in record.turns]
    positions = [n for block in blocks for n in block.positions.tolist()]
    assert positions == [record.position for record in packed for _ in record.turns]
    problems = [record for block in blocks for record in block.problems]
    assert problems == list(problems_of(packed))
    assert [b.position for b in blocks[-1:]] == [record.position for record in packed[-1:]]
