"""RecMem's coroutine driven by hand: each step of the specification, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from undertow.engine.base.model import Decision, memory_id
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import Complete, GateReading, PromptBudget, TurnView, deletion
from undertow.engine.policies.recmem import RecMem
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.reply_schemas import (
    EpisodeDraft,
    EpisodesReply,
    FactDraft,
    FactsReply,
    MergeReply,
    Reply,
)

from ..support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under, stored, view_of

NO_FACTS = FactsReply(facts=[])


def episodes(*drafts: tuple[str, list[int]]) -> EpisodesReply:
    return EpisodesReply(episodes=[EpisodeDraft(text=text, turns=turns) for text, turns in drafts])


def facts(*drafts: tuple[str, int | None], turns: Sequence[int] = ()) -> FactsReply:
    like: dict[str, Any] = {"kind": "user_event", "turns": list(turns)}
    return FactsReply(facts=[FactDraft(text=text, replaces=n, **like) for text, n in drafts])


def decide(
    view: View, seq: int, reading: GateReading, *replies: Reply | BadReply, budget: PromptBudget = ROOMY
) -> Driven:
    return drive(RecMem(budget).decide(seq, view), view, reading=reading, replies=replies)


STORY = stored("episode", "Ann plans a trip.", 2, (0, 1))


# ---- prompts that do not fit


def tight(turn_count: int, view: View) -> PromptBudget:
    """A budget that holds an episode prompt of the first turns, and not one more."""
    recmem = RecMem(PromptBudget(1 << 20, 64))
    seqs = tuple(range(turn_count - 1))
    steps = recmem.decide(turn_count - 1, view)
    next(steps)
    effect = steps.send(GateReading(None, None, seqs, (1.0,) * len(seqs), len(seqs)))
    assert isinstance(effect, Complete)
    return PromptBudget(effect.prompt.size_tokens + 64, 64)


def test_a_cluster_that_does_not_fit_is_split_oldest_first() -> None:
    view = view_of(7, words=300)
    reading = GateReading(None, None, (0, 1, 2, 3, 4, 5), (0.9,) * 6, 6)
    told = [episodes(("Early.", [1])), episodes(("Middle.", [])), episodes()]
    # refinement adds the episode, so its turns may come in one part more than the episode prompt's
    budget = tight(3, view)
    roomier = PromptBudget(budget.context_tokens + 200, budget.reply_tokens)
    done = decide(view, 6, reading, *told, facts(("F1.", None)), NO_FACTS, budget=roomier)
    sizes = [len(lines_under(p, "Turns")) for p in done.prompts]
    assert [p.operation for p in done.prompts] == ["episode"] * 3 + ["refine"] * 2
    assert sizes == [3, 3, 1, 3, 3]
    assert "turn0" in done.prompts[0].user and "turn2" in done.prompts[0].user
    early, middle = done.made("episode")
    assert (early.source_seqs, middle.source_seqs) == ((0,), (3, 4, 5))
    assert [m.source_seqs for m in done.made("fact")] == [(0, 1, 2)]
    assert "F1." in done.prompts[4].user, "the second part's refinement sees the first part's facts"
    assert done.outcome.settled == tuple(range(7))


def test_one_oversized_turn_parks_the_job() -> None:
    view = view_of(3)
    view.turns[1] = TurnView(1, "Ann: " + "word " * 9_000, "2026-03-02")
    done = decide(view, 2, GateReading(None, None, (0, 1), (0.9, 0.8), 2))
    assert (done.outcome.decision, done.outcome.settled) == (Decision.PARKED, (0, 1, 2))
    assert "tokens" in (done.outcome.reason or "")
    assert done.prompts == []


def test_an_oversized_turn_parks_at_the_merge_question_too() -> None:
    view = view_of(1)
    view.turns[0] = TurnView(0, "Ann: " + "word " * 9_000, "2026-03-02")
    done = decide(view, 0, GateReading(STORY, 0.9))
    assert (done.outcome.decision, done.outcome.cluster) == (Decision.PARKED, (0,))


# ---- replay


def replay(view: View, job: LlmJob, *replies: Reply | BadReply, reading: GateReading | None = None) -> Driven:
    return drive(RecMem(ROOMY).replay(9, job, view), view, reading=reading, replies=replies)


def test_replay_runs_the_stored_cluster_and_what_it_makes_carries_the_records_seq() -> None:
    job = LlmJob("j", 5, "parked", "episode", (3, 4, 5))
    done = replay(view_of(8), job, episodes(("Told.", [1])), facts(("Fact.", None)))
    assert done.outcome.decision is Decision.FIRED
    (episode,), (fact,) = done.made("episode"), done.made("fact")
    assert (episode.made_at_seq, episode.born_at_seq) == (9, 9)
    assert episode.id == memory_id("ann", 1, 9, "episode", 0)
    assert (episode.source_seqs, fact.source_seqs) == ((3,), (3, 4, 5))
    assert done.outcome.revived == ()


def test_replay_without_episodes_brings_the_turns_back_to_the_gates() -> None:
    done = replay(view_of(8), LlmJob("j", 5, "parked", "episode", (3, 4, 5)), episodes())
    assert (done.outcome.decision, done.outcome.revived) == (Decision.FIRED, (3, 4, 5))


def test_replay_of_a_merge_asks_for_the_episode_nearest_by_now() -> None:
    job = LlmJob("j", 5, "parked", "merge", (5,))
    merge = MergeReply(same_story=True, narrative="More.")
    done = replay(view_of(8), job, merge, NO_FACTS, reading=GateReading(STORY, 0.8))
    assert done.outcome.decision is Decision.MERGED
    assert done.made("episode")[0].source_seqs == (0, 1, 5)
    refused = replay(
        view_of(8), job, MergeReply(same_story=False, narrative=""), reading=GateReading(STORY, 0.8)
    )
    assert (refused.outcome.decision, refused.outcome.revived) == (Decision.WAITS, (5,))


def test_replay_that_fails_again_is_parked_again_and_deleted_turns_are_left_out() -> None:
    view = view_of(8)
    del view.turns[4]
    job = LlmJob("j", 5, "parked", "episode", (3, 4, 5))
    again = replay(view, job, BAD)
    assert (again.outcome.decision, again.outcome.cluster) == (Decision.PARKED, (3, 5))
    assert len(lines_under(again.prompts[0], "Turns")) == 2
    view.turns.clear()
    assert replay(view, job).outcome.decision is Decision.WAITS


# ---- forget


def forget(view: View, turn_seq: int, *replies: Reply | BadReply) -> Driven:
    return drive(RecMem(ROOMY).forget(9, turn_seq, view), view, replies=replies)


def test_forgetting_a_turn_remakes_what_rests_on_it_from_the_other_turns() -> None:
    told = stored("episode", "Told of three.", 5, (1, 2, 3))
    other = stored("episode", "Another.", 6, (3,))
    resting = stored("fact", "It rests on it.", 5, (1, 2, 3), episode_id=told.id)
    apart = stored("fact", "It does not.", 6, (3,), episode_id=other.id)
    view = view_of(8, memories=[told, other, resting, apart])
    del view.turns[2]
    done = forget(view, 2, episodes(("Told of two.", [])), facts(("New.", None)))
    (remade,) = done.made("episode")
    assert (remade.id, remade.version, remade.source_seqs) == (told.id, 2, (1, 3))
    assert (remade.text, remade.made_at_seq) == ("Told of two.", 9)
    assert done.deleted() == [resting.id]
    assert len(lines_under(done.prompts[0], "Turns")) == 2
    assert "It rests on it." not in "".join(p.user for p in done.prompts)
    assert [f.source_seqs for f in done.made("fact")] == [(1, 3)]


def test_an_episode_that_was_shown_a_forgotten_turn_is_remade_though_it_does_not_name_it() -> None:
    told = stored("episode", "Told of three.", 5, (1, 3), shown_seqs=(2, 4))
    view = view_of(8, memories=[told])
    del view.turns[2]
    done = forget(view, 2, episodes(("Told of two.", [])), facts())
    (remade,) = done.made("episode")
    assert (remade.text, remade.source_seqs, remade.shown_seqs) == ("Told of two.", (1, 3), ())
    assert len(lines_under(done.prompts[0], "Turns")) == 2


def test_facts_written_in_sight_of_a_deleted_episode_go_with_a_turn_that_it_was_shown() -> None:
    told = stored("episode", "Told.", 5, (1,), shown_seqs=(2,))
    later = stored("fact", "Fact.", 6, (4,), episode_id=told.id)
    done = forget(view_of(8, memories=[deletion(told, 7), later]), 2)
    assert sorted(done.deleted()) == sorted([told.id, later.id])


def test_an_episode_of_a_forgotten_turn_alone_is_removed_without_asking() -> None:
    told = stored("episode", "Told.", 5, (2,))
    done = forget(view_of(8, memories=[told]), 2)
    assert done.deleted() == [told.id]
    assert done.prompts == []


# ---- the turns that a fact rests on


@pytest.mark.parametrize(
    ("named", "sources", "beside", "date"),
    [
        ([2], (1,), (0, 3), "2026-03-02"),
        ([3, 1], (0, 3), (1,), "2026-03-04"),
        ([], (0, 1, 3), (), "2026-03-04"),
        ([4], (0, 1, 3), (), "2026-03-04"),
    ],
)
def test_a_fact_rests_on_the_turns_that_say_it_and_has_their_date(
    named: list[int], sources: tuple[int, ...], beside: tuple[int, ...], date: str
) -> None:
    reading = GateReading(None, None, (1, 0), (0.9, 0.8), 2)
    told = facts(("Ann works at the harbour.", None), turns=named)
    done = drive(
        RecMem(ROOMY).decide(3, view_of(4)), view_of(4), reading=reading, replies=[episodes(("E.", [])), told]
    )
    (fact,) = done.made("fact")
    assert (fact.source_seqs, fact.shown_seqs, fact.timestamp) == (sources, beside, date)


def test_a_fact_whose_prompt_showed_a_forgotten_turn_is_extracted_anew_from_all_the_others() -> None:
    narrow = stored("fact", "One.", 5, (1,), shown_seqs=(2, 3))
    view = view_of(8, memories=[narrow])
    del view.turns[2]
    done = forget(view, 2, facts(("New.", None), turns=[2]))
    assert done.deleted() == [narrow.id] and len(lines_under(done.prompts[0], "Turns")) == 2
    assert [(m.text, m.source_seqs, m.shown_seqs) for m in done.made("fact")] == [("New.", (3,), (1,))]


# ---- ablations (section 4.3)


def test_forgetting_a_turn_extracts_directly_anew_what_was_extracted_directly() -> None:
    first = stored("fact", "One.", 5, (1, 2, 3))
    second = replace(first, id=memory_id("ann", 1, 5, "fact", 1), ordinal=1, text="Two.")
    alone = stored("fact", "Alone.", 6, (2,))
    view = view_of(8, memories=[first, second, alone])
    del view.turns[2]
    done = forget(view, 2, facts(("New.", None)))
    assert done.deleted() == [first.id, second.id, alone.id]
    assert [p.operation for p in done.prompts] == ["direct"]
    assert [(m.text, m.source_seqs) for m in done.made("fact")] == [("New.", (1, 3))]
