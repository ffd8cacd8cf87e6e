"""The journal of a shard: one atomic append a step. All other state derives from it.

It is a Lance dataset. Small appends are in a write-ahead log first (engine/storage/wal.py), and many of them
move to Lance as one version.

Rows are never changed in place. A row's `kind` says what it is; `payload` is JSON whose fields depend on the
kind (see engine/storage/row_codec.py). Vectors are little-endian fp16 bytes: a fixed-size list would spend a
full vector on each of the many rows that have none (docs/decisions/0002). Writers take over from each other
by the rules of engine/storage/fencing.py; their marks are rows too, of kind "epoch".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from undertow.engine.storage.fenced_log import NO_MARKS, lock_folder, mark_table
from undertow.engine.storage.fenced_log import Displaced as Displaced
from undertow.engine.storage.fenced_log import Durability as Durability
from undertow.engine.storage.fenced_log import Fenced as Fenced
from undertow.engine.storage.fenced_log import JournalError as JournalError
from undertow.engine.storage.journal_reads import JournalReads
from undertow.engine.storage.journal_rows import SCHEMA as SCHEMA
from undertow.engine.storage.journal_rows import Kind as Kind
from undertow.engine.storage.journal_rows import Row as Row
from undertow.engine.storage.journal_rows import Rows as Rows
from undertow.engine.storage.journal_rows import (
    RowStream,
    any_of,
    in_batches,
    key_groups,
    row_count,
)
from undertow.engine.storage.lance_log import LANCE_ERRORS, LanceLog
from undertow.engine.storage.location import Location
from undertow.engine.storage.store_info import (
    DESCRIPTION,
    FORMAT_VERSION,
    JOURNAL_NAME,
    StoreError,
    StoreInfo,
    read_info,
    write_info,
)
from undertow.engine.storage.tail import Tail
from undertow.engine.storage.version_cleanup import VersionCleaner
from undertow.engine.storage.wal import WriteAheadLog

log = logging.getLogger(__name__)

COMMITS_PER_COMPACTION = 16
# A commit of so many rows goes to Lance at once: its rows need not be written twice.
ROWS_PAST_LOG = 4_096


class Journal(JournalReads):
    """Append-only log of one shard. Open with `create` or `open`; one writer at a time."""

    _commits = 0
    # Whether the last flush has failed, so that its rows may be in Lance all the same.
    _unsure = False

    @cached_property
    def _cleaner(self) -> VersionCleaner:
        return VersionCleaner(self._table)

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

        `hash_key`: 64 hexadecimal digits, shared by stores that exchange rows; by default a new one.
        `policy`: the name of the policy that makes its memories.
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
        owner: str = "",
        settled: bool = False,
        repair: bool = False,
    ) -> Journal:
        """Open an existing store; a writer begins a new epoch, which stops any former writer for good.

        In a folder, opening for writing raises StoreLocked while another process holds the lock, unless
        `takeover`. An object store has no lock: the last writer to open always takes over.
        `owner` names the shard of a cluster, whose writers restart by themselves. Displaced: another owner
        has taken the store over.
        `settled`, for a reader that acts on what it reads: JournalError while a writer is taking over,
        since rows that the former writer has not acknowledged may turn out stale.
        `repair`, for a writer: give up the damaged rows of the write-ahead log, else DamagedLog.
        """
        location = Location.of(where)
        info = read_info(location)  # raises before anything is written if this is no store
        wal = WriteAheadLog(location, fsync=durability == "fsync")
        if not writable:
            content = wal.read()
            journal = cls(location, info, durability=durability)
            with journal._opening():
                journal._begin_reading(content)
            if settled and journal._fences.claimed > journal._fences.in_force:
                raise JournalError(
                    f"another writer is taking over {journal._where}. Try again when it is up."
                )
            return journal
        lock = lock_folder(location, takeover)
        try:
            journal = cls(
                location,
                read_info(location),
                lock=lock,
                takeover=takeover,
                owner=owner,
                writable=True,
                durability=durability,
                wal=wal,
                repair=repair,
            )
            journal._upgrade()
            with journal._opening():
                journal._begin()
            return journal
        except BaseException:
            if lock is not None:
                lock.close()
            raise

    def _upgrade(self) -> None:
        """Mark an older store as one that may have a write-ahead log, which older programs would not read."""
        if self.info.format_version < FORMAT_VERSION:
            self.info = replace(self.info, format_version=FORMAT_VERSION)
            write_info(self.location, self.info)

    @property
    def commits_quickly(self) -> bool:
        """Whether an append of a few rows takes about a tenth of a millisecond."""
        return self._tail is not None and self._wal is not None and self._wal.commits_quickly

    @cached_property
    def _tail(self) -> Tail | None:
        return Tail(self._wal, self._move) if self._wal is not None and self._wal.takes_commits else None

    def close(self) -> None:
        if self.writable and self._failure is None:
            try:
                self.settle()
            except StoreError as error:
                log.warning("%s The rows are safe in the write-ahead log.", error)
        self.writable = False
        if self._tail is not None:
            self._tail.close()
        self.finish_tidying()  # under the lock, so that the next writer is alone
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def sibling(self, info: StoreInfo) -> Journal:
        """Open, or make, the journal `info.journal` of the same store, for writing under this lock."""
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
                copy._table.append(mark_table(marks))
            copy._next_lsn = copy._survey()
        return copy

    # ---- writing

    def append(self, rows: Sequence[Rows]) -> None:
        """Write all rows as one atomic commit. JournalError: none of them is acknowledged.

        After a failure every later append fails too: the state in memory is then ahead of the log, and only
        reopening the store reconciles them. Fenced: another writer has taken over.
        """
        self._check_writable()
        if rows:
            self._commit(rows)

    def _commit(self, rows: Sequence[Rows]) -> None:
        if self._tail is None or row_count(rows) >= ROWS_PAST_LOG:
            self.append_copies(RowStream(rows, self._next_lsn, self.epoch))
            return
        with self._putting():
            batches = list(in_batches(rows))
            batch = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
            self._tail.append(self._next_lsn, batch, self.epoch)
            self._check_claim()
        self._next_lsn += batch.num_rows
        if not self._reserved and self._tail.flush_is_due:
            with self._rewriting():
                self._tail.begin_flush()

    def _check_claim(self) -> None:
        """After an entry was written to the log: Fenced if another writer may have read the log before it."""
        assert self._wal is not None
        while self._wal.is_claimed_by_another:
            # Lance decides whether that claim counts. A writer that claims the store after we renew ours has
            # yet to read the log.
            self.settle()
            self._wal.renew_claim()
            self.check_in_force()

    def settle(self, *, for_good: bool = False) -> None:
        """Move all rows to Lance, before it is read, changed, or appended to otherwise. JournalError.

        `for_good`: no power failure shall bring them back to the log.
        """
        if self._tail is not None and self.writable and self._reader != threading.get_ident():
            with self._one_user, self._rewriting():
                self._tail.settle()
        if for_good and self._wal is not None:
            with self._rewriting():
                self._wal.sync_removals()

    def move_until(self, lsn: int) -> Future[None] | None:
        """Have rows before `lsn` moved to Lance in the background. None: they are there.

        While that is under way one may append; on an error it leaves them in the log.
        """
        return None if self._tail is None else self._tail.move_until(lsn)

    def log_holds(self, tenant: str) -> bool:
        """Whether rows of the tenant are in the log, and not in Lance."""
        return self._tail is not None and self._tail.holds(self.info.tenant_key(tenant))

    def _move(self, rows: pa.Table) -> None:
        """Append rows to Lance, but for those that landed there when an earlier attempt seemed to fail."""
        if self._unsure:
            self._table.reload()
            rows = rows.slice(min(max(self._look() - rows["lsn"][0].as_py(), 0), rows.num_rows))
        self._unsure = True
        if rows.num_rows:
            self._table.append(rows)
        self._follow()
        self._unsure = False
        self._note_commit()

    def append_copies(self, rows: Iterable[Rows]) -> None:
        """Append rows of another journal with their lsn and epoch; for `reindex`. JournalError."""
        self.settle()
        table = pa.Table.from_batches(in_batches(rows), SCHEMA)
        with self._putting():
            self._table.append(table)
        self._acknowledge(table["lsn"][-1].as_py() + 1)

    def append_stream(self, rows: Iterable[Rows]) -> int:
        """Write any number of rows as one atomic version with a few batches in memory. Returns their number.

        Record batches have the columns of SCHEMA. All rows get new lsns, in order, and this writer's epoch.
        An exception of the iterator passes through; then nothing is written, and the journal stays usable.
        """
        self._check_writable()
        self.settle()
        first, stream = self._next_lsn, RowStream(rows, self._next_lsn, self.epoch)
        reader = pa.RecordBatchReader.from_batches(SCHEMA, stream)
        with self._putting(stream):
            self._table.append_stream(reader)
        self._acknowledge(stream.next_lsn)
        return stream.next_lsn - first

    def sync(self) -> None:
        """Flush everything to the disk, whatever the durability of appends. JournalError.

        Call it before another machine acts on what is stored: a power failure then loses nothing of it.
        """
        self.settle()
        with self._rewriting():
            self._table.sync()

    def _acknowledge(self, next_lsn: int) -> None:
        """End an append: look for a newer writer, then count its rows as stored. Fenced."""
        with self._putting():
            self._follow()
        self._next_lsn = next_lsn
        self._note_commit()

    def _note_commit(self) -> None:
        self._commits += 1
        if self._commits % COMMITS_PER_COMPACTION == 0:
            self._try_to_tidy()

    def _try_to_tidy(self) -> None:
        """Compact if possible. The rows are stored by now, so a full disk must not fail the append."""
        try:
            self._tidy()
        except LANCE_ERRORS as error:
            log.warning("cannot compact %s: %s. It goes on uncompacted; free some space.", self._where, error)
        except Fenced as error:  # claimed after this append's commit; the next append fails
            log.warning("%s", error)

    # ---- deleting and compaction

    def delete(
        self, tenant_keys: Sequence[str] | None, *, before_lsn: int, kinds: Sequence[str] | None = None
    ) -> None:
        """Delete rows older than `before_lsn` of these tenants and kinds; bytes stay until `purge`.

        None means all. Marks of writers stay.
        """
        self.settle(for_good=True)
        old = f"lsn < {before_lsn} AND {any_of('kind', kinds) or NO_MARKS}"
        for keys in key_groups(tenant_keys):
            with self._rewriting():
                self._table.delete(old if keys is None else f"{any_of('tenant_key', keys)} AND {old}")
                self._follow()

    def delete_rows(self, lsns: Sequence[int]) -> None:
        """Delete single rows; bytes stay until `purge`."""
        if lsns:
            self.settle(for_good=True)
            with self._rewriting():
                self._table.delete(f"{NO_MARKS} AND lsn IN ({', '.join(map(str, lsns))})")
                self._follow()

    def purge(self) -> bool:
        """Rewrite what deletions touched and drop all old versions, so that no deleted byte remains.

        Returns whether that is certain. With `takeover`, an append that was interrupted in the last ten
        minutes may still have files; a later purge removes them.
        """
        self.settle()
        self.finish_tidying()
        if self._wal is not None:
            self._wal.remove_former()
        self.check_in_force()  # also to learn of rows that a former writer has added
        with self._rewriting():
            if self._stale:
                self._table.delete(self._stale)
            self._table.rewrite_deleted()
            self.check_in_force()
            self._table.drop_history(alone=self._alone)
            self.remove_others()
        return self._alone

    def compact(self) -> None:
        """Merge all small fragments, refresh the tenant index, drop versions that no reader can still hold.

        Versions are dropped at most every few minutes: see engine/storage/version_cleanup.py.
        """
        self.settle()
        self._take_free_lock()
        self._table.compact()
        self._look()
        self._cleaner.start()
        self.finish_tidying()

    def finish_tidying(self) -> None:
        """Wait for background work to end."""
        self._cleaner.wait()

    def _tidy(self) -> None:
        """The part of `compact` that is due every few commits; versions are dropped in the background."""
        self._take_free_lock()
        self._follow(self._table.tidy())
        self._cleaner.start()

    def remove_others(self) -> None:
        """Remove all other journals of this store: those that a reindex replaced or did not finish."""
        for name in self.location.children():
            if JOURNAL_NAME.fullmatch(name) and name != self.info.journal:
                self.location.remove(name)
