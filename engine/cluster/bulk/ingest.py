"""Bulk ingest: tasks on a Ray cluster read logs side by side, and a router feeds the shards.

The parts of the logs are sent in their order, so that a tenant's turns arrive as in one process. While
shards store, the next parts are read. What is under way is bounded: parts that are read ahead, by Ray's
object store; turns sent, by the router.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from undertow.engine.base.model import BadInput, UndertowError
from undertow.engine.base.results import IngestReport
from undertow.engine.cluster.bulk.read_ahead import ReadAhead, free_cpus
from undertow.engine.cluster.bulk.reading import FileReport, Part, PartReader, Piece
from undertow.engine.cluster.bulk.records import FileProgress, IngestRecords, pieces_left
from undertow.engine.cluster.shard_map import ShardMap, load
from undertow.engine.cluster.wire import Status, from_buffer
from undertow.engine.readers import JSON_LINES, Format, Log, StoreEncoder
from undertow.engine.storage.location import Location

# of a part, for each shard: enough for a call that is worth it
SHARD_TURNS = 2_048
MOST_PART_TURNS = 65_536
# how many reasons of parked turns are reported
TOLD_PARKED = 10
# between two records of how far the logs were taken
RECORD_S = 5.0


class Feeder(Protocol):
    """What takes turns in: a `Router`."""

    @property
    def store_encoder(self) -> StoreEncoder: ...

    def feed_table(self, table: pa.Table) -> Future[pa.Table]: ...


@dataclass(slots=True)
class BulkReport(IngestReport):
    """What one bulk ingest took in. `files`: those with errors or warnings, in their order.

    `new_turns` is a lower bound: what a call had stored when its shard died comes back as known when it is
    sent again, and no one can tell any more that it was new. `stored_turns` is exact.
    """

    files: list[tuple[Log, FileReport]] = field(default_factory=list)
    parked_turns: int = 0
    parked_reasons: list[str] = field(default_factory=list)

    @property
    def stored_turns(self) -> int:
        """Turns of this run that are known to be stored, by it or before."""
        return self.read_turns - self.parked_turns

    def count(self, receipts: pa.Table) -> None:
        """Add the turns of one call."""
        counts = Counter(receipts.column("status").to_pylist())
        self.read_turns += counts.total()
        self.new_turns += counts[Status.STORED]
        self.parked_turns += counts[Status.PARKED]
        if counts[Status.PARKED]:
            parked = receipts.filter(pc.equal(receipts.column("status"), Status.PARKED.value))
            self.parked_reasons += parked.column("detail").to_pylist()
            del self.parked_reasons[TOLD_PARKED:]


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """How far a bulk ingest is: the logs that it has to read, those that are done, and the turns stored."""

    logs: int
    logs_done: int
    stored_turns: int


@dataclass(frozen=True, slots=True)
class _SentPart:
    """A part under way: the receipts of each shard's turns."""

    reports: list[FileReport]
    receipts: dict[str, Future[pa.Table]]

    @property
    def done(self) -> bool:
        return all(future.done() for future in self.receipts.values())


@dataclass
class BulkIngest:
    """Feeds logs to the shards of a root. Ray must be initialised, and the shards must run.

    `resume`: skip what earlier runs have taken. `strict`: store nothing of the part with the first refused
    input, nor of later ones. `stop` is polled; once it is true, the calls under way are finished and the run
    ends. `part_turns`: of each part, about; None: by the number of shards.
    """

    root: Location
    feeder: Feeder
    _: KW_ONLY
    max_message_bytes: int
    format: Format = "auto"
    resume: bool = False
    strict: bool = False
    part_turns: int | None = None
    on_error: Callable[[BadInput], None] = lambda _: None
    on_warning: Callable[[str], None] = lambda _: None
    on_progress: Callable[[BulkProgress], None] = lambda _: None
    stop: Callable[[], bool] = lambda: False
    report: BulkReport = field(default_factory=BulkReport, init=False)

    def feed(self, logs: Sequence[Log]) -> None:
        """Store every turn of the logs. UndertowError: some shard could not be fed; the others were."""
        began_s = time.perf_counter()
        try:
            self._feed(load(self.root), logs)
        finally:
            self.report.admit_s += time.perf_counter() - began_s

    def _feed(self, shard_map: ShardMap, logs: Sequence[Log]) -> None:
        records = IngestRecords(self.root)
        pieces = [Piece(n, log) for n, log in enumerate(logs)]
        if self.resume:
            pieces, changed = pieces_left(shard_map, logs, records.reached())
            for log in changed:
                self.report.warnings += 1
                self.on_warning(f"{log}: has changed since it was last read; reading it from the start")
        if pieces and not free_cpus():
            self.on_warning("no processor of the Ray cluster is free to read the logs: waiting for one")
        _Run(self, shard_map, pieces, records).feed()
        if not self.report.ended:
            records.tidy()


