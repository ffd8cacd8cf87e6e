"""Kept responses of requests with an Idempotency-Key, and the state database that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from undertow.serving.http.middleware.idempotency import IdempotencyStore, IdempotentRequest, Response
from undertow.serving.http.problems import Problem
from undertow.serving.http.state_db import StateDb, StateError

from ...support.service.http import Running

MARK, OTHER, REQUEST = b"m" * 32, b"o" * 32, b"r" * 32


@pytest.mark.anyio
async def test_requests_of_a_killed_service_are_repeated(state: StateDb) -> None:
    killed, now = IdempotencyStore(state, 60.0), IdempotencyStore(state, 60.0)
    cut_off = await killed.begin(MARK, "key", REQUEST)
    assert isinstance(cut_off, IdempotentRequest)
    assert not cut_off.again
    with pytest.raises(Problem) as under_way:
        await killed.begin(MARK, "key", REQUEST)
    assert (under_way.value.status_code, under_way.value.slug) == (409, "under-way")
    begun = await now.begin(MARK, "key", REQUEST)
    assert isinstance(begun, IdempotentRequest)
    assert begun.again
    given = Response(200, [(b"content-type", b"a/b"), (b"x-request-id", b"1")], bytearray(b"told"))
    await now.keep(begun, given)
    again = await now.begin(MARK, "key", REQUEST)
    assert isinstance(again, Response)
    assert (again.status, bytes(again.body)) == (200, b"told")
    assert again.headers == [(b"content-type", b"a/b"), (b"content-length", b"4")]
    with pytest.raises(Problem) as other:
        await now.begin(MARK, "key", b"another")
    assert (other.value.status_code, other.value.slug) == (422, "idempotency-key-reused")
    await now.forget("key")
    anew = await now.begin(MARK, "key", REQUEST)
    assert isinstance(anew, IdempotentRequest)
    assert not anew.again
    # what an erasure has forgotten does not come back with the end of a request that was under way
    await now.keep(begun, given)
    with pytest.raises(Problem, match="under way"):
        await now.begin(MARK, "key", REQUEST)
    await now.forget("key")
    await now.keep(anew, given)
    assert isinstance(await now.begin(MARK, "key", REQUEST), IdempotentRequest)


@pytest.mark.anyio
async def test_kept_responses_expire(state: StateDb) -> None:
    once = IdempotencyStore(state, 0.0)
    begun = await once.begin(MARK, None, REQUEST)
    assert isinstance(begun, IdempotentRequest)
    await once.keep(begun, Response(200))
    for mark in (OTHER, MARK):
        anew = await once.begin(mark, None, REQUEST)
        assert isinstance(anew, IdempotentRequest)
        assert not anew.again


def test_every_operation_that_changes_something_describes_the_header(running: Running) -> None:
    others = {"/v1/tenants/{tenant}/search", "/v1/tenants/{tenant}/answer", "/v1/webhooks"}
    missing, seen = [], 0
    for path, operations in running.app.openapi()["paths"].items():
        for method, operation in operations.items():
            headers = {
                one["name"].lower() for one in operation.get("parameters", ()) if one["in"] == "header"
            }
            changes = method != "get" and not (method == "post" and path in others)
            seen += changes
            if ("idempotency-key" in headers) != changes:
                missing.append((method, path))
    assert not missing
    assert seen >= 12


def test_a_state_folder_is_of_one_service(tmp_path: Path) -> None:
    state = StateDb(tmp_path)
    with pytest.raises(StateError, match="a service that is running"):
        StateDb(tmp_path)
    state.close()
    StateDb(tmp_path).close()


def test_a_damaged_state_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "service.sqlite3").write_bytes(b"no database" * 100)
    with pytest.raises(StateError, match="begun anew"):
        StateDb(tmp_path)
    (tmp_path / "service.sqlite3").unlink()
    StateDb(tmp_path).close()
