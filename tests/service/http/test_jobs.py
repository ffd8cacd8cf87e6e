"""Jobs, idempotency and erasure over HTTP: accepted work is carried out once; an erasure leaves no trace."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from undertow.engine.base.queries import EraseCommand, FlushCommand, UpdateCommand
from undertow.engine.cluster.routing.errors import ShardDown
from undertow.engine.tenants.migration_records import Move
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import Scope
from undertow.serving.http.jobs.queue import JobQueue, ServiceJob
from undertow.serving.http.problems import Problem
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.state_db import StateDb

from ...support.llm_servers import wait_until
from ...support.service.http import (
    SOON_S,
    Held,
    Running,
    at,
    intercepted,
    is_problem,
    said,
    serving,
)

ASYNC = {"Prefer": "respond-async"}
BOUNDS = {"max_tenant_jobs": 2}


def add(client: httpx2.Client, tenant: str, *texts: str) -> list[str]:
    body = {"messages": [message for text in texts for message in said(text)]}
    response = client.post(at(tenant, "/memories"), json=body)
    assert response.status_code == 200, response.text
    return [result["id"] for result in response.json()["results"]]


def ended(client: httpx2.Client, location: str) -> dict[str, Any]:
    """The job once it has ended."""
    wait_until(lambda: client.get(location).json()["status"] in ("done", "failed"))
    job: dict[str, Any] = client.get(location).json()
    return job


def test_a_flush_as_a_job(client: httpx2.Client) -> None:
    add(client, "acme/ann", "the boat needs planks")
    accepted = client.post(at("acme/ann", "/flush"), headers=ASYNC)
    assert accepted.status_code == 202
    document = accepted.json()
    assert document["status"] == "queued"
    assert accepted.headers["location"] == at("acme/ann", f"/jobs/{document['id']}")
    job = ended(client, accepted.headers["location"])
    assert (job["operation"], job["status"], job["result"]) == ("flush", "done", {"decided": True})
    assert job["created_at"] <= job["finished_at"]
    listed = client.get(at("acme/ann", "/jobs")).json()["results"]
    assert [entry["id"] for entry in listed] == [job["id"]]
    assert client.post(at("acme/ann", "/flush")).json() == {"decided": True}


def test_a_failed_job_has_its_problem(client: httpx2.Client) -> None:
    failed = ended(client, client.post(at("nobody", "/flush"), headers=ASYNC).headers["location"])
    assert (failed["status"], failed["error"]["status"], "result" in failed) == ("failed", 404, False)


def test_a_repeated_request_is_carried_out_once(running: Running, client: httpx2.Client) -> None:
    (made,) = add(client, "cyd", "the meeting is on monday")
    one = at("cyd", f"/memories/{made}")
    key = {"Idempotency-Key": "u-1"}
    first = client.put(one, json={"text": "on friday"}, headers=key)
    assert first.status_code == 200
    again = client.put(one, json={"text": "on friday"}, headers=key)
    assert (again.status_code, again.content) == (200, first.content)
    assert again.headers["content-type"] == "application/json"
    is_problem(client.put(one, json={"text": "on sunday"}, headers=key), 422, "idempotency-key-reused")
    other = at("cyd", f"/memories/{first.json()['id']}")
    is_problem(client.put(other, json={"text": "on friday"}, headers=key), 422, "idempotency-key-reused")
    # for another API key, tenant or route, it is another key
    is_problem(running.client().put(one, json={"text": "on friday"}, headers=key), 404, "unknown-memory")
    deleted = client.delete(other, headers=key)
    assert deleted.status_code == 200
    assert client.delete(other, headers=key).content == deleted.content
    is_problem(client.delete(other), 404, "unknown-memory")


def test_a_failed_request_may_be_retried_under_its_key(client: httpx2.Client) -> None:
    key = {"Idempotency-Key": "f-1"}
    is_problem(client.post(at("dan", "/flush"), headers=key), 404, "unknown-tenant")
    add(client, "dan", "hi")
    assert client.post(at("dan", "/flush"), headers=key).json() == {"decided": True}
    is_problem(client.post(at("dan", "/flush"), headers={"Idempotency-Key": "x" * 256}), 422, "input")


@pytest.mark.parametrize("failure", [ShardDown("s0", 1.0, "it is gone"), asyncio.CancelledError()])
def test_a_repeat_of_a_completed_change_without_response_succeeds(
    tmp_path: Path, failure: BaseException
) -> None:
    failures = [failure]

    def lossy(memories: AsyncMemories) -> AsyncMemories:
        async def update(_: UpdateCommand, go_on: Callable[[], Awaitable[Any]]) -> Any:
            done = await go_on()
            if failures:
                raise failures.pop()
            return done

        return intercepted(memories, UpdateCommand, update)

    with serving(tmp_path, wrap=lossy) as running:
        client = running.client()
        (made,) = add(client, "ann", "the meeting is on monday")
        asked: dict[str, Any] = {"url": at("ann", f"/memories/{made}"), "json": {"text": "on friday"}}
        assert client.put(**asked, headers={"Idempotency-Key": "u"}).status_code >= 500
        again = client.put(**asked, headers={"Idempotency-Key": "u"})
        assert again.status_code == 200, again.text
        new = client.get(at("ann", f"/memories/{again.json()['id']}")).json()
        assert new["memory"] == "user: on friday"


def test_a_tenants_jobs_delay_no_other_tenant_and_no_erasure(tmp_path: Path) -> None:
    held = Held(FlushCommand, tenant="ann")
    with serving(tmp_path, wrap=held.around, jobs_at_once=2, max_tenant_jobs=4) as running:
        client = running.client()
        for tenant in ("ann", "bob"):
            add(client, tenant, "hi")
        try:
            waiting = [client.post(at("ann", "/flush"), headers=ASYNC) for _ in range(3)]
            wait_until(lambda: client.get(waiting[0].headers["location"]).json()["status"] == "running")
            for method, rest in (("POST", "/flush"), ("DELETE", "")):
                job = client.request(method, at("bob", rest), headers=ASYNC)
                assert ended(client, job.headers["location"])["status"] == "done"
            assert client.get(waiting[1].headers["location"]).json()["status"] == "queued"
        finally:
            held.go.set()
        for job in waiting:
            assert ended(client, job.headers["location"])["status"] == "done"


def test_a_job_under_a_key_is_one_job(client: httpx2.Client) -> None:
    add(client, "eve", "hi")
    headers = {**ASYNC, "Idempotency-Key": "j-1"}
    first = client.post(at("eve", "/flush"), headers=headers)
    again = client.post(at("eve", "/flush"), headers=headers)
    assert (again.status_code, again.json()) == (202, first.json())
    assert again.headers["location"] == first.headers["location"]
    assert len(client.get(at("eve", "/jobs")).json()["results"]) == 1
    ended(client, first.headers["location"])


def test_kept_requests_do_not_name_the_tenant(running: Running, client: httpx2.Client) -> None:
    add(client, "gil of note", "hi")
    headers = {**ASYNC, "Idempotency-Key": "n-1"}
    first = client.post(at("gil of note", "/flush"), headers=headers)
    ended(client, first.headers["location"])
    with closing(sqlite3.connect(running.folder / "service" / "service.sqlite3")) as db:
        rows = [row for table in ("kept", "jobs") for row in db.execute(f"select * from {table}")]
    assert "n-1" not in str(rows) and "gil" not in str(rows)
    again = client.post(at("gil of note", "/flush"), headers=headers)
    assert (
        again.headers["location"]
        == first.headers["location"]
        == at("gil of note", f"/jobs/{first.json()['id']}")
    )


def test_an_erasure_that_is_repeated_under_its_key_erases_nothing_new(client: httpx2.Client) -> None:
    key = {"Idempotency-Key": "e-1"}
    add(client, "hal", "the boat")
    first = client.delete(at("hal"), headers=key)
    add(client, "hal", "the knee")
    assert client.delete(at("hal"), headers=key).json() == first.json()
    assert client.get(at("hal", "/stats")).json()["turns"] == 1
    job = client.delete(at("hal"), headers={**ASYNC, "Idempotency-Key": "e-2"})
    assert ended(client, job.headers["location"])["status"] == "done"
    add(client, "hal", "the shed")
    assert client.delete(at("hal"), headers={**ASYNC, "Idempotency-Key": "e-2"}).json() == job.json()
    assert client.get(at("hal", "/stats")).json()["turns"] == 1


def test_a_key_that_names_a_tenant_cannot_erase_it_as_a_job(running: Running, client: httpx2.Client) -> None:
    add(client, "ida", "hi")
    own = running.client(Scope.ERASE, tenants=("ida",))
    refused = is_problem(own.delete(at("ida"), headers=ASYNC), 422, "input")
    assert refused["errors"][0]["field"] == "Prefer"
    assert own.delete(at("ida")).json()["turns_removed"] == 1


def test_every_accepted_erasure_reports_a_certificate(tmp_path: Path) -> None:
    """Erasures of one tenant, as jobs and not, are under way together; each drops the tenant's other jobs."""
    held = Held(EraseCommand)
    with ThreadPoolExecutor(1) as pool, serving(tmp_path, wrap=held.around, max_tenant_jobs=4) as running:
        client, other = running.client(), running.client()
        add(client, "ann", "the boat", "the knee")
        flushed = client.post(at("ann", "/flush"), headers=ASYNC).headers["location"]
        ended(client, flushed)
        try:
            accepted = [client.delete(at("ann"), headers=ASYNC).headers["location"] for _ in range(2)]
            wait_until(lambda: held.begun == 1)  # the other job waits for it
            asked = pool.submit(other.delete, at("ann"))
            wait_until(lambda: held.begun == 2)
            is_problem(client.get(flushed), 404, "unknown-job")
        finally:
            held.go.set()
        answer = asked.result(SOON_S)
        jobs = [ended(client, location) for location in accepted]
        certificates = [answer.json(), *(job["result"] for job in jobs)]
        assert [job["status"] for job in jobs] == ["done", "done"]
        assert {c["tenant_key"] for c in certificates} == {running.service.memories.tenant_key("ann")}
        assert [c["turns_removed"] for c in certificates] == [2, 2, 2]
        # erasing the tenant's next life leaves these certificates as they are
        add(client, "ann", "the shed")
        assert client.delete(at("ann")).json()["turns_removed"] == 1
        assert [client.get(location).json() for location in accepted] == jobs
        with closing(sqlite3.connect(tmp_path / "service" / "service.sqlite3")) as db:
            assert db.execute("select count(*), count(tenant) from jobs").fetchone() == (2, 0)


