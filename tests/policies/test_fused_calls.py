"""Fused calls: what the papers ask for in several LLM calls comes in one reply."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Decision, Memory
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import GateReading, PromptBudget, TurnView
from undertow.engine.policies.himem.policy import HiMem
from undertow.engine.policies.nemori.policy import Nemori
from undertow.engine.policies.recmem import RecMem
from undertow.engine.policies.registry import management_of
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.builders import prompt_version
from undertow.prompts.reply_schemas import (
    CandidateDecision,
    ConsolidateAllReply,
    EpisodeDraft,
    EpisodeFactsDraft,
    EpisodeFactsReply,
    EpisodesReply,
    FactDraft,
    FactsReply,
    MergeFactsReply,
    NarrativeReply,
    NoteDraft,
    NotesAllReply,
    PredictionReply,
    Reply,
    SegmentDraft,
    SegmentReply,
    SelectReply,
    StatementDraft,
    StatementsReply,
)

from ..support.engine import RecordingLLM, open_engine, settings_of, turns_of
from ..support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under, stored, view_of

STORY = stored("episode", "Ann plans a trip.", 2, (0, 1))
FIRES = GateReading(None, None, (0, 1), (0.9, 0.8), 2)
THETA: dict[str, Any] = {"theta_sim": 0.2, "theta_merge": 0.2, "theta_count": 3, "quiet_share": 0.0}


def fact(text: str, *turns: int, replaces: int | None = None) -> FactDraft:
    return FactDraft(text=text, kind="user_event", turns=list(turns), replaces=replaces)


def episode(text: str, turns: Sequence[int], *facts: FactDraft) -> EpisodeFactsDraft:
    return EpisodeFactsDraft(text=text, turns=list(turns), facts=list(facts))


def told(*episodes: EpisodeFactsDraft) -> EpisodeFactsReply:
    return EpisodeFactsReply(episodes=list(episodes))


def merged(narrative: str, *facts: FactDraft) -> MergeFactsReply:
    return MergeFactsReply(same_story=bool(narrative), narrative=narrative, facts=list(facts))


def decide(
    view: View, seq: int, reading: GateReading, *replies: Reply | BadReply, budget: PromptBudget = ROOMY
) -> Driven:
    policy = RecMem(budget, is_fused=True)
    return drive(policy.decide(seq, view), view, reading=reading, replies=replies)


# ---- RecMem


def test_episodes_and_their_facts_come_in_one_reply() -> None:
    known = stored("fact", "Ann has a boat.", 1, (0,))
    done = decide(
        view_of(3, memories=[known]),
        2,
        FIRES,
        told(
            episode("The boat.", [1], fact("Ann sold it.", 2, replaces=1), fact("Ann has a boat.", 1)),
            episode("The bread.", [2, 3], fact("Ann sold it.", 1), fact("Ann bakes.", 3), fact("Of all.")),
        ),
    )
    assert [p.operation for p in done.prompts] == ["episode"]
    assert "Ann has a boat." in lines_under(done.prompts[0], "Stored facts")[0]
    boat, bread = done.made("episode")
    assert (boat.source_seqs, boat.shown_seqs, bread.source_seqs) == ((0,), (1, 2), (1, 2))
    facts = [(f.text, f.source_seqs, f.episode_id, f.supersedes) for f in done.made("fact")]
    assert facts == [
        ("Ann sold it.", (1,), boat.id, (known.id,)),
        ("Ann bakes.", (2,), bread.id, ()),
        ("Of all.", (0, 1, 2), bread.id, ()),
    ], "neither what is stored nor what was said before is repeated"
    assert {m.prompt_version for m in done.made("fact")} == {prompt_version("episode_facts")}
    assert (done.outcome.decision, done.outcome.settled) == (Decision.FIRED, (0, 1, 2))


def test_a_merge_and_its_facts_come_in_one_reply() -> None:
    known = stored("fact", "Ann plans a trip by boat.", 1, (0,))
    reading = GateReading(STORY, 0.9)
    done = decide(view_of(6, memories=[STORY, known]), 5, reading, merged("More.", fact("F.", replaces=1)))
    assert [p.operation for p in done.prompts] == ["merge"]
    (prompt,) = done.prompts
    assert len(lines_under(prompt, "Stored facts")) == 1 and "turn5" in lines_under(prompt, "New turn")[0]
    (longer,), (made,) = done.made("episode"), done.made("fact")
    assert (longer.id, longer.version, longer.text, longer.source_seqs) == (STORY.id, 2, "More.", (0, 1, 5))
    assert (made.source_seqs, made.episode_id, made.supersedes) == ((5,), STORY.id, (known.id,))


def test_the_facts_of_a_refused_merge_are_not_stored() -> None:
    done = decide(view_of(6), 5, GateReading(STORY, 0.9), merged("", fact("Of another story.")))
    assert (done.outcome.decision, done.outcome.merge_asked) == (Decision.WAITS, True)
    assert not done.outcome.drafts


def test_stored_facts_that_have_no_room_beside_a_turn_are_left_out_of_its_merge() -> None:
    known = [stored("fact", f"{n} " + "word " * 100, n, (0,)) for n in range(3)]
    view, reading = view_of(6, memories=known, words=100), GateReading(STORY, 0.9)
    bare = decide(view_of(6, words=100), 5, reading, merged("")).prompts[0]
    tight = PromptBudget(bare.size_tokens + 250 + 64, 64)
    done = decide(view, 5, reading, merged("More."), budget=tight)
    assert (len(lines_under(done.prompts[0], "Stored facts")), done.outcome.decision) == (1, "merged")
    parked = decide(view, 5, reading, budget=PromptBudget(bare.size_tokens - 1 + 64, 64)).outcome
    assert (parked.decision, parked.operation, parked.settled) == (Decision.PARKED, "merge", (5,))


def test_a_cluster_that_is_split_shows_the_second_part_the_facts_of_the_first() -> None:
    view = view_of(4, words=600)
    reading = GateReading(None, None, (0, 1, 2), (0.9,) * 3, 3)
    whole = decide(view, 3, reading, told()).prompts[0]
    replies = [told(episode("Early.", [], fact("F1.", 1))), told(episode("Late.", [1], fact("F1.", 1)))]
    done = decide(view, 3, reading, *replies, budget=PromptBudget(whole.size_tokens * 2 // 3 + 64, 64))
    assert [len(lines_under(p, "Turns")) for p in done.prompts] == [2, 2]
    assert "F1." in done.prompts[1].user and [f.text for f in done.made("fact")] == ["F1."]
    assert [m.source_seqs for m in done.made("episode")] == [(0, 1), (2,)]


def test_an_empty_reply_stores_nothing_and_a_bad_one_is_parked() -> None:
    empty = decide(view_of(3), 2, FIRES, told()).outcome
    assert (empty.decision, empty.settled, empty.drafts) == (Decision.FIRED, (), ())
    bad = decide(view_of(3), 2, FIRES, BAD).outcome
    assert (bad.decision, bad.operation, bad.cluster) == (Decision.PARKED, "episode", (0, 1, 2))


def test_a_parked_job_of_either_form_is_run_again_in_the_form_that_is_set() -> None:
    view = view_of(8)
    cluster, turn = LlmJob("j", 5, "parked", "episode", (3, 4)), LlmJob("j", 5, "parked", "merge", (5,))
    policy = RecMem(ROOMY, is_fused=True)
    fired = drive(policy.replay(9, cluster, view), view, replies=[told(episode("E.", [1], fact("F.", 2)))])
    assert (fired.outcome.decision, len(fired.outcome.drafts)) == (Decision.FIRED, 2)
    grown = drive(
        policy.replay(9, turn, view), view, reading=GateReading(STORY, 0.8), replies=[merged("More.")]
    )
    assert (grown.outcome.decision, len(grown.prompts)) == (Decision.MERGED, 1)


def test_what_a_deleted_turn_leaves_is_remade_in_two_calls() -> None:
    """Facts are read in more turns than their episode rests on, so one reply cannot remake both."""
    resting = stored("fact", "It rests on it.", 2, (0, 1, 3), episode_id=STORY.id)
    view = view_of(8, memories=[STORY, resting])
    del view.turns[0]
    replies = [
        EpisodesReply(episodes=[EpisodeDraft(text="Told anew.", turns=[])]),
        FactsReply(facts=[fact("New.", 2)]),
    ]
    done = drive(RecMem(ROOMY, is_fused=True).forget(9, 0, view), view, replies=replies)
    assert [p.operation for p in done.prompts] == ["episode", "refine"]
    assert [(m.text, m.source_seqs) for m in done.made("fact")] == [("New.", (3,))]


def test_without_facts_none_are_asked_for() -> None:
    view = view_of(3)
    policy = RecMem(ROOMY, "without-facts", is_fused=True)
    reply = EpisodesReply(episodes=[EpisodeDraft(text="E.", turns=[])])
    done = drive(policy.decide(2, view), view, reading=FIRES, replies=[reply])
    assert [p.reply for p in done.prompts] == [EpisodesReply]


# ---- NEMORI

BOAT = stored("fact", "Ann keeps a wooden boat in the harbour.", 1, (0,))
BREAD = stored("fact", "Ben bakes rye bread on every sunday.", 2, (0,))
TALE = stored("episode", "Ann and her boat\nA long story.", 1, (0,), source_messages=((0, 0),))


def decision(candidate: int, action: Any, *targets: int, text: str = "") -> CandidateDecision:
    return CandidateDecision(candidate=candidate, action=action, targets=list(targets), text=text)


def learns(
    texts: Sequence[str],
    *replies: Reply,
    known: Sequence[Memory] = (BOAT, BREAD),
    budget: PromptBudget = ROOMY,
) -> Driven:
    """A window of two turns as one group, of which these facts are distilled."""
    turns = {n: TurnView(n, f"A: ask{n}", f"2026-03-{n + 1:02d}", (f"A: ask{n}",)) for n in (0, 8, 9)}
    view = View(turns, [*known], record=9, settled_end=8)
    settings = settings_of(policy="nemori", theta_evoke=1.0, theta_compare=0.6)
    policy = Nemori(budget, 2, management_of(settings), "fixed-chunks", by_cue=True)
    drafts = [StatementDraft(text=text, messages=[1]) for text in texts]
    first: list[Reply] = [
        NarrativeReply(cue="Cue", narrative="It happened."),
        *([SelectReply(continues=None)] if TALE in known else []),
        PredictionReply(prediction="They talked."),
        StatementsReply(facts=drafts),
    ]
    return drive(policy.decide(9, view), view, replies=[*first, *replies])


def test_a_fact_without_a_near_one_is_new_without_a_call() -> None:
    done = learns(["Zoe plays chess."])
    assert "consolidate" not in [p.operation for p in done.prompts]
    assert [f.text for f in done.made("fact")] == ["Zoe plays chess."]


def test_the_facts_of_an_episode_are_compared_in_one_call() -> None:
    texts = [
        "Ann keeps a wooden boat in a harbour.",
        "Zoe plays chess.",
        "Ben bakes rye bread on every monday.",
        "Ann keeps a wooden boat in the yard.",
    ]
    reply = ConsolidateAllReply(
        decisions=[
            decision(1, "merge", 1, text="Ann has a wooden boat in the harbour."),
            decision(2, "conflict", 2),
            decision(3, "conflict", 1),  # which the first has changed
            decision(9, "conflict", 1),
        ]
    )
    done = learns(texts, reply)
    (asked,) = [p for p in done.prompts if p.operation == "consolidate"]
    assert [len(lines_under(asked, name)) for name in ("New facts", "Stored facts")] == [3, 2]
    assert "chess" not in asked.user
    facts = {f.text: f for f in done.made("fact")}
    merged = facts["Ann has a wooden boat in the harbour."]
    assert (merged.id, merged.source_seqs) == (BOAT.id, (0, 8))
    assert merged.prompt_version == prompt_version("consolidate_all")
    assert facts[texts[2]].supersedes == (BREAD.id,) and done.deleted() == [BREAD.id]
    assert facts[texts[1]].supersedes == facts[texts[3]].supersedes == ()
    assert texts[0] not in facts


def test_comparisons_that_do_not_fit_are_made_in_parts() -> None:
    texts = [f"{BOAT.text} {n}" for n in range(9)]
    none = ConsolidateAllReply(decisions=[])
    whole = learns(texts, none).prompts[-1]
    tight = PromptBudget(whole.size_tokens - 20 + 64, 64)
    parts = learns(texts, none, ConsolidateAllReply(decisions=[decision(1, "conflict", 1)]), budget=tight)
    shown = [len(lines_under(p, "New facts")) for p in parts.prompts if p.operation == "consolidate"]
    assert sum(shown) == 9 and len(shown) == 2
    (replacing,) = [f for f in parts.made("fact") if f.supersedes]
    assert replacing.text == texts[shown[0]], "the first of the second part"


def test_episodes_that_may_be_continued_are_shown_by_their_cues() -> None:
    done = learns([], known=[TALE])
    (asked,) = [p for p in done.prompts if p.operation == "select"]
    assert '"Ann and her boat"' in asked.user and "A long story." not in asked.user
    assert "It happened." in lines_under(asked, "New episode")[0]


# ---- HiMem


def test_notes_of_all_stages_come_in_one_reply() -> None:
    view = View({n: TurnView(n, f"Ann: turn{n}", "2026-03-01", (f"Ann: turn{n}",), "s") for n in range(2)})
    view.record = 2
    episodes = SegmentReply(episodes=[SegmentDraft(first=1, topic="T", summary="S.")])
    notes = NotesAllReply(
        notes=[
            NoteDraft(text="Ann sails.", kind="fact", turns=[1]),
            NoteDraft(text="Ann likes boats.", kind="preference", turns=[1, 2]),
        ]
    )
    done = drive(HiMem(ROOMY, is_fused=True).flush(2, view), view, replies=[episodes, notes])
    assert [p.operation for p in done.prompts] == ["segment", "notes"]
    made = [(m.text, m.fact_kind, m.source_seqs, m.shown_seqs) for m in done.made("fact")]
    assert made == [("Ann sails.", "fact", (0,), (1,)), ("Ann likes boats.", "preference", (0, 1), ())]


# ---- the setting


def test_the_profile_of_the_paper_has_its_calls_unless_the_form_is_set() -> None:
    assert Settings().call_form == Settings(profile="assistant").call_form == "fused"
    assert Settings(profile="paper").call_form == "paper"
    assert Settings(profile="paper", calls="fused").call_form == "fused"
    assert Settings(calls="paper").call_form == "paper"


def prompts_of(engine: Engine) -> set[str]:
    llm = engine._llm
    assert isinstance(llm, RecordingLLM)
    return {p.version for p in llm.prompts["ann"] if p.operation in ("episode", "merge", "refine")}


@pytest.mark.parametrize(("first", "second"), [("paper", "fused"), ("fused", "paper")])
def test_a_store_goes_on_in_the_other_form_from_the_same_memories(
    first: str, second: str, tmp_path: Path
) -> None:
    """Decisions are read back, never asked for again; the form is that of the calls to come."""
    turns = turns_of("ann", 12, text="the boat in the harbour {n}")
    with open_engine(tmp_path, RecordingLLM(MockReplies(1)), **THETA, calls=first) as engine:
        engine.add_batch(turns[:6])
        assert engine.drain()
        before, spoke = engine.get_all("ann"), prompts_of(engine)
    assert {m.kind for m in before} == {"episode", "fact"}
    with open_engine(tmp_path, RecordingLLM(MockReplies(1)), **THETA, calls=second) as engine:
        assert engine.drain() and engine.get_all("ann") == before and not prompts_of(engine)
        engine.add_batch(turns[6:])
        assert engine.drain()
        after, speaks = engine.get_all("ann"), prompts_of(engine)
    assert spoke and speaks and not spoke & speaks
    assert after != before
    with open_engine(tmp_path, None, **THETA, calls=first) as engine:
        assert engine.get_all("ann") == after
