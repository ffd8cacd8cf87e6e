"""How a question is answered: modes as coroutines that say what to ask the LLM next (HiMem, section 2.3).

A mode searches when it is about to ask, not before: what was deleted while the LLM was at work is in no later
prompt. It runs on the engine's thread and waits for nothing; the engine sends its prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from undertow.engine.base.model import AnswerMode
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import PromptBudget
from undertow.engine.search.ranking import Hit, SearchResult, question_prompt
from undertow.prompts.builders import Prompt, ShownMemory, sufficiency_prompt
from undertow.prompts.reply_schemas import SufficiencyReply

NOT_ANSWERABLE = "Not answerable from memory."


@dataclass(frozen=True, slots=True)
class Say:
    """The next prompt. `answers`: its reply is the answer, which is told while it is written.

    `missed`: ids of the episodes that supported the answer where the notes did not.
    """

    prompt: Prompt
    answers: bool = False
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, how to search for it, and how long a prompt may be."""

    text: str
    as_of: str | None
    search: Callable[[], SearchResult]
    budget: PromptBudget


# the answer and what it was given
Answering = Generator[Say, Any, tuple[str, SearchResult]]


def answering(mode: AnswerMode, question: Question) -> Answering:
    """The coroutine of a mode."""
    return best_effort(question) if mode == "best_effort" else hybrid(question)


def hybrid(question: Question) -> Answering:
    """From all tiers at once."""
    found = question.search()
    return (yield _answer(question, found)), found


def best_effort(question: Question) -> Answering:
    """From notes, and turns that no episode holds yet; from episodes only where those are not sufficient.

    Where neither is, the question is not answerable, and no answer is written. A judgement without a usable
    reply decides nothing, nor does one that no prompt has room for: the next tier is looked at, or the answer
    left to the answering prompt.
    """
    found = question.search()
    near = replace(found, episodes=())
    judged = yield from _judged(question, "Notes and turns", (*near.facts, *near.turns))
    if judged is not None and judged.sufficient:
        near = replace(question.search(), episodes=())
        return (yield _answer(question, near)), near
    found = question.search()
    shown = _fitting(question, "Episodes", found.episodes)
    seen = yield from _judged(question, "Episodes", found.episodes)
    if seen is not None and not seen.sufficient:
        return NOT_ANSWERABLE, found
    supporting = () if judged is None or seen is None else _supporting(seen, shown)
    found = question.search()
    return (yield _answer(question, found, missed=supporting)), found


def _answer(question: Question, found: SearchResult, missed: tuple[str, ...] = ()) -> Say:
    prompt = question_prompt(question.text, found, question.as_of, question.budget)
    return Say(prompt, answers=True, missed=missed)


def _judged(
    question: Question, heading: str, hits: Sequence[Hit]
) -> Generator[Say, Any, SufficiencyReply | None]:
    """Whether these are enough; without any, not. None: no usable reply, or none that can be shown."""
    if not hits:
        return SufficiencyReply(lines=[], sufficient=False)
    shown = _fitting(question, heading, hits)
    if not shown:
        return None
    try:
        reply: SufficiencyReply = yield Say(_judging(question, heading, shown))
    except BadReply:
        return None
    return reply


def _fitting(question: Question, heading: str, hits: Sequence[Hit]) -> Sequence[Hit]:
    """Those that one prompt has room for, the nearest first."""
    ranked = sorted(hits, key=lambda hit: -hit.score)
    return question.budget.that_fit(ranked, lambda shown: _judging(question, heading, shown))


def _judging(question: Question, heading: str, hits: Sequence[Hit]) -> Prompt:
    lines = [ShownMemory(n, hit.timestamp, hit.memory) for n, hit in enumerate(hits, 1)]
    return sufficiency_prompt(question.text, heading, lines, question.as_of)


def _supporting(judged: SufficiencyReply, shown: Sequence[Hit]) -> tuple[str, ...]:
    """The episodes that the judgement names; all that it saw where it names none, or what is not there."""
    lines = judged.lines if all(1 <= n <= len(shown) for n in judged.lines) else []
    return tuple(dict.fromkeys(shown[n - 1].id for n in lines)) or tuple(hit.id for hit in shown)
