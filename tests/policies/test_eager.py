"""The eager policy's coroutine driven by hand: extraction, the four decisions, replay and forgetting."""

from __future__ import annotations

from typing import Any

import pytest

from undertow.engine.base.model import Decision, Memory, memory_id
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import PromptBudget, TurnView
from undertow.engine.policies.eager import Eager
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.reply_schemas import ExtractDraft, ExtractReply, FactDecision, ReconcileReply, Reply

from ..support.policies.driver import ROOMY, Driven, View, drive, lines_under, stored, view_of

NOTHING = ExtractReply(facts=[])


def extracted(*texts: str) -> ExtractReply:
    return ExtractReply(facts=[ExtractDraft(text=text) for text in texts])


def decided(*decisions: tuple[int, Any, int | None, str]) -> ReconcileReply:
    return ReconcileReply(
        decisions=[FactDecision(candidate=c, action=a, fact=f, text=t) for c, a, f, t in decisions]
    )


def fact(text: str, born: int, *sources: int) -> Memory:
    return stored("fact", text, born, sources)


def decide(view: View, seq: int, *replies: Reply | BadReply, budget: PromptBudget = ROOMY) -> Driven:
    return drive(Eager(budget).decide(seq, view), view, replies=replies)


# ---- extraction


def test_context_that_does_not_fit_is_left_out_oldest_first_and_an_oversized_turn_is_parked() -> None:
    view = view_of(4, words=300)
    whole = decide(view, 3, NOTHING).prompts[0].size_tokens
    (prompt,) = decide(view, 3, NOTHING, budget=PromptBudget(whole + 63, 64)).prompts
    assert [f"turn{n}" in line for n, line in zip((1, 2), lines_under(prompt, "Earlier turns"), strict=True)]
    assert "turn1" in lines_under(prompt, "Earlier turns")[0]
    view.turns[3] = TurnView(3, "Ann: " + "word " * 9_000, "2026-03-02")
    done = decide(view, 3)
    assert (done.outcome.decision, done.outcome.cluster, done.prompts) == (Decision.PARKED, (3,), [])


# ---- ADD, UPDATE, DELETE, NOOP

SAILS = fact("Ann sails a boat.", 0, 0)


def test_too_many_candidates_are_decided_by_halves_and_the_second_sees_the_first() -> None:
    view = view_of(6, memories=[SAILS])
    texts = [f"Fact{n} " + "word " * 60 for n in range(4)]
    whole = decide(view, 5, extracted(*texts), decided()).prompts[1].size_tokens
    replies = [decided((1, "add", None, ""), (2, "update", 1, "Ann rows.")), decided((1, "delete", 1, ""))]
    done = decide(view, 5, extracted(*texts), *replies, budget=PromptBudget(whole + 63, 64))
    assert [p.operation for p in done.prompts] == ["extract", "reconcile", "reconcile"]
    assert "Ann rows." in lines_under(done.prompts[2], "Stored facts")[0]
    versions = [(d.memory.version, d.memory.deleted) for d in done.outcome.drafts if d.memory.id == SAILS.id]
    assert versions == [(2, False), (3, True)]
    assert [m.ordinal for m in done.made("fact") if m.version == 1] == [0, 1]


# ---- replay


def replay(view: View, *replies: Reply | BadReply) -> Driven:
    job = LlmJob("j", 3, "parked", "extract", (3, 4))
    return drive(Eager(ROOMY).replay(9, job, view), view, replies=replies)


def test_replay_reads_the_stored_turns_and_what_it_makes_carries_the_records_seq() -> None:
    done = replay(view_of(10), extracted("One."), extracted("Two."), decided((1, "update", 1, "Both.")))
    first, second = [d.memory for d in done.outcome.drafts]
    assert (first.id, first.made_at_seq, first.source_seqs) == (memory_id("ann", 1, 9, "fact", 0), 9, (3,))
    assert (second.id, second.version, second.source_seqs) == (first.id, 2, (3, 4))
    assert done.outcome.revived == ()
    assert "turn2" in done.prompts[0].user and "turn5" not in done.prompts[0].user
    assert replay(view_of(10), NOTHING, NOTHING).outcome.revived == (3, 4)


