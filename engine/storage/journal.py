"""The journal: one Lance dataset a shard, one atomic append a step. All other state derives from it.

Rows are never changed in place. A row's `kind` says what it is; `payload` is JSON whose fields
depend on the kind (see engine/storage/row_codec.py). Vectors are little-endian fp16 bytes: a fixed-size list
would spend a full vector on each of the many rows that have none (docs/decisions.md). Writers take
over from each other by the rules of engine/storage/fencing.py; their marks are rows too, of kind "epoch".
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from undertow.engine.storage.fencing import MARK_LSN, FenceMark, Fences
from undertow.engine.storage.lance_log import LANCE_ERRORS, LanceLog
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import (
    DESCRIPTION,
    JOURNAL_NAME,
    StoreError,
    StoreInfo,
    StoreLocked,
    WriterLock,
    read_info,
)
from undertow.engine.storage.version_cleanup import VersionCleaner

log = logging.getLogger(__name__)

Durability = Literal["commit", "fsync"]
Kind = Literal[
    "turn",
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

COMMITS_PER_COMPACTION = 16
KEYS_PER_FILTER = 512
ROWS_PER_BATCH = 4_096
ROWS_PER_SURVEY_BATCH = 262_144

MARKS = "tenant_key = '' AND kind = 'epoch'"
NO_MARKS = "kind != 'epoch'"


class JournalError(StoreError):
    """An append or a read failed; nothing of the failed append is acknowledged."""


class Fenced(JournalError):
    """A later writer has taken the store over: this one is to stop."""


class Displaced(JournalError):
    """Another writer has taken the store over; this one does not take it back (engine/storage/fencing.py)."""


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


class Journal:
    """Append-only log of one shard. Open with `create` or `open`; one writer at a time."""

    def __init__(
        self,
        location: Location,
        info: StoreInfo,
        *,
        lock: WriterLock | None = None,
        takeover: bool = False,
        life: str = "",
        writable: bool = False,
        durability: Durability = "commit",
    ) -> None:
        self.location = location
        self.info = info
        self.writable = writable
        self.epoch = 0
        self._lock = lock
        self._takeover = takeover
        self._life = life
        self._durability = durability
        self._commits = 0
        self._failure: JournalError | None = None
        self._where = location / info.journal
        self._next_lsn = 0
        # of the version `_seen`, the last that we have looked at for claims
        self._seen = 0
        self._fences = Fences([])
        self._stale = ""
        self._ordered = True
        with self._opening():
            self._table = LanceLog(self._where, fsync=durability == "fsync")
        self._cleaner = VersionCleaner(self._table)

    @classmethod
    def create(
        cls,
        where: Location | Path | str,
        dim: int,
        encoder: dict[str, Any],
        *,
        hash_key: str | None = None,
        policy: str = "recmem",
    ) -> None:
        """Make an empty store, if there is none. Safe to repeat after a kill, or from many processes.

        `hash_key`: 64 hexadecimal digits, for stores between which rows are to move; else a new one.
        `policy`: the name of the one that is to make its memories.
        """
        location = Location.of(where)
        info = StoreInfo.new(dim, encoder, hash_key, policy)
        try:
            if not location.exists(DESCRIPTION):
                LanceLog.make(location / info.journal, SCHEMA)
                location.create(DESCRIPTION, info.as_json)
        except (*LANCE_ERRORS, StoreError) as error:
            raise StoreError(
                f"cannot create a store in {location}: {error}. Check --store, its rights and disk space."
            ) from error

    @classmethod
    def open(
        cls,
        where: Location | Path | str,
        *,
        writable: bool,
        durability: Durability = "commit",
        takeover: bool = False,
        life: str = "",
        settled: bool = False,
    ) -> Journal:
        """Open an existing store; a writer begins a new epoch, which stops any former writer for good.

        In a folder, a writer refuses (StoreLocked) while another process holds the lock, unless
        `takeover`. An object store has no lock: there the last to open always takes over.
        `life`: that the writer belongs to, if it starts again by itself. Displaced: that is over.
        `settled`, for a reader that acts on what it reads: JournalError while a writer is taking over,
        since rows that its former has not acknowledged may turn out not to count.
        """
        location = Location.of(where)
        info = read_info(location)  # refuses what is no store before anything is written into it
        if not writable:
            journal = cls(location, info, durability=durability)
            with journal._opening():
                journal._survey()
            if settled and journal._fences.claimed > journal._fences.in_force:
                raise JournalError(
                    f"another writer is taking over {journal._where}. Try again when it is up."
                )
            return journal
        lock = _lock(location, takeover)
        try:
            journal = cls(
                location,
                read_info(location),
                lock=lock,
                takeover=takeover,
                life=life,
                writable=True,
                durability=durability,
            )
            with journal._opening():
                journal._begin()
            return journal
        except BaseException:
            if lock is not None:
                lock.close()
            raise

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except LANCE_ERRORS as error:
            raise JournalError(
                f"{self._where} cannot be opened ({error}). Restore it from a backup."
            ) from error

    def close(self) -> None:
        self.writable = False
        self.finish_tidying()  # under the lock: the next writer is to be alone
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- who may write

    def _begin(self) -> None:
        """Claim the next epoch and begin it: see engine/storage/fencing.py."""
        token = secrets.token_hex(8)
        writer = f"{self._life}.{token}" if self._life else token
        contested = True
        while contested:
            fences = self._read_fences()
            if self._life and fences.is_over(self._life):
                raise Displaced(
                    f"another cluster works on this root and has taken over {self.location}. Stop one of the "
                    "two. To go on with this one, stop its shards (`undertow cluster drain --stop`) and run "
                    "the command again."
                )
            self.epoch = fences.claimed + 1
            with self._putting():
                self._table.append(_mark_table([FenceMark(self.epoch, writer)]))
            contested = self._read_fences().contested(self.epoch, writer)
        self._table.reload()
        self._look()
        begin = FenceMark(self.epoch, writer, self._next_lsn, self._fences.in_force)
        with self._putting():
            self._table.append(_mark_table([begin]))
            self._follow()
        self._fences = self._read_fences()
        if read_info(self.location).journal != self.info.journal:
            raise StoreError(f"{self.location} was embedded again while it was opened. Open it once more.")

    @property
    def former_epoch(self) -> int:
        """The epoch of the writer that the last one took over from; 0 for none."""
        return self._fences.former

    def _read_fences(self) -> Fences:
        """The marks that stand in the version we are at."""
        marks = self._table.scanner(["epoch", "payload"], MARKS).to_table().to_pylist()
        return Fences(FenceMark.of(**mark) for mark in marks)

    def check_in_force(self) -> None:
        """Fenced if another writer has claimed the store by now."""
        with self._rewriting():
            self._table.reload()
            self._look()

    def _follow(self, versions: int = 1) -> None:
        """After so many of our commits: if others came between, see whether someone has claimed the store."""
        if self._table.version > self._seen + versions:
            self._look()
        self._seen = self._table.version

    def _look(self) -> None:
        """Fenced if someone has claimed the store in the version we are at."""
        self._survey()
        if self.writable and self._fences.claimed > self.epoch:
            self._failure = Fenced(
                f"another writer has taken over {self._where} (epoch {self._fences.claimed} after "
                f"{self.epoch}). Nothing of this step was acknowledged; leave it to that one, or open again."
            )
            raise self._failure

    def _survey(self) -> None:
        """Learn from the version we are at which rows are stale, and where the log ends."""
        self._fences = self._read_fences()
        self._ordered = True
        stale: set[int] = set()
        end = np.empty(0, np.int64)
        last = self._fences.first_lsn - 1
        scanner = self._table.scanner(["epoch", "lsn"], batch_size=ROWS_PER_SURVEY_BATCH)
        for batch in scanner.to_batches():
            epochs, lsns = (batch.column(name).to_numpy() for name in ("epoch", "lsn"))
            dead = self._fences.stale(epochs, lsns)
            stale.update(np.unique(epochs[dead]).tolist())
            alive = np.concatenate([end, lsns[~dead & (lsns != MARK_LSN)]])
            # a former writer's late compaction may put older rows behind newer ones
            self._ordered &= bool((np.diff(alive) > 0).all())
            end = alive[-1:]
            last = max(last, int(alive.max(initial=MARK_LSN)))
        ends = self._fences.end_of(stale)
        self._stale = " OR ".join(f"(epoch = {epoch} AND lsn >= {end})" for epoch, end in ends.items())
        self._next_lsn = max(self._next_lsn, last + 1)
        self._seen = self._table.version

    # ---- writing

    def append(self, rows: Sequence[Row]) -> None:
        """Write all rows as one atomic version. JournalError: none of them is acknowledged.

        After a failure every later append fails too: the state in memory is ahead of the log by then,
        and only opening the store again brings them together. Fenced: another writer has taken over.
        """
        self._check_writable()
        if not rows:
            return
        for lsn, row in enumerate(rows, self._next_lsn):
            row.lsn, row.epoch = lsn, self.epoch
        self.append_copies(rows)

    def append_copies(self, rows: Sequence[Row]) -> None:
        """Append rows of another journal as they are, lsn and epoch kept; for `reindex`. JournalError."""
        table = _to_table(rows)
        with self._putting():
            self._table.append(table)
        self._acknowledge(rows[-1].lsn + 1)

    def append_stream(self, rows: Iterable[Row | pa.RecordBatch]) -> int:
        """Write any number of rows as one atomic version, a few batches in memory; returns how many.

        Record batches have the columns of SCHEMA. All get new lsns, in order, and this writer's epoch.
        What the iterator raises passes through: then nothing is written, and the journal goes on.
        """
        self._check_writable()
        first, stream = self._next_lsn, _Stream(rows, self._next_lsn, self.epoch)
        reader = pa.RecordBatchReader.from_batches(SCHEMA, stream)
        with self._putting(stream):
            self._table.append_stream(reader)
        self._acknowledge(stream.next_lsn)
        return stream.next_lsn - first

    def sync(self) -> None:
        """Have all that is stored on the disk, whatever the durability of appends. JournalError.

        For what others are about to act upon, maybe on another machine: who loses power loses no more.
        """
        with self._rewriting():
            self._table.sync()

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(f"an earlier write failed: {self._failure}")
        if not self.writable:
            raise JournalError(f"{self.location} was opened for reading only.")

    @contextmanager
    def _putting(self, stream: _Stream | None = None) -> Iterator[None]:
        """Around what adds rows: an error of storage ends all writing, one of the rows' source does not."""
        try:
            yield
        except LANCE_ERRORS as error:
            if stream is not None and stream.error is not None:
                raise stream.error from None
            self._failure = JournalError(
                f"cannot write to {self._where}: {error}. Nothing of this step was acknowledged; "
                "free space or fix the disk, then run again."
            )
            raise self._failure from error

    def _acknowledge(self, next_lsn: int) -> None:
        """What every append ends with, before its rows count as stored. Fenced."""
        with self._putting():
            self._follow()
        self._next_lsn = next_lsn
        self._commits += 1
        if self._commits % COMMITS_PER_COMPACTION == 0:
            self._try_to_tidy()

    def _try_to_tidy(self) -> None:
        """The rows of the append are stored by now: that a disk is too full for more must not undo that."""
        try:
            self._tidy()
        except LANCE_ERRORS as error:
            log.warning("cannot compact %s: %s. It goes on uncompacted; free some space.", self._where, error)
        except Fenced as error:  # by a claim after this append's commit; the next append is refused
            log.warning("%s", error)

    # ---- reading

    def read(
        self,
        *,
        tenant_keys: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        vectors: bool = True,
        after_lsn: int = -1,
    ) -> Iterator[Row]:
        """Rows in append order, behind `after_lsn`; of the named tenants, kinds and ids where given.

        Streams: memory is bounded by one batch, plus one tenant filter's rows when keys are given."""
        columns = [name for name in SCHEMA.names if vectors or name != "vector"]
        late = f"lsn > {after_lsn}" if after_lsn >= 0 else None
        wanted = _all_of(_any_of("kind", kinds), _any_of("id", ids), late)
        for keys in _key_groups(tenant_keys):
            filter = self._counting(_all_of(_any_of("tenant_key", keys), wanted))
            for batch in self._scan(columns, filter):
                yield from _to_rows(batch)

    def columns(self, names: Sequence[str], *, kinds: Sequence[str] | None = None) -> pa.Table:
        """Some columns of all rows (of `kinds`), in append order: cheap even for millions of rows."""
        filter = self._counting(_any_of("kind", kinds))
        if self._ordered:
            return self._table.scanner(names, filter).to_table()
        return self._table.scanner([*{*names, "lsn"}], filter).to_table().sort_by("lsn").select(list(names))

    def _scan(self, columns: Sequence[str], filter: str | None) -> Iterator[pa.RecordBatch]:
        scanner = self._table.scanner(columns, filter, batch_size=ROWS_PER_BATCH)
        if self._ordered:
            return iter(scanner.to_batches())
        return iter(scanner.to_table().sort_by("lsn").to_batches(ROWS_PER_BATCH))

    def _counting(self, filter: str | None) -> str | None:
        """`filter`, without marks where it names nothing, and without stale rows."""
        return _all_of(filter or NO_MARKS, f"NOT ({self._stale})" if self._stale else None)

    def count(self, tenant_keys: Sequence[str]) -> int:
        """How many rows the tenants have."""
        return self._table.count(self._counting(_any_of("tenant_key", tenant_keys)))

    @property
    def row_count(self) -> int:
        return self._table.count(self._counting(None))

    @property
    def next_lsn(self) -> int:
        return self._next_lsn

    # ---- deleting and tidying

    def delete(
        self, tenant_keys: Sequence[str] | None, *, before_lsn: int, kinds: Sequence[str] | None = None
    ) -> None:
        """Delete rows older than `before_lsn`, of these tenants and kinds; bytes stay until `purge`.

        None stands for all of them, but the marks of writers stay.
        """
        old = f"lsn < {before_lsn} AND {_any_of('kind', kinds) or NO_MARKS}"
        for keys in _key_groups(tenant_keys):
            with self._rewriting():
                self._table.delete(old if keys is None else f"{_any_of('tenant_key', keys)} AND {old}")
                self._follow()

    def delete_rows(self, lsns: Sequence[int]) -> None:
        """Delete single rows; bytes stay until `purge`."""
        if lsns:
            with self._rewriting():
                self._table.delete(f"{NO_MARKS} AND lsn IN ({', '.join(map(str, lsns))})")
                self._follow()

    def purge(self) -> bool:
        """Rewrite what deletions touched and drop all old versions: no deleted byte stays behind.

        True: for certain. False: where writers take over, an append that was cut off in the last ten minutes
        may still have its files; a later purge takes them.
        """
        self.finish_tidying()
        with self._rewriting():
            if self._stale:
                self._table.delete(self._stale)
            self._table.rewrite_deleted()
            self.check_in_force()
            self._table.drop_history(alone=self._alone)
            self.remove_others()
        return self._alone

    @property
    def _alone(self) -> bool:
        """Whether no other writer can have an append under way.

        Where writers take over, the next one appends without the lock, even while we still hold it.
        """
        return self._lock is not None and not self._takeover

    def compact(self) -> None:
        """Merge all small fragments, refresh the tenant index, drop versions no reader can still hold.

        The last of these unless it was done lately: see engine/storage/version_cleanup.py.
        """
        self._take_free_lock()
        self._table.compact()
        self._look()
        self._cleaner.start()
        self.finish_tidying()

    def finish_tidying(self) -> None:
        """Return once nothing is done in the background any more."""
        self._cleaner.wait()

    def _tidy(self) -> None:
        """What is due of `compact`, every few commits; the dropping goes on in the background."""
        self._take_free_lock()
        self._follow(self._table.tidy())
        self._cleaner.start()

    def _take_free_lock(self) -> None:
        """Whoever had the lock when we took over may be gone by now."""
        if self._lock is None and self.writable:
            self._lock = _lock(self.location, takeover=True)

    @contextmanager
    def _rewriting(self) -> Iterator[None]:
        """Deletions and purges: what fails can be repeated, since deleted rows stay deleted."""
        try:
            yield
        except LANCE_ERRORS as error:
            raise JournalError(
                f"cannot rewrite {self._where}: {error}. Free space or fix the disk, then run it again."
            ) from error

    def sibling(self, info: StoreInfo) -> Journal:
        """The journal `info.journal` of the same store, made if need be, under this writer's right."""
        with self._opening():
            LanceLog.make(self.location / info.journal, SCHEMA)
            copy = Journal(
                self.location,
                info,
                lock=self._lock,
                takeover=self._takeover,
                writable=True,
                durability=self._durability,
            )
            copy.epoch = self.epoch
            known = copy._read_fences().marks
            if marks := [mark for mark in self._fences.marks if mark not in known]:
                copy._table.append(_mark_table(marks))
            copy._survey()
        return copy

    def remove_others(self) -> None:
        """Remove every journal of this store but this one: what a reindex replaced or did not finish."""
        for name in self.location.children():
            if JOURNAL_NAME.fullmatch(name) and name != self.info.journal:
                self.location.remove(name)


