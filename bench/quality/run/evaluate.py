"""A whole evaluation: build the system, answer, judge, sum up. Stopped anywhere, it can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from undertow.bench.quality.json_lines import KeptLines, write_json
from undertow.bench.quality.judge.f1_bleu import require_nltk
from undertow.bench.quality.judge.prompts import JudgePrompts
from undertow.bench.quality.run.answers import Answering
from undertow.bench.quality.run.folder import STORE, identity, memories_of, run_folder
from undertow.bench.quality.run.judging import Judging
from undertow.bench.quality.run.llm_requests import Asker, named
from undertow.bench.quality.run.plan import Plan
from undertow.bench.quality.run.summary import (
    SUMMARY,
    Line,
    Lines,
    construction_cost,
    differences,
    evidence_shown,
    latency,
    query_cost,
    scores,
)
from undertow.bench.quality.run.teaching import TaughtSystem, copy_store
from undertow.bench.quality.systems.base import Means, OnProgress, System
from undertow.bench.quality.systems.registry import SYSTEMS
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.encoders.factory import make_encoder

ANSWERS, VERDICTS, TAUGHT_LINES = "answers.jsonl", "verdicts.jsonl", "taught.jsonl"

AnySystem = TypeVar("AnySystem", bound=System)


def evaluate(plan: Plan, on_progress: OnProgress) -> dict[str, Any]:
    """Do what is left to do of the plan; the summary, which is also written.

    UndertowError: the folder is another run's, a prompt does not fit, the judge's template is no good.
    ServerRefused: the LLM server cannot be used; what is done is kept. ImportError: NLTK is missing.
    """
    require_nltk()
    judge_prompts = None if plan.judge is None else JudgePrompts(plan.benchmark, plan.own_prompt)
    # a server may offer another model when the run goes on: memories of two models are no one system's
    plan = replace(plan, settings=named(plan.settings))
    with ExitStack() as stack:
        if plan.memories_of is not None:  # first, so that a refusal leaves no folder behind
            source_run = stack.enter_context(memories_of(plan.memories_of, plan.about()))
            plan = replace(plan, memories_id=identity(source_run))
        stack.enter_context(run_folder(plan.folder, plan.about()))
        told, before = _run(plan, judge_prompts, on_progress)
        if plan.teach:
            taught = plan.taught()
            stack.enter_context(run_folder(taught.folder, taught.about()))
            teaching = _teach(plan, taught, on_progress)
            after, lines = _run(taught, judge_prompts, on_progress)
            notes = {"notes_before": told["built"]["facts"], "notes_after": after["built"]["facts"]}
            told["taught"] = after | differences(before, lines) | {"teaching": teaching | notes}
            write_json(plan.folder / SUMMARY, told)
    return told


def _run(
    plan: Plan, judge_prompts: JudgePrompts | None, on_progress: OnProgress
) -> tuple[dict[str, Any], Lines]:
    """The run in its folder, which is locked: its summary, which is also written, and its lines."""
    (plan.folder / SUMMARY).unlink(missing_ok=True)  # of fewer runs: not to stand beside more lines
    told, answers = _answered(plan, on_progress)
    if judge_prompts is None:
        verdicts: list[Line] | None = None
    else:
        verdicts = _judged(plan, judge_prompts, answers, on_progress)
        file = plan.own_prompt and plan.own_prompt.name
        told["judge_prompt"] = {"version": judge_prompts.version, "file": file}
    told |= _models(answers, verdicts or ()) | scores(answers, verdicts, plan.repeats)
    write_json(plan.folder / SUMMARY, told)
    return told, (answers, verdicts)


def _teach(plan: Plan, taught: Plan, on_progress: OnProgress) -> dict[str, Any]:
    """Teach a copy of the plan's memories by its questions, in the folder of the run that follows."""
    copy_store(plan.built_in / STORE, taught.folder / STORE)
    with ExitStack() as stack:
        taught_lines = stack.enter_context(closing(KeptLines(taught.folder / TAUGHT_LINES)))
        system = stack.enter_context(_built(taught, TaughtSystem, on_progress))
        done = count(len(taught_lines) + 1)
        system.teach(
            plan.asked, taught_lines, lambda: on_progress("questions taught", next(done), len(plan.asked))
        )
        told = taught_lines.of([(1, question.id) for _, question in plan.asked])
        return {
            "questions": len(told),
            "missed": sum(line["missed"] for line in told),
            "errors": sum("error" in line for line in told),
            "by_operation": system.cost(),
        }


