"""Removes old versions of a table on a background thread.

Each removal inspects all versions of the last `READER_GRACE`, at 0.3 ms each. Twenty commits a second make
thousands of them, so removals run only a few times in that span, however many commits there are.
"""

from __future__ import annotations

import logging
import threading
import time

from undertow.engine.storage import lance_log
from undertow.engine.storage.lance_log import LANCE_ERRORS, LanceLog

log = logging.getLogger(__name__)

RUNS_PER_GRACE = 5


class VersionCleaner:
    """Runs at most one removal at a time. The table's writer calls `start` and `wait`."""

    def __init__(self, table: LanceLog) -> None:
        self._table = table
        self._due_s = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start a removal unless one is running or began recently. RuntimeError: no thread can be started."""
        now_s = time.monotonic()
        if now_s < self._due_s or (self._thread is not None and self._thread.is_alive()):
            return
        # No daemon: the interpreter waits for it at exit, even if the journal was not closed.
        thread = threading.Thread(target=self._run, name="version-cleanup")
        thread.start()
        self._thread = thread
        self._due_s = now_s + lance_log.READER_GRACE.total_seconds() / RUNS_PER_GRACE

    def wait(self) -> None:
        """Wait for a running removal to end."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._table.drop_old_versions()
        except LANCE_ERRORS as error:  # harmless: the next removal removes what this one left
            log.warning("cannot remove old versions of %s: %s. The next try follows.", self._table, error)
