"""Background jobs of callers: kept in the state database, and resumed after a restart.

Each operation may be repeated safely, so an interrupted job starts again from its beginning.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

import orjson

from undertow.engine.storage.location import fsync_path, replace_file
from undertow.serving.http.problems import Problem, problem_of
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.state_db import StateDb

Operation = Literal["flush", "import", "erase"]
Status = Literal["queued", "running", "done", "failed"]
COLUMNS = "id, tenant_key, tenant, key_id, operation, status, created_at, finished_at, result, error"
OPEN = "status in ('queued', 'running')"
UNKNOWN = "This tenant has no such job. Those that ended are kept for a while."


@dataclass(frozen=True, slots=True)
class ServiceJob:
    """One job. `tenant`: its name, None once the job has ended; `key_id`: the key that requested it.

    `result`: the operation's response; `error`: a problem document. Times are ISO 8601, UTC. `again`: a
    service that has ended since began the job.
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

    @classmethod
    def of(cls, row: tuple[Any, ...], *, again: bool = False) -> ServiceJob:
        """A job from a row of COLUMNS."""
        known: dict[str, Any] = dict(zip(COLUMNS.split(", "), row, strict=True))
        known |= {name: known[name] and orjson.loads(known[name]) for name in ("result", "error")}
        return cls(**known, again=again)

    @property
    def document(self) -> dict[str, Any]:
        """The job as the caller sees it."""
        shown = ["id", "operation", "status", "created_at", "finished_at"]
        shown += {"done": ["result"], "failed": ["error"]}.get(self.status, [])
        return {name: getattr(self, name) for name in shown}


Work = Callable[[ServiceJob], Awaitable[Mapping[str, Any]]]


