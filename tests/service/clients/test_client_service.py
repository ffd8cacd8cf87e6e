"""Both clients against a real service, over a real store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from undertow.serving.client import (
    Answer,
    BadRequest,
    NotFound,
)

from ...support.service.client import Driven, driven
from ...support.service.http import Running, said

BOAT = "the boat needs new planks before summer"
KNEE = "my knee hurts when I run along the estuary"


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(running: Running, kind: str) -> Iterator[Driven]:
    with driven(kind, running.url, running.key()) as opened:
        yield opened


def test_what_is_added_is_found(client: Driven, kind: str) -> None:
    tenant = f"found/{kind}"
    (boat,) = client.add(tenant, said(BOAT), timestamp="2026-05-08", metadata={"topic": "boat", "n": 5})
    (knee,) = client.add(tenant, KNEE, session_id="s2", timestamp="2026-06-01")
    assert (boat.event, boat.seq, knee.seq) == ("ADD", 0, 1)

    found = client.search(tenant, BOAT)
    assert [hit.id for hit in found.results] == [boat.id, knee.id] and found.recall == 1.0
    assert found.results[0].memory == f"user: {BOAT}\nassistant: noted"
    assert found.results[0].source_seqs == (0,)

    def ids(**how: object) -> list[str]:
        return [hit.id for hit in client.search(tenant, BOAT, **how).results]

    assert ids(top_k=1) == [boat.id]
    assert ids(filters={"topic": ["boat", "sea"], "n": 5}) == [boat.id]
    assert ids(since="2026-05-20") == [knee.id] and ids(until="2026-05-20") == [boat.id]
    assert ids(kinds=["fact"]) == [] and ids(threshold=found.results[0].score - 0.01) == [boat.id]


def test_answers_whole_and_in_pieces(client: Driven, kind: str) -> None:
    tenant = f"asked/{kind}"
    client.add(tenant, BOAT)
    whole = client.answer(tenant, "What does the boat need?", as_of="2026-05-09")
    assert whole.answer and BOAT in whole.memories[0].memory and whole.usage["calls"] == 1
    *pieces, last = client.answer_stream(tenant, "What does the boat need?", as_of="2026-05-09")
    assert isinstance(last, Answer) and "".join(pieces) == last.answer == whole.answer
    assert last.memories == whole.memories
    for answer in (client.answer, client.answer_stream):
        with pytest.raises(BadRequest, match="'best_effort' is of the policy 'himem'"):
            answer(tenant, "What does the boat need?", mode="best_effort")


def test_a_tenant_as_a_whole(client: Driven, kind: str) -> None:
    tenant = f"whole/{kind}"
    client.add(tenant, BOAT)
    assert client.flush(tenant) is True
    job = client.flush_job(tenant)
    assert client.job(tenant, job.id, wait_s=60).result == {"decided": True}
    assert [record["seq"] for record in client.explain(tenant)] == [0]
    certificate = client.erase(tenant)
    assert certificate.model_extra["turns_removed"] == 1 and certificate.out_of_reach
    with pytest.raises(NotFound):
        client.stats(tenant)


def test_an_import_and_an_erasure_as_jobs(client: Driven, kind: str) -> None:
    source, tenant = f"from/{kind}", f"gone/{kind}"
    client.add(source, said(BOAT))
    begun = client.import_job(tenant, client.export(source))
    ended = client.job(tenant, begun.id, wait_s=60)
    assert (ended.status, ended.operation, ended.result["turns"]) == ("done", "import", 1)
    assert [job.id for job in client.jobs(tenant)] == [begun.id]
    assert client.get_all(tenant)[0].memory == client.get_all(source)[0].memory
    ended = client.job(tenant, client.erase_job(tenant).id, wait_s=60)
    assert (ended.status, ended.result["turns_removed"]) == ("done", 1)


def test_the_service_as_a_whole(client: Driven, kind: str) -> None:
    for n in range(3):
        client.add(f"list/{kind}/{n}", BOAT)
    assert client.tenants(prefix=f"list/{kind}/") == [f"list/{kind}/{n}" for n in range(3)]
    assert client.stats()["tenants"] >= 3
    assert isinstance(client.usage(), dict)
    assert [shard["state"] for shard in client.status().values()] == ["serving"]
    client.delete_all(f"list/{kind}/0")
    assert isinstance(client.purge(), tuple)
    assert client.replay_jobs() == 0
