"""Evidence within a budget of tokens: the share that an answer's packing shows, without an LLM.

Each system is compared with `turns-only`, question by question, at the same number of tokens. A turn shows
all evidence in it; an episode or fact shows that which it rests on and tells of (`systems/telling.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from undertow.bench.quality.ablations import varied
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.evidence.gold_replies import gold_llm
from undertow.bench.quality.json_lines import write_json
from undertow.bench.quality.run.folder import STORE, memories_of
from undertow.bench.quality.run.plan import Plan
from undertow.bench.quality.run.summary import SUMMARY, construction_cost, difference
from undertow.bench.quality.systems.base import Means, OnProgress, prompt_of
from undertow.bench.quality.systems.registry import CONTROL, CONTROLS, SYSTEMS
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.token_count import by_bytes

LINES = "evidence-in-budget.jsonl"
Line = dict[str, Any]


def measure(plan: Plan, budgets: Sequence[int], on_progress: OnProgress, *, gold: bool) -> dict[str, Any]:
    """Turns alone, naive RAG, and the plan's policy where it has memories: `gold` ones, or another run's.

    Writes the lines and their summary into the plan's folder; returns the summary. UndertowError: the other
    run's memories are not the plan's.
    """
    with ExitStack() as stack:
        if plan.memories_of is not None:
            stack.enter_context(memories_of(plan.memories_of, plan.about()))
        store = Path(stack.enter_context(TemporaryDirectory(prefix="undertow-eval-")))
        vectors = KeptVectors(make_encoder(plan.settings), plan.vectors)
        means = Means(plan.benchmark, plan.settings, store, lambda: vectors)
        systems = dict.fromkeys(CONTROLS, means)
        if gold:
            systems[plan.policy] = replace(means, folder=store / "gold", llm=gold_llm(plan.samples))
        elif plan.memories_of is not None:
            systems[plan.policy] = replace(means, folder=plan.built_in / STORE)
        built: dict[str, Any] = {}
        about = {**plan.about(), "gold_memories": gold, "budgets": budgets, "built": built}
        told = write_lines(_measured(systems, plan.samples, budgets, on_progress, built), plan.folder, about)
        vectors.save()
        return told


def _measured(
    systems: Mapping[str, Means],
    samples: Sequence[Sample],
    budgets: Sequence[int],
    on_progress: OnProgress,
    built: dict[str, Any],
) -> Iterator[Line]:
    """A line a system, budget and question that is scored: the share of its evidence that is shown.

    `built` gets what each system's construction has cost and counts.
    """
    for name, means in systems.items():
        for budget in budgets:
            set_to = replace(means, settings=varied(means.settings, answer_tokens=budget))
            with closing(SYSTEMS[name](set_to)) as system:
                system.build(samples, on_progress)
                spent = {sample.tenant: system.construction(sample.tenant) for sample in samples}
                built[name] = construction_cost(spent) | system.counts()
                for sample in samples:
                    for question in sample.questions:
                        if question.is_scored:
                            material = system.material(sample, question)
                            prompt = prompt_of(question, material, means.settings.style_of_answers)
                            shown = {*material.in_turns, *material.in_memories}
                            yield {
                                **{"system": name, "budget": budget, "id": question.id},
                                **{"category": question.category, "share": _share(question, shown)},
                                "in_turns": _share(question, set(material.in_turns)),
                                "prompt_tokens": by_bytes(prompt.system + prompt.user),
                            }


def _share(question: Question, shown: set[str]) -> float:
    return len(shown.intersection(question.evidence)) / len(question.evidence)


def write_lines(lines: Iterator[Line], folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Write the lines and their summary, which begins with `about`; returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)  # an earlier run's must not stand beside new lines
    kept = []
    with (folder / LINES).open("wb") as file:
        for line in lines:
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
            kept.append(line)
    told = {**about, "systems": summary(kept)}
    write_json(folder / SUMMARY, told)
    return told


def summary(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """One entry a system and budget, in order: means by category, and the difference from the control."""
    found = []
    for name, budget in dict.fromkeys((line["system"], line["budget"]) for line in lines):
        of = [line for line in lines if (line["system"], line["budget"]) == (name, budget)]
        control = [line for line in lines if (line["system"], line["budget"]) == (CONTROL, budget)]
        told = {
            **{"system": name, "budget": budget, "questions": len(of)},
            "prompt_tokens": round(fmean(line["prompt_tokens"] for line in of), 1),
            "evidence": {"all": _mean(of), **{c: _mean(_in(of, c)) for c in _categories(of)}},
            "in_turns": round(fmean(line["in_turns"] for line in of), 4),
        }
        if name != CONTROL and control:
            told["difference"] = {"all": _differs(of, control)} | {
                c: _differs(_in(of, c), _in(control, c)) for c in _categories(of)
            }
        found.append(told)
    return found


def _categories(lines: Sequence[Line]) -> list[str]:
    return sorted({line["category"] for line in lines})


def _in(lines: Sequence[Line], category: str) -> list[Line]:
    return [line for line in lines if line["category"] == category]


def _mean(lines: Sequence[Line]) -> float:
    return round(fmean(line["share"] for line in lines), 4)


def _differs(lines: Sequence[Line], control: Sequence[Line]) -> dict[str, Any]:
    base = {line["id"]: line["share"] for line in control}
    return difference([line["share"] - base[line["id"]] for line in lines])
