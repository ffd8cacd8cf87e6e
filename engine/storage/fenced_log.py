"""A journal's table with one writer in force: opening it, claiming it, and detecting a newer writer.

The rules are in engine/storage/fencing.py. A folder also has a lock, which refuses a second writer.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

import numpy as np
import pyarrow as pa

from undertow.engine.storage.fencing import MARK_LSN, FenceMark, Fences
from undertow.engine.storage.journal_rows import SCHEMA, Row, RowStream, numbered, to_table
from undertow.engine.storage.lance_log import LANCE_ERRORS, LanceLog
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import StoreError, StoreInfo, StoreLocked, WriterLock, read_info
from undertow.engine.storage.wal import Damage, LogContent, WriteAheadLog

log = logging.getLogger(__name__)

ROWS_PER_SURVEY_BATCH = 262_144

Durability = Literal["commit", "fsync"]

MARKS = "tenant_key = '' AND kind = 'epoch'"
NO_MARKS = "kind != 'epoch'"


class JournalError(StoreError):
    """An append or a read failed. Nothing of the failed append is acknowledged."""


class Fenced(JournalError):
    """A later writer has taken the store over. This one must stop."""


class DamagedLog(JournalError):
    """Rows of the write-ahead log were acknowledged and cannot be read."""

    def __init__(self, damages: Sequence[Damage]) -> None:
        super().__init__(damages)
        self.damages = damages

    def __str__(self) -> str:
        found = "; ".join(map(str, self.damages))
        return (
            f"{found}. Restore a backup, or run `undertow repair`, which gives up these rows and no others."
        )


class Displaced(JournalError):
    """Another owner has taken the store over; this one must not take it back (engine/storage/fencing.py)."""


class FencedLog:
    """The table of one journal, with the writer's epoch and lock. Reads skip the rows of fenced writers."""

    def __init__(
        self,
        location: Location,
        info: StoreInfo,
        *,
        lock: WriterLock | None = None,
        takeover: bool = False,
        owner: str = "",
        writable: bool = False,
        durability: Durability = "commit",
        wal: WriteAheadLog | None = None,
        repair: bool = False,
    ) -> None:
        """`wal`: the log of commits before Lance. `repair`: give up the rows of it that are damaged."""
        self.location = location
        self.info = info
        self.writable = writable
        self.epoch = 0
        self._lock = lock
        self._takeover = takeover
        self._owner = owner
        self._durability = durability
        self._failure: JournalError | None = None
        self._where = location / info.journal
        self._wal = wal
        # The damaged parts of the log that were given up.
        self.given_up: Sequence[Damage] = ()
        self._repair = repair
        self._next_lsn = 0
        # The last version that was searched for claims; the following describe that version.
        self._seen = 0
        self._fences = Fences([])
        # Begins that the next begin has to commit too.
        self._unmarked: Sequence[FenceMark] = ()
        self._stale = ""
        self._ordered = True
        # Of a reader, what was in the write-ahead log when it opened.
        self._tail_view: LanceLog | None = None
        with self._opening():
            self._table = LanceLog(self._where, fsync=durability == "fsync")

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except LANCE_ERRORS as error:
            raise JournalError(
                f"{self._where} cannot be opened ({error}). Restore it from a backup."
            ) from error

    def _begin(self) -> None:
        """Claim the next epoch and begin it, by the steps of engine/storage/fencing.py. Displaced, Fenced."""
        token = secrets.token_hex(8)
        writer = f"{self._owner}.{token}" if self._owner else token
        claimed = False
        while not claimed:
            fences = self._read_fences()
            if self._owner and fences.has_displaced(self._owner):
                raise Displaced(
                    f"another cluster works on this root and has taken over {self.location}. Stop one of the "
                    "two. To go on with this one, stop its shards (`undertow cluster drain --stop`) and run "
                    "the command again."
                )
            self.epoch = fences.claimed + 1
            with self._putting():
                self._table.append(mark_table([FenceMark(self.epoch, writer)]))
            if self._read_fences().contested(self.epoch, writer):
                continue
            content = LogContent()
            if self._wal is not None:
                self._wal.claim(self.epoch, writer)
                content = self._wal.read()
            self._table.reload()
            claimed = self._read_fences().is_claimed_by(writer, self.epoch)
        self._next_lsn = self._look()
        begin = FenceMark(self.epoch, writer, self._next_lsn, self._fences.in_force)
        left = self._left_in(content)
        rows = [numbered(entry.batch, entry.first_lsn, self.epoch) for entry in left.entries]
        with self._putting():
            marks = mark_table([*self._unmarked, begin])
            self._table.append(pa.concat_tables([pa.Table.from_batches(rows, SCHEMA), marks]))
            self._follow()
        self._next_lsn = max([self._next_lsn, *(entry.end_lsn for entry in left.entries)])
        self._fences = self._read_fences()
        if read_info(self.location).journal != self.info.journal:
            raise StoreError(f"{self.location} was embedded again while it was opened. Open it once more.")
        if self._wal is not None:
            self._wal.remove_former()

    def _begin_reading(self, content: LogContent) -> None:
        """Survey the table, and add what was in the write-ahead log before it was opened. DamagedLog."""
        self._next_lsn = self._survey()
        if entries := self._left_in(content).entries:
            batches = [numbered(e.batch, e.first_lsn, e.epoch) for e in entries]
            self._tail_view = LanceLog.in_memory(pa.Table.from_batches(batches, SCHEMA))
            self._next_lsn = entries[-1].end_lsn

    def _left_in(self, content: LogContent) -> LogContent:
        """What a log has beyond the table, of the writer in force. DamagedLog."""
        left = content.after(self._fences.in_force, self._next_lsn)
        if left.damages and not self._repair:
            raise DamagedLog(left.damages)
        self.given_up = left.damages
        for place in left.torn if self.writable else ():  # a reader may meet an append under way
            log.warning("an append that was never acknowledged was cut off in %s; it is left out", place)
        return left

    @property
    def _views(self) -> Sequence[LanceLog]:
        """The tables that together have all rows, in order."""
        return [self._table, *([self._tail_view] if self._tail_view is not None else [])]

    @property
    def former_epoch(self) -> int:
        """The epoch of the writer that the last one took over from; 0 for none."""
        return self._fences.former

    def _read_fences(self) -> Fences:
        """The marks in the current version, and those that its rows stand for."""
        found = self._table.scanner(["epoch", "payload"], MARKS).to_table().to_pylist()
        marks = [FenceMark.of(**mark) for mark in found]
        self._unmarked = self._writers_of_rows() if all(mark.first_lsn is None for mark in marks) else []
        return Fences([*marks, *self._unmarked])

    def _writers_of_rows(self) -> list[FenceMark]:
        """The begins of the writers of a store of version 1: under a lock, each followed the last."""
        rows = self._table.scanner(["epoch", "lsn"], NO_MARKS).to_table()
        firsts = rows.group_by("epoch").aggregate([("lsn", "min")]).sort_by("epoch")
        begins: list[FenceMark] = []
        for epoch, first_lsn in zip(
            *(firsts[name].to_pylist() for name in ("epoch", "lsn_min")), strict=True
        ):
            begins.append(FenceMark(epoch, "", first_lsn, begins[-1].epoch if begins else 0))
        return begins

    def check_in_force(self) -> None:
        """Fenced if another writer has claimed the store by now."""
        with self._rewriting():
            self._table.reload()
            self._look()

    def _follow(self, versions: int = 1) -> None:
        """After this many own commits: if others came between, look for a claim. Fenced.

        The numbers of versions do not tell all: where a purge has removed versions, a writer that was paused
        within its commit may have made one of their number. Its claim in the folder was replaced before.
        """
        if self._wal is not None and self._wal.is_claimed_by_another:
            self._table.reload()
            self._look()
        elif self._table.version > self._seen + versions:
            self._look()
        self._seen = self._table.version

    def _look(self) -> int:
        """As `_survey`. Fenced if the current version holds a higher claim."""
        next_lsn = self._survey()
        if self.writable and self._fences.claimed > self.epoch:
            self._failure = Fenced(
                f"another writer has taken over {self._where} (epoch {self._fences.claimed} after "
                f"{self.epoch}). Nothing of this step was acknowledged; leave it to that one, or open again."
            )
            raise self._failure
        return next_lsn

    def _survey(self) -> int:
        """Read from the current version which rows are stale. Returns the lsn after the last row."""
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
            # A former writer's late compaction may put older rows after newer ones.
            self._ordered &= bool((np.diff(alive) > 0).all())
            end = alive[-1:]
            last = max(last, int(alive.max(initial=MARK_LSN)))
        ends = self._fences.end_of(stale)
        self._stale = " OR ".join(f"(epoch = {epoch} AND lsn >= {end})" for epoch, end in ends.items())
        self._seen = self._table.version
        return last + 1

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(f"an earlier write failed: {self._failure}")
        if not self.writable:
            raise JournalError(f"{self.location} was opened for reading only.")

    @contextmanager
    def _putting(self, stream: RowStream | None = None) -> Iterator[None]:
        """Around appends: a storage error ends all writing, an error of the rows' source does not."""
        try:
            yield
        except JournalError as error:
            self._failure = self._failure or error
            raise
        except (*LANCE_ERRORS, StoreError) as error:
            if stream is not None and stream.error is not None:
                raise stream.error from None
            self._look_for_takeover()
            self._failure = JournalError(
                f"cannot write to {self._where}: {error}. Nothing of this step was acknowledged; "
                "free space or fix the disk, then run again."
            )
            raise self._failure from error

    @contextmanager
    def _rewriting(self) -> Iterator[None]:
        """Around deletions and purges: repeatable after an error, since deleted rows stay deleted. Fenced."""
        try:
            yield
        except LANCE_ERRORS as error:
            self._look_for_takeover()
            raise JournalError(
                f"cannot rewrite {self._where}: {error}. Free space or fix the disk, then run it again."
            ) from error

    def _look_for_takeover(self) -> None:
        """After an error of the table: Fenced if another writer may be the reason."""
        with suppress(*LANCE_ERRORS):
            self._table.reload()
            self._look()

    @property
    def _alone(self) -> bool:
        """Whether no other writer can have an append in flight.

        With `takeover`, the next writer appends without the lock, even while this one holds it.
        """
        return self._lock is not None and not self._takeover

    def _take_free_lock(self) -> None:
        """Take the lock if the writer that held it at our takeover is gone by now."""
        if self._lock is None and self.writable:
            self._lock = lock_folder(self.location, takeover=True)


def lock_folder(location: Location, takeover: bool) -> WriterLock | None:
    """Take the writer's lock of a folder. None on an object store, or if it is held and `takeover` is set."""
    if location.folder is None:
        return None
    try:
        return WriterLock(location.folder)
    except StoreLocked:
        if takeover:
            return None
        raise


def mark_table(marks: Sequence[FenceMark]) -> pa.Table:
    return to_table([Row("epoch", "", "", -1, m.payload, lsn=MARK_LSN, epoch=m.epoch) for m in marks])
