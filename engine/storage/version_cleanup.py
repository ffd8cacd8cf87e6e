"""Old versions of a table are removed on a thread of its own, beside the one that serves.

All versions of the last `READER_GRACE` are looked through each time: 0.3 ms each, and at twenty commits a
second there are thousands of them. So it is done a few times in that span, however many commits there are.
"""

from __future__ import annotations

import logging
import threading
import time

from undertow.engine.storage import lance_log as log_table
from undertow.engine.storage.lance_log import LANCE_ERRORS, LanceLog

log = logging.getLogger(__name__)

RUNS_PER_GRACE = 5


class VersionCleaner:
    """At most one removal at a time. `start` and `wait` belong to the table's writer."""

    def __init__(self, table: LanceLog) -> None:
        self._table = table
        self._due_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a removal, unless one is under way or has begun lately. RuntimeError: there is no thread."""
        now_s = time.monotonic()
        if now_s < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        # no daemon: Python's end waits for it, who forgets to close a journal included
        thread = threading.Thread(target=self._run, name="tidier")
        thread.start()
        self._thread = thread
        self._due_s = now_s + log_table.READER_GRACE.total_seconds() / RUNS_PER_GRACE

    def wait(self) -> None:
        """Return once no removal is under way."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._table.drop_old_versions()
        except LANCE_ERRORS as error:  # nothing rests on it, and the next one removes what this one left
            log.warning("cannot remove old versions of %s: %s. The next try follows.", self._table, error)
