"""Sends every answer to the judge and writes each verdict as a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from undertow.bench.quality.json_lines import KeptLines, Key, key_of
from undertow.bench.quality.judge.prompts import JudgePrompts, verdict_of
from undertow.bench.quality.run.llm_requests import Asker
from undertow.engine.base.model import UndertowError, Usage
from undertow.engine.llm.client import BadReply
from undertow.prompts.builders import Prompt

RIGHT, WRONG, UNJUDGED = "right", "wrong", "unjudged"

# how often the judge is asked before an answer counts as unjudged
JUDGE_ATTEMPTS = 3


@dataclass(slots=True)
class _Case:
    """An answer to judge.

    `replies`: the outcome of each attempt, for the record. `said`: the judge's reply, None where it had none.
    """

    line: Mapping[str, Any]
    replies: list[str] = field(default_factory=list)
    said: list[str | None] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    model: str | None = None


class Judging:
    """Judges the answers that have no verdict yet; writes each verdict to `verdicts` at once."""

    def __init__(self, prompts: JudgePrompts, verdicts: KeptLines, asker: Asker) -> None:
        """UndertowError: the existing verdicts were made with another prompt."""
        verdicts.require("prompt_version", prompts.version)
        self._prompts = prompts
        self._verdicts = verdicts
        self._asker = asker

    def judge(self, answers: Sequence[Mapping[str, Any]], on_verdict: Callable[[], None]) -> None:
        """Judge every line that has an answer. ServerRefused: verdicts made before it are kept."""
        given = [line for line in answers if "answer" in line]
        for line in given:
            self._check_same(line)
        cases = [_Case(line) for line in given if key_of(line) not in self._verdicts]
        for attempt in range(1, JUDGE_ATTEMPTS + 1):
            cases = list(self._unread(cases, attempt == JUDGE_ATTEMPTS, on_verdict))
        order: list[Key] = [key_of(line) for line in given]
        self._verdicts.settle(order)

    def _check_same(self, line: Mapping[str, Any]) -> None:
        judged = self._verdicts.get(key_of(line))
        if judged is not None and judged["answer"] != line["answer"]:
            raise UndertowError(
                f"{self._verdicts.file}: the verdict on {line['question_id']} is on another answer. "
                "Delete the file to have all answers judged anew."
            )

    def _unread(
        self, cases: Sequence[_Case], is_last: bool, on_verdict: Callable[[], None]
    ) -> Iterator[_Case]:
        """Judge each case once; yields those with an unreadable reply, except on the last attempt."""
        prompts = ((case, self._prompt(case)) for case in cases)
        for case, reply in self._asker.ask(prompts):
            case.usage += reply.usage
            if isinstance(reply, BadReply):
                said, told = None, reply.reason
            else:
                said = told = str(reply.reply)
                case.model = reply.model
            case.replies.append(told)
            case.said.append(said)
            says = None if said is None else verdict_of(said)
            if says is None and not is_last:
                yield case
                continue
            self._verdicts.add(self._line(case, UNJUDGED if says is None else RIGHT if says else WRONG))
            on_verdict()

    def _prompt(self, case: _Case) -> Prompt:
        of = case.line
        return self._prompts.prompt(of["question"], of["gold"], of["answer"], of["category"], case.said)

    def _line(self, case: _Case, verdict: str) -> dict[str, Any]:
        of = case.line
        line = {
            "question_id": of["question_id"],
            "run": of["run"],
            "category": of["category"],
            "verdict": verdict,
            "answer": of["answer"],
            "replies": case.replies,
            "prompt_version": self._prompts.version,
            "tokens": asdict(case.usage),
        }
        return line if case.model is None else line | {"model": case.model}
