"""What a real model makes of the construction prompts: twenty short logs with planted details.

    python -m undertow.serving.vllm.local_server &
    python -m undertow.bench.quality.real_model.prompt_suite --llm http://127.0.0.1:8000/v1 --out FILE

UNDERTOW_POLICY and UNDERTOW_CALLS choose another policy or form of calls. With `--unlike` no turn is like
another, so that RecMem reads salient turns alone.
Each log of `prompt_suite_cases.json` is a tenant. Its first four turns fire, the fifth may be merged, and a
flush reads what else says much. A planted detail names its turn and patterns of words, all of which one
memory must have, and no other turn has. `when`: patterns of the date that a relative time must be worked out
to; `replaces`: the earlier detail that it puts out of force. The prompts' versions are in the result, to
compare two of them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from undertow.bench.machine import commit, describe
from undertow.bench.quality.json_lines import write_json
from undertow.bench.quality.run.llm_requests import named
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.api.views.stats import store_usage
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Memory, UndertowError, Usage
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.llm.client import LLMClient
from undertow.prompts.builders import prompt_versions

CASES = Path(__file__).with_name("prompt_suite_cases.json")
_ALIKE = 0.7  # two facts with this share of common words say the same
_WORD = re.compile(r"\w+")
Case = dict[str, Any]
Outcome = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Detail:
    """A planted detail; see the module. `said_on`: the date of its turn."""

    turn: int
    words: tuple[str, ...]
    said_on: date
    when: str | None
    replaces: int | None

    def is_in(self, memory: Memory) -> bool:
        return all(re.search(word, memory.text, re.IGNORECASE) for word in self.words)


def cases() -> list[Case]:
    """The logs, in the order of the file."""
    found: list[Case] = json.loads(CASES.read_text())["cases"]
    return found


def details(case: Case) -> list[Detail]:
    days = [date.fromisoformat(turn[0]) for turn in case["turns"]]
    return [
        Detail(p["turn"], tuple(p["words"]), days[p["turn"]], p.get("when"), p.get("replaces"))
        for p in case["planted"]
    ]


def settings_for(llm_url: str | None, model: str | None, theta: float = -1.0) -> Settings:
    """With this theta every turn is similar to every other: four make a cluster, the next may be merged."""
    given: dict[str, Any] = {"llm_url": llm_url, "llm_model": model, "llm_timeout_s": 900.0}
    given |= {"theta_sim": theta, "theta_merge": theta, "theta_count": 4, "quiet_share": 0.0}
    return Settings(encoder="hash:384", device="cpu", context_tokens=4_096, reply_tokens=640, **given)


def run(engine: Engine, some: Sequence[Case]) -> Iterator[Outcome]:
    """The outcome of each case. UndertowError: the LLM server is lost."""
    for case in some:
        for day, said, reply in case["turns"]:
            messages = [
                {"role": "user", "name": case["user"], "content": said},
                {"role": "assistant", "content": reply},
            ]
            engine.add(case["name"], messages, timestamp=f"{day}T18:00:00", session_id=day)
        engine.flush(case["name"])
    if not engine.drain():
        raise UndertowError(f"the LLM server is lost: {engine.llm_error}")
    for case in some:
        usage = {op: Usage(**used) for op, used in store_usage(engine.tenants, case["name"]).items()}
        yield {**scored(case, engine.get_all(case["name"])), "usage": usage}


def scored(case: Case, memories: Sequence[Memory]) -> Outcome:
    """Which details the current memories tell, with which dates, and what is told twice."""
    facts = [memory for memory in memories if memory.kind == "fact"]
    planted = details(case)
    told = [[memory for memory in memories if detail.is_in(memory)] for detail in planted]
    dated = [
        _is_of(max(said), fact)
        for fact in facts
        if (said := [detail.said_on for detail in planted if detail.is_in(fact)]) and fact.timestamp
    ]
    return {
        "case": case["name"],
        "found": [bool(by) for by in told],
        "worked_out": [
            any(re.search(detail.when, memory.text, re.IGNORECASE) for memory in by)
            for detail, by in zip(planted, told, strict=True)
            if detail.when is not None and by
        ],
        "replaced": [
            _is_replaced(told[detail.replaces], by)
            for detail, by in zip(planted, told, strict=True)
            if detail.replaces is not None and by and told[detail.replaces]
        ],
        "facts_dated": dated,
        "repeats": sum(_alike(a.text, b.text) for a, b in combinations(facts, 2)),
        "facts": [{"text": fact.text, "date": (fact.timestamp or "")[:10]} for fact in facts],
        "episodes": [memory.text for memory in memories if memory.kind == "episode"],
    }


def _is_of(said_on: date, fact: Memory) -> bool:
    """Whether the fact's date is within a day of the turn that says it, the last one if several do."""
    assert fact.timestamp is not None, "the caller has checked"
    return abs(date.fromisoformat(fact.timestamp[:10]) - said_on) <= timedelta(days=1)


