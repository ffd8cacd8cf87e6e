"""Sends every question with a system's material to the LLM and writes each answer as a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.json_lines import KeptLines, Key
from undertow.bench.quality.judge.f1_bleu import bleu_1, f1
from undertow.bench.quality.run.llm_requests import Asker, Talk
from undertow.bench.quality.systems.base import Material, Steps, Stepwise, System
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError, Usage
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import PromptBudget
from undertow.prompts.builders import Prompt, answer_prompt, prompt_version

Asked = tuple[Sample, Question]


@dataclass(frozen=True, slots=True)
class _Given:
    """A question's answer or error, its material and its cost.

    `llm_s` and `usage` are totals over all its calls; `model` is None without a call.
    """

    material: Material
    usage: Usage
    llm_s: float
    model: str | None
    answer: str = ""
    error: str | None = None


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
            prompt = prompt_of(question, self._material(sample, question))
            if not budget.fits(prompt):
                raise UndertowError(
                    f"{self._system.name}: the prompt of question {question.id} has about "
                    f"{prompt.size_tokens} tokens and the reply up to {budget.reply_tokens}, but "
                    f"UNDERTOW_CONTEXT_TOKENS is {budget.context_tokens}. Set it to what the model holds, "
                    "serve the model with a longer context, or choose another --policy."
                )

    def answer(self, asked: Sequence[Asked], runs: Sequence[int], on_answer: Callable[[], None]) -> None:
        """Answer every question in every run. ServerRefused: answers given before it are kept."""
        for (run, question), given in self._asker.hold(self._talks(asked, runs)):
            self._lines.add(_line(run, question, given, self._first_s[question.id]))
            on_answer()
        self._lines.settle([(run, question.id) for run in runs for _, question in asked])

    def _talks(
        self, asked: Sequence[Asked], runs: Sequence[int]
    ) -> Iterator[tuple[tuple[int, Question], Talk[_Given]]]:
        for run in runs:
            for sample, question in asked:
                if not self.is_answered((run, question.id)):
                    yield (run, question), self._talk(sample, question)

    def _talk(self, sample: Sample, question: Question) -> Talk[_Given]:
        """Yields the prompts of the system's steps; without steps, the one answering prompt."""
        material = self._material(sample, question)
        if isinstance(self._system, Stepwise):
            steps = self._system.steps(sample, question)
        else:
            steps = _one_step(question, material)
        usage, llm_s, model = Usage(), 0.0, None
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
            return _Given(material, usage, llm_s, model, answer)
        except BadReply as bad:
            return _Given(material, usage, llm_s, model, error=bad.reason)

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


def _one_step(question: Question, material: Material) -> Steps:
    reply = yield prompt_of(question, material)
    return str(reply), material


def _line(run: int, question: Question, given: _Given, retrieval_s: float) -> dict[str, Any]:
    """A question's line in the file; either `answer` or `error` is present."""
    material = given.material
    line = {
        "question_id": question.id,
        "run": run,
        "category": question.category,
        "question": question.text,
        "gold": question.answer,
        "prompt_version": prompt_version("answer"),
    }
    if given.error is not None:
        line["error"] = given.error
    else:
        line["answer"] = given.answer
        line["f1"] = round(f1(given.answer, question.answer, question.category), 4)
        line["bleu_1"] = round(bleu_1(given.answer, question.answer, question.category), 4)
        if given.model is not None:
            line |= {"model": given.model, "llm_s": round(given.llm_s, 4)}
    return line | {
        "tokens": asdict(given.usage),
        "retrieval_s": round(retrieval_s, 4),
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
