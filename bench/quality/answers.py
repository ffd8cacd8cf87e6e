"""The answering half: every question to the LLM with what a system gives for it, each answer a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from undertow.bench.quality.asking import Asker
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.lines import KeptLines, Key
from undertow.bench.quality.overlap import bleu_1, f1
from undertow.bench.quality.systems import Material, System
from undertow.engine.config import Settings
from undertow.engine.llm import BadReply, Completion
from undertow.engine.model import UndertowError
from undertow.engine.policies.base import PromptBudget
from undertow.prompts import Prompt, answer_prompt

Asked = tuple[Sample, Question]


@dataclass(frozen=True, slots=True)
class _Pending:
    """A question that has been sent to the LLM."""

    run: int
    question: Question
    material: Material
    prompt: Prompt
    retrieval_s: float


class Answering:
    """Asks what is not answered yet, errors of an earlier run again. `lines` keeps each reply at once."""

    def __init__(self, system: System, settings: Settings, lines: KeptLines, asker: Asker) -> None:
        self._system = system
        self._settings = settings
        self._lines = lines
        self._asker = asker
        # of each question's first search: a later one finds made what the first has to make
        self._first_s: dict[str, float] = {}

    def is_answered(self, key: Key) -> bool:
        """Whether it has an answer; an error is none."""
        line = self._lines.get(key)
        return line is not None and "answer" in line

    def check_room(self, asked: Sequence[Asked], runs: Sequence[int]) -> None:
        """UndertowError before the first call if a prompt does not fit: nothing is cut behind one's back."""
        budget = PromptBudget(self._settings.context_tokens, self._settings.reply_tokens)
        for sample, question in asked:
            if all(self.is_answered((run, question.id)) for run in runs):
                continue
            prompt = prompt_of(question, self._material(sample, question))
            if not budget.fits(prompt):
                raise UndertowError(
                    f"{self._system.name}: the prompt of question {question.id} has about "
                    f"{prompt.size_tokens} tokens and the reply up to {budget.reply_tokens}, but "
                    f"UNDERTOW_CONTEXT_TOKENS is {budget.context_tokens}. Set it to what the model holds, "
                    "serve the model with a longer context, or choose another --policy."
                )

    def answer(self, asked: Sequence[Asked], runs: Sequence[int], on_answer: Callable[[], None]) -> None:
        """Every question in every run. ServerRefused: what was answered by then is kept."""
        for pending, reply in self._asker.ask(self._prompts(asked, runs)):
            self._lines.add(_line(pending, reply))
            on_answer()
        self._lines.settle([(run, question.id) for run in runs for _, question in asked])

    def _prompts(self, asked: Sequence[Asked], runs: Sequence[int]) -> Iterator[tuple[_Pending, Prompt]]:
        for run in runs:
            for sample, question in asked:
                key: Key = (run, question.id)
                if self.is_answered(key):
                    continue
                material = self._material(sample, question)
                prompt = prompt_of(question, material)
                yield _Pending(run, question, material, prompt, self._first_s[question.id]), prompt

    def _material(self, sample: Sample, question: Question) -> Material:
        began_s = time.perf_counter()
        material = self._system.material(sample, question)
        self._first_s.setdefault(question.id, time.perf_counter() - began_s)
        return material


def prompt_of(question: Question, material: Material) -> Prompt:
    """The same prompt for every system."""
    return answer_prompt(
        question.text,
        material.episodes,
        material.facts,
        material.turns,
        question.asked_on,
        order=material.order,
    )


def _line(pending: _Pending, reply: Completion | BadReply) -> dict[str, Any]:
    """What is kept of a question; `answer` is absent where there is an `error`."""
    question, material = pending.question, pending.material
    line = {
        "question_id": question.id,
        "run": pending.run,
        "category": question.category,
        "question": question.text,
        "gold": question.answer,
        "prompt_version": pending.prompt.version,
    }
    if isinstance(reply, BadReply):
        line["error"] = reply.reason
    else:
        text = str(reply.reply)
        line |= {"answer": text, "model": reply.model}
        line["f1"] = round(f1(text, question.answer, question.category), 4)
        line["bleu_1"] = round(bleu_1(text, question.answer, question.category), 4)
        line["llm_s"] = round(reply.latency_s, 4)
    return line | {
        "tokens": asdict(reply.usage),
        "retrieval_s": round(pending.retrieval_s, 4),
        "evidence": question.evidence,
        "is_scored": question.is_scored,
        "in_turns": material.in_turns,
        "behind_memories": material.behind_memories,
        "material": {
            "order": material.order,
            "episodes": material.episodes,
            "facts": material.facts,
            "turns": material.turns,
        },
    }
