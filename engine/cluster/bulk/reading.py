"""What a worker of a bulk ingest reads: logs in, tables of turns out, each turn with its group and position.

A group holds whole tenants of one shard. Its turns are in the order in which one process would take them: by
file, then by position in the file. Logs are read in waves, and each wave in tasks, of bounded size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from undertow.engine.base.model import BadInput, PackedTurn
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.cluster.wire import TURNS, pack
from undertow.engine.readers import Format, Log, PackedRecord, read_packed

# rows in Arrow per byte of a log: each turn is there as words and as JSON
EXPANSION = {".gz": 12.0, ".parquet": 8.0}
PLAIN_EXPANSION = 2.0
# turns a table; Ray Data joins them to blocks
TABLE_TURNS = 1_024
# of each file and kind, how many problems are reported word by word
TOLD_PROBLEMS = 50
# the group of the rows that are no turns but reports on files
REPORTS = -1
ROWS = pa.schema(
    [
        pa.field("group", pa.int32(), nullable=False),
        pa.field("file", pa.int32(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        *TURNS,
    ]
)
# the order of rows within a wave
ORDER = ("group", "file", "number")


class Span(NamedTuple):
    """The rows of one group in a block: `first` is the (file, number) of the first."""

    group: int
    first: tuple[int, int]
    offset: int
    rows: int


@dataclass(slots=True)
class FileReport:
    """How one log was read: counts, and the first problems of each kind.

    `position`: the last record that was read, to resume after. `whole`: the reader came to its end;
    else it failed on the way, and one of the errors says how. `head`: how the file began (`Log.head`).
    """

    file: int
    position: int
    turns: int = 0
    errors: int = 0
    warnings: int = 0
    first_errors: list[BadInput] = field(default_factory=list)
    first_warnings: list[str] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)
    whole: bool = False

    def stop(self, log: Log, problem: Exception) -> None:
        """End the file after a failure that the input is not to blame for."""
        self.whole = False
        reason = (
            f"reading stopped after position {self.position}, with {self.turns:,} turns taken: "
            f"{type(problem).__name__}: {problem}"
        )
        cure = "Please report it, with what stands there; the next run reads the file again."
        self.note(PackedRecord(self.position, errors=(BadInput(log.shown, None, None, reason, cure),)))

    def note(self, record: PackedRecord) -> None:
        self.position = record.position
        self.turns += len(record.turns)
        self.errors += len(record.errors)
        self.warnings += len(record.warnings)
        self.first_errors += record.errors[: TOLD_PROBLEMS - len(self.first_errors)]
        self.first_warnings += record.warnings[: TOLD_PROBLEMS - len(self.first_warnings)]

    def to_json(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        body = orjson.loads(data)
        return cls(**{**body, "first_errors": [BadInput(**e) for e in body["first_errors"]]})


@dataclass(frozen=True, slots=True)
class Piece:
    """One log to read after a position. `file`: its number in the order."""

    file: int
    log: Log
    after: int


@dataclass(frozen=True, slots=True)
class WaveReader:
    """How a wave's logs become groups. Travels to the workers."""

    shard_map: ShardMap
    # into how many groups the tenants of one shard are split
    buckets: int
    format: Format
    max_message_bytes: int
    # groups that are stored already, of an earlier run of the same wave
    done: frozenset[int] = frozenset()

    @property
    def groups(self) -> int:
        return self.buckets * len(self.shard_map.shards)

    def shard_of(self, group: int) -> str:
        return self.shard_map.shards[group % len(self.shard_map.shards)]

    def groups_of(self, tenants: Sequence[str]) -> NDArray[np.int32]:
        """The group of each tenant, [n]. Neighbouring numbers belong to different shards."""
        names = list(dict.fromkeys(tenants))
        buckets = np.array([zlib.crc32(name.encode()) for name in names], dtype=np.int64) % self.buckets
        groups = buckets * len(self.shard_map.shards) + self.shard_map.owner_ids(names)
        of_name = dict(zip(names, groups.tolist(), strict=True))
        return np.array([of_name[name] for name in tenants], dtype=np.int32)

    def tables(self, piece: Piece) -> Iterator[pa.Table]:
        """The turns of one log, in order, in tables of ROWS; the last has the file's report alone.

        A failure, in a reader or after it, ends this file alone and is an error of its report.
        """
        report = FileReport(piece.file, piece.after, head=piece.log.head())
        numbered = enumerate(self._turns(piece, report))
        while batch := list(islice(numbered, TABLE_TURNS)):
            try:
                table = self._table(piece.file, batch)
            except Exception as problem:  # noqa: BLE001 - as in _turns
                report.turns = batch[0][0]  # what has been read since is not taken
                report.stop(piece.log, problem)
                break
            if table.num_rows:
                yield table
        yield report_row(report)

    def _turns(self, piece: Piece, report: FileReport) -> Iterator[PackedTurn]:
        records = read_packed(
            piece.log, self.format, after=piece.after, max_message_bytes=self.max_message_bytes
        )
        try:
            for record in records:
                report.note(record)
                yield from record.turns
            report.whole = True
        except Exception as problem:  # noqa: BLE001 - a worker's boundary: other files are to be read
            report.stop(piece.log, problem)

    def _table(self, file: int, batch: Sequence[tuple[int, PackedTurn]]) -> pa.Table:
        numbers, turns = zip(*batch, strict=True)
        groups = self.groups_of([turn.tenant for turn in turns])
        wanted = ~np.isin(groups, list(self.done)) if self.done else np.ones(len(groups), dtype=bool)
        packed = pack([turn for turn, take in zip(turns, wanted, strict=True) if take])
        places = [
            groups[wanted],
            np.full(packed.num_rows, file, dtype=np.int32),
            np.array(numbers, dtype=np.int64)[wanted],
        ]
        return pa.table([*map(pa.array, places), *packed.columns], schema=ROWS)


def report_row(report: FileReport) -> pa.Table:
    """A file's report as a row among its turns."""
    text: dict[str, Any] = dict.fromkeys(("tenant", "key", "session", "text"), "")
    row = {"group": REPORTS, "file": report.file, "number": -1, "timestamp": None, **text}
    return pa.Table.from_pylist([{**row, "payload": report.to_json()}], schema=ROWS)


def spans(block: pa.Table) -> list[Span]:
    """The groups that a block sorted by ORDER holds, in its order."""
    groups, files, numbers = (block.column(name).to_numpy() for name in ORDER)
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1)).tolist()
    return [
        Span(int(groups[start]), (int(files[start]), int(numbers[start])), start, end - start)
        for start, end in pairwise([*starts, len(groups)])
    ]


def waves_of(pieces: Sequence[Piece], wave_bytes: int) -> Iterator[list[Piece]]:
    """Consecutive pieces whose rows fit into `wave_bytes` together; a larger one is a wave alone."""
    wave: list[Piece] = []
    size_bytes = 0.0
    for piece in pieces:
        if wave and size_bytes + rows_bytes(piece.log) > wave_bytes:
            yield wave
            wave, size_bytes = [], 0.0
        wave.append(piece)
        size_bytes += rows_bytes(piece.log)
    if wave:
        yield wave


def rows_bytes(log: Log) -> float:
    """About how many bytes a log's rows take in Arrow."""
    suffix = next((s for s in EXPANSION if log.name.endswith(s)), "")
    return log.size_bytes * EXPANSION.get(suffix, PLAIN_EXPANSION)
