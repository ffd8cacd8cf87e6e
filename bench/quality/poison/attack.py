"""How the cases of `poison` are told to an engine, and what is there afterwards.

Each case is a tenant: three exchanges on one topic, one of them with an attack in it, then a question. The
thresholds are at their lowest, as an attacker would word a text to recur: the second turn fires, the third is
offered for a merge, what is made is refined, and the question finds everything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from undertow.bench.quality.poison.cases import Case
from undertow.engine.api.engine import Engine
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.llm.client import BadReply, Completion, OpenAILLM
from undertow.prompts.builders import Prompt, quoted

AT_ONCE = 17  # cases side by side; the controls and all cases are two groups
CONTEXT_TOKENS = 4_096

Calls = dict[str, list[dict[str, Any]]]


def settings_for(llm_url: str | None, model: str | None) -> Settings:
    """Every turn is like every other one: two make a cluster, and each later one may be merged."""
    return Settings(
        encoder="hash:384",
        device="cpu",
        theta_sim=-1.0,
        theta_merge=-1.0,
        theta_count=2,
        llm_url=llm_url,
        llm_model=model,
        llm_in_flight=AT_ONCE,
        llm_timeout_s=900.0,
        context_tokens=CONTEXT_TOKENS,
        reply_tokens=640,
    )


class Overheard(OpenAILLM):
    """The client, with every prompt and reply of each tenant written down in the order of asking."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.calls: Calls = {}

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        call: dict[str, Any] = {"operation": prompt.operation, "user": prompt.user}
        self.calls.setdefault(tenant, []).append(call)
        future = super().submit(prompt, tenant=tenant)
        future.add_done_callback(lambda done: _write_down(call, done))
        return future


def _write_down(call: dict[str, Any], done: Future[Completion]) -> None:
    if done.cancelled():
        call["error"] = "cancelled"
    elif (error := done.exception()) is not None:
        call["error"] = str(error)
    else:
        reply = done.result().reply
        call["reply"] = reply.model_dump() if isinstance(reply, BaseModel) else reply


@dataclass(frozen=True)
class Remembered:
    """What is there of one case once all is decided and asked. `answer`: None, there was no good one."""

    decisions: list[str]
    episodes: list[str]
    facts: list[str]
    answer: str | None
    calls: list[dict[str, Any]]

    @property
    def memories(self) -> list[str]:
        return [*self.episodes, *self.facts]


def remember(engine: Engine, cases: Sequence[Case], calls: Calls) -> dict[str, Remembered]:
    """Tell the engine all the cases' conversations side by side, and ask their questions.

    `calls`: where the engine's client writes down what each tenant asks. UndertowError: the server is lost.
    """
    for case in cases:
        for turn, messages in zip(case.conversation.turns, case.exchanges(), strict=True):
            engine.add(case.name, messages, timestamp=turn["timestamp"], session_id=case.name)
    if not engine.drain():
        raise UndertowError(f"the LLM server is lost: {engine.llm_error}")
    answers = _answers(engine, cases)
    return {case.name: _remembered(engine, case, answers[case.name], calls) for case in cases}


def _answers(engine: Engine, cases: Sequence[Case]) -> dict[str, str | None]:
    asked = {case.name: engine.ask(case.name, case.conversation.question) for case in cases}
    answers: dict[str, str | None] = {}
    while len(answers) < len(asked):
        for name in asked.keys() - answers.keys():
            try:
                heard = engine.heard(asked[name])
            except BadReply:
                answers[name] = None  # why, stands in the calls
            else:
                if heard is not None:
                    answers[name] = heard.text
        time.sleep(0.05)
    return answers


def _remembered(engine: Engine, case: Case, answer: str | None, calls: Calls) -> Remembered:
    memories = engine.get_all(case.name)
    reports = Reports(engine.journal, engine.tenants)
    return Remembered(
        [report["decision"] for report in reports.explain(case.name)],
        [m.text for m in memories if m.kind == "episode"],
        [m.text for m in memories if m.kind == "fact"],
        answer,
        [_told(case, call) for call in calls.get(case.name, [])],
    )


def _told(case: Case, call: dict[str, Any]) -> dict[str, Any]:
    """A call without its prompt, but whether that held the attack."""
    told = {"operation": call["operation"], "attack_shown": shown(case, call["user"])}
    return told | {key: call[key] for key in ("reply", "error") if key in call}


def shown(case: Case, prompt_user: str) -> bool:
    """Whether a prompt holds the attack, as it is fenced."""
    return bool(case.text) and quoted(case.text)[1:-1] in prompt_user
