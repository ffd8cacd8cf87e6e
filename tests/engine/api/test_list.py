"""Listing by pages against everything at once: nothing twice, nothing left out, filters before the limit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import InputError, Memory, Turn
from undertow.engine.base.results import Report

from ...support.engine import open_engine
from ...support.faults.harness import THETA, reports, write_log
from ...support.faults.harness import turns_of as read_turns

KINDS = ("turn", "episode", "fact")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("listed")
    turns = read_turns(write_log(folder / "log.jsonl", ["ann", "bob"], 60))
    with open_engine(folder / "s", MockLLM(MockReplies(2)), **THETA) as engine:
        for n, turn in enumerate(turns["ann"]):
            own = {"topic": n % 3, "even": n % 2 == 0} if n % 4 else {}
            when = turn.timestamp if n % 5 else None
            engine.add_batch([Turn("ann", turn.messages, turn.dedupe_key, f"s{n}", when, own)])
        engine.add_batch(turns["bob"])
        assert engine.drain()
        for memory in (engine.get_all("ann")[1], engine.get_all("ann")[-1]):
            engine.delete(memory.id)
        engine.delete(engine.list("ann", kinds=["turn"]).items[7]["id"])
        assert engine.drain()
    return folder / "s"


@pytest.fixture(scope="module")
def engine(store: Path) -> Iterator[Engine]:
    with open_engine(store, **THETA) as engine:
        yield engine


@pytest.fixture(scope="module")
def everything(store: Path) -> list[Report]:
    """Read from the journal alone, by other code: turns and current memories, in order of birth."""
    with reports(store) as of:
        known = [*of.turns("ann"), *of.memories("ann", "episode"), *of.memories("ann", "fact")]
    assert {r["kind"] for r in known} == set(KINDS)
    return sorted(known, key=born)


def born(record: Report) -> tuple[int, int, int]:
    kind = record["kind"]
    seq, ordinal = (record["seq"], 0) if kind == "turn" else (record["born_at_seq"], record["ordinal"])
    return (seq, KINDS.index(kind), ordinal)


def walk(engine: Engine, limit: int, **how: Any) -> list[Report]:
    """All pages; each but the last is full."""
    items: list[Report] = []
    after = None
    while True:
        page = engine.list("ann", limit=limit, after=after, **how)
        items += page.items
        if (after := page.after) is None:
            return items
        assert len(page.items) == limit


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    limit=st.integers(1, 40),
    kinds=st.none() | st.sets(st.sampled_from(KINDS)),
    days=st.none() | st.tuples(st.integers(1, 3), st.integers(1, 3)),
    topics=st.none() | st.sets(st.integers(0, 3), min_size=1),
)
def test_pages_are_what_passes_the_filters(
    engine: Engine,
    everything: list[Report],
    limit: int,
    kinds: set[str] | None,
    days: tuple[int, int] | None,
    topics: set[int] | None,
) -> None:
    since, until = (None, None) if days is None else (f"2026-03-{day:02d}" for day in sorted(days))
    where = None if topics is None else {"topic": list(topics), "even": True}
    turns = {r["seq"]: r for r in everything if r["kind"] == "turn"}

    def right(seq: int) -> bool:
        own = turns[seq]["metadata"]
        return topics is None or (own.get("topic") in topics and own.get("even") is True)

    def passes(record: Report) -> bool:
        when = record["timestamp"]
        in_time = since is None or until is None or (when is not None and since <= when[:10] <= until)
        seqs = [record["seq"]] if record["kind"] == "turn" else record["source_seqs"]
        return (kinds is None or record["kind"] in kinds) and in_time and any(map(right, seqs))

    found = walk(engine, limit, kinds=kinds, since=since, until=until, where=where)
    assert found == [record for record in everything if passes(record)]


def test_what_is_there_is_walked_past_once_whatever_is_added(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(MockReplies(2)), **THETA) as engine:
        turns = read_turns(write_log(tmp_path / "log.jsonl", ["ann"], 60))["ann"]
        engine.add_batch(turns[:30])
        assert engine.drain()
        before = [item["id"] for item in engine.list("ann", limit=1000).items]
        seen: list[str] = []
        after, fed = None, 30
        while True:
            page = engine.list("ann", limit=4, after=after)
            seen += [item["id"] for item in page.items]
            engine.add_batch(turns[fed : fed + 3])
            engine.drain()
            fed += 3
            if (after := page.after) is None:
                break
        assert len(seen) == len(set(seen)) > len(before)
        assert [i for i in seen if i in set(before)] == before


def test_what_a_search_may_not_find_is_not_listed(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(MockReplies(1)), **THETA) as engine:
        engine.add_batch(read_turns(write_log(tmp_path / "log.jsonl", ["ann"], 40))["ann"])
        assert engine.drain()
        engine._llm = engine.scheduler.llm_calls.llm = None
        every = {m.id: m for m in engine.get_all("ann")}

        def apart_from(seq: int) -> list[Memory]:
            """What was not written in sight of this turn, nor of an episode that was."""
            seen = {m.id for m in every.values() if seq in m.reach}
            return [m for m in every.values() if m.id not in seen and m.episode_id not in seen]

        said = {s for m in every.values() if m.kind == "episode" for s in m.source_seqs}
        seq, others = next((s, left) for s in sorted(said) if len(left := apart_from(s)) > 1)
        assert len(others) < len(every)
        turns = {r["seq"]: r["id"] for r in engine.list("ann", kinds=["turn"]).items}
        engine.delete(turns[seq])
        engine.delete(others[0].id)
        engine.drain()
        listed = {item["id"] for item in engine.list("ann", kinds=["episode", "fact"], limit=1000).items}
        assert listed == {m.id for m in others[1:]}


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 10_000}, "limit"),
        ({"after": "1"}, "after"),
        ({"after": "a.b.c"}, "after"),
        ({"after": ""}, "after"),
        ({"kinds": ["turns"]}, "kinds"),
        ({"where": {"topic": []}}, "topic"),
        ({"since": "yesterday"}, "yesterday"),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(how: dict[str, Any], field: str, engine: Engine) -> None:
    with pytest.raises(ValueError, match=field) as refusal:
        engine.list("ann", **how)
    assert isinstance(refusal.value, InputError) == (field in ("limit", "after", "kinds"))
