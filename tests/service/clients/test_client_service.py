"""What only the clients of a service offer, against a real one. tests/test_contract.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from undertow.serving.client import Answer, BadRequest

from ...support.service.client import Driven, driven
from ...support.service.http import Running, said

BOAT = "the boat needs new planks before summer"
KNEE = "my knee hurts when I run along the estuary"


@pytest.fixture
def client(running: Running, kind: str) -> Iterator[Driven]:
    with driven(kind, running.url, running.key()) as opened:
        yield opened


def test_a_search_tells_its_recall_and_keeps_to_a_threshold(client: Driven, kind: str) -> None:
    tenant = f"found/{kind}"
    (boat, knee) = (client.add(tenant, text)[0] for text in (BOAT, KNEE))
    found = client.search(tenant, BOAT)
    assert [hit.id for hit in found.results] == [boat.id, knee.id] and found.recall == 1.0
    above = client.search(tenant, BOAT, threshold=found.results[0].score - 0.01)
    assert [hit.id for hit in above.results] == [boat.id]
    assert found.explanation is None
    for bound, reason in (({"threshold": 1}, "threshold"), ({"top_k": 1, "kinds": ["turn"]}, "count")):
        how = client.search(tenant, "boat", **bound, explain=True).explanation
        assert {hit.id: hit.reason for hit in how.left_out}[knee.id] == reason
        assert (how.scores[boat.id].matched, how.scores[knee.id].matched) == (("boat",), ())


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


def test_an_import_a_flush_and_an_erasure_as_jobs(client: Driven, kind: str) -> None:
    source, tenant = f"from/{kind}", f"gone/{kind}"
    client.add(source, said(BOAT))
    begun = client.import_job(tenant, client.export(source))
    ended = client.job(tenant, begun.id, wait_s=60)
    assert (ended.status, ended.operation, ended.result["turns"]) == ("done", "import", 1)
    assert [job.id for job in client.jobs(tenant)] == [begun.id]
    assert client.job(tenant, client.flush_job(tenant).id, wait_s=60).result == {"decided": True}
    assert client.get_all(tenant)[0].memory == client.get_all(source)[0].memory
    ended = client.job(tenant, client.erase_job(tenant).id, wait_s=60)
    assert (ended.status, ended.result["turns_removed"]) == ("done", 1)
    certificate = client.erase(source)
    assert certificate.model_extra["turns_removed"] == 1 and certificate.out_of_reach


def test_the_status_of_the_service(client: Driven) -> None:
    assert [shard["state"] for shard in client.status().values()] == ["serving"]
