"""Answer modes: coroutines that yield the next prompt of a question (HiMem, section 2.3).

A mode searches right before each prompt, so that no prompt contains what was deleted during the previous LLM
call. It runs on the engine's thread and never blocks; the engine sends its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from undertow.engine.base.model import AnswerMode, AnswerStyle
from undertow.engine.base.results import Hit, SearchResult
from undertow.engine.base.timestamps import in_words
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import PromptBudget
from undertow.engine.search.ranking import question_prompt, shown_lines
from undertow.prompts.builders import Prompt, sufficiency_prompt
from undertow.prompts.reply_schemas import SufficiencyReply

NOT_ANSWERABLE = "Not answerable from memory."


@dataclass(frozen=True, slots=True)
class Say:
    """The next prompt. `answers`: its reply is the answer, which may be streamed.

    `missed`: ids of the episodes that supported the answer when the notes did not.
    """

    prompt: Prompt
    answers: bool = False
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its search, the budget of its prompts, and the style of the answering one."""

    text: str
    as_of: str | None
    search: Callable[[], SearchResult]
    budget: PromptBudget
    style: AnswerStyle


# Returns the answer and the search result that it was given.
Answering = Generator[Say, Any, tuple[str, SearchResult]]


def answering(mode: AnswerMode, question: Question) -> Answering:
    """The coroutine of a mode."""
    return best_effort(question) if mode == "best_effort" else hybrid(question)


def hybrid(question: Question) -> Answering:
    """Answer from all tiers at once."""
    found = question.search()
    return (yield _answer(question, found)), found


def best_effort(question: Question) -> Answering:
    """Answer from notes and turns without an episode; from episodes only if those are insufficient.

    The answer is given the lines that the judgement names. If neither tier suffices, the question is not
    answerable, and no answer is written. A judgement without a usable reply, or without room in a prompt,
    decides nothing: the next tier is tried, or the answering prompt decides, from all that was found.
    """
    found = question.search()
    judged, shown = yield from _judged(question, "Notes and turns", (*found.facts, *found.turns))
    if judged is not None and judged.sufficient:
        near = _only(replace(question.search(), episodes=()), _supporting(judged, shown))
        return (yield _answer(question, near)), near
    seen, shown = yield from _judged(question, "Episodes", question.search().episodes)
    found = question.search()
    if seen is None:
        return (yield _answer(question, found)), found
    if not seen.sufficient:
        return NOT_ANSWERABLE, found
    supporting = _supporting(seen, shown)
    found = _only(found, supporting)
    return (yield _answer(question, found, missed=supporting if judged is not None else ())), found


def _answer(question: Question, found: SearchResult, missed: tuple[str, ...] = ()) -> Say:
    q = question
    prompt = question_prompt(q.text, found, q.as_of, q.budget, q.style)
    return Say(prompt, answers=True, missed=missed)


def _judged(
    question: Question, heading: str, hits: Sequence[Hit]
) -> Generator[Say, Any, tuple[SufficiencyReply | None, Sequence[Hit]]]:
    """Whether the hits suffice, and those that were shown. No hits do not.

    None: no usable reply, or no hit fits into a prompt.
    """
    if not hits:
        return SufficiencyReply(lines=[], sufficient=False), ()
    shown = _fitting(question, heading, hits)
    if not shown:
        return None, ()
    try:
        reply: SufficiencyReply = yield Say(_judging(question, heading, shown))
    except BadReply:
        return None, shown
    return reply, shown


def _fitting(question: Question, heading: str, hits: Sequence[Hit]) -> Sequence[Hit]:
    """The hits that fit into one prompt, nearest first."""
    ranked = sorted(hits, key=lambda hit: -hit.score)
    return question.budget.select_fitting(ranked, lambda shown: _judging(question, heading, shown))


def _judging(question: Question, heading: str, hits: Sequence[Hit]) -> Prompt:
    as_of = question.as_of and in_words(question.as_of)
    return sufficiency_prompt(question.text, heading, shown_lines(hits), as_of)


def _supporting(judged: SufficiencyReply, shown: Sequence[Hit]) -> tuple[str, ...]:
    """The hits that the judgement names; all shown ones if it names none or an invalid number."""
    lines = judged.lines if all(1 <= n <= len(shown) for n in judged.lines) else []
    return tuple(dict.fromkeys(shown[n - 1].id for n in lines)) or tuple(hit.id for hit in shown)


def _only(found: SearchResult, ids: Collection[str]) -> SearchResult:
    """The result with these hits alone; as it is if all of them were deleted in the meantime."""
    episodes, facts, turns = (
        tuple(hit for hit in tier if hit.id in ids) for tier in (found.episodes, found.facts, found.turns)
    )
    only = replace(found, episodes=episodes, facts=facts, turns=turns)
    return only if (*episodes, *facts, *turns) else found
