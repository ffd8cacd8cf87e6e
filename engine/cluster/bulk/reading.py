"""What a worker of a bulk ingest reads: logs in, parts out, each with the turns of every shard in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from undertow.engine.base.model import BadInput, PackedTurn
from undertow.engine.cluster.routing.route_table import RouteTable
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.cluster.wire import pack, to_buffer
from undertow.engine.readers import Format, Log, PackedRecord, read_packed

# of each file and kind, how many problems are reported word by word
TOLD_PROBLEMS = 50
# of the payloads of a part
PART_BYTES = 16 << 20


@dataclass(slots=True)
class FileReport:
    """How some records of one log were read: counts, and the first problems of each kind.

    `position`: the last of them, to resume after. `ended`: none follows. `head`: how the file began
    (`Log.head`).
    """

    file: int
    position: int
    head: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    errors: int = 0
    warnings: int = 0
    first_errors: list[BadInput] = field(default_factory=list)
    first_warnings: list[str] = field(default_factory=list)
    ended: bool = False

    def note(self, record: PackedRecord) -> None:
        """Count one more record."""
        self.turns += len(record.turns)
        self._count(record.position, len(record.errors), len(record.warnings), record.errors, record.warnings)

    def extend(self, later: FileReport) -> None:
        """Add the report on the records that follow."""
        self.turns += later.turns
        self.head, self.ended = later.head, later.ended
        self._count(later.position, later.errors, later.warnings, later.first_errors, later.first_warnings)

    def _count(
        self, position: int, errors: int, warnings: int, told: Sequence[BadInput], warned: Sequence[str]
    ) -> None:
        self.position = position
        self.errors += errors
        self.warnings += warnings
        self.first_errors += told[: TOLD_PROBLEMS - len(self.first_errors)]
        self.first_warnings += warned[: TOLD_PROBLEMS - len(self.first_warnings)]


@dataclass(frozen=True, slots=True)
class Piece:
    """One log to read after a position. `file`: its number in the order.

    Turns up to the position `until` are stored already, but for those of the shards in `behind`, which have
    theirs up to the position given there.
    """

    file: int
    log: Log
    after: int = 0
    until: int = 0
    behind: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive records of some logs.

    `turns`: of each shard, in order, as wire.TURNS by `to_buffer`. `reports`: on the records of each log.
    """

    turns: dict[str, pa.Buffer]
    reports: list[FileReport]


@dataclass(frozen=True, slots=True)
class PartReader:
    """How logs become parts of about `part_turns` turns. Travels to the workers."""

    shard_map: ShardMap
    format: Format
    max_message_bytes: int
    part_turns: int

    def parts(self, pieces: Sequence[Piece]) -> Iterator[Part]:
        """The records of the logs, in order, each whole in one part. Ends a log alone if its reader fails."""
        part = _PartBuilder(self.shard_map)
        for piece in pieces:
            head = piece.log.head()
            report = part.begin(piece, piece.after, head)
            for record in self._records(piece):
                part.add(record)
                if len(part) >= self.part_turns or part.size_bytes >= PART_BYTES:
                    yield part.build()
                    report = part.begin(piece, record.position, head)
            report.ended = True
        if part.reports:
            yield part.build()

    def _records(self, piece: Piece) -> Iterator[PackedRecord]:
        position = piece.after
        try:
            for record in read_packed(
                piece.log, self.format, after=piece.after, max_message_bytes=self.max_message_bytes
            ):
                position = record.position
                yield record
        except Exception as problem:  # noqa: BLE001 - a worker's boundary: other files are to be read
            reason = f"reading stopped after position {position}: {type(problem).__name__}: {problem}"
            cure = "Please report it, with what stands there; the next run reads on from there."
            yield PackedRecord(position, errors=(BadInput(piece.log.shown, None, None, reason, cure),))


class _PartBuilder:
    """Collects the records of a part."""

    def __init__(self, shard_map: ShardMap) -> None:
        self._routes = RouteTable(shard_map)
        self._clear()

    def _clear(self) -> None:
        self._turns: list[PackedTurn] = []
        self.reports: list[FileReport] = []
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._turns)

    def begin(self, piece: Piece, position: int, head: dict[str, Any]) -> FileReport:
        """The records that follow are those of a log after a position."""
        self._piece = piece
        self.reports.append(FileReport(piece.file, position, head))
        return self.reports[-1]

    def add(self, record: PackedRecord) -> None:
        self.reports[-1].note(record)
        turns: Sequence[PackedTurn] = record.turns
        if record.position <= self._piece.until:
            reached, until = self._piece.behind, self._piece.until
            turns = [t for t in turns if record.position > reached.get(self._routes.home_of(t.tenant), until)]
        self._turns += turns
        self.size_bytes += sum(len(turn.payload) for turn in turns)

    def build(self) -> Part:
        """The part; the next one begins empty."""
        of_shard: dict[str, list[PackedTurn]] = {}
        routes = self._routes.routes_of([turn.tenant for turn in self._turns])
        for route, turn in zip(routes, self._turns, strict=True):
            of_shard.setdefault(route.shard, []).append(turn)
        part = Part({shard: to_buffer(pack(turns)) for shard, turns in of_shard.items()}, self.reports)
        self._clear()
        return part
