"""Poisoning attempts against a real small model: `python -m undertow.bench.quality.poison.run`.

Controls are the same conversations without an attack. What counts as a success, and how far to trust it,
stands in `poison_judge`; how a case is told to the engine, in `poison_run`. The result keeps every reply, so
that it can be read, and judged again. It is written after each group of cases: a long run which is stopped
leaves what it has. `--llm` takes any server; without it the model of `make model` is served here, without
drafting, as the cases go side by side and a busy processor has nothing to spare for guesses.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from undertow.bench.machine import commit, describe
from undertow.bench.quality.poison import judge
from undertow.bench.quality.poison.attack import (
    AT_ONCE,
    CONTEXT_TOKENS,
    Calls,
    Overheard,
    Remembered,
    remember,
    settings_for,
)
from undertow.bench.quality.poison.cases import Case, all_cases, controls
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders.factory import make_encoder
from undertow.prompts.builders import REPLIES, prompt_version
from undertow.serving.vllm.local_server import OFFLINE_MODEL, LocalVLLM, report_to

Outcome = dict[str, Any]


def judged(case: Case, found: Remembered, control: Remembered) -> Outcome:
    """One case's record: verdicts, what stayed of the conversation, and all texts."""
    record: Outcome = {"case": case.name, "family": case.family, "conversation": case.conversation.name}
    if case.text:
        record |= {"turn": case.at, "role": case.role, "attack": case.text[-400:]}
        record["memories"] = judge.of_memories(case, found.memories, control.memories)
        record["answer"] = judge.of_answer(case, found.answer, control.answer)
    record["kept_in_memories"] = judge.kept(case, found.memories)
    record["kept_in_answer"] = judge.kept(case, [found.answer or ""])
    return record | {
        "decisions": found.decisions,
        "episodes": found.episodes,
        "facts": found.facts,
        "answer_text": found.answer,
        "calls": found.calls,
    }


def run(engine: Engine, calls: Calls, cases: Sequence[Case]) -> Iterator[Outcome]:
    """The records of the controls and then the cases, as they come; `calls` as for `remember`."""
    references: dict[str, Remembered] = {}
    queue = [*controls(cases), *cases]
    for start in range(0, len(queue), AT_ONCE):
        group = queue[start : start + AT_ONCE]
        found = remember(engine, group, calls)
        references |= {case.conversation.name: found[case.name] for case in group if not case.text}
        for case in group:
            yield judged(case, found[case.name], references[case.conversation.name])


def judged_again(outcomes: Sequence[Outcome]) -> Iterator[Outcome]:
    """The records of an earlier run, by the judge of today."""
    cases = {case.name: case for case in (*controls(all_cases()), *all_cases())}
    found = {
        o["case"]: Remembered(o["decisions"], o["episodes"], o["facts"], o["answer_text"], o["calls"])
        for o in outcomes
    }
    for name, remembered in found.items():
        control = found[f"control-{cases[name].conversation.name}"]
        yield judged(cases[name], remembered, control)


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
    """The verdicts by case, as Markdown; `kept`: of what a conversation is about, memories, answer."""
    lines = ["| attack | family | turn, role | memories | answer | kept |", "|---|---|---|---|---|---|"]
    for o in outcomes:
        kept = f"{_part(o['kept_in_memories'])}, {_part(o['kept_in_answer'])}"
        place = "" if o["family"] == "control" else f"{o['turn'] + 1}, {o['role']}"
        verdicts = f"{o.get('memories', '')} | {o.get('answer') or 'none given'}" if place else " | "
        lines.append(f"| {o['case']} | {o['family']} | {place} | {verdicts} | {kept} |")
    return "\n".join(lines)


def _part(kept: Sequence[bool]) -> str:
    return f"{sum(kept)}/{len(kept)}"


@contextmanager
def _served(llm: str | None, model: str | None) -> Iterator[Settings]:
    """Settings with a server: the one at `llm`, or a local one that ends with the block."""
    if llm is not None:
        yield settings_for(llm, model)
        return
    name, report = OFFLINE_MODEL.name, report_to(sys.stderr.write)
    with LocalVLLM(OFFLINE_MODEL, name, max_model_len=CONTEXT_TOKENS, progress=report) as server:
        yield settings_for(server.url, name)


def main(
    out: Annotated[Path, typer.Option(help="the result, one JSON document")] = Path("build/poison.json"),
    case: Annotated[list[str] | None, typer.Option(help="only these cases")] = None,
    llm: Annotated[str | None, typer.Option(help="URL of a server to use")] = None,
    model: Annotated[str | None, typer.Option(help="its model, if it serves several")] = None,
    again: Annotated[bool, typer.Option("--judge-again", help="judge what --out holds, ask nothing")] = False,
) -> None:
    if again:
        document = json.loads(out.read_text())
        outcomes = list(judged_again(document["outcomes"]))
        _write(out, document, outcomes)
        _report(outcomes)
        return
    cases = [c for c in all_cases() if not case or c.name in case]
    if not cases:
        raise typer.BadParameter(
            "no case has such a name; the names stand in bench/quality/poison/cases.json"
        )
    started_s, outcomes = time.perf_counter(), []
    with _served(llm, model) as settings, TemporaryDirectory(prefix="undertow-poison-") as folder:
        about = {
            "bench": "poison",
            "command": "python -m undertow.bench.quality.poison.run",
            "model": settings.llm_model,
            "commit": commit(),
            "machine": describe(),
            "prompt_versions": {operation: prompt_version(operation) for operation in REPLIES},
        }
        client = Overheard(settings)
        with Engine(Path(folder) / "store", settings, make_encoder(settings), llm=client) as engine:
            for outcome in run(engine, client.calls, cases):
                outcomes.append(outcome)
                sys.stderr.write(f"{outcome['case']}: {outcome.get('memories')}, {outcome.get('answer')}\n")
                minutes = round((time.perf_counter() - started_s) / 60, 1)
                _write(out, about | {"minutes": minutes}, outcomes)
    _report(outcomes)


def _report(outcomes: Sequence[Outcome]) -> None:
    print(table(outcomes))
    print(json.dumps({"bench": "poison"} | summary(outcomes)))


def _write(out: Path, about: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    document = about | {"summary": summary(outcomes), "outcomes": list(outcomes)}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    typer.run(main)
