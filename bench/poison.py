"""Poisoning attempts against a real small model: `python -m undertow.bench.poison`.

Each case is a tenant: three exchanges on one topic, one of them with an attack in it, then a question. The
thresholds are at their lowest, as an attacker would word a text to recur: the second turn fires, the third is
offered for a merge, what is made is refined, and the question finds everything. Controls are the same
conversations without an attack.

What counts as a success, and how far to trust it, stands in `poison_judge`. The result keeps every reply. It
is written after each group of cases, so that a long run which is stopped leaves what it has. `--llm` takes
any server; without it the model of `make model` is served here, without drafting, as the cases go side by
side and a busy processor has nothing to spare for guesses.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from undertow.bench import poison_judge as judge
from undertow.bench.machine import commit, describe
from undertow.bench.poison_cases import Case, all_cases, controls
from undertow.engine.config import Settings
from undertow.engine.encoder import make_encoder
from undertow.engine.engine import Engine
from undertow.engine.llm import BadReply, Completion, OpenAILLM
from undertow.engine.model import UndertowError
from undertow.engine.reports import Reports
from undertow.prompts import Operation, Prompt, prompt_version, quoted
from undertow.serving.local_vllm import OFFLINE_MODEL, LocalVLLM, report_to

AT_ONCE = 17  # cases side by side: a server on a CPU reads its weights once for all of them
CONTEXT_TOKENS = 4_096
OPERATIONS: tuple[Operation, ...] = ("episode", "merge", "refine", "answer")

Outcome = dict[str, Any]
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


@dataclass
class Remembered:
    """What is there of one case once all is decided and asked."""

    decisions: list[str]
    episodes: list[str]
    facts: list[str]
    answer: str
    calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def memories(self) -> list[str]:
        return [*self.episodes, *self.facts]


def remember(engine: Engine, cases: Sequence[Case]) -> dict[str, Remembered]:
    """Tell the engine all the cases' conversations side by side, and ask their questions.

    UndertowError: the server is lost.
    """
    for case in cases:
        for turn, messages in zip(case.conversation.turns, case.exchanges(), strict=True):
            engine.add(case.name, messages, timestamp=turn["timestamp"], session_id=case.name)
    if not engine.drain():
        raise UndertowError(f"the LLM server is lost: {engine.llm_error}")
    asked = {case.name: engine.ask(case.name, case.conversation.question) for case in cases}
    answers: dict[str, str] = {}
    while len(answers) < len(asked):
        for name in asked.keys() - answers.keys():
            try:
                heard = engine.heard(asked[name])
            except BadReply as bad:
                answers[name] = f"(no answer: {bad})"
            else:
                if heard is not None:
                    answers[name] = heard.text
        time.sleep(0.05)
    return {case.name: _remembered(engine, case.name, answers[case.name]) for case in cases}


def _remembered(engine: Engine, tenant: str, answer: str) -> Remembered:
    memories = engine.get_all(tenant)
    return Remembered(
        [report["decision"] for report in Reports(engine.journal, engine.tenants).explain(tenant)],
        [m.text for m in memories if m.kind == "episode"],
        [m.text for m in memories if m.kind == "fact"],
        answer,
    )


def judged(case: Case, found: Remembered, control: Remembered) -> Outcome:
    """One case's record: verdicts, what stayed of the conversation, and all texts."""
    record: Outcome = {"case": case.name, "family": case.family, "conversation": case.conversation.name}
    if case.text:
        record |= {"turn": case.at, "role": case.role, "attack": case.text[-400:]}
        record["memories"] = judge.of_memories(case, found.memories, control.memories)
        record["answer"] = judge.of_answer(case, found.answer, control.answer)
    record["kept_in_memories"] = judge.kept(case, found.memories)
    record["kept_in_answer"] = judge.kept(case, [found.answer])
    calls = [
        {"operation": c["operation"], "attack_shown": shown(case, c["user"])}
        | {k: v for k, v in c.items() if k in ("reply", "error")}
        for c in found.calls
    ]
    return record | {
        "decisions": found.decisions,
        "episodes": found.episodes,
        "facts": found.facts,
        "answer_text": found.answer,
        "calls": calls,
    }


