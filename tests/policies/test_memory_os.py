"""MemoryOS by hand: paging, heat, long-term lines, and what an answer gets (docs/policies/memory-os.md)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockReplies
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Decision, Memory
from undertow.engine.policies.base import TurnView
from undertow.engine.policies.memory_os import persona, segments
from undertow.engine.policies.memory_os.pages import TurnPages
from undertow.engine.policies.memory_os.policy import MemoryOS
from undertow.engine.policies.memory_os.segments import Segments, jaccard
from undertow.engine.policies.registry import tiers_of
from undertow.engine.policies.work import Work
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.reply_schemas import PersonaLine, PersonaReply, TopicReply

from ..support.engine import RecordingLLM, bytes_hold, open_engine, put, turn_of
from ..support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under

BOAT = TopicReply(summary="Ann has a boat.", keywords=["boat", "Sail"])
ONE_PAGE = MemoryOS(ROOMY, 1, 5.0)


def line(
    text: str, kind: Any = "knowledge", turns: tuple[int, ...] = (1,), replaces: Any = None
) -> PersonaLine:
    return PersonaLine(text=text, kind=kind, turns=[*turns], replaces=replaces)


def learning(*lines: PersonaLine) -> PersonaReply:
    return PersonaReply(lines=[*lines])


def taken(view: View, seq: int, *replies: Any, policy: MemoryOS = ONE_PAGE, word: str = "boat") -> Driven:
    """A turn about boats, which sends the one before into mid-term memory."""
    said = f"Ann: {word} number{seq}"
    view.turns[seq] = TurnView(seq, said, f"2026-03-{seq + 1:02d}", (said,))
    view.record = seq
    done = drive(policy.decide(seq, view), view, replies=replies)
    view.take_in(done.outcome)
    if done.outcome.settled:
        view.settled_end = max(done.outcome.settled) + 1
    return done


def boats(pages: int, *replies: Any) -> View:
    """A segment of so many pages."""
    view = View({})
    taken(view, 0)
    for seq in range(1, pages + 1):
        more = replies if seq == pages else ()
        taken(view, seq, *([BOAT] if seq == 1 else [BOAT, BOAT]), *more)
    return view


def lines_of(view: View) -> dict[str, Memory]:
    return {fact.text: fact for fact in view.current("fact")}


def test_pages_wait_in_short_term_memory_until_an_eighth_comes() -> None:
    policy = MemoryOS(ROOMY, Settings().short_term_pages, Settings().heat_threshold)
    view = View({})
    for seq in range(7):
        assert taken(view, seq, policy=policy).outcome.decision is Decision.WAITS
    done = taken(view, 7, BOAT, policy=policy)
    assert (done.outcome.cluster, done.outcome.settled) == ((0,), (0,))


def test_a_page_joins_the_segment_of_its_topic_or_begins_one() -> None:
    view = boats(1)
    taken(view, 2, BOAT, BOAT, word="violin")
    (segment,) = view.current("episode")
    assert segment.source_seqs == (0, 1) and segment.text == "Ann has a boat.\nKeywords: boat, sail"
    taken(view, 3, TopicReply(summary="The violin is old.", keywords=["violin", "bow"]))
    assert [s.source_seqs for s in view.current("episode")] == [(0, 1), (2,)]


def test_the_similarity_of_keywords_is_jaccards() -> None:
    assert jaccard(frozenset("ab"), frozenset("bc")) == pytest.approx(1 / 3)
    assert jaccard(frozenset(), frozenset()) == 0.0


def test_a_segment_of_five_unlearned_pages_is_hot_and_cools_when_learned_from() -> None:
    view = boats(4)
    assert not lines_of(view)
    done = taken(view, 5, BOAT, BOAT, learning(line("Ann sails.", turns=(1, 3))))
    assert len(lines_under(done.prompts[-1], "Turns")) == 5
    fact = lines_of(view)["Ann sails."]
    assert (fact.source_seqs, fact.shown_seqs, fact.fact_kind) == ((0, 2), (1, 3, 4), "knowledge")
    assert [p.operation for p in taken(view, 6, BOAT, BOAT).prompts] == ["topic", "topic"], "it is cool"


def test_recency_is_the_rest_of_heat() -> None:
    view = boats(2)
    (segment,) = view.current("episode")
    view.turns[9] = TurnView(9, "Ann: x", "2026-06-25T17:46:40")  # 10**7 seconds after the last page
    dated = replace(segment, timestamp="2026-03-02T00:00:00")
    pages = TurnPages(Work(9, view, ROOMY))
    job, (page,) = Segments(pages, 5.0), pages.existing([9])
    assert job.heat(dated, page, frozenset()) == pytest.approx(2 + 0.3679, abs=1e-3)
    assert job.heat(replace(segment, timestamp=None), page, frozenset()) == 3


def test_of_too_many_segments_the_coldest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MOST_SEGMENTS", 2)
    view = boats(1)
    taken(view, 2, BOAT, BOAT, word="violin")
    for seq, word in ((3, "violin"), (4, "bread")):
        taken(view, seq, TopicReply(summary=f"Of {word}.", keywords=[word]), word="bread")
    assert [s.source_seqs for s in view.current("episode")] == [(0, 1), (3,)], "of equal ones the oldest"


def test_a_line_of_the_profile_takes_the_place_of_the_one_it_names() -> None:
    view = boats(5, learning(line("Ann is young.", "profile"), line("Bo helps.", "agent", (2,))))
    for seq in range(6, 10):
        taken(view, seq, BOAT, BOAT)
    replacing = line("Ann is thirty.", "profile", (5,), replaces=1)
    done = taken(
        view, 10, BOAT, BOAT, learning(replacing, line("Bo helps.", "agent", (9,)), line("New.", replaces=1))
    )
    assert "Ann is young." in lines_under(done.prompts[-1], "Stored facts")[0]
    found = lines_of(view)
    assert found.keys() == {"Ann is thirty.", "Bo helps.", "New."}
    assert (found["Ann is thirty."].version, found["Ann is thirty."].source_seqs) == (2, (0, 9))
    assert found["Bo helps."].reach == frozenset(range(10)), "a repeat rests on both readings"


def test_the_queues_of_long_term_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(persona.QUEUES, "knowledge", 2)
    view = boats(5, learning(*(line(f"Fact {n}.") for n in range(4)), line("Ann.", "profile")))
    assert lines_of(view).keys() == {"Fact 2.", "Fact 3.", "Ann."}
    assert [p.operation for p in taken(view, 6, BOAT, BOAT).prompts] == ["topic", "topic"], (
        "learned all the same"
    )


def forgotten_turn(*replies: Any) -> tuple[View, Driven]:
    view = boats(5, learning(line("Ann sails.", turns=(2,)), line("Ann rows.", turns=(3,))))
    del view.turns[1]
    view.record = 6
    done = drive(ONE_PAGE.forget(6, 1, view), view, replies=replies)
    view.take_in(done.outcome)
    return view, done


def test_a_deleted_turn_has_its_segment_and_the_lines_of_its_reading_made_again() -> None:
    view, done = forgotten_turn(BOAT, learning(line("Ann rows.", turns=(2,))))
    assert [len(lines_under(p, "Turns")) for p in done.prompts] == [4, 4]
    (segment,) = view.current("episode")
    assert segment.source_seqs == (0, 2, 3, 4)
    assert lines_of(view)["Ann rows."].reach == {0, 2, 3, 4} and len(lines_of(view)) == 1


def test_where_that_fails_a_replay_files_and_learns_the_pages_again() -> None:
    view, done = forgotten_turn(BAD)
    assert not view.current("episode") and not view.current("fact")
    assert (done.outcome.operation, done.outcome.cluster) == ("persona", (0, 2, 3, 4))
    job = LlmJob("j", 6, "parked", "persona", done.outcome.cluster)
    view.record = 7
    again = drive(ONE_PAGE.replay(7, job, view), view, replies=[BOAT] * 7 + [learning(line("Ann rows."))])
    view.take_in(again.outcome)
    assert view.current("episode")[0].source_seqs == (0, 2, 3, 4) and lines_of(view).keys() == {"Ann rows."}


def test_an_answer_gets_short_term_memory_and_the_profile_whole(tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "memory-os", "short_term_pages": 3, "heat_threshold": 1.0}
    assert tiers_of(Settings(policy="memory-os", answer_tokens=0)).recent == 7
    with open_engine(
        tmp_path, RecordingLLM(MockReplies(3)), **options, k_sub=1, k_epi=1, k_sem=0, answer_tokens=0
    ) as engine:
        put(engine, [turn_of("ann", n, f"boat harbour sail number{n}") for n in range(12)])
        assert engine.drain()
        found = engine.recall("ann", "boat harbour number0")
        assert {turn.source_seqs for turn in found.turns} >= {(9,), (10,), (11,)} and len(found.turns) == 4
        profile = [fact for fact in engine.get_all("ann") if fact.fact_kind == "profile"]
        assert profile and {fact.id for fact in found.facts} == {fact.id for fact in profile}
        assert len(engine.search("ann", "boat").turns) == 1, "a search returns what it is asked for"


def test_no_word_of_a_deleted_turn_is_left(tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "memory-os", "short_term_pages": 1, "heat_threshold": 1.0}
    with open_engine(tmp_path, RecordingLLM(MockReplies(3)), **options) as engine:
        put(engine, [turn_of("ann", n, "boat xylophonist" if n == 1 else f"boat {n}") for n in range(6)])
        assert engine.drain()
        assert any("xylophonist" in m.text for m in engine.get_all("ann") if m.kind == "fact")
        engine.delete(engine.search("ann", "xylophonist", k_sub=1).turns[0].id)
        assert engine.drain()
        engine.purge()
    assert not bytes_hold(tmp_path, "xylophonist")
