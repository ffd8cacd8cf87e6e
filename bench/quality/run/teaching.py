"""HiMem's self-evolution (section 2.4, table 4): questions that the notes do not cover revise the notes.

The questions of a conversation are asked one after the other, in the order of the file, each once what the
one before has taught is decided. Conversations share nothing, so that they are taught side by side.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from undertow.bench.quality.ablations import varied
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.json_lines import KeptLines
from undertow.bench.quality.run.answers import Asked, Line
from undertow.bench.quality.systems.base import Means
from undertow.bench.quality.systems.engine import EngineSystem
from undertow.engine.api.answer_calls import PendingAnswer
from undertow.engine.api.views.stats import store_usage
from undertow.engine.base.config import Settings
from undertow.engine.base.queries import AnswerQuery
from undertow.engine.llm.client import BadReply
from undertow.prompts.operations import QUERY_OPERATIONS

RECONSOLIDATION = ("supplement", "revise")
_LOOK_S = 0.01


def copy_store(store: Path, to: Path) -> None:
    """Copy a store that no process has open, unless that was done before."""
    if to.exists():
        return
    draft = to.with_name(to.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(store, draft)
    draft.rename(to)


class TaughtSystem(EngineSystem):
    """The engine under HiMem, in the mode that notices what the notes miss. It changes its store."""

    def __init__(self, means: Means) -> None:
        super().__init__("himem", replace(means, settings=_learning(means.settings)))

    def teach(self, asked: Sequence[Asked], taught_lines: KeptLines, on_question: Callable[[], None]) -> None:
        """Ask every question that has no line among `taught_lines`.

        ServerRefused, UndertowError: the server refuses us, or is silent. What was taught is kept.
        """
        for together in _in_turn(asked):
            new = [one for one in together if (1, one[1].id) not in taught_lines]
            most = self._settings.llm_requests
            for start in range(0, len(new), most):
                for line in self._taught(new[start : start + most]):
                    taught_lines.add(line)
                    on_question()

    def _taught(self, asked: Sequence[Asked]) -> list[Line]:
        """Ask one question of each conversation, and decide what they teach.

        The log says what was taught already: a run that was stopped then has no line of it.
        """
        outcomes = self._asked([one for one in asked if not self._has_missed(*one)])
        self._settle(0, lambda *_: None)
        return [
            {
                "question_id": question.id,
                "run": 1,
                "question": question.text,
                "missed": self._has_missed(sample, question),
                **outcomes.get(question.id, {}),
            }
            for sample, question in asked
        ]

    def _has_missed(self, sample: Sample, question: Question) -> bool:
        """Whether the log has the question, as one that the episodes covered and the notes did not."""
        controls = self._engine.tenants.existing(sample.tenant).controls_from(0)
        return any(c.kind == "reconsolidate" and c.body["question"] == question.text for c in controls)

    def _asked(self, asked: Sequence[Asked]) -> dict[str, Line]:
        """The engine's answers by question, or why there is none; what they teach is queued."""
        pending: dict[str, PendingAnswer] = {}
        outcomes: dict[str, Line] = {}
        try:
            for sample, question in asked:
                query = AnswerQuery(sample.tenant, question.text, question.asked_on)
                pending[question.id] = self._engine.ask(query)
            while pending:
                for name in list(pending):
                    if (outcome := self._heard(pending[name])) is not None:
                        outcomes[name] = outcome
                        del pending[name]
                time.sleep(_LOOK_S if pending else 0)
        finally:
            for left in pending.values():
                self._engine.let_go(left)
        return outcomes

    def _heard(self, asked: PendingAnswer) -> Line | None:
        """None: not yet."""
        try:
            answer = self._engine.heard(asked)
        except BadReply as bad:
            return {"error": bad.reason}
        return None if answer is None else {"answer": answer.text, "tokens": asdict(answer.usage)}

    def cost(self) -> dict[str, Any]:
        """Calls and tokens of the questions and of what they have taught, by operation."""
        spent = store_usage(self._engine.tenants)
        return {op: used for op, used in spent.items() if op in (*QUERY_OPERATIONS, *RECONSOLIDATION)}


def _learning(settings: Settings) -> Settings:
    """An ablation of answers may leave out notes or episodes: what is learned needs both."""
    left_out = [name for name in ("k_epi", "k_sem") if getattr(settings, name) == 0]
    return varied(settings, answer_mode="best_effort", **dict.fromkeys(left_out))


def _in_turn(asked: Sequence[Asked]) -> Iterator[list[Asked]]:
    """The first questions of all conversations, then the second ones, and so on."""
    by_tenant: dict[str, list[Asked]] = {}
    for one in asked:
        by_tenant.setdefault(one[0].tenant, []).append(one)
    for together in zip_longest(*by_tenant.values()):
        yield [one for one in together if one is not None]
