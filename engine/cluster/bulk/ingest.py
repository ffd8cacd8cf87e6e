"""Bulk ingest: Ray Data reads many logs side by side, groups their turns, and workers feed the shards.

Logs are taken in waves of bounded size, in their order: while one wave is fed, the next is read. So a
tenant's turns arrive in the order in which one process would take them, memory is bounded whatever the
amount, and what is done is done for a resumed run. A wave's turns are sorted into groups of whole tenants
of one shard; a group is fed in order, one call after another, by one worker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import pyarrow as pa

from undertow.engine.api.ingest_files import IngestReport
from undertow.engine.base.model import BadInput, UndertowError
from undertow.engine.cluster.bulk.feeding import TOLD_PARKED, Feeder, FeedReport, feed_group, inspect
from undertow.engine.cluster.bulk.reading import (
    ORDER,
    FileReport,
    Piece,
    Span,
    WaveReader,
    rows_bytes,
    waves_of,
)
from undertow.engine.cluster.bulk.records import IngestRecords, pieces_left, reached_by, wave_name
from undertow.engine.cluster.shard_map import ShardMap, load
from undertow.engine.cluster.wire import Status
from undertow.engine.readers import Format, Log
from undertow.engine.storage.location import Location

try:
    import ray
    import ray.data
    from ray.exceptions import RayError
except ModuleNotFoundError as missing:
    raise UndertowError(
        f"bulk ingest needs Ray Data ({missing}). Install it: pip install 'undertow[cluster]'"
    ) from None

# of Ray's object store, a wave is at most one of so many parts: two waves are there at a time, each as
# it was read, as it is being sorted, and sorted
WAVE_PARTS = 8
MAX_WAVE_BYTES = 4 << 30
# of turns in a group, about 10,000: enough for calls that are worth it, few enough to show progress
GROUP_BYTES = 8 << 20
# feeding a shard at a time: one call is worked on, the next is waiting
FEEDERS_PER_SHARD = 2
# of a processor: a feeder waits nearly all the time
FEEDER_CPUS = 0.1
# times that a wave is read again where Ray lost what it had read
ATTEMPTS = 3
POLL_S = 0.25
# of rows that one task reads
TASK_BYTES = 64 << 20


@dataclass(slots=True)
class BulkReport(IngestReport):
    """What one bulk ingest took in. `files`: those with errors or warnings, in their order.

    `new_turns` is a lower bound: what a call had stored when its shard or its sender died comes back as
    known when it is sent again, and no one can tell any more that it was new. `stored_turns` is exact.
    """

    files: list[tuple[Log, FileReport]] = field(default_factory=list)
    parked_turns: int = 0
    parked_reasons: list[str] = field(default_factory=list)

    @property
    def stored_turns(self) -> int:
        """Turns of this run that are known to be stored, by it or before."""
        return self.read_turns - self.parked_turns


@dataclass(frozen=True, slots=True)
class BulkProgress:
    """How far a bulk ingest is: the wave that is being fed, of how many, and the groups it has left."""

    waves: int
    wave: int
    stored_turns: int
    groups_left: int


# some rows of a block: its reference, the first row, and how many
_Part = tuple[Any, int, int]


@dataclass(slots=True)
class _Wave:
    """A wave that has been read: where its groups are, and how its files were."""

    name: str
    reading: WaveReader
    pieces: list[Piece]
    groups: dict[int, list[_Part]]
    reports: list[FileReport]


@dataclass
class BulkIngest:
    """Feeds logs to the shards of a root. Ray must be initialised, and the shards must run.

    `connect` is called in the workers, and must be picklable. `resume`: skip what earlier runs have taken.
    `strict`: store nothing of the wave with the first refused input, nor of later ones. `stop` is polled
    while shards are fed; once it is true, the groups under way are finished and the run ends. `wave_bytes`
    of rows in Arrow; None: what Ray's object store has room for.
    """

    root: Location
    connect: Callable[[], Feeder]
    _: KW_ONLY
    max_message_bytes: int
    format: Format = "auto"
    resume: bool = False
    strict: bool = False
    wave_bytes: int | None = None
    group_bytes: int = GROUP_BYTES
    on_error: Callable[[BadInput], None] = lambda _: None
    on_warning: Callable[[str], None] = lambda _: None
    on_progress: Callable[[BulkProgress], None] = lambda _: None
    stop: Callable[[], bool] = lambda: False
    report: BulkReport = field(default_factory=BulkReport, init=False)

    def feed(self, logs: Sequence[Log]) -> None:
        """Store every turn of the logs. UndertowError: some shard could not be fed; the others were."""
        began_s = time.perf_counter()
        shard_map = load(self.root)
        pieces = [Piece(n, log, 0) for n, log in enumerate(logs)]
        if self.resume:
            pieces, changed = pieces_left(shard_map, logs, IngestRecords(self.root).reached())
            for log in changed:
                self._warn(f"{log}: has changed since it was last read; reading it from the start")
        waves = list(waves_of(pieces, self.wave_bytes or _room_bytes()))
        if pieces and not _free_cpus():
            self.on_warning("no processor of the Ray cluster is free to read the logs: waiting for one")
        with _quiet_ray_data():
            try:
                self._feed_waves(shard_map, waves)
            finally:
                self.report.admit_s += time.perf_counter() - began_s
        if not self.report.ended:
            IngestRecords(self.root).tidy()

    def _stopping(self) -> bool:
        return self.report.interrupt_if(self.stop)

    def _feed_waves(self, shard_map: ShardMap, waves: list[list[Piece]]) -> None:
        """Feed one wave while the next is read."""
        coming = [_begun(partial(self._read, shard_map, pieces)) for pieces in waves[:1]]
        for number in range(len(waves)):
            wave = _waited(coming.pop(), self._stopping)
            if wave is None or self._refuses(wave):
                return
            coming = [
                _begun(partial(self._read, shard_map, pieces)) for pieces in waves[number + 1 : number + 2]
            ]
            self._feed_wave(wave, partial(BulkProgress, len(waves), number + 1))
            if self.report.ended:
                return

    # ---- reading

    def _read(self, shard_map: ShardMap, pieces: list[Piece]) -> _Wave:
        """A wave's turns in groups in Ray's object store. Read again where Ray has lost parts of it."""
        size_bytes = sum(rows_bytes(piece.log) for piece in pieces)
        buckets = max(1, round(size_bytes / self.group_bytes / len(shard_map.shards)))
        reading = WaveReader(shard_map, buckets, self.format, self.max_message_bytes)
        name = wave_name(reading, pieces)
        if self.resume:
            reading = replace(reading, done=IngestRecords(self.root).stored(name))
        for attempt in range(1, ATTEMPTS + 1):
            try:
                groups, reports = _sorted(reading, pieces)
                break
            except RayError as error:
                if attempt == ATTEMPTS:
                    raise UndertowError(f"the logs cannot be read on the Ray cluster: {error}") from error
        return _Wave(name, reading, pieces, groups, reports)

    def _refuses(self, wave: _Wave) -> bool:
        """Tell the problems of a wave's files; whether one of them ends the run."""
        for piece, report in zip(wave.pieces, wave.reports, strict=True):
            self.report.errors += report.errors
            self.report.warnings += report.warnings
            if report.errors or report.warnings:
                self.report.files.append((piece.log, report))
            for warning in report.first_warnings:
                self.on_warning(warning)
            for error in report.first_errors:
                self.on_error(error)
                if self.strict:
                    self.report.stopped_by = error
                    return True
        return False

    def _warn(self, text: str) -> None:
        self.report.warnings += 1
        self.on_warning(text)

    # ---- feeding

    def _feed_wave(self, wave: _Wave, progress: Callable[..., BulkProgress]) -> None:
        """Feed all groups, a bounded number of each shard at a time: a slow shard holds no other up."""

        def feed(parts: list[_Part], *how: Any) -> FeedReport:
            """In a worker: one part of a group is fetched after another."""
            blocks: Iterator[Any] = ((ray.get(ref), start, count) for ref, start, count in parts)
            return feed_group((block.slice(start, count) for block, start, count in blocks), *how)

        task = ray.remote(feed).options(num_cpus=FEEDER_CPUS, max_retries=-1)
        queues = _queues(wave)
        running: dict[Any, str] = {}
        failures: dict[str, Exception] = {}
        while True:
            for shard, queue in queues.items():
                busy = sum(1 for other in running.values() if other == shard)
                while queue and busy < FEEDERS_PER_SHARD and shard not in failures and not self._stopping():
                    group = queue.popleft()
                    ref = task.remote(wave.groups[group], group, self.connect, self.root, wave.name)
                    running[ref] = shard
                    busy += 1
            if not running:
                break
            ready, _ = ray.wait(list(running), num_returns=1, timeout=POLL_S)
            for ref in ready:
                shard = running.pop(ref)
                try:
                    self._count(ray.get(ref))
                except (UndertowError, RayError) as error:
                    failures.setdefault(shard, error)
            left = len(running) + sum(map(len, queues.values()))
            self.on_progress(progress(self.report.stored_turns, left))
        if failures:
            raise _failed(failures)
        if not self.report.ended:
            reports = zip(wave.pieces, wave.reports, strict=True)
            whole = [reached_by(wave.reading.shard_map, p.log, r) for p, r in reports if r.whole]
            IngestRecords(self.root).note_reached(wave.name, dict(whole))

    def _count(self, fed: FeedReport) -> None:
        self.report.read_turns += fed.turns
        self.report.new_turns += fed.counts[Status.STORED]
        self.report.parked_turns += fed.counts[Status.PARKED]
        self.report.parked_reasons += fed.parked[: TOLD_PARKED - len(self.report.parked_reasons)]


