"""`undertow eval`: how well memories are found, and answered from, on the benchmarks of the field."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.bench.quality import Benchmark
from undertow.serving.cli import options as opt
from undertow.serving.cli.commands.eval.answers import measure_answers
from undertow.serving.cli.commands.eval.evidence import measure_evidence
from undertow.serving.cli.errors import WrongUsage

if TYPE_CHECKING:
    from undertow.bench.quality.datasets import Sample
    from undertow.engine.base.config import Settings

Data = Annotated[
    Path, typer.Option("--data", metavar="FILE", help="The benchmark's published file.", show_default=False)
]
Policy = Annotated[
    str | None, typer.Option("--policy", metavar="NAME", help="Which system; default: recmem.")
]
LlmModel = Annotated[
    str | None, typer.Option("--llm-model", metavar="NAME", help="Model at --llm; left out: its first.")
]
JudgeLlm = Annotated[
    str | None, typer.Option("--judge-llm", metavar="URL|off", help="The judge's server; left out: the same.")
]
JudgeModel = Annotated[
    str | None, typer.Option("--judge-model", metavar="NAME", help="Model of the judge; left out: its first.")
]
JudgePrompt = Annotated[
    Path | None,
    typer.Option(
        "--judge-prompt",
        metavar="FILE",
        help="A Jinja2 template of your own, with question, gold, answer and, if it likes, category.",
    ),
]
EvidenceOnly = Annotated[
    bool, typer.Option("--evidence-only", help="Only how much of the evidence a search finds: no LLM.")
]
Tokens = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="N,N,...",
        help="With --evidence-only: the evidence in an answer of so many tokens, beside turns alone "
        "and naive RAG.",
    ),
]
GoldMemories = Annotated[
    bool,
    typer.Option(
        "--gold-memories",
        help="With --tokens: LoCoMo's own observations, in place of an LLM's replies, make the memories.",
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        min=1,
        help="How often to answer and judge; default: 1. The requests are alike: the spread is the servers' "
        "own variation.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--sample", metavar="ID", help="Only this conversation or question; may be given again."),
]
Questions = Annotated[
    int | None, typer.Option("--questions", min=1, help="Only so many of a sample's, evenly spread.")
]
AblationName = Annotated[
    str | None,
    typer.Option(
        "--ablation",
        metavar="NAME",
        help="The policy without a part of it, see docs/evaluation-reference.md.",
    ),
]
MemoriesOf = Annotated[
    Path | None,
    typer.Option(
        "--memories-of",
        metavar="FOLDER",
        help="Answer from the memories of another run, its --out, where other settings of search and answer "
        "need no new ones.",
    ),
]
Teach = Annotated[
    bool | None,
    typer.Option(
        "--teach",
        help="HiMem: then let the questions revise the notes, once in the file's order, and ask them again.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="FOLDER",
        help="What each question brought; default: eval-BENCHMARK, with the policy's name unless "
        "--evidence-only, and the ablation's.",
    ),
]

_NEEDS_LLM = {
    *("policy", "ablation", "memories_of", "llm", "llm_model", "judge_llm", "judge_model", "judge_prompt"),
    *("repeats", "questions", "teach", "profile", "answer_style", "calls"),
    *("theta_share", "theta_sim", "theta_merge", "theta_count"),
}
# what memories are made under, and so what reads those of another run
_IN_BUDGET = {
    *("policy", "ablation", "memories_of", "llm_model", "profile"),
    *("theta_share", "theta_sim", "theta_merge", "theta_count", "calls"),
}


def evaluate(
    context: typer.Context,
    benchmark: Annotated[Benchmark, typer.Argument(help="Whose questions and evidence the file has.")],
    data: Data,
    policy: Policy = None,
    ablation: AblationName = None,
    memories_of: MemoriesOf = None,
    teach: Teach = None,
    llm: opt.Llm = None,
    llm_model: LlmModel = None,
    judge_llm: JudgeLlm = None,
    judge_model: JudgeModel = None,
    judge_prompt: JudgePrompt = None,
    evidence_only: EvidenceOnly = False,
    tokens: Tokens = None,
    gold_memories: GoldMemories = False,
    repeats: Repeats = None,
    only: Only = None,
    questions: Questions = None,
    thresholds: opt.Thresholds = opt.NO_THRESHOLDS,
    answer_style: opt.AnswerStyle = None,
    vectors: opt.KeptIn = None,
    out: Out = None,
    encoder: opt.EncoderName = None,
    as_json: opt.AsJson = False,
) -> None:
    """Measure how well a system remembers: build its memories, answer every question, judge the answers.

    One prompt and one model at temperature 0 answer for all systems. The same command resumes a stopped run.
    With --evidence-only no LLM is used: the share of each question's evidence (messages in LoCoMo, answer
    sessions in LongMemEval) in the best 5, 10 and 20 turns. With --tokens too, the share that an answer's
    memories show in so many tokens; memories come with --memories-of or --gold-memories.
    """
    from undertow.bench.quality.run.plan import Plan

    budgets = _budgets(context, tokens, evidence_only=evidence_only, gold_memories=gold_memories)
    name = _known(policy)
    at = {"llm": "off" if evidence_only else llm, "model": llm_model, "encoder": encoder}
    settings = _settings(name, ablation, **at, **asdict(thresholds), answer_style=answer_style)
    samples = chosen_samples(data, benchmark, settings, only)
    chosen = None if only is None else tuple(sample.tenant for sample in samples)
    if evidence_only:
        what = (benchmark, data, tuple(samples), name, settings, None, out or Path(f"eval-{benchmark}"))
        plan = Plan(*what, only=chosen, vectors=vectors, memories_of=memories_of)
        measure_evidence(plan, budgets, gold=gold_memories, as_json=as_json)
        return
    if settings.llm_url is None:
        raise WrongUsage("answering needs an LLM server. Give --llm URL, or --evidence-only.")
    folder = out or Path("-".join(["eval", benchmark, name, *([ablation] if ablation else [])]))
    _check_memories(name, folder, memories_of)
    if teach and (name != "himem" or not settings.himem_self_evolution):
        raise WrongUsage("--teach works only with --policy himem, and with self-evolution. Leave it out.")
    judge = _judge_settings(settings, judge_llm, judge_model, judge_prompt)
    plan = Plan(
        *(benchmark, data, tuple(samples), name, settings, judge, folder, judge_prompt, chosen),
        *(questions, repeats or 1, vectors, memories_of),
        teach=bool(teach),
    )
    measure_answers(plan, as_json=as_json)


def _budgets(
    context: typer.Context, text: str | None, *, evidence_only: bool, gold_memories: bool
) -> list[int]:
    """The budgets that are named. WrongUsage, also for options that have no meaning with --evidence-only."""
    if evidence_only:
        _refuse_with_evidence(context, in_budget=text is not None)
    if text is None and not gold_memories:
        return []
    if text is None or not evidence_only:
        raise WrongUsage("--tokens belongs to --evidence-only, and --gold-memories to --tokens. Give both.")
    try:
        budgets = [int(part) for part in text.split(",")]
    except ValueError:
        budgets = []
    if not budgets or min(budgets) < 1:
        raise WrongUsage(f"--tokens {text!r:.80}: give numbers of tokens, such as 600,1200,2400.")
    return budgets


def _refuse_with_evidence(context: typer.Context, *, in_budget: bool) -> None:
    refused = _NEEDS_LLM - _IN_BUDGET if in_budget else _NEEDS_LLM
    for parameter in context.command.params:
        if parameter.name in refused and context.params.get(parameter.name) is not None:
            raise WrongUsage(
                f"{parameter.opts[0]} has no meaning with --evidence-only. Leave one of them out."
            )


def _settings(policy: str, ablation: str | None, **flags: Any) -> Settings:
    from undertow.bench.quality.systems.registry import POLICIES

    settings = opt.settings_of(policy=policy if policy in POLICIES else None, **flags)
    opt.check_settings(settings)
    return settings if ablation is None else _ablated(settings, policy, ablation)


def _known(policy: str | None) -> str:
    from undertow.bench.quality.systems.registry import DEFAULT, SYSTEMS

    if policy is not None and policy not in SYSTEMS:
        raise WrongUsage(f"--policy {policy!r:.80}: there are {', '.join(SYSTEMS)}.")
    return policy or DEFAULT


def _ablated(settings: Settings, policy: str, ablation: str) -> Settings:
    from undertow.bench.quality.ablations import ABLATIONS, ablated

    if ablation not in ABLATIONS:
        raise WrongUsage(f"--ablation {ablation!r:.80}: there are {', '.join(ABLATIONS)}.")
    of = ABLATIONS[ablation].of
    if policy not in of:
        raise WrongUsage(
            f"--ablation {ablation} leaves out a part of {' or '.join(of)}; --policy is {policy}."
        )
    return ablated(settings, ablation)


def _check_memories(policy: str, folder: Path, memories_of: Path | None) -> None:
    from undertow.bench.quality.systems.registry import CONSTRUCTING

    if memories_of is None:
        return
    if policy not in CONSTRUCTING:
        raise WrongUsage(f"--memories-of has no meaning with --policy {policy}, which makes no memories.")
    if memories_of.resolve() == folder.resolve():
        raise WrongUsage(f"--memories-of names this run's own folder, {folder}. Name another --out.")


def _judge_settings(
    settings: Settings, url: str | None, model: str | None, prompt: Path | None
) -> Settings | None:
    """The run's settings with the judge's server and model; None without a judge."""
    if url is not None and url.lower() == "off":
        if model is not None:
            raise WrongUsage("--judge-model names a model for a judge, and --judge-llm is off.")
        if prompt is not None:
            raise WrongUsage("--judge-prompt is for a judge, and --judge-llm is off. Leave one of them out.")
        return None
    # another server's models are others
    named = model or (settings.llm_model if url is None else None)
    extra = settings.llm_extra_body if url is None else "{}"
    of_judge = {"llm_url": url or settings.llm_url, "llm_model": named, "llm_extra_body": extra}
    judge = settings.model_copy(update=of_judge)
    opt.check_settings(judge)
    return judge


def chosen_samples(
    data: Path, benchmark: Benchmark, settings: Settings, only: list[str] | None
) -> list[Sample]:
    """All samples of a file, or those that are named. InputError; WrongUsage: one is not there."""
    from undertow.bench.quality.datasets import load

    samples = list(load(data, benchmark, settings.max_message_bytes))
    if unknown := set(only or ()) - {s.tenant for s in samples}:
        names = ", ".join(s.tenant for s in samples[:20])
        raise WrongUsage(f"--sample {sorted(unknown)[0]!r:.80}: the file has {names}.")
    return [s for s in samples if only is None or s.tenant in only]
