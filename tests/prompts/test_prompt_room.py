"""What a prompt shows where the model's context has no room for all that was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from undertow.engine.base.model import Memory
from undertow.engine.base.results import Hit, HitKind, SearchResult
from undertow.engine.policies.base import PromptBudget, TurnView
from undertow.engine.policies.himem.policy import HiMem
from undertow.engine.search.answer_modes import NOT_ANSWERABLE, Question, Say, best_effort
from undertow.engine.search.ranking import question_prompt
from undertow.prompts.builders import Prompt, ShownMemory, sufficiency_prompt, supplement_prompt
from undertow.prompts.reply_schemas import (
    NotesReply,
    SegmentDraft,
    SegmentReply,
    SufficiencyReply,
    SupplementReply,
    TraitsReply,
)

from ..support.policies.driver import ROOMY, View, drive, lines_under, stored

QUESTION = "How many cats does Ann have?"
TOO_LONG = "tram " * 5_000
INSUFFICIENT = SufficiencyReply(lines=[], sufficient=False)


def hit(kind: HitKind, n: int, text: str, score: float) -> Hit:
    return Hit(f"{kind}{n}", kind, text, score, "2026-03-01", (n,))


def facts(count: int = 10) -> tuple[Hit, ...]:
    return tuple(hit("fact", n, f"Ann has {n} cats.", 0.5 - n / 100) for n in range(count))


def shown(prompt: Prompt) -> list[int]:
    return [len(lines_under(prompt, tier)) for tier in ("Episodes", "Facts", "Turns")]


# ---- answers


def test_a_hit_that_is_too_long_takes_no_less_relevant_one_along() -> None:
    episodes = (hit("episode", 1, TOO_LONG, 0.9), hit("episode", 2, "short", 0.3))
    prompt = question_prompt(QUESTION, SearchResult(episodes, facts(), ()), None, ROOMY, "notes")
    assert ROOMY.fits(prompt) and shown(prompt) == [1, 10, 0]
    assert "short" in lines_under(prompt, "Episodes")[0]


def test_of_what_has_room_by_itself_the_most_relevant_is_shown() -> None:
    halves = tuple(hit("turn", n, f"tram{n} " * 2_000, 0.9 - n / 10) for n in range(3))
    prompt = question_prompt(QUESTION, SearchResult((), facts(), halves), None, ROOMY, "notes")
    assert shown(prompt) == [0, 10, 1] and "tram0" in lines_under(prompt, "Turns")[0]


def test_the_words_of_episodes_leave_their_room_to_facts() -> None:
    """Each has its episode's score, which is the highest there is."""
    words = tuple(hit("turn", n, "tram " * 200, 0.9) for n in range(40))
    found = SearchResult((hit("episode", 1, "short", 0.9),), facts(), words, quoted=frozenset(range(40)))
    episodes, of_facts, of_words = shown(question_prompt(QUESTION, found, None, ROOMY, "notes"))
    assert (episodes, of_facts) == (1, 10) and 0 < of_words < 40


def best_effort_of(found: SearchResult, *replies: SufficiencyReply) -> tuple[list[Say], str]:
    """What best effort says, and its answer; the answering prompt is answered "An answer."."""
    steps = best_effort(Question(QUESTION, None, lambda: found, ROOMY, "notes"))
    said, value, waiting = [], None, [*replies]
    try:
        while True:
            said.append(steps.send(value))
            value = "An answer." if said[-1].answers else waiting.pop(0)
    except StopIteration as end:
        assert not waiting
        return said, end.value[0]


def test_episodes_that_no_prompt_holds_are_no_reason_not_to_answer() -> None:
    found = SearchResult((hit("episode", 1, TOO_LONG, 0.9),), facts(), ())
    said, text = best_effort_of(found, INSUFFICIENT)
    assert text == "An answer." and [len(lines_under(s.prompt, "Facts")) for s in said] == [0, 10]
    assert said[-1].missed == (), "nothing to learn from"
    assert best_effort_of(SearchResult((), facts(), ()), INSUFFICIENT)[1] == NOT_ANSWERABLE, "there is none"


def test_an_episode_that_is_too_long_does_not_keep_others_from_being_judged() -> None:
    episodes = (hit("episode", 1, TOO_LONG, 0.9), hit("episode", 2, "short", 0.3))
    sufficient = SufficiencyReply(lines=[1], sufficient=True)
    said, _ = best_effort_of(SearchResult(episodes, facts(), ()), INSUFFICIENT, sufficient)
    assert len(lines_under(said[1].prompt, "Episodes")) == 1
    assert said[-1].missed == ("episode2",)


def test_what_was_judged_has_room_where_it_is_learnt_from() -> None:
    for text in ("short", TOO_LONG):
        line = [ShownMemory(1, None, text)]
        judging = sufficiency_prompt(QUESTION, "Episodes", line, None)
        assert supplement_prompt(QUESTION, line).size_tokens <= judging.size_tokens


# ---- HiMem: windows and reconsolidation


def closed_window(turn_chars: int) -> Memory:
    """The one episode of a session on one topic, as long as a window may be."""
    view, seq = View({}), 0
    policy = HiMem(ROOMY)
    piece = SegmentDraft(first=1, topic="t" * 120, summary="s" * 500)
    replies: Sequence[Any] = [SegmentReply(episodes=[piece]), NotesReply(notes=[]), TraitsReply(notes=[])]
    while True:
        view.turns[seq] = TurnView(seq, "Ann: " + "x" * turn_chars, "2026-03-01", session="a")
        view.record = seq
        steps = policy.decide(seq, view)
        try:
            next(steps)
        except StopIteration:  # it waits
            seq += 1
            continue
        done = drive(policy.decide(seq, view), view, replies=replies)
        (episode,) = done.made("episode")
        return episode


def test_an_episode_of_a_whole_window_leaves_room_in_every_prompt_that_reads_it() -> None:
    for turn_chars in (700, 3_000):
        whole = closed_window(turn_chars)
        assert len(whole.text) > 6_000, "half of the room is not little"
        episode = hit("episode", 1, whole.text, 0.9)
        long_question = "cat " * 200
        prompt = question_prompt(long_question, SearchResult((episode,), facts(), ()), None, ROOMY, "notes")
        assert shown(prompt) == [1, 10, 0]
        line = [ShownMemory(1, None, whole.text)]
        assert ROOMY.fits(sufficiency_prompt(long_question, "Episodes", line, None))
        assert ROOMY.fits(supplement_prompt(long_question, line))


def reconsolidated(*episodes: Memory, budget: PromptBudget = ROOMY) -> list[Prompt]:
    view = View({1: TurnView(1, "Ann: x", None), 2: TurnView(2, "Ann: y", None)}, list(episodes))
    steps = HiMem(budget).reconsolidate(9, QUESTION, [e.id for e in episodes], view)
    return drive(steps, view, replies=[SupplementReply(notes=[])]).prompts


def test_an_episode_that_is_too_long_does_not_keep_others_from_being_learnt_from() -> None:
    long, short = stored("episode", TOO_LONG, 1, (1,)), stored("episode", "short", 2, (2,))
    (prompt,) = reconsolidated(long, short)
    assert [short.text in line for line in lines_under(prompt, "Episodes")] == [True]
