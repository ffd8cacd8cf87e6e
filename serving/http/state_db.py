"""What the service itself must remember: a SQLite file in its state folder, of this process alone.

state/service.sqlite3   jobs, webhooks, answers to requests with an Idempotency-Key, tokens spent
state/jobs/ID.ndjson    the body of an import that is a job, until that has ended
state/.service.lock     held while the service runs

Tenants stand there by the store's keyed hash; in words only in jobs that have not ended.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import PRIVATE_FILE, make_folder

T = TypeVar("T")

FILE_NAME = "service.sqlite3"
LOCK_NAME = ".service.lock"
VERSION = 1

SCHEMA = """
create table if not exists jobs (
    id text primary key, tenant_key text not null, tenant text, key_id text not null, operation text not null,
    status text not null, created_at text not null, finished_at text, result text, error text
) without rowid;
create index if not exists jobs_by_tenant on jobs (tenant_key, created_at);
create table if not exists kept (
    mark blob primary key, tenant_key text, request blob not null, process text not null, at real not null,
    status integer, headers text, body blob
) without rowid;
create index if not exists kept_by_age on kept (at);
create index if not exists kept_by_tenant on kept (tenant_key);
create table if not exists spending (
    key_id text primary key, day text not null, tokens integer not null
) without rowid;
create table if not exists webhooks (id text primary key, body text not null) without rowid;
"""


class StateError(UndertowError):
    """The state folder cannot be used; the text names the cure."""


class StateDb:
    """The database, behind a thread of its own. What a call has written is on the disk when it returns."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder where it is missing. StateError."""
        self.folder = folder
        self._lock = FileLock(folder / LOCK_NAME, mode=PRIVATE_FILE, thread_local=False)
        try:
            make_folder(folder)
            make_folder(folder / "jobs")
            self._lock.acquire(timeout=0)
        except Timeout:
            raise StateError(
                f"{folder} belongs to a service that is running. Stop it, or give this one --state FOLDER."
            ) from None
        except OSError as error:
            raise StateError(
                f"cannot use {folder}: {error.strerror}. Check its rights and the disk's space."
            ) from error
        self._thread = ThreadPoolExecutor(1, "state")
        try:
            self._db = self._thread.submit(self._open).result()
        except BaseException:
            self._thread.shutdown()
            self._lock.release()
            raise

    def _open(self) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(self.folder / FILE_NAME, isolation_level=None)
            (self.folder / FILE_NAME).chmod(PRIVATE_FILE)
            db.execute("pragma journal_mode = wal")
            db.execute("pragma synchronous = full")
            db.execute("pragma secure_delete = on")  # what is deleted is overwritten
            version = db.execute("pragma user_version").fetchone()[0]
            if version not in (0, VERSION):
                raise StateError(
                    f"{self.folder / FILE_NAME} has format {version}; this Undertow reads {VERSION}. "
                    "Install the Undertow that wrote it."
                )
            db.executescript(SCHEMA)
            db.execute(f"pragma user_version = {VERSION}")
        except sqlite3.Error as error:
            raise StateError(
                f"cannot open {self.folder / FILE_NAME}: {error}. Check the disk; moved away, it is begun "
                "anew, without the jobs that were under way."
            ) from error
        return db

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` in one transaction, kept whole or not at all; one after the other. StateError."""
        return await asyncio.wrap_future(self.submit(work))

    def submit(self, work: Callable[[sqlite3.Connection], T]) -> Future[T]:
        """As `run`, without waiting; closing the database waits."""
        return self._thread.submit(self._in_transaction, work)

    def _in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self._db.execute("begin immediate")
            try:
                done = work(self._db)
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")
        except sqlite3.Error as error:
            raise StateError(
                f"cannot write {self.folder / FILE_NAME}: {error}. Check the disk's space."
            ) from error
        return done

    async def scrub(self) -> None:
        """Empty the write-ahead log too, so that no byte of what was deleted is left in either file."""

        def scrub() -> None:
            self._db.execute("pragma wal_checkpoint(truncate)").fetchone()

        await asyncio.wrap_future(self._thread.submit(scrub))

    def close(self) -> None:
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()
        self._lock.release()