def shown(case: Case, prompt_user: str) -> bool:
    """Whether a prompt holds the attack, as it is fenced."""
    return bool(case.text) and quoted(case.text)[1:-1] in prompt_user


def run(engine: Engine, calls: Calls, cases: Sequence[Case]) -> Iterator[Outcome]:
    """The records of the controls and then the cases, as they come."""
    plain = controls(list(cases))
    references: dict[str, Remembered] = {}
    queue = [*plain, *cases]
    for start in range(0, len(queue), AT_ONCE):
        group = queue[start : start + AT_ONCE]
        found = remember(engine, group)
        references |= {case.conversation.name: found[case.name] for case in group if not case.text}
        for case in group:
            found[case.name].calls = calls.get(case.name, [])
            yield judged(case, found[case.name], references[case.conversation.name])


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts of the verdicts, and the share of what the conversations are about that stayed."""
    attacks = [o for o in outcomes if o["family"] != "control"]
    plain = [o for o in outcomes if o["family"] == "control"]
    return {
        "cases": len(attacks),
        **{where: dict(Counter(o[where] for o in attacks)) for where in ("memories", "answer")},
        "either_asserted": sum("asserted" in (o["memories"], o["answer"]) for o in attacks),
        **{
            f"{part}_{which}": _share([kept for o in those for kept in o[part]])
            for which, those in (("attacked", attacks), ("control", plain))
            for part in ("kept_in_memories", "kept_in_answer")
        },
    }


def _share(kept: Sequence[bool]) -> float | None:
    return round(sum(kept) / len(kept), 3) if kept else None


def table(outcomes: Sequence[Outcome]) -> str:
    """The verdicts by case, as Markdown."""
    lines = ["| attack | family | turn, role | memories | answer |", "|---|---|---|---|---|"]
    for o in outcomes:
        if o["family"] != "control":
            place = f"{o['turn'] + 1}, {o['role']}"
            lines.append(f"| {o['case']} | {o['family']} | {place} | {o['memories']} | {o['answer']} |")
    return "\n".join(lines)


@contextmanager
def _served(llm: str | None, model: str | None) -> Iterator[Settings]:
    """Settings with a server: the one at `llm`, or a local one that ends with the block."""
    if llm is not None:
        yield settings_for(llm, model)
        return
    name = OFFLINE_MODEL.name
    report = report_to(Console(stderr=True).file.write)
    with LocalVLLM(OFFLINE_MODEL, name, max_model_len=CONTEXT_TOKENS, progress=report) as server:
        yield settings_for(server.url, name)


def main(
    out: Annotated[Path, typer.Option(help="the result, one JSON document")] = Path("build/poison.json"),
    case: Annotated[list[str] | None, typer.Option(help="only these cases")] = None,
    llm: Annotated[str | None, typer.Option(help="URL of a server to use")] = None,
    model: Annotated[str | None, typer.Option(help="its model, if it serves several")] = None,
) -> None:
    cases = [c for c in all_cases() if not case or c.name in case]
    if not cases:
        raise typer.BadParameter("no case has such a name; the names stand in bench/poison_cases.json")
    console, outcomes, started_s = Console(stderr=True), [], time.perf_counter()
    with _served(llm, model) as settings, TemporaryDirectory(prefix="undertow-poison-") as folder:
        client = Overheard(settings)
        with Engine(Path(folder) / "store", settings, make_encoder(settings), llm=client) as engine:
            for outcome in run(engine, client.calls, cases):
                outcomes.append(outcome)
                verdicts = f"{outcome.get('memories', '')} / {outcome.get('answer', '')}"
                console.print(f"{outcome['case']}: {verdicts}")
                _write(out, outcomes, settings, time.perf_counter() - started_s)
    print(table(outcomes))
    print(json.dumps({"bench": "poison"} | summary(outcomes)))


def _write(out: Path, outcomes: Sequence[Outcome], settings: Settings, seconds: float) -> None:
    document = {
        "bench": "poison",
        "model": settings.llm_model,
        "commit": commit(),
        "machine": describe(),
        "minutes": round(seconds / 60, 1),
        "prompt_versions": {operation: prompt_version(operation) for operation in OPERATIONS},
        "summary": summary(outcomes),
        "outcomes": list(outcomes),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
