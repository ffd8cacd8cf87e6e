"""Events against what the journal's other readers say: read in parts, and in one go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.queries import EventsQuery
from undertow.engine.base.results import Report

from ...support.engine import open_engine
from ...support.faults.harness import THETA, turns_of, write_log

NAMES = ("ann", "bob")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Two tenants, with parked jobs, a deleted turn, a reworded turn, a deleted episode."""
    folder = tmp_path_factory.mktemp("events")
    turns = turns_of(write_log(folder / "log.jsonl", [*NAMES], 40))
    replies = MockReplies(2, malformed_rate=0.3, malformed_sticky=True)
    with open_engine(folder / "s", MockLLM(replies), **THETA) as engine:
        for n in range(0, 40, 7):
            for name in NAMES:
                engine.add_batch(turns[name][n : n + 7])
                engine.step()
        assert engine.drain()
        listed = engine.list("ann", kinds=["turn"]).items
        engine.delete(listed[7]["id"])
        engine.update(listed[9]["id"], "I sold the boat.")
        engine.update(engine.get_all("ann")[0].id, "The boat was sold.")
        engine.delete(engine.get_all("ann")[1].id)
        assert engine.drain()
        yield engine


def told(
    api: MemoryApi, keys: Sequence[str] | None, sizes: Sequence[int] = (999,), at: int = -1
) -> list[Report]:
    """All events of some tenants behind an lsn, each with its own, in parts of these sizes in turn."""
    found: list[Report] = []
    is_cut = True
    for size in cycle(sizes):
        query = EventsQuery({"single": at}, None if keys is None else frozenset(keys), size, text=True)
        page = api.call(query)["single"]
        found += [{"lsn": lsn, **event} for lsn, event in page.items]
        assert is_cut or not page.items, "the page before was told to be the last one"
        if at == page.at:
            assert not page.is_cut
            return found
        at, is_cut = page.at, page.is_cut
    raise AssertionError


def key_of(engine: Engine, name: str) -> str:
    return engine.journal.info.tenant_key(name)


def current(events: Sequence[Report]) -> dict[str, str]:
    """What a follower has of the memories: each one's text by id."""
    held: dict[str, str] = {}
    for event in events:
        if event["type"] == "memory.deleted":
            held.pop(event["memory_id"], None)
        elif event["type"].startswith("memory."):
            held[event["memory_id"]] = event["text"]
    return held


@pytest.mark.parametrize("name", NAMES)
def test_a_follower_has_what_a_list_has(engine: Engine, name: str) -> None:
    events = told(engine, [key_of(engine, name)])
    assert current(events) == {r["id"]: r["text"] for r in engine.list(name, limit=1000).items}
    assert {event["tenant"] for event in events} == {name}
    for memory in engine.get_all(name):
        versions = [e["version"] for e in events if e.get("memory_id") == memory.id]
        assert versions == [v["version"] for v in engine.history(memory.id, tenant=name)]


def test_the_words_of_a_deleted_memory_are_not_told(engine: Engine) -> None:
    events = told(engine, [key_of(engine, "ann")])
    gone = [e["memory_id"] for e in events if e["type"] == "memory.deleted" and e["kind"] != "turn"]
    assert gone
    for memory_id in gone:
        assert [e["type"] for e in events if e.get("memory_id") == memory_id] == ["memory.deleted"]


def test_parked_jobs_are_told_with_their_turns(engine: Engine) -> None:
    events = told(engine, [key_of(engine, "ann")])
    parked = [event for event in events if event["type"] == "turn.parked"]
    jobs = {job["id"]: job for job in engine._reports.jobs() if job["tenant"] == "ann"}
    assert jobs and jobs.keys() <= {event["job_id"] for event in parked}
    turns = {event["seq"]: event["memory_id"] for event in events if event.get("kind") == "turn"}
    for event in parked:
        if event["job_id"] in jobs:
            assert event["turn_ids"] == [turns[seq] for seq in jobs[event["job_id"]]["cluster_seqs"]]


@pytest.mark.parametrize("seed", range(3))
def test_events_in_parts_are_those_in_one_go(engine: Engine, seed: int) -> None:
    rng, keys = Random(seed), [key_of(engine, "ann")]
    whole = told(engine, keys)
    assert told(engine, keys, [rng.randint(1, 9) for _ in range(20)]) == whole
    n = rng.randrange(len(whole))
    assert told(engine, keys, at=whole[n]["lsn"]) == whole[n + 1 :]


def test_what_each_tenant_is_told_is_what_all_are(engine: Engine) -> None:
    everything = told(engine, None, [13])
    for name in NAMES:
        assert [e for e in everything if e["tenant"] == name] == told(engine, [key_of(engine, name)])
    end = engine.call(EventsQuery({}))["single"]
    assert end.items == ()
    assert engine.call(EventsQuery({"single": end.at}, limit=9))["single"] == end
    beyond = engine.call(EventsQuery({"single": 10**9}, limit=1))["single"]
    assert beyond.at < end.at, "of a store that is an older copy all is told again"


def test_of_an_erased_tenant_the_erasure_alone_is_told(tmp_path: Path) -> None:
    turns = turns_of(write_log(tmp_path / "log.jsonl", ["ann"], 4))["ann"]
    with open_engine(tmp_path / "s", MockLLM(MockReplies()), **THETA) as engine:
        keys = [key_of(engine, "ann")]
        assert told(engine, keys) == []
        engine.add_batch(turns[:2])
        at = told(engine, keys)[-1]["lsn"]
        engine.erase("ann", now=True)
        (erased,) = told(engine, keys, at=at)
        assert (erased["type"], erased["tenant"], erased["tenant_key"]) == ("tenant.erased", None, keys[0])
        assert told(engine, None) == [erased]
        engine.add_batch(turns[2:])
        assert [e["type"] for e in told(engine, None)] == ["tenant.erased", *["memory.created"] * 2]