class _Stream:
    """Rows as record batches with lsns and an epoch; `error` is what their source raised."""

    def __init__(self, rows: Iterable[Row | pa.RecordBatch], next_lsn: int, epoch: int) -> None:
        self.next_lsn = next_lsn
        self.error: BaseException | None = None
        self._epoch = epoch
        self._batches = _in_batches(rows)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            self.error = error  # between here and the caller lies Arrow, which keeps its text alone
            raise
        lsns = np.arange(self.next_lsn, self.next_lsn + batch.num_rows)
        self.next_lsn += batch.num_rows
        columns = {name: batch.column(name) for name in SCHEMA.names}
        columns |= {"lsn": pa.array(lsns), "epoch": pa.array(np.full_like(lsns, self._epoch))}
        return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _in_batches(rows: Iterable[Row | pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    waiting: list[Row] = []
    for row in rows:
        if isinstance(row, Row):
            waiting.append(row)
        if waiting and (len(waiting) == ROWS_PER_BATCH or not isinstance(row, Row)):
            yield from _to_table(waiting).to_batches()
            waiting = []
        if not isinstance(row, Row):
            yield row
    if waiting:
        yield from _to_table(waiting).to_batches()


def _lock(location: Location, takeover: bool) -> WriterLock | None:
    """The writer's lock of a folder; None where there is none to have."""
    if location.folder is None:
        return None
    try:
        return WriterLock(location.folder)
    except StoreLocked:
        if takeover:
            return None
        raise


def _mark_table(marks: Sequence[FenceMark]) -> pa.Table:
    return _to_table([Row("epoch", "", "", -1, m.payload, lsn=MARK_LSN, epoch=m.epoch) for m in marks])


def _key_groups(tenant_keys: Sequence[str] | None) -> Iterator[Sequence[str] | None]:
    """The keys in groups that a filter can take; None, for all tenants, is one group."""
    if tenant_keys is None:
        yield None
        return
    for i in range(0, len(tenant_keys), KEYS_PER_FILTER):
        yield tenant_keys[i : i + KEYS_PER_FILTER]


def _any_of(column: str, values: Sequence[str] | None) -> str | None:
    """SQL filter for `column IN values`; None when there is nothing to filter by."""
    if values is None:
        return None
    quoted = ", ".join("'" + v.replace("'", "''") + "'" for v in values)
    return f"{column} IN ({quoted})" if quoted else "false"


def _all_of(*terms: str | None) -> str | None:
    """SQL filter for all terms; None when there is none."""
    return " AND ".join(term for term in terms if term) or None


def _to_table(rows: Sequence[Row]) -> pa.Table:
    return pa.table(
        [
            [r.kind for r in rows],
            [r.tenant for r in rows],
            [r.tenant_key for r in rows],
            pa.array([r.seq for r in rows], pa.int64()),
            pa.array([r.lsn for r in rows], pa.int64()),
            pa.array([r.epoch for r in rows], pa.int64()),
            pa.array([r.id for r in rows], pa.string()),
            pa.array([r.timestamp for r in rows], pa.string()),
            pa.array([None if r.vector is None else r.vector.tobytes() for r in rows], pa.binary()),
            pa.array([r.payload for r in rows], pa.binary()),
        ],
        schema=SCHEMA,
    )


def _to_rows(batch: pa.RecordBatch) -> Iterator[Row]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    vectors = columns.pop("vector", None)
    for i, values in enumerate(zip(*columns.values(), strict=True)):
        row = Row(**dict(zip(columns, values, strict=True)))
        if vectors is not None and vectors[i] is not None:
            row.vector = np.frombuffer(vectors[i], dtype="<f2")
        yield row