class Late(JobQueue):
    """Begins its jobs on `begin`, as late as a busy event loop would."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.accepted: list[ServiceJob] = []

    def _launch(self, job: ServiceJob) -> None:
        self.accepted.append(job)

    def begin(self) -> None:
        for job in self.accepted:
            super()._launch(job)


@pytest.mark.anyio
async def test_a_forgotten_job_does_not_begin(state: StateDb, tmp_path: Path) -> None:
    done: list[str] = []

    async def work(job: ServiceJob) -> dict[str, Any]:
        done.append(job.tenant_key)
        return {}

    jobs = Late(state, ServiceSettings())
    await jobs.start({"flush": work, "import": work, "erase": work})
    for key in ("ann", "bob"):
        await jobs.accept("import", key, key, "k", b"body")
    assert await jobs.forget("ann") == 1
    jobs.begin()
    while (await jobs.of_tenant("bob"))[0].status != "done":
        await asyncio.sleep(0.001)
    await jobs.stop()
    assert done == ["bob"]
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.anyio
async def test_jobs_and_their_bodies_are_bounded(state: StateDb) -> None:
    bounds = ServiceSettings(max_jobs=3, max_job_bytes=2_048, max_import_bytes=2_048)
    jobs = Late(state, bounds)
    await jobs.accept("import", "ann", "ann", "k", b"x" * 1_500)
    with pytest.raises(Problem, match="imported") as full:
        await jobs.accept("import", "bob", "bob", "k", b"x" * 600)
    assert (full.value.status_code, full.value.headers) == (429, {"Retry-After": "5"})
    await jobs.accept("import", "bob", "bob", "k", b"x" * 500)
    await jobs.forget("ann")
    await jobs.accept("import", "cyd", "cyd", "k", b"x" * 1_500)
    await jobs.accept("flush", "dan", "dan", "k")
    with pytest.raises(Problem, match="Too many jobs are open"):
        await jobs.accept("flush", "eve", "eve", "k")


def files_with(folder: Path, text: bytes) -> list[str]:
    """Files of a service's own that hold a text."""
    own = [folder / "keys.json", folder / "audit.jsonl", *(folder / "service").rglob("*")]
    return [path.name for path in own if path.is_file() and text in path.read_bytes()]


