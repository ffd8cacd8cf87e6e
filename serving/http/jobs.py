"""Work that a caller does not wait for: kept in the state's database, and taken up again after a kill.

Each operation may be repeated without harm, so a job that was cut off is done again from its beginning.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

import orjson

from undertow.engine.storage.location import fsync_path, replace_file
from undertow.serving.http.problems import Problem, problem_of
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.state_db import MODE, StateDb

Operation = Literal["flush", "import", "erase"]
Status = Literal["queued", "running", "done", "failed"]
COLUMNS = "id, tenant_key, tenant, key_id, operation, status, created_at, finished_at, result, error"
OPEN = "status in ('queued', 'running')"


@dataclass(frozen=True, slots=True)
class ServiceJob:
    """One job. `tenant` is its name, until it has ended; `key_id`: whose key had it done.

    `result` is what the operation would have answered, `error` a problem's document. Times are ISO 8601, UTC.
    `again`: it was begun by a service that has ended since.
    """

    id: str
    tenant_key: str
    tenant: str | None
    key_id: str
    operation: Operation
    status: Status
    created_at: str
    finished_at: str | None = None
    result: Any = None
    error: Any = None
    again: bool = False

    @property
    def document(self) -> dict[str, Any]:
        """What the caller sees."""
        document = {
            "id": self.id,
            "operation": self.operation,
            "status": self.status,
            "created_at": self.created_at,
            "finished_at": self.finished_at,
        }
        if self.status == "done":
            document["result"] = self.result
        if self.status == "failed":
            document["error"] = self.error
        return document


Work = Callable[[ServiceJob], Awaitable[Mapping[str, Any]]]


class JobQueue:
    """Accepts jobs, does them in tasks of this process, and tells how they are."""

    def __init__(self, state: StateDb, settings: ServiceSettings) -> None:
        self._state = state
        self._settings = settings
        self._work: Mapping[Operation, Work] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # of each operation, so that flushes, which wait for the LLM, hold up no erasure
        self._places = {of: asyncio.Semaphore(settings.jobs_at_once) for of in get_args(Operation)}
        # bytes of the bodies that lie in the state folder, by job
        self._bodies: dict[str, int] = {}
        # whoever has one of a tenant's does so alone: its others of the operation take up no place meanwhile
        self._turns: WeakValueDictionary[tuple[Operation, str], asyncio.Lock] = WeakValueDictionary()

    async def start(self, work: Mapping[Operation, Work]) -> None:
        """Take up what an earlier service left, oldest first."""
        self._work = work
        await self._state.run(
            lambda db: db.execute("delete from jobs where finished_at < ?", (self._too_old,))
        )
        rows = await self._rows(f"{OPEN} order by created_at")
        known = {row[0] for row in rows}
        for left in (self._state.folder / "jobs").iterdir():
            if left.stem in known:
                self._bodies[left.stem] = left.stat().st_size
            else:
                left.unlink()
        for row in rows:
            self._launch(_job(row, again=row[5] == "running"))

    async def stop(self) -> None:
        """Leave the open jobs as they are, for the next service to take up."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def accept(
        self, operation: Operation, tenant: str, tenant_key: str, key_id: str, body: bytes | None = None
    ) -> ServiceJob:
        """A new job, which outlives this process from now on. Problem 429: there is no room for it."""
        job = ServiceJob(secrets.token_hex(16), tenant_key, tenant, key_id, operation, "queued", _now())

        def insert(db: sqlite3.Connection) -> None:
            count = f"select count(*), count(*) filter (where tenant_key = ?) from jobs where {OPEN}"
            self._check_room(*db.execute(count, (tenant_key,)).fetchone())
            row = (job.id, tenant_key, tenant, key_id, operation, job.status, job.created_at)
            db.execute(f"insert into jobs ({COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, null, null, null)", row)

        try:
            if body is not None:
                await self._take_body(job, body)
            await self._state.run(insert)
        except BaseException:
            self._drop_body(job)
            raise
        self._launch(job)
        return job

    async def get(self, tenant_key: str, job_id: str) -> ServiceJob:
        """A tenant's job. Problem 404."""
        rows = await self._rows("tenant_key = ? and id = ?", tenant_key, job_id)
        if not rows:
            raise Problem(
                404, "unknown-job", "This tenant has no such job. Those that ended are kept for a while."
            )
        return _job(rows[0])

    async def of_tenant(self, tenant_key: str) -> list[ServiceJob]:
        """A tenant's jobs, newest first, at most 1,000."""
        rows = await self._rows("tenant_key = ? order by created_at desc limit 1000", tenant_key)
        return [_job(row) for row in rows]

    async def forget(self, tenant_key: str) -> int:
        """Stop and drop what an erased tenant has of jobs; how many.

        Its erasures stay: each was promised a certificate, and holds no word of the tenant but its name,
        until it has ended.
        """

        def delete(db: sqlite3.Connection) -> list[Any]:
            where = "where tenant_key = ? and operation <> 'erase'"
            return db.execute(f"delete from jobs {where} returning {COLUMNS}", (tenant_key,)).fetchall()

        # from here on none of them begins; one that is accepted later is another job
        jobs = [_job(row) for row in await self._state.run(delete)]
        tasks = [self._tasks[job.id] for job in jobs if job.id in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for job in jobs:
            self._drop_body(job)
        return len(jobs)

    def body_of(self, job: ServiceJob) -> Path:
        """Where the body of a job lies, if it has one."""
        return self._state.folder / "jobs" / f"{job.id}.ndjson"

    def _check_room(self, count: int, of_tenant: int) -> None:
        """Problem 429, where so many are open that no further one is taken."""
        if of_tenant >= self._settings.max_tenant_jobs:
            raise _too_many("Too many jobs of this tenant are open. Wait for some to end.")
        if count >= self._settings.max_jobs:
            raise _too_many("Too many jobs are open. Try again when some have ended.")

    async def _take_body(self, job: ServiceJob, body: bytes) -> None:
        """Put a body into the state folder. Problem 429: those that lie there leave no room for it."""
        if sum(self._bodies.values()) + len(body) > self._settings.max_job_bytes:
            raise _too_many("Too much waits to be imported. Try again when some of it is.")
        self._bodies[job.id] = len(body)
        await asyncio.to_thread(self._write_body, job, body)

    def _write_body(self, job: ServiceJob, body: bytes) -> None:
        path = self.body_of(job)
        replace_file(path, body, mode=MODE)
        fsync_path(path.parent)

    def _drop_body(self, job: ServiceJob) -> None:
        self.body_of(job).unlink(missing_ok=True)
        self._bodies.pop(job.id, None)

    def _launch(self, job: ServiceJob) -> None:
        task = asyncio.create_task(self._do(job))
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.id, None))

    async def _do(self, job: ServiceJob) -> None:
        turn = self._turns.setdefault((job.operation, job.tenant_key), asyncio.Lock())
        async with turn, self._places[job.operation]:
            if not await self._begin(job):
                return
            try:
                result = await self._work[job.operation](job)
            except Exception as error:  # noqa: BLE001 - the boundary of a job: it has failed, others go on
                await self._end(job, "failed", error=problem_of(error).document)
            else:
                await self._end(job, "done", result=result)

    async def _begin(self, job: ServiceJob) -> bool:
        """The job is running; False: it was forgotten before."""
        begin = "update jobs set status = 'running' where id = ?"
        return await self._state.run(lambda db: db.execute(begin, (job.id,)).rowcount) > 0

    async def _end(self, job: ServiceJob, status: Status, *, result: Any = None, error: Any = None) -> None:
        """The job has ended: its tenant's name goes, and what it brought."""
        row = (status, _now(), _json(result), _json(error), job.id)
        old = self._too_old

        def end(db: sqlite3.Connection) -> None:
            db.execute(
                "update jobs set status = ?, finished_at = ?, result = ?, error = ?, "
                "tenant = null where id = ?",
                row,
            )
            db.execute("delete from jobs where finished_at < ?", (old,))

        await self._state.run(end)
        self._drop_body(job)
        if job.operation == "erase":
            await self._state.scrub()  # of the tenant's name, which this row held

    async def _rows(self, where: str, *values: Any) -> list[Any]:
        return await self._state.run(
            lambda db: db.execute(f"select {COLUMNS} from jobs where {where}", values).fetchall()
        )

    @property
    def _too_old(self) -> str:
        return _iso(datetime.now(UTC) - timedelta(seconds=self._settings.keep_s))


def _too_many(detail: str) -> Problem:
    return Problem(429, "too-many-jobs", detail, retry_after_s=5)


def _job(row: Any, *, again: bool = False) -> ServiceJob:
    """From a row of COLUMNS."""
    known: dict[str, Any] = dict(zip(COLUMNS.split(", "), row, strict=True))
    known |= {name: _parsed(known[name]) for name in ("result", "error")}
    return ServiceJob(**known, again=again)


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


def _parsed(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)


def _now() -> str:
    return _iso(datetime.now(UTC))


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
