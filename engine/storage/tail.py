"""The tail of the journal: rows that are in the write-ahead log and not yet in Lance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pyarrow as pa
import pyarrow.compute as pc

from undertow.engine.storage.fenced_log import Fenced
from undertow.engine.storage.journal_rows import numbered
from undertow.engine.storage.lance_log import LANCE_ERRORS
from undertow.engine.storage.location import StoreError
from undertow.engine.storage.wal import WriteAheadLog

log = logging.getLogger(__name__)

# A flush is due at so many rows, which then fill a fragment, or at so many bytes, which wait in memory.
ROWS_PER_FLUSH, BYTES_PER_FLUSH = 32_768, 128 << 20
# Beyond so many times that, an append waits for the flush.
MOST_FLUSHES = 4

Commit = tuple[int, pa.RecordBatch, int]
"""The first lsn of its rows, the rows without lsns and epochs, and the epoch of the writer."""


class Tail:
    """Owns the log of a writer, the rows in it, and the thread that moves them to Lance in the background.

    `move` appends rows to Lance as one version. While a flush is under way nobody else may use the table:
    call `settle` first.
    """

    def __init__(self, wal: WriteAheadLog, move: Callable[[pa.Table], None]) -> None:
        self._wal = wal
        self._move = move
        self._waiting: list[Commit] = []
        self._waiting_rows = self._waiting_bytes = 0
        # what a flush is moving, or a failed one has left, and the segments that have it
        self._moving: list[Commit] = []
        self._moving_bytes = 0
        self._segments: list[str] = []
        self._thread: ThreadPoolExecutor | None = None
        self._flush: Future[None] | None = None

    def append(self, first_lsn: int, batch: pa.RecordBatch, epoch: int) -> None:
        """Write a batch to the log, as rows from `first_lsn` on. OSError, StoreError; else as `settle`."""
        left = max(len(self._moving) / self._wal.most_entries, self._moving_bytes / BYTES_PER_FLUSH)
        if left > MOST_FLUSHES:  # flushes keep failing
            self.settle()
        size = self._wal.append(first_lsn, batch)
        self._waiting_bytes += size
        self._waiting.append((first_lsn, batch, epoch))
        self._waiting_rows += batch.num_rows

    @property
    def flush_is_due(self) -> bool:
        """Whether to begin a flush: there is enough for it, and no other is under way, or it is late."""
        flushes = max(self._waiting_rows / ROWS_PER_FLUSH, self._waiting_bytes / BYTES_PER_FLUSH)
        if flushes < 1 and len(self._waiting) < self._wal.most_entries:
            return False
        return self._flush is None or self._flush.done() or flushes >= MOST_FLUSHES

    def begin_flush(self) -> None:
        """Begin a flush in the background, after waiting for an earlier one. Fenced."""
        self._end_flush()
        self._flush_aside()

    def move_until(self, lsn: int) -> Future[None] | None:
        """Begin to move rows before `lsn`, in the background. None: they are moved. Fenced."""
        if self._flush is None or self._flush.done():
            self._end_flush()
            left = self._moving or self._segments  # by a flush that has failed
            if not left and not (self._waiting and self._waiting[0][0] < lsn):
                return None
            self._flush_aside()
        return self._flush

    def holds(self, tenant_key: str) -> bool:
        """Whether rows of the tenant wait to be moved."""
        return any(
            pc.any(pc.equal(batch["tenant_key"], tenant_key)).as_py()
            for _, batch, _ in (*self._moving, *self._waiting)
        )

    def _flush_aside(self) -> None:
        self._take_waiting()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="flush")
        try:
            self._flush = self._thread.submit(self._run)
        except RuntimeError as error:  # no thread can be started; the next flush moves these rows too
            log.warning("cannot move the log's rows in the background: %s", error)
            self._flush = Future()
            self._flush.set_exception(error)

    def settle(self) -> None:
        """Move everything to Lance now. StoreError, and what `move` raises; the log then keeps the rows."""
        self._end_flush()
        if self._waiting or self._moving or self._segments:
            self._take_waiting()
            self._run()

    def close(self) -> None:
        """End the thread. What could not be moved stays in the log."""
        if self._thread is not None:
            self._thread.shutdown()
        self._wal.close()

    def _take_waiting(self) -> None:
        self._segments += self._wal.end_segments()
        self._moving += self._waiting
        self._moving_bytes += self._waiting_bytes
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0

    def _run(self) -> None:
        if self._moving:
            self._move(_numbered(self._moving))
            self._moving, self._moving_bytes = [], 0
        self._wal.remove(self._segments)
        self._segments = []

    def _end_flush(self) -> None:
        """Wait for a flush. What the disk has refused is told, and done again by the next one."""
        flush, self._flush = self._flush, None
        try:
            if flush is not None:
                flush.result()
        except Fenced:
            raise
        except (*LANCE_ERRORS, StoreError) as error:
            log.warning("the log waits to be moved to Lance: %s. Free some space.", error)


def _numbered(commits: Sequence[Commit]) -> pa.Table:
    """All their rows, with lsns and the epoch, which one writer has given in a row."""
    first_lsn, _, epoch = commits[0]
    return numbered(pa.Table.from_batches([batch for _, batch, _ in commits]), first_lsn, epoch)
