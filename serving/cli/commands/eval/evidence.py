"""`undertow eval --evidence-only`: what a search finds, without an LLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from undertow.serving.cli.output import put_json, put_table, say

if TYPE_CHECKING:
    from undertow.bench.quality.run.plan import Plan


def measure_evidence(plan: Plan, budgets: list[int], *, gold: bool, as_json: bool) -> None:
    """What a search finds of each question's evidence, or what an answer shows of it in the budgets."""
    if budgets:
        _measure_in_budget(plan, budgets, gold=gold, as_json=as_json)
    else:
        _measure_recall(plan, as_json=as_json)


def _measure_recall(plan: Plan, *, as_json: bool) -> None:
    """Search for the questions with evidence or without an answer; write what is found, show a summary."""
    from undertow.bench.quality.evidence.recall import retrieve, write_evidence
    from undertow.bench.quality.vectors import KeptVectors
    from undertow.engine.api.engine import Engine
    from undertow.engine.encoders.factory import make_encoder
    from undertow.serving.cli.progress import Bar

    began_s = time.perf_counter()
    questions = [q for s in plan.samples for q in s.questions]
    asked = sum(q.is_searched for q in questions)
    about: dict[str, Any] = {
        "benchmark": plan.benchmark,
        "data": plan.data.name,
        "samples": len(plan.samples),
        "turns": sum(len(s.turns) for s in plan.samples),
        "left_out": sum(not q.is_scored for q in questions),
        "encoder": plan.settings.encoder,
        "search": plan.settings.search,
        "rerank": plan.settings.rerank,
    }
    kept = KeptVectors(make_encoder(plan.settings), plan.vectors)
    with (
        TemporaryDirectory(prefix="undertow-eval-") as store,
        Engine(Path(store), plan.settings, kept) as engine,
        Bar() as bar,
    ):
        done = iter(range(1, asked + 1))

        def show() -> None:
            count = next(done)
            bar.show(f"{count:,} of {asked:,} questions", count, asked)

        summary = write_evidence(retrieve(engine, kept, plan.samples, on_question=show), plan.folder, about)
    kept.save()
    _put(summary | {"elapsed_s": round(time.perf_counter() - began_s, 1)}, plan.folder, as_json=as_json)


def _measure_in_budget(plan: Plan, budgets: list[int], *, gold: bool, as_json: bool) -> None:
    """Pack each scored question's memories into the budgets; write what they show and show a summary."""
    from undertow.bench.quality.evidence.budget import measure
    from undertow.serving.cli.progress import Bar

    with Bar() as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.show(f"{what}: {done:,} of {total:,}", done, total)

        summary = measure(plan, budgets, show, gold=gold)
    if as_json:
        put_json(summary)
        return
    rows = []
    for of in summary["systems"]:
        differs = of.get("difference", {}).get("all")
        rows.append(
            {
                **{"system": of["system"], "tokens": of["budget"], "in the prompt": of["prompt_tokens"]},
                **{"in turns": of["in_turns"], **of["evidence"]},
                "against turns": "" if differs is None else interval(differs),
            }
        )
    put_table(rows, list(rows[0]), title="Share of the evidence shown, with memories that tell of it")
    say(f"What was shown for each question: {plan.folder}")


def interval(differs: dict[str, Any]) -> str:
    """A difference in words, with its interval where there is one."""
    if differs["low"] is None:
        return str(differs["verdict"])
    interval = f"{differs['mean']:+.3f} [{differs['low']:+.3f}, {differs['high']:+.3f}]"
    return f"{interval} {differs['verdict']}"


def _put(summary: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        put_json(summary)
        return
    rows = list(_rows(summary))
    put_table(rows, [name for name in rows[0] if name != "questions"] + ["questions"])
    without = summary["without_answer"]
    if (area := without["auroc_of_best_score"]) is not None:
        say(f"Best score, {without['questions']} questions without an answer: AUROC {area:.3f} (chance: 0.5)")
    say(f"What was found for each question: {folder}")


def _rows(summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    figures = ("questions", *(name for name in summary if name.startswith("evidence_recall_")), "mrr")
    for name, means in [*summary["by_category"].items(), ("all", summary)]:
        yield {"category": name, **{figure: means[figure] for figure in figures}}