@pytest.mark.parametrize("as_job", [False, True])
def test_an_erasure_leaves_nothing_but_its_certificate(running: Running, as_job: bool) -> None:
    client, name = running.client(), f"tenant-{as_job}-of-note"
    alone = running.client(Scope.READ, tenants=(name,))
    both = running.key(Scope.READ, tenants=(name, "other"))
    ids = add(client, name, "the boat", "the knee")
    assert alone.get(at(name, "/jobs")).status_code == 200
    client.post(at(name, "/flush"), headers={"Idempotency-Key": "k"})
    ended(client, client.post(at(name, "/flush"), headers=ASYNC).headers["location"])
    asked = client.delete(at(name), headers=ASYNC if as_job else {})
    if as_job:
        job = ended(client, asked.headers["location"])
        certificate = job["result"]
        assert [j["id"] for j in client.get(at(name, "/jobs")).json()["results"]] == [job["id"]]
    else:
        certificate = asked.json()
        assert client.get(at(name, "/jobs")).json() == {"results": []}
    assert certificate["turns_removed"] == 2
    assert certificate["tenant_key"] == running.service.memories.tenant_key(name)
    assert any("audit log" in line for line in certificate["out_of_reach"])
    is_problem(client.get(at(name, f"/memories/{ids[0]}")), 404)
    is_problem(client.post(at(name, "/search"), json={"query": "boat"}), 404, "unknown-tenant")
    is_problem(alone.get(at(name, "/jobs")), 401)
    left = KeyFile(running.folder / "keys.json").require(both.split("_")[1])
    assert left.reach.tenants == ("other",)
    assert files_with(running.folder, name.encode()) == []
    lines = (running.folder / "audit.jsonl").read_bytes().splitlines()
    mine = [line for line in map(orjson.loads, lines) if line.get("tenant_key") == certificate["tenant_key"]]
    assert [(line["act"], line["outcome"]) for line in mine] == [("erase", "begun"), ("erase", "done")]


