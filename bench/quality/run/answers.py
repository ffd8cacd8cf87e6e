"""Sends every question with a system's material to the LLM and writes each answer as a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.json_lines import KeptLines, Key
from undertow.bench.quality.judge.f1_bleu import bleu_1, f1
from undertow.bench.quality.run.llm_requests import Asker, Talk
from undertow.bench.quality.systems.base import Material, System, prompt_of
from undertow.engine.base.config import Settings
from undertow.engine.base.model import AnswerStyle, UndertowError, Usage
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import PromptBudget
from undertow.prompts.builders import answer_version

Asked = tuple[Sample, Question]
Line = dict[str, Any]
"""A question's line in the file; either `answer` or `error` is present."""


class Answering:
    """Asks the unanswered questions and retries errors of an earlier run; writes each reply to `lines`."""

    def __init__(self, system: System, settings: Settings, lines: KeptLines, asker: Asker) -> None:
        self._system = system
        self._settings = settings
        self._lines = lines
        self._asker = asker
        # of each question's first search: a later one finds made what the first has to make
        self._first_s: dict[str, float] = {}

    def is_answered(self, key: Key) -> bool:
        """Whether it has an answer; an error does not count."""
        line = self._lines.get(key)
        return line is not None and "answer" in line

    def check_room(self, asked: Sequence[Asked], runs: Sequence[int]) -> None:
        """UndertowError, before the first call, if a prompt does not fit: prompts are never truncated."""
        budget = PromptBudget(self._settings.context_tokens, self._settings.reply_tokens)
        for sample, question in asked:
            if all(self.is_answered((run, question.id)) for run in runs):
                continue
            prompt = prompt_of(question, self._material(sample, question), self._settings.style_of_answers)
            if not budget.fits(prompt):
                raise UndertowError(
                    f"{self._system.name}: the prompt of question {question.id} has about "
                    f"{prompt.size_tokens} tokens and the reply up to {budget.reply_tokens}, but "
                    f"UNDERTOW_CONTEXT_TOKENS is {budget.context_tokens}. Set it to what the model holds, "
                    "serve the model with a longer context, or choose another --policy."
                )

    def answer(self, asked: Sequence[Asked], runs: Sequence[int], on_answer: Callable[[], None]) -> None:
        """Answer every question in every run. ServerRefused: answers given before it are kept."""
        talks = (
            self._talk(run, sample, question)
            for run in runs
            for sample, question in asked
            if not self.is_answered((run, question.id))
        )
        for line in self._asker.hold(talks):
            self._lines.add(line)
            on_answer()

    def _talk(self, run: int, sample: Sample, question: Question) -> Talk[Line]:
        """Yields the prompts of the system's steps; returns the question's line."""
        material = self._material(sample, question)
        style = self._settings.style_of_answers
        steps = self._system.steps(sample, question, material, style)
        usage, llm_s, model = Usage(), 0.0, None
        outcome: Line
        try:
            prompt = next(steps)
            while True:
                reply = yield prompt
                assert reply is not None, "every prompt is sent its reply"
                usage += reply.usage
                if isinstance(reply, BadReply):
                    prompt = steps.throw(reply)
                else:
                    llm_s, model = llm_s + reply.latency_s, reply.model
                    prompt = steps.send(reply.reply)
        except StopIteration as ended:
            answer, material = ended.value
            outcome = _scored(question, answer)
            if model is not None:  # without a call there is none
                outcome |= {"model": model, "llm_s": round(llm_s, 4)}
        except BadReply as bad:
            outcome = {"error": bad.reason}
        return {
            **_asked(run, question, style),
            **outcome,
            "tokens": asdict(usage),
            "retrieval_s": round(self._first_s[question.id], 4),
            **_shown(question, material),
        }

    def _material(self, sample: Sample, question: Question) -> Material:
        began_s = time.perf_counter()
        material = self._system.material(sample, question)
        self._first_s.setdefault(question.id, time.perf_counter() - began_s)
        return material


def _asked(run: int, question: Question, style: AnswerStyle) -> Line:
    return {
        "question_id": question.id,
        "run": run,
        "category": question.category,
        "question": question.text,
        "gold": question.answer,
        "prompt_version": answer_version(style),
    }


def _scored(question: Question, answer: str) -> Line:
    compared = (answer, question.answer, question.category)
    return {"answer": answer, "f1": round(f1(*compared), 4), "bleu_1": round(bleu_1(*compared), 4)}


def _shown(question: Question, material: Material) -> Line:
    shown = ("order", "episodes", "facts", "turns")
    return {
        "evidence": question.evidence,
        "is_scored": question.is_scored,
        "in_turns": material.in_turns,
        "behind_memories": material.behind_memories,
        "material": {name: getattr(material, name) for name in shown},
    }