class _Run:
    """One run over the pieces of some logs."""

    def __init__(
        self, ingest: BulkIngest, shard_map: ShardMap, pieces: Sequence[Piece], records: IngestRecords
    ) -> None:
        self._ingest = ingest
        self._report = ingest.report
        self._shard_map = shard_map
        self._pieces = {piece.file: piece for piece in pieces}
        self._records = records
        self._sent: deque[_SentPart] = deque()
        self._failures: dict[str, UndertowError] = {}
        # how the logs under way were read so far
        self._reports: dict[int, FileReport] = {}
        # how far logs were taken: those under way, and those that have ended since the last record
        self._progress: dict[int, FileProgress] = {}
        self._ended: list[int] = []
        self._logs_done = 0
        self._recorded_s = time.monotonic()

    def feed(self) -> None:
        """Send all parts, and wait for their receipts."""
        ingest, shards = self._ingest, self._shard_map.shards
        part_turns = ingest.part_turns or min(SHARD_TURNS * len(shards), MOST_PART_TURNS)
        lines = all(piece.log.name.endswith(JSON_LINES) for piece in self._pieces.values())
        # others may bring vectors; only a shard that has a store knows its encoder
        encoder = None if lines else ingest.feeder.store_encoder
        reader = PartReader(self._shard_map, ingest.format, ingest.max_message_bytes, part_turns, encoder)
        try:
            read = ReadAhead(reader, list(self._pieces.values()), self._stopping).parts()
            with closing(read) as parts:
                for part in parts:
                    if self._stopping() or len(self._failures) == len(shards) or self._refuses(part):
                        break
                    self._send(part)
                    while self._sent and self._sent[0].done:
                        self._settle(self._sent.popleft())
            while self._sent:
                self._settle(self._sent.popleft())
        finally:
            self._record()
        if self._failures:
            raise _failed(self._failures)

    def _stopping(self) -> bool:
        return self._report.interrupt_if(self._ingest.stop)

    def _refuses(self, part: Part) -> bool:
        """Report the problems in a part; whether one of them ends the run."""
        for found in part.reports:
            so_far = self._reports.setdefault(found.file, FileReport(found.file, 0))
            if not (so_far.errors or so_far.warnings) and (found.errors or found.warnings):
                self._report.files.append((self._pieces[found.file].log, so_far))
            so_far.extend(found)
            self._report.errors += found.errors
            self._report.warnings += found.warnings
            for warning in found.first_warnings:
                self._ingest.on_warning(warning)
            for error in found.first_errors:
                self._ingest.on_error(error)
                if self._ingest.strict:
                    self._report.stopped_by = error
                    return True
        return False

    def _send(self, part: Part) -> None:
        """Send a part to the shards that have not failed. Waits while too many turns wait for one."""
        receipts = {
            shard: self._ingest.feeder.feed_table(from_buffer(turns))
            for shard, turns in part.turns.items()
            if shard not in self._failures
        }
        self._sent.append(_SentPart(part.reports, receipts))

    def _settle(self, part: _SentPart) -> None:
        """Wait for a part's receipts. What a failed shard has not stored is noted for a later run."""
        for shard, receipts in part.receipts.items():
            try:
                self._report.count(receipts.result())
            except UndertowError as error:
                self._failures.setdefault(shard, error)
        for report in part.reports:
            self._advance(report)
        if time.monotonic() - self._recorded_s > RECORD_S:
            self._record()
        self._ingest.on_progress(BulkProgress(len(self._pieces), self._logs_done, self._report.stored_turns))

    def _advance(self, report: FileReport) -> None:
        """The turns of some records of a log are stored, but for those of the shards that have failed."""
        file = report.file
        if (progress := self._progress.get(file)) is None:
            progress = FileProgress.begun(self._pieces[file], self._shard_map.version)
            self._progress[file] = progress
        progress.advance(report, self._failures)
        if report.ended:
            progress.clean = not self._reports.pop(file).errors
            self._ended.append(file)
            self._logs_done += 1

    def _record(self) -> None:
        if self._progress:
            keys = {
                file: self._shard_map.tenant_key(self._pieces[file].log.identity) for file in self._progress
            }
            self._records.note({keys[file]: progress for file, progress in self._progress.items()})
        for file in self._ended:
            del self._progress[file]
        self._ended.clear()
        self._recorded_s = time.monotonic()


def _failed(failures: Mapping[str, UndertowError]) -> UndertowError:
    told = "; ".join(f"{shard}: {error}" for shard, error in sorted(failures.items()))
    return UndertowError(
        f"{len(failures)} of the shards could not be fed to the end ({told}). "
        "All that was acknowledged is stored; mend them, then run the same command again with --resume."
    )