def test_deleting_all_leaves_the_keys_and_the_certificate_says_so(running: Running) -> None:
    client, name = running.client(), "tenant-of-two-notes"
    running.key(Scope.READ, tenants=(name,))
    add(client, name, "the boat", "the knee")
    client.post(at(name, "/flush"), headers={"Idempotency-Key": "k"})
    ended(client, client.post(at(name, "/flush"), headers=ASYNC).headers["location"])
    assert client.delete(at(name, "/memories")).status_code == 200
    assert files_with(running.folder, name.encode()) == ["keys.json"]
    certificates = client.post("/v1/purge").json()["certificates"]
    key = running.service.memories.tenant_key(name)
    (certificate,) = (issued for issued in certificates if issued["tenant_key"] == key)
    assert any("keys that name the tenant" in line for line in certificate["out_of_reach"])


def test_deleting_all_then_erasing(client: httpx2.Client) -> None:
    add(client, "fay", "the boat")
    assert client.delete(at("fay", "/memories")).json() == {"event": "DELETE_ALL"}
    is_problem(client.post(at("fay", "/search"), json={"query": "boat"}), 404, "unknown-tenant")
    certificate = client.delete(at("fay")).json()
    assert certificate["turns_removed"] == 1
    is_problem(client.delete(at("neverhere")), 404, "unknown-tenant")


def test_an_erasure_between_shards_forgets_at_once_and_is_certified_later(running: Running) -> None:
    client, name = running.client(), "tenant-on-the-move"
    alone = running.client(Scope.READ, tenants=(name,))
    add(client, name, "the boat")
    client.post(at(name, "/flush"), headers={"Idempotency-Key": "k"})
    shard = running.service.memories._router._shard  # type: ignore[union-attr]
    arrived = shard._supervisor.open().tenants.arrived
    arrived[running.service.memories.tenant_key(name)] = Move("arrived", "elsewhere", 1)
    refused = client.delete(at(name))
    is_problem(refused, 503, "resharding")
    assert refused.headers["retry-after"]
    is_problem(client.post(at(name, "/search"), json={"query": "boat"}), 404, "unknown-tenant")
    is_problem(alone.get(at(name, "/jobs")), 401)
    assert files_with(running.folder, name.encode()) == []
    arrived.clear()
    assert client.delete(at(name)).json()["turns_removed"] == 1
