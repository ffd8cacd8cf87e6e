"""Both clients against a real service, over a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from undertow.serving.auth.principal import KeyLimits, Scope
from undertow.serving.client import (
    Answer,
    AuthError,
    BadRequest,
    Forbidden,
    NotFound,
    RateLimited,
    Retries,
)

from ...support.service.client import Driven, driven
from ...support.service.http import Running, said, serving

BOAT = "the boat needs new planks before summer"
KNEE = "my knee hurts when I run along the estuary"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("store"), max_items=4) as service:
        yield service


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


def test_a_name_is_one_tenant_s_however_it_is_spelt(client: Driven, kind: str) -> None:
    for tenant in (f"a/{kind}", f"a%2F{kind}", f"a?{kind}#", ".", "..", f"名前 {kind}"):
        client.add(tenant, f"this belongs to {tenant}")
        found = client.search(tenant, "this belongs to")
        assert {hit.memory for hit in found.results} == {f"user: this belongs to {tenant}"}


def test_a_key_given_twice_adds_once(client: Driven, kind: str) -> None:
    tenant = f"twice/{kind}"
    first = client.add(tenant, BOAT, idempotency_key="k")
    again = client.add(tenant, BOAT, idempotency_key="k")
    assert (first[0].event, again[0].event) == ("ADD", "DUPLICATE")
    assert first[0].id == again[0].id
    assert len(client.search(tenant, BOAT).results) == 1


def test_of_many_the_good_ones_are_stored(client: Driven, kind: str) -> None:
    tenant = f"many/{kind}"
    good, bad, other = client.add_many(
        tenant, [{"messages": BOAT}, {"messages": []}, {"messages": KNEE, "metadata": {"a": 1}}]
    )
    assert (good.status, bad.status, other.status) == (200, 422, 200)
    assert bad.detail and bad.results is None
    assert len(client.search(tenant, "boat knee").results) == 2


def test_answers_whole_and_in_pieces(client: Driven, kind: str) -> None:
    tenant = f"asked/{kind}"
    client.add(tenant, BOAT)
    whole = client.answer(tenant, "What does the boat need?", as_of="2026-05-09")
    assert whole.answer and BOAT in whole.memories[0].memory and whole.usage["calls"] == 1
    *pieces, last = client.answer_stream(tenant, "What does the boat need?", as_of="2026-05-09")
    assert isinstance(last, Answer) and "".join(pieces) == last.answer == whole.answer
    assert client.answer(tenant, "What does the boat need?", mode="hybrid").answer == whole.answer
    with pytest.raises(BadRequest, match="'best_effort' is of the policy 'himem'"):
        client.answer(tenant, "What does the boat need?", mode="best_effort")
    with pytest.raises(BadRequest, match="'best_effort' is of the policy 'himem'"):
        list(client.answer_stream(tenant, "What does the boat need?", mode="best_effort"))


def test_a_tenant_as_a_whole(client: Driven, kind: str) -> None:
    tenant = f"whole/{kind}"
    client.add(tenant, BOAT)
    assert client.flush(tenant) is True
    job = client.flush_job(tenant)
    assert client.job(tenant, job.id, wait_s=60).result == {"decided": True}
    assert client.stats(tenant)["turns"] == 1
    assert isinstance(client.usage(tenant), dict)
    (explained,) = client.explain(tenant)
    assert explained["seq"] == 0
    certificate = client.erase(tenant)
    assert certificate.model_extra["turns_removed"] == 1 and certificate.out_of_reach
    with pytest.raises(NotFound):
        client.get_page(tenant)


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
    assert isinstance(client.usage(), dict) and isinstance(client.status(), dict)
    client.delete_all(f"list/{kind}/0")
    assert isinstance(client.purge(), tuple)
    assert client.replay_jobs() == 0


def test_bad_input_is_told_by_field(client: Driven) -> None:
    with pytest.raises(BadRequest) as raised:
        client.search("ann", "boat", top_k=0)
    assert [field.field for field in raised.value.fields] == ["top_k"]
    with pytest.raises(BadRequest, match=r"messages\[0\]|role"):
        client.add("ann", [{"content": "no role"}])
    with pytest.raises(BadRequest, match="items"):
        client.add_many("ann", [{"messages": "x"}] * 5)


def test_keys_decide(running: Running, kind: str, client: Driven) -> None:
    client.add("eve", BOAT)
    with driven(kind, running.url, running.key(Scope.READ, tenants=("ann",))) as bound:
        for tenant in ("eve", "nobody"):
            with pytest.raises(Forbidden, match="may not do this"):
                bound.search(tenant, BOAT)
        with pytest.raises(Forbidden):
            bound.add("ann", BOAT)
    for key in (None, "ut_wrong"):
        with driven(kind, running.url, key) as stranger, pytest.raises(AuthError):
            stranger.search("eve", BOAT)


def test_a_key_s_rate_is_waited_for_or_told(running: Running, kind: str, client: Driven) -> None:
    client.add("ann", BOAT)
    slow = running.key(limits=KeyLimits(requests_per_s=1, burst=1))
    with driven(kind, running.url, slow) as patient:
        for _ in range(2):
            assert patient.search("ann", BOAT).results
    never = running.key(limits=KeyLimits(requests_per_s=0.001, burst=1))
    with driven(kind, running.url, never, retries=Retries(patience_s=5)) as impatient:
        impatient.search("ann", BOAT)
        with pytest.raises(RateLimited) as raised:
            impatient.search("ann", BOAT)
    assert raised.value.retry_after_s is not None and raised.value.retry_after_s > 5


def test_a_service_that_comes_back_is_waited_for(tmp_path: Path, kind: str) -> None:
    """Its first answer may be lost on the way: the same call again stores nothing twice."""
    with serving(tmp_path) as first:
        key, url = first.key(), first.url
        with driven(kind, url, key) as client:
            client.add("ann", BOAT, idempotency_key="once")
    with serving(tmp_path) as second, driven(kind, second.url, key) as client:
        (added,) = client.add("ann", BOAT, idempotency_key="once")
        assert added.event == "DUPLICATE"