def _is_replaced(older: Sequence[Memory], newer: Sequence[Memory]) -> bool:
    """Whether one memory tells both, or a newer fact names the older one as replaced."""
    both = {memory.id for memory in older} & {memory.id for memory in newer}
    replaced = {id for memory in newer for id in memory.supersedes}
    return bool(both or replaced.intersection(memory.id for memory in older))


def _alike(a: str, b: str) -> bool:
    one, other = set(_WORD.findall(a.lower())), set(_WORD.findall(b.lower()))
    return len(one & other) >= _ALIKE * len(one | other) > 0


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Shares over all cases, each with its count, and the cost by operation."""
    found: dict[str, Any] = {"cases": len(outcomes)}
    for name in ("found", "worked_out", "replaced", "facts_dated"):
        every = [held for outcome in outcomes for held in outcome[name]]
        found[name] = {"share": round(sum(every) / len(every), 3) if every else None, "of": len(every)}
    found["facts"] = sum(len(outcome["facts"]) for outcome in outcomes)
    found["repeats"] = sum(outcome["repeats"] for outcome in outcomes)
    cost: dict[str, Usage] = {}
    for outcome in outcomes:
        for operation, usage in outcome["usage"].items():
            cost[operation] = cost.get(operation, Usage()) + usage
    return {**found, "usage": {operation: asdict(usage) for operation, usage in sorted(cost.items())}}


def measure(settings: Settings, out: Path, llm: LLMClient | None = None) -> dict[str, Any]:
    """Run all cases, write the result to `out` and return its summary. `llm`: in place of the server's."""
    with (
        TemporaryDirectory(prefix="undertow-prompts-") as folder,
        Engine(
            Path(folder) / "store", settings, make_encoder(settings), llm=llm or make_llm(settings)
        ) as engine,
    ):
        outcomes = list(run(engine, cases()))
        told = {**summary(outcomes), "parked": engine.stats()["dead_letters"]}
    for outcome in outcomes:
        outcome["usage"] = {operation: asdict(usage) for operation, usage in outcome["usage"].items()}
    about: dict[str, Any] = {"bench": "prompt-suite", "policy": settings.policy, "calls": settings.call_form}
    about |= {"model": settings.llm_model, "commit": commit()}
    about |= {"theta_sim": settings.theta_sim, "machine": describe()}
    about |= {"prompt_versions": prompt_versions(settings.style_of_answers)}
    write_json(out, {**about, "summary": told, "outcomes": outcomes})
    return told


def main(
    llm: Annotated[str, typer.Option(help="URL of the LLM server")],
    out: Annotated[Path, typer.Option(help="the result, one JSON document")],
    model: Annotated[str | None, typer.Option(help="its model, if the server has several")] = None,
    unlike: Annotated[bool, typer.Option("--unlike", help="no turn is like another")] = False,
) -> None:
    sys.stderr.write("twenty logs: minutes on a CPU\n")
    print(json.dumps(measure(named(settings_for(llm, model, 1.0 if unlike else -1.0)), out), indent=1))


if __name__ == "__main__":
    typer.run(main)