class JobQueue:
    """Accepts jobs, runs them in tasks of this process, and reports them."""

    def __init__(self, state: StateDb, settings: ServiceSettings) -> None:
        self._state = state
        self._settings = settings
        self._work: Mapping[Operation, Work] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Per operation. Erasures have none: one purge serves many, and a tenant that erases itself again and
        # again waits for its next one without delaying the others.
        self._slots: Mapping[Operation, asyncio.Semaphore] = {
            of: asyncio.Semaphore(settings.jobs_at_once) for of in get_args(Operation) if of != "erase"
        }
        # size of each import's body in the state folder, by job
        self._body_bytes: dict[str, int] = {}
        # a tenant's jobs of one operation run in turn, and take one slot together
        self._turns: WeakValueDictionary[tuple[Operation, str], asyncio.Lock] = WeakValueDictionary()

    async def start(self, work: Mapping[Operation, Work]) -> None:
        """Resume the open jobs of an earlier service, oldest first."""
        self._work = work
        await self._run("delete from jobs where finished_at < ?", self._expiry)
        rows = await self._rows(f"{OPEN} order by created_at")
        known = {row[0] for row in rows}
        for body in (self._state.folder / "jobs").iterdir():
            if body.stem in known:
                self._body_bytes[body.stem] = body.stat().st_size
            else:
                body.unlink()
        for row in rows:
            self._launch(ServiceJob.of(row, again=row[5] == "running"))

    async def stop(self) -> None:
        """Leave the open jobs for the next service."""
        await _cancel(list(self._tasks.values()))

    async def accept(
        self, operation: Operation, tenant: str, tenant_key: str, key_id: str, body: bytes | None = None
    ) -> ServiceJob:
        """A new job, durable on return. Problem 429: too many jobs are open."""
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
            raise Problem(404, "unknown-job", UNKNOWN)
        return ServiceJob.of(rows[0])

    async def of_tenant(self, tenant_key: str) -> list[ServiceJob]:
        """A tenant's jobs, newest first, at most 1,000."""
        rows = await self._rows("tenant_key = ? order by created_at desc limit 1000", tenant_key)
        return [ServiceJob.of(row) for row in rows]

    async def forget(self, tenant_key: str) -> int:
        """Stop and delete the jobs of an erased tenant; returns their number.

        Its erasures stay: each must report a certificate, and holds nothing of the tenant but its name.
        """
        delete = f"delete from jobs where tenant_key = ? and operation <> 'erase' returning {COLUMNS}"
        # a deleted job does not begin; one that is accepted later is another job
        jobs = [ServiceJob.of(row) for row in await self._run(delete, tenant_key)]
        await _cancel([self._tasks[job.id] for job in jobs if job.id in self._tasks])
        for job in jobs:
            self._drop_body(job)
        return len(jobs)

    def body_of(self, job: ServiceJob) -> Path:
        """The path of a job's body, which exists for imports."""
        return self._state.folder / "jobs" / f"{job.id}.ndjson"

    def _check_room(self, count: int, of_tenant: int) -> None:
        """Problem 429: too many jobs are open."""
        if of_tenant >= self._settings.max_tenant_jobs:
            raise _too_many("Too many jobs of this tenant are open. Wait until some have ended.")
        if count >= self._settings.max_jobs:
            raise _too_many("Too many jobs are open. Try again when some have ended.")

    async def _take_body(self, job: ServiceJob, body: bytes) -> None:
        """Store a body in the state folder. Problem 429: the bodies there leave no room for it."""
        if sum(self._body_bytes.values()) + len(body) > self._settings.max_job_bytes:
            raise _too_many("Too much waits to be imported. Try again when some of it is.")
        self._body_bytes[job.id] = len(body)
        await asyncio.to_thread(self._write_body, job, body)

    def _write_body(self, job: ServiceJob, body: bytes) -> None:
        path = self.body_of(job)
        replace_file(path, body)
        fsync_path(path.parent)

    def _drop_body(self, job: ServiceJob) -> None:
        self.body_of(job).unlink(missing_ok=True)
        self._body_bytes.pop(job.id, None)

    def _launch(self, job: ServiceJob) -> None:
        task = asyncio.create_task(self._do(job))
        self._tasks[job.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.id, None))

    async def _do(self, job: ServiceJob) -> None:
        turn = self._turns.setdefault((job.operation, job.tenant_key), asyncio.Lock())
        async with turn, self._slots.get(job.operation, nullcontext()):
            # no row: the job was forgotten before it began
            if not await self._run("update jobs set status = 'running' where id = ? returning id", job.id):
                return
            try:
                result = await self._work[job.operation](job)
            except Exception as error:  # noqa: BLE001 - the boundary of a job: it failed, others continue
                await self._end(job, "failed", error=problem_of(error).document)
            else:
                await self._end(job, "done", result=result)

    async def _end(self, job: ServiceJob, status: Status, *, result: Any = None, error: Any = None) -> None:
        """Record a job's end; deletes its tenant's name, its body, and expired jobs."""
        ended = (
            "update jobs set status = ?, finished_at = ?, result = ?, error = ?, tenant = null where id = ?"
        )
        row = (status, _now(), _json(result), _json(error), job.id)
        expiry = self._expiry

        def end(db: sqlite3.Connection) -> None:
            db.execute(ended, row)
            db.execute("delete from jobs where finished_at < ?", (expiry,))

        await self._state.run(end)
        self._drop_body(job)
        if job.operation == "erase":
            await self._state.scrub()  # remove the bytes of the tenant's name

    async def _rows(self, where: str, *values: Any) -> list[Any]:
        return await self._run(f"select {COLUMNS} from jobs where {where}", *values)

    async def _run(self, statement: str, *values: Any) -> list[Any]:
        return await self._state.run(lambda db: db.execute(statement, values).fetchall())

    @property
    def _expiry(self) -> str:
        """Jobs that ended before this time are deleted."""
        return _iso(datetime.now(UTC) - timedelta(seconds=self._settings.keep_s))


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _too_many(detail: str) -> Problem:
    return Problem(429, "too-many-jobs", detail, retry_after_s=5)


def _json(value: Any) -> str | None:
    return None if value is None else orjson.dumps(value).decode()


def _now() -> str:
    return _iso(datetime.now(UTC))


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds")
