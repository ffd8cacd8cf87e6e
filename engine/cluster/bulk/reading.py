"""What a worker of a bulk ingest reads: logs in, parts out, each with the turns of every shard in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.model import BadInput
from undertow.engine.cluster.routing.batch import ShardBatch, split
from undertow.engine.cluster.routing.route_table import RouteTable
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.cluster.wire import TURNS, to_buffer
from undertow.engine.readers import Format, Log, StoreEncoder, TurnBlock, block_of_error, read_blocks

# of each file and kind, how many problems are reported word by word
TOLD_PROBLEMS = 50
# of the payloads and vectors of a part
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

    def note(self, block: TurnBlock, position: int) -> None:
        """Count the records of a block up to a position."""
        found = [record for record in block.problems if record.position <= position]
        errors = [error for record in found for error in record.errors]
        warnings = [warning for record in found for warning in record.warnings]
        counts = block.before(position), len(errors), len(warnings)
        self.extend(FileReport(self.file, position, self.head, *counts, errors, warnings))

    def extend(self, later: FileReport) -> None:
        """Add the report on the records that follow."""
        self.position, self.head, self.ended = later.position, later.head, later.ended
        self.turns += later.turns
        self.errors += later.errors
        self.warnings += later.warnings
        self.first_errors += later.first_errors[: TOLD_PROBLEMS - len(self.first_errors)]
        self.first_warnings += later.first_warnings[: TOLD_PROBLEMS - len(self.first_warnings)]


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
    """How logs become parts of about `part_turns` turns. Travels to the workers.

    `encoder`: that of the shards, which given vectors must be of. None: they are not read.
    """

    shard_map: ShardMap
    format: Format
    max_message_bytes: int
    part_turns: int
    encoder: StoreEncoder | None = None

    def parts(self, pieces: Sequence[Piece]) -> Iterator[Part]:
        """The records of the logs, in order, each whole in one part. Ends a log alone if its reader fails."""
        part = _PartBuilder(self.shard_map, self.part_turns)
        for piece in pieces:
            head = piece.log.head()
            report = part.begin(piece, piece.after, head)
            for block in self._blocks(piece):
                left: TurnBlock | None = block
                while left is not None and (left := part.add(left)) is not None:
                    yield part.build()
                    report = part.begin(piece, report.position, head)
            report.ended = True
        if part.reports:
            yield part.build()

    def _blocks(self, piece: Piece) -> Iterator[TurnBlock]:
        position = piece.after
        try:
            for block in read_blocks(
                piece.log,
                self.format,
                after=piece.after,
                max_message_bytes=self.max_message_bytes,
                encoder=self.encoder,
            ):
                position = block.position
                yield block
        except Exception as problem:  # noqa: BLE001 - a worker's boundary: other files are to be read
            reason = f"reading stopped after position {position}: {type(problem).__name__}: {problem}"
            cure = "Please report it, with what stands there; the next run reads on from there."
            yield block_of_error(position, BadInput(piece.log.shown, None, None, reason, cure))


class _PartBuilder:
    """Collects the records of a part, up to `most_turns` turns or PART_BYTES and the last record's."""

    def __init__(self, shard_map: ShardMap, most_turns: int) -> None:
        self._routes = RouteTable(shard_map)
        self._most_turns = most_turns
        self._clear()

    def _clear(self) -> None:
        self._tables: list[pa.Table] = [TURNS.empty_table()]
        self._count = self._size_bytes = 0
        self.reports: list[FileReport] = []

    def begin(self, piece: Piece, position: int, head: dict[str, Any]) -> FileReport:
        """The records that follow are those of a log after a position."""
        self._piece = piece
        self.reports.append(FileReport(piece.file, position, head))
        return self.reports[-1]

    def add(self, block: TurnBlock) -> TurnBlock | None:
        """Add records until the part is full: those that are left. None: there is room for more."""
        turns, positions = self._to_send(block)
        vector_sizes = pc.fill_null(pc.binary_length(turns.column("vector")), 0)
        sizes = pc.add(pc.binary_length(turns.column("payload")), vector_sizes).to_numpy()
        counts = self._count + np.arange(1, len(positions) + 1)
        sizes_bytes = self._size_bytes + np.cumsum(sizes)
        full = np.flatnonzero((counts >= self._most_turns) | (sizes_bytes >= PART_BYTES))
        position = int(positions[full[0]]) if len(full) else block.position
        stop = int(np.searchsorted(positions, position, side="right"))
        self._tables.append(turns.slice(0, stop))
        self._count += stop
        self._size_bytes += int(sizes[:stop].sum())
        self.reports[-1].note(block, position)
        return block.after(position) if len(full) else None

    def _to_send(self, block: TurnBlock) -> tuple[pa.Table, NDArray[np.int64]]:
        """The turns of a block that are not stored yet, and the record of each, int64 [turns]."""
        piece, positions = self._piece, block.positions
        if not len(positions) or positions[0] > piece.until:
            return block.turns, positions
        tenants = block.turns.column("tenant").combine_chunks().dictionary_encode()
        routes = self._routes.routes_of(tenants.dictionary.to_pylist())
        reached = np.array([piece.behind.get(route.shard, piece.until) for route in routes])
        left = positions > reached[tenants.indices.to_numpy()]
        return block.turns.filter(pa.array(left)), positions[left]

    def build(self) -> Part:
        """The part; the next one begins empty."""
        batch = ShardBatch.of(pa.concat_tables(self._tables))
        turns = split(batch, self._routes.routes_of, max(1, len(batch)))
        part = Part({route.shard: to_buffer(mine.table) for route, mine in turns}, self.reports)
        self._clear()
        return part