@pytest.mark.parametrize("action", ["update", "delete"])
def test_a_turn_read_late_changes_no_fact_of_a_later_turn(action: str) -> None:
    berlin = fact("Ann lives in Berlin.", 8, 8)
    job = LlmJob("j", 3, "parked", "extract", (3,))
    view = view_of(10, memories=[berlin])
    replies = [extracted("Ann lives in Paris."), decided((1, action, 1, "Ann lives in Paris."))]
    done = drive(Eager(ROOMY).replay(9, job, view), view, replies=replies)
    (made,) = done.made("fact")
    assert (made.text, made.source_seqs, made.timestamp) == ("Ann lives in Paris.", (3,), "2026-03-04")
    assert (made.version, done.deleted()) == (1, [])


def test_a_turn_read_late_that_repeats_a_later_fact_leaves_its_date() -> None:
    berlin = fact("Ann lives in Berlin.", 8, 8)
    view = view_of(10, memories=[berlin])
    done = drive(
        Eager(ROOMY).replay(9, LlmJob("j", 3, "parked", "extract", (3,)), view),
        view,
        replies=[extracted("Ann: Berlin."), decided((1, "none", 1, ""))],
    )
    (made,) = done.made("fact")
    assert (made.id, made.text, made.source_seqs) == (berlin.id, berlin.text, (3, 8))
    assert made.timestamp == "2026-03-09"


# ---- forget


def forget(view: View, turn_seq: int, *replies: Reply | BadReply) -> Driven:
    del view.turns[turn_seq]
    return drive(Eager(ROOMY).forget(12, turn_seq, view), view, replies=replies)


def test_facts_of_a_deleted_turn_alone_go_without_asking_and_others_stay() -> None:
    alone, before, far = fact("Alone.", 2, 2), fact("Before.", 1, 1), fact("Far.", 8, 8)
    done = forget(view_of(12, memories=[alone, before, far]), 2)
    assert (done.deleted(), done.prompts) == ([alone.id], [])


def test_the_other_turns_of_a_fact_are_read_anew_and_see_neither_it_nor_the_deleted_turn() -> None:
    both, apart = fact("Both.", 1, 1, 2, 9), fact("Apart.", 9, 9)
    view = view_of(12, memories=[both, apart])
    done = forget(view, 2, extracted("One."), decided(), NOTHING)
    assert done.deleted() == [both.id]
    assert [p.operation for p in done.prompts] == ["extract", "reconcile", "extract"]
    assert "turn1 " in done.prompts[0].user and "turn9 " in done.prompts[2].user
    assert not any("turn2 " in p.user or "Both." in p.user for p in done.prompts)
    assert [(m.text, m.source_seqs) for m in done.made("fact")] == [("One.", (1,))]


def test_facts_of_turns_that_were_read_with_the_deleted_one_are_made_anew() -> None:
    """Their words may be its words: "she" was resolved from it."""
    near, out_of_reach = fact("Near.", 7, 7), fact("Out of reach.", 8, 8)
    done = forget(view_of(12, memories=[near, out_of_reach]), 2, extracted("Anew."), decided())
    assert done.deleted() == [near.id]
    assert [(m.text, m.source_seqs) for m in done.made("fact")] == [("Anew.", (7,))]


def test_what_two_turns_said_alike_is_told_anew_by_the_one_that_is_left() -> None:
    """Word for word, so that the LLM was never asked about the second."""
    view = view_of(12, memories=[fact("Ann sails.", 1, 1)])
    (twice,) = decide(view, 9, extracted("Ann sails.")).made("fact")
    view.memories[:] = [twice]
    done = forget(view, 1, extracted("Ann sails."))
    assert done.deleted() == [twice.id]
    assert [(m.text, m.source_seqs) for m in done.made("fact")] == [("Ann sails.", (9,))]