def _free_cpus() -> int:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return int(free.get("CPU", 0))


def _room_bytes() -> int:
    held: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    room = int(held.get("object_store_memory", 0))
    return max(1, min(room // WAVE_PARTS, MAX_WAVE_BYTES))


def _sorted(reading: WaveReader, pieces: Sequence[Piece]) -> tuple[dict[int, list[_Part]], list[FileReport]]:
    """Where the turns of each group are, in order, and the report of each piece, in order."""
    tasks = list(waves_of(pieces, TASK_BYTES))

    def read_task(rows: pa.Table) -> Iterator[pa.Table]:
        for number in rows.column("task").to_pylist():
            yield from chain.from_iterable(map(reading.tables, tasks[number]))

    items = [{"task": number} for number in range(len(tasks))]
    turns = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        read_task, batch_size=1, batch_format="pyarrow", num_cpus=1
    )
    blocks = turns.sort(list(ORDER)).to_arrow_refs()
    look = ray.remote(inspect).options(num_cpus=FEEDER_CPUS, max_retries=-1)
    found: list[tuple[Span, Any]] = []
    reports: list[FileReport] = []
    for block, (spans, told) in zip(blocks, ray.get([look.remote(b) for b in blocks]), strict=True):
        found += [(span, block) for span in spans]
        reports += map(FileReport.from_json, told)
    groups: dict[int, list[_Part]] = {}
    for span, block in sorted(found, key=lambda pair: pair[0][:2]):
        groups.setdefault(span.group, []).append((block, span.offset, span.rows))
    return groups, sorted(reports, key=lambda report: report.file)


def _queues(wave: _Wave) -> dict[str, deque[int]]:
    """The groups that wait for each shard."""
    queues: dict[str, deque[int]] = {}
    for group in sorted(wave.groups):
        queues.setdefault(wave.reading.shard_of(group), deque()).append(group)
    return queues


def _failed(failures: dict[str, Exception]) -> UndertowError:
    told = "; ".join(f"{shard}: {error}" for shard, error in sorted(failures.items()))
    return UndertowError(
        f"{len(failures)} of the shards could not be fed to the end ({told}). "
        "All that was acknowledged is stored; mend them, then run the same command again with --resume."
    )


def _begun(work: Callable[[], _Wave]) -> Future[_Wave]:
    """Work in a thread that does not outlive the process, nor keep it from ending."""
    future: Future[_Wave] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
            future.set_exception(error)

    threading.Thread(target=run, name="bulk-read", daemon=True).start()
    return future


def _waited(coming: Future[_Wave], stopping: Callable[[], bool]) -> _Wave | None:
    """The wave that is being read; None: the run was stopped before it came."""
    while not coming.done():
        if stopping():
            return None
        time.sleep(POLL_S / 5)
    return coming.result()


@contextmanager
def _quiet_ray_data() -> Iterator[None]:
    """Ray Data without bars and log lines of its own: we show progress ourselves."""
    # it warns that there are no bars
    quiet = {"ray.data": logging.WARNING, "ray.data._internal.progress": logging.ERROR}
    before = {name: logging.getLogger(name).level for name in quiet}
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.shuffle_strategy = ray.data.context.ShuffleStrategy.SORT_SHUFFLE_PULL_BASED
    for name, level in quiet.items():
        logging.getLogger(name).setLevel(level)
    try:
        with ray.data.DataContext.current(context):
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
