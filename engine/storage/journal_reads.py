"""Reading a journal: its rows in order, from Lance and from the write-ahead log beyond it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain

import pyarrow as pa

from undertow.engine.storage.fenced_log import NO_MARKS, Fenced, FencedLog, JournalError
from undertow.engine.storage.journal_rows import (
    ROWS_PER_BATCH,
    SCHEMA,
    Row,
    all_of,
    any_of,
    key_groups,
    to_rows,
)
from undertow.engine.storage.lance_log import LANCE_ERRORS


class JournalReads(FencedLog):
    """The reading part of Journal."""

    # The thread that reads within `beside_appends`.
    _reader: int | None = None
    _reserved = False

    @cached_property
    def _one_user(self) -> threading.Lock:
        """Held by who reads beside appends, and by `settle`."""
        return threading.Lock()

    def settle(self) -> None:
        """Move the rows of the write-ahead log to Lance; a reader has nothing to move. JournalError."""

    def read(
        self,
        *,
        tenant_keys: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        vectors: bool = True,
        after_lsn: int = -1,
    ) -> Iterator[Row]:
        """Rows in append order after `after_lsn`, of these tenants, kinds and ids if given.

        Streams: memory is bounded by one batch, plus one tenant filter's rows if keys are given.
        """
        for batch in self.batches(
            tenant_keys=tenant_keys, kinds=kinds, ids=ids, vectors=vectors, after_lsn=after_lsn
        ):
            yield from to_rows(batch)

    def batches(
        self,
        *,
        tenant_keys: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        ids: Sequence[str] | None = None,
        vectors: bool = True,
        after_lsn: int = -1,
    ) -> Iterator[pa.RecordBatch]:
        """As `read`, in batches with the columns of SCHEMA; without `vector` if so asked."""
        columns = [name for name in SCHEMA.names if vectors or name != "vector"]
        late = f"lsn > {after_lsn}" if after_lsn >= 0 else None
        wanted = all_of(any_of("kind", kinds), any_of("id", ids), late)
        for keys in key_groups(tenant_keys):
            self.settle()  # it may find that another writer has added rows that do not count
            filter = self._counting(all_of(any_of("tenant_key", keys), wanted))
            with self._reading():
                yield from self._scan(columns, filter)

    def columns(self, names: Sequence[str], *, kinds: Sequence[str] | None = None) -> pa.Table:
        """Some columns of all rows (of `kinds`), in append order: cheap even for millions of rows."""
        self.settle()
        filter = self._counting(any_of("kind", kinds))
        read = names if self._ordered else [*{*names, "lsn"}]
        with self._reading():
            table = pa.concat_tables(view.scanner(read, filter).to_table() for view in self._views)
        return table if self._ordered else table.sort_by("lsn").select(list(names))

    def _scan(self, columns: Sequence[str], filter: str | None) -> Iterator[pa.RecordBatch]:
        scanners = [view.scanner(columns, filter, batch_size=ROWS_PER_BATCH) for view in self._views]
        if self._ordered:
            return chain.from_iterable(scanner.to_batches() for scanner in scanners)
        tables = [scanner.to_table() for scanner in scanners]
        return iter(pa.concat_tables(tables).sort_by("lsn").to_batches(ROWS_PER_BATCH))

    def _counting(self, filter: str | None) -> str | None:
        """`filter` without stale rows; without marks too if it is None."""
        return all_of(filter or NO_MARKS, f"NOT ({self._stale})" if self._stale else None)

    def count(self, tenant_keys: Sequence[str]) -> int:
        """How many rows the tenants have."""
        return self._count(any_of("tenant_key", tenant_keys))

    @property
    def row_count(self) -> int:
        return self._count(None)

    def _count(self, filter: str | None) -> int:
        self.settle()
        with self._reading():
            return sum(view.count(self._counting(filter)) for view in self._views)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if isinstance(self._failure, Fenced):  # its successor may have moved or deleted what is asked for
            raise Fenced(*self._failure.args)
        try:
            yield
        except LANCE_ERRORS as error:
            if self.writable:  # another writer that has taken over may have purged what is read here
                self._look_for_takeover()
            raise JournalError(
                f"cannot read {self._where}: {error}. If another writer has purged it meanwhile, open the "
                "store again; else check the disk."
            ) from error

    # ---- beside appends

    @property
    def is_read_beside(self) -> bool:
        """Whether another thread reads Lance beside appends, or is about to; or this one, within that."""
        return self._reserved or self._reader is not None

    def reserve(self) -> None:
        """Have nothing moved to Lance until `release`: another thread reads it, within `beside_appends`."""
        self._reserved = True

    def release(self) -> None:
        """What it was reserved for is over."""
        self._reserved = False

    @contextmanager
    def beside_appends(self) -> Iterator[None]:
        """Around reads or a purge on one thread, while another one appends. They see what is in Lance."""
        with self._one_user:
            self._reader = threading.get_ident()
            try:
                yield
            finally:
                self._reader = None

    @property
    def next_lsn(self) -> int:
        return self._next_lsn
