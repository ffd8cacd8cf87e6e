"""What an answer is given within a budget of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.engine.base.model import Memory, memory_id
from undertow.engine.base.results import Hit, HitKind, SearchResult
from undertow.engine.search.packing import KEY_SHARE, as_told, line_tokens, packed, raised_by_facts

from ...support.engine import open_engine, turns_of

WORDS = "the boat left the harbour with the first tide"


def hit(kind: HitKind, score: float, *sources: int, text: str = WORDS) -> Hit:
    return Hit(f"{kind} {sources}", kind, text, score, "2026-05-07", sources)


def found(*hits: Hit) -> SearchResult:
    episodes, facts, turns = (
        tuple(h for h in hits if h.kind == kind) for kind in ("episode", "fact", "turn")
    )
    return SearchResult(episodes, facts, turns)


def ids(result: SearchResult) -> list[str]:
    return [h.id for h in (*result.episodes, *result.facts, *result.turns)]


def test_the_best_of_all_tiers_fill_the_budget() -> None:
    one = line_tokens(hit("turn", 0.9, 1))
    result = found(hit("episode", 0.8, 5, 6), hit("fact", 0.7, 7), hit("turn", 0.9, 1), hit("turn", 0.1, 2))
    assert ids(packed(result, 3 * one)) == ["episode (5, 6)", "fact (7,)", "turn (1,)"]
    assert ids(packed(result, 2 * one)) == ["episode (5, 6)", "turn (1,)"]
    assert ids(packed(result, one - 1)) == []


def test_what_is_too_long_is_skipped_and_shorter_memories_follow() -> None:
    result = found(hit("turn", 0.9, 1, text=WORDS * 20), hit("turn", 0.5, 2))
    assert ids(packed(result, line_tokens(hit("turn", 0.5, 2)))) == ["turn (2,)"]


def test_a_memory_of_turns_that_are_shown_is_left_out() -> None:
    result = found(hit("turn", 0.9, 1), hit("turn", 0.8, 2), hit("fact", 0.7, 1), hit("episode", 0.6, 1, 2))
    assert ids(packed(result, 10_000)) == ["turn (1,)", "turn (2,)"]
    more = found(hit("turn", 0.9, 1), hit("episode", 0.6, 1, 2))
    assert ids(packed(more, 10_000)) == ["episode (1, 2)", "turn (1,)"]


def test_a_fact_raises_the_turns_that_it_rests_on() -> None:
    result = found(hit("fact", 0.9, 2), hit("fact", 0.5, 2), hit("turn", 0.6, 1), hit("turn", 0.55, 2))
    raised = raised_by_facts(result).turns
    assert [turn.source_seqs for turn in raised] == [(2,), (1,)]
    assert raised[0].score == pytest.approx(1 - 0.45 * (1 - KEY_SHARE * 0.9))
    assert raised[1].score == 0.6


def test_a_short_log_is_shown_whole_in_order_of_time(tmp_path: Path) -> None:
    with open_engine(
        tmp_path, MockLLM(), theta_sim=0.2, theta_count=2, answer_tokens=600, profile="companion"
    ) as engine:
        engine.add_batch(turns_of("ann", 6, text="the boat sails {n} miles"))
        assert engine.drain() and engine.get_all("ann")
        whole = engine.recall("ann", "boat 4 miles")
        assert whole.order == "time" and not (whole.episodes or whole.facts)
        assert [h.source_seqs for h in whole.turns] == [(n,) for n in range(6)]
        engine.delete(whole.turns[2].id)
        assert engine.drain()
        assert [h.source_seqs for h in engine.recall("ann", "boat").turns] == [(0,), (1,), (3,), (4,), (5,)]
        engine.add_batch(turns_of("ann", 60, 6, "the boat sails {n} more miles"))
        assert engine.drain()
        part = engine.recall("ann", "boat 4 miles")
    assert part.order == "relevance" and 0 < sum(map(line_tokens, part.ranked())) <= 600


def test_an_episode_is_shown_without_its_turns_word_for_word(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(), policy="himem", answer_tokens=400) as engine:
        engine.add_batch(turns_of("ann", 40, text="the boat sails {n} miles and anchors"))
        engine.flush("ann")
        assert engine.drain()
        (stored, *_) = [memory for memory in engine.get_all("ann") if memory.kind == "episode"]
        given = engine.recall("ann", "boat miles")
        whole = engine.search("ann", "boat miles", k_epi=20)
    lines = set(stored.text.split("\n")[2:])
    assert lines and all(not lines.intersection(e.memory.split("\n")) for e in given.episodes)
    assert any(lines.intersection(e.memory.split("\n")) for e in whole.episodes), "a search shows them"


def living(text: str, born: int, *sources: int, replaces: tuple[str, ...] = ()) -> Memory:
    identity = memory_id("ann", 1, born, "fact", 0)
    return Memory(identity, "fact", "ann", text, 1, born, born, 0, sources, "2026-05-07", supersedes=replaces)


class Facts:
    """A tenant with these facts, none of whose turns was deleted."""

    may_change = False

    def __init__(self, *facts: Memory) -> None:
        self.facts = facts

    def current(self, kind: str) -> tuple[Memory, ...]:
        return self.facts

    def exists(self, seq: int) -> bool:
        return True

    def is_changing(self, memory: Memory) -> bool:
        return False

    def episode_of(self, memory: Memory) -> None:
        return None


def test_a_replaced_fact_stands_behind_the_newest_one() -> None:
    first = living("Ann lives in Rome.", 1, 1)
    second = living("Ann lives in Oslo.", 2, 2, replaces=(first.id,))
    third = living("Ann lives in Bonn.", 3, 3, replaces=(second.id,))
    other = living("Ann has a cat.", 4, 4)
    hits = [
        Hit(m.id, "fact", m.text, score, m.timestamp, m.source_seqs)
        for m, score in ((first, 0.9), (other, 0.8), (second, 0.7), (third, 0.6))
    ]
    tenant: Any = Facts(first, second, third, other)
    told = as_told(tenant, found(*hits)).facts
    assert [(h.id, h.score) for h in told] == [(third.id, 0.9), (other.id, 0.8)]
    replaced = "(Replaced on 7 May 2026: Ann lives in Rome.) (Replaced on 7 May 2026: Ann lives in Oslo.)"
    assert told[0].memory == f"Ann lives in Bonn. {replaced}"
    assert told[0].source_seqs == (1, 2, 3)
    alone = as_told(tenant, found(hits[2])).facts
    assert [(h.id, h.score) for h in alone] == [(third.id, 0.7)], "what replaces it need not be found"
    assert as_told(tenant, found(hits[1], hits[3])).facts == (hits[1], hits[3])


def test_facts_that_replace_each_other_in_a_circle_are_answered_from() -> None:
    """An import may say so."""
    first, second = (living(f"Fact {n}.", n, n, replaces=(other,)) for n, other in ((1, "x"), (2, "y")))
    circle = replace(first, supersedes=(second.id, first.id)), replace(second, supersedes=(first.id,))
    hits = [Hit(m.id, "fact", m.text, 0.5, m.timestamp, m.source_seqs) for m in circle]
    tenant: Any = Facts(*circle)
    assert [h.id for h in as_told(tenant, found(*hits)).facts] == [second.id]


def test_an_episode_says_from_when_to_when_it_lasted(tmp_path: Path) -> None:
    turns = [replace(turn, timestamp=f"2026-03-0{n + 1}") for n, turn in enumerate(turns_of("ann", 2))]
    with open_engine(tmp_path) as engine:
        engine.add_batch(turns)
        tenant = engine.tenants.existing("ann")
        long, short = (as_told(tenant, found(hit("episode", 0.5, *of))).episodes[0] for of in ((0, 1), (1,)))
    assert long.memory == f"(1 March 2026 to 2 March 2026) {WORDS}" and short.memory == WORDS
