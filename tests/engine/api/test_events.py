"""Events against what the journal's other readers say: read in parts, in one go, and after a restart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import InputError
from undertow.engine.base.results import Report
from undertow.engine.cluster.in_process import InProcess
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.encoders.hashing import HashingEncoder

from ...support.cluster.in_process import settings as shard_settings
from ...support.engine import open_engine
from ...support.faults.harness import THETA, turns_of, write_log


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tenants, with parked jobs, a deleted turn, a reworded turn, a deleted episode."""
    folder = tmp_path_factory.mktemp("events")
    turns = turns_of(write_log(folder / "log.jsonl", ["ann", "bob"], 40))
    replies = MockReplies(2, malformed_rate=0.3, malformed_sticky=True)
    with open_engine(folder / "s", MockLLM(replies), **THETA) as engine:
        for n in range(0, 40, 7):
            for name in ("ann", "bob"):
                engine.add_batch(turns[name][n : n + 7])
                engine.step()
        assert engine.drain()
        listed = engine.list("ann", kinds=["turn"]).items
        engine.delete(listed[7]["id"])
        engine.update(listed[9]["id"], "I sold the boat.")
        engine.update(engine.get_all("ann")[0].id, "The boat was sold.")
        engine.delete(engine.get_all("ann")[1].id)
        assert engine.drain()
    return folder / "s"


@pytest.fixture
def engine(store: Path) -> Iterator[Engine]:
    with open_engine(store, **THETA) as engine:
        yield engine


def events(
    engine: Any, tenant: str, sizes: Sequence[int] = (1000,), after: str | None = None
) -> list[Report]:
    """All of them, in parts of these sizes in turn."""
    found: list[Report] = []
    for n in range(10_000):
        page = engine.events(tenant, after=after, limit=sizes[n % len(sizes)], text=True)
        found += page.items
        if page.after == after:
            return found
        after = page.after
    raise AssertionError("no end")


def current(told: Sequence[Report]) -> dict[str, str]:
    """What a follower has of the memories: each one's text by id."""
    held: dict[str, str] = {}
    for event in told:
        if event["type"] == "memory.deleted":
            held.pop(event["memory_id"], None)
        elif event["type"].startswith("memory."):
            held[event["memory_id"]] = event["text"]
    return held


def test_a_follower_has_what_a_list_has(engine: Engine) -> None:
    for tenant in ("ann", "bob"):
        told = events(engine, tenant)
        listed = engine.list(tenant, limit=1000).items
        assert current(told) == {report["id"]: report["text"] for report in listed}
        assert len({event["id"] for event in told}) == len(told)
        for event in told:
            assert event["tenant"] == tenant
            if event.get("version"):
                versions = engine.history(event["memory_id"], tenant=tenant)
                assert event["version"] in [version["version"] for version in versions]


def test_parked_jobs_are_told_with_their_turns(engine: Engine) -> None:
    told = [event for event in events(engine, "ann") if event["type"] == "turn.parked"]
    jobs = [job for job in engine._reports.jobs() if job["tenant"] == "ann"]
    assert jobs and {job["id"] for job in jobs} <= {event["job_id"] for event in told}
    ids = {event["memory_id"] for event in events(engine, "ann") if event.get("kind") == "turn"}
    assert all(set(event["turn_ids"]) <= ids for event in told)


@pytest.mark.parametrize("seed", range(3))
def test_events_in_parts_are_those_in_one_go(engine: Engine, seed: int) -> None:
    rng, whole = Random(seed), events(engine, "ann")
    assert events(engine, "ann", [rng.randint(1, 9) for _ in range(20)]) == whole
    at = rng.randrange(len(whole))
    assert events(engine, "ann", after=whole[at]["id"]) == whole[at + 1 :]
    assert engine.events("ann", after="latest").items == ()


def test_the_store_tells_what_its_tenants_tell(store: Path, engine: Engine) -> None:
    """By the shard's own path, which reads beside its steps; and only what the keys name."""
    expected = {name: events(engine, name) for name in ("ann", "bob")}
    engine.close()
    parts = EngineParts(encoder=lambda _: HashingEncoder(64), llm=lambda _: MockLLM(MockReplies()))
    with closing(InProcess(store, shard_settings(**THETA), parts)) as api:
        found: list[Report] = []
        after: dict[str, int] = {}
        while (page := api.store_events(after, limit=13, text=True)["single"]).at != after.get("single"):
            found += [event for _, event in page.items]
            after = {"single": page.at}
        for name, events_of in expected.items():
            assert [event for event in found if event["tenant"] == name] == events_of
        key = expected["ann"][0]["tenant_key"]
        only = api.store_events({}, keys=[key], limit=1000)["single"].items
        assert [event["id"] for _, event in only] == [event["id"] for event in expected["ann"]]
        assert "text" not in only[0][1]
        assert api.store_events(after, limit=0)["single"].changed == frozenset()
        api.delete(expected["bob"][0]["memory_id"])
        changed = api.store_events(after, limit=0)["single"].changed
        assert changed == {expected["bob"][0]["tenant_key"]}
        (last,) = [e for e in events(api, "bob") if e["id"] not in {e["id"] for e in expected["bob"]}][:1]
        assert (last["type"], last["memory_id"]) == ("memory.deleted", expected["bob"][0]["memory_id"])


def test_of_an_erased_tenant_the_erasure_alone_is_told(tmp_path: Path) -> None:
    turns = turns_of(write_log(tmp_path / "log.jsonl", ["ann"], 4))["ann"]
    with open_engine(tmp_path / "s", MockLLM(MockReplies()), **THETA) as engine:
        assert events(engine, "ann") == []
        engine.add_batch(turns[:2])
        behind = events(engine, "ann")[-1]["id"]
        engine.erase("ann", now=True)
        (told,) = events(engine, "ann", after=behind)
        assert (told["type"], told["tenant"]) == ("tenant.erased", "ann")
        ((_, seen),) = engine.store_events({}, limit=9)["single"].items
        assert seen == {**told, "tenant": None}, "nobody knows the name any more"
        assert str(engine.store_events({}, limit=9)).count("ann") == 0
        engine.add_batch(turns[2:])
        assert [e["type"] for e in events(engine, "ann")] == ["tenant.erased", *["memory.created"] * 2]
        assert events(engine, "ann", after=told["id"]) == events(engine, "ann")[1:]


def test_ids_tell_nothing_and_strange_ones_are_refused(engine: Engine) -> None:
    ann, bob = events(engine, "ann"), events(engine, "bob")
    assert not {e["id"] for e in ann} & {e["id"] for e in bob}
    assert sorted(e["id"] for e in ann) != [e["id"] for e in ann]
    for strange in (bob[3]["id"], "0" * 32):  # as of a shard that the tenant has left: all again
        assert events(engine, "ann", after=strange) == ann
    for wrong in ("", "no cursor", ann[0]["id"][:-1], "12", "LATEST"):
        with pytest.raises(InputError, match="after"):
            engine.events("ann", after=wrong)
    for limit in (0, 1001):
        with pytest.raises(InputError, match="limit"):
            engine.events("ann", limit=limit)