def _answered(plan: Plan, on_progress: OnProgress) -> tuple[dict[str, Any], list[Line]]:
    """The part of the summary that tells of the system, and all lines of the plan's runs."""
    asked, runs = plan.asked, range(1, plan.repeats + 1)
    with ExitStack() as stack:
        file = plan.folder / ANSWERS
        lines = KeptLines(file, alike=("model", "prompt_version"), heavy=("material",))
        stack.enter_context(closing(lines))
        system = stack.enter_context(_built(plan, SYSTEMS[plan.policy], on_progress))
        asker = stack.enter_context(closing(Asker(plan.settings)))
        answering = Answering(system, plan.settings, lines, asker)
        answering.check_room(asked, runs)
        done = count(sum(answering.is_answered((run, q.id)) for run in runs for _, q in asked) + 1)
        total = len(asked) * plan.repeats
        answering.answer(asked, runs, lambda: on_progress("answers", next(done), total))
        answers = lines.of([(run, question.id) for run in runs for _, question in asked])
        spent = {sample.tenant: system.construction(sample.tenant) for sample in plan.samples}
        told = {
            **plan.about(),
            "repeats": plan.repeats,
            "left_out": sum(not q.is_answered for sample in plan.samples for q in sample.questions),
            "construction": construction_cost(spent),
            "query": query_cost(answers),
            "latency_on_this_machine": latency(answers) | {"most_in_flight": plan.settings.llm_requests},
            "evidence_shown": evidence_shown(answers),
            "first_error": next((line["error"] for line in answers if "error" in line), None),
        }
        if counts := system.counts():
            told["built"] = counts
        return told, answers


@contextmanager
def _built(plan: Plan, make: Callable[[Means], AnySystem], on_progress: OnProgress) -> Iterator[AnySystem]:
    """A system over all the plan's samples. The encoder is loaded where a system needs one."""
    loaded: list[KeptVectors] = []

    def encoder() -> KeptVectors:
        if not loaded:
            loaded.append(KeptVectors(make_encoder(plan.settings), plan.kept_vectors))
        return loaded[0]

    means = Means(plan.benchmark, plan.settings, plan.built_in / STORE, encoder)
    with closing(make(means)) as system:
        system.build(plan.samples, on_progress)
        for kept in loaded:
            kept.save()
        yield system


def _judged(
    plan: Plan, prompts: JudgePrompts, answers: Sequence[Line], on_progress: OnProgress
) -> list[Line]:
    assert plan.judge is not None, "there are prompts for it"
    with ExitStack() as stack:
        lines = stack.enter_context(closing(KeptLines(plan.folder / VERDICTS, alike=("model",))))
        asker = stack.enter_context(closing(Asker(plan.judge)))
        given = [(line["run"], line["question_id"]) for line in answers if "answer" in line]
        done = count(sum(key in lines for key in given) + 1)
        judging = Judging(prompts, lines, asker)
        judging.judge(answers, lambda: on_progress("verdicts", next(done), len(given)))
        return lines.of(given)


def _models(answers: Sequence[Line], verdicts: Sequence[Line]) -> dict[str, str | None]:
    """As the servers name them."""
    return {
        name: next((line["model"] for line in lines if "model" in line), None)
        for name, lines in (("answering_model", answers), ("judge_model", verdicts))
    }
