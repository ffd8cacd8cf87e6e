"""Lines of the messages format, files of them, and the records read from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from undertow.engine.base.model import PackedTurn, time_key
from undertow.engine.cluster import wire
from undertow.engine.readers import Format, Record, blocks, read, read_blocks
from undertow.engine.readers.messages import LineParser

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
    """The blocks of a file hold what LineParser makes of it without columns and short cut, in its place."""

    def content() -> tuple[Any, ...]:
        found = list(read_blocks(path, after=after, max_message_bytes=limit))
        turns = [turn for block in found for turn in wire.unpack(block.turns)]
        positions = [n for block in found for n in block.positions.tolist()]
        return turns, positions, [r for b in found for r in b.problems], [b.position for b in found[-1:]]

    turns, positions, problems, last = content()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LEAST_ROWS", 1 << 30)
        patch.setattr(LineParser, "_plain_exchange", lambda *_: None)
        assert (turns, positions, problems, last) == content()
    warned = [r.position for r in problems if any("is earlier than the one before" in w for w in r.warnings)]
    assert warned == late(turns, positions)


def late(turns: Sequence[PackedTurn], positions: Sequence[int]) -> list[int]:
    """The records with a turn that is earlier than the one before it in its session."""
    latest: dict[tuple[str, str], str] = {}
    found = set()
    for (tenant, _, session, time, *_), position in zip(turns, positions, strict=True):
        if time is not None:
            if time_key(time) < time_key(latest.get((tenant, session), time)):
                found.add(position)
            latest[tenant, session] = time
    return sorted(found)
