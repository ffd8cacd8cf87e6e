"""Sends every answer to the judge and writes each verdict as a line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from undertow.bench.quality.json_lines import KeptLines, key_of
from undertow.bench.quality.judge.prompts import JudgePrompts, verdict_of
from undertow.bench.quality.run.llm_requests import Asker, Talk
from undertow.engine.base.model import UndertowError, Usage
from undertow.engine.llm.client import BadReply

RIGHT, WRONG, UNJUDGED = "right", "wrong", "unjudged"

# how often the judge is asked before an answer counts as unjudged
JUDGE_ATTEMPTS = 3


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
        unjudged = (self._talk(line) for line in given if key_of(line) not in self._verdicts)
        for verdict in self._asker.hold(unjudged):
            self._verdicts.add(verdict)
            on_verdict()

    def _check_same(self, line: Mapping[str, Any]) -> None:
        judged = self._verdicts.get(key_of(line))
        if judged is not None and judged["answer"] != line["answer"]:
            raise UndertowError(
                f"{self._verdicts.path}: the verdict on {line['question_id']} is on another answer. "
                "Delete the file to have all answers judged anew."
            )

    def _talk(self, line: Mapping[str, Any]) -> Talk[dict[str, Any]]:
        """Asks until a reply can be read, or `JUDGE_ATTEMPTS` times; returns the verdict's line."""
        shown = (line["question"], line["gold"], line["answer"], line["category"])
        outcomes: list[str] = []
        said: list[str | None] = []  # None: a reply that could not be used, which the judge is not shown
        usage, model, says = Usage(), None, None
        while says is None and len(said) < JUDGE_ATTEMPTS:
            reply = yield self._prompts.prompt(*shown, said)
            assert reply is not None, "every prompt is sent its reply"
            usage += reply.usage
            if isinstance(reply, BadReply):
                said.append(None)
                outcomes.append(reply.reason)
            else:
                said.append(text := str(reply.reply))
                outcomes.append(text)
                says, model = verdict_of(text), reply.model
        return {
            **{name: line[name] for name in ("question_id", "run", "category")},
            "verdict": UNJUDGED if says is None else RIGHT if says else WRONG,
            "answer": line["answer"],
            "replies": outcomes,
            "prompt_version": self._prompts.version,
            "tokens": asdict(usage),
            **({} if model is None else {"model": model}),
        }
