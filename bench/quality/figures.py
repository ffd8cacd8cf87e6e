"""A run's summary, from its lines: scores by category and overall, over runs, and what they have cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, stdev
from typing import Any

import numpy as np

from undertow.bench.quality.judging import RIGHT, UNJUDGED, WRONG
from undertow.engine.model import Usage

Line = Mapping[str, Any]
Figure = Callable[[Sequence[Line]], float | None]


def scores(answers: Sequence[Line], verdicts: Sequence[Line], repeats: int) -> dict[str, Any]:
    """Of all runs: `f1`, `bleu_1`, `judge` as mean and spread, counts of what has no score, `by_category`.

    A question without an answer has F1 and BLEU-1 of 0 and is not right: left out, a system whose prompts
    fail where it is weak would score the better for it. What the judge gave no verdict on is neither right
    nor wrong and in no share. Both are counted.
    """
    categories = sorted({line["category"] for line in answers})
    return {
        **_scores(answers, verdicts, repeats),
        "by_category": {
            name: _scores(_of(answers, name), _of(verdicts, name), repeats) for name in categories
        },
    }


def _of(lines: Sequence[Line], category: str) -> list[Line]:
    return [line for line in lines if line["category"] == category]


def _scores(answers: Sequence[Line], verdicts: Sequence[Line], repeats: int) -> dict[str, Any]:
    failed = [line for line in answers if "answer" not in line]
    judged = [*verdicts, *({"run": line["run"], "verdict": WRONG} for line in failed)] if verdicts else []
    return {
        "questions": len({line["question_id"] for line in answers}),
        "errors": len(failed),
        "unjudged": sum(line["verdict"] == UNJUDGED for line in verdicts),
        "f1": over_runs(answers, repeats, lambda of: mean([line.get("f1", 0.0) for line in of])),
        "bleu_1": over_runs(answers, repeats, lambda of: mean([line.get("bleu_1", 0.0) for line in of])),
        "judge": over_runs(judged, repeats, share_right),
    }


def share_right(verdicts: Sequence[Line]) -> float | None:
    """Of what was judged."""
    return mean([line["verdict"] == RIGHT for line in verdicts if line["verdict"] != UNJUDGED])


def over_runs(lines: Sequence[Line], repeats: int, figure: Figure) -> dict[str, float | None]:
    """Mean of the runs' figures, and their sample standard deviation; None where there is too little."""
    by_run = [figure([line for line in lines if line["run"] == run]) for run in range(1, repeats + 1)]
    told = [value for value in by_run if value is not None]
    return {
        "mean": round(fmean(told), 4) if told else None,
        "spread": round(stdev(told), 4) if len(told) > 1 else None,
    }


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def evidence_shown(answers: Sequence[Line]) -> float | None:
    """The share of the evidence that lay in what the prompt showed, averaged over questions that have any.

    None where no source is known: the system cannot tell.
    """
    shares = [
        len(set(line["evidence"]) & set(line["sources"])) / len(line["evidence"])
        for line in answers
        if line["evidence"]
    ]
    known = any(line["sources"] for line in answers)
    return round(fmean(shares), 4) if shares and known else None


def query_cost(answers: Sequence[Line]) -> dict[str, float | None]:
    """Tokens a question, errors included: they cost too."""
    used = [line["tokens"] for line in answers]
    names = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
    per_question = {name: mean([one[name] for one in used]) for name in names}
    return {f"{name}_per_question": value and round(value, 1) for name, value in per_question.items()}


def construction_cost(spent: Mapping[str, Mapping[str, Usage]]) -> dict[str, Any]:
    """Calls and tokens a conversation, together and by operation; and those of each conversation."""
    operations = sorted({operation for by_operation in spent.values() for operation in by_operation})
    total = {op: sum((one.get(op, Usage()) for one in spent.values()), Usage()) for op in operations}
    return {
        "conversations": len(spent),
        "per_conversation": _shared(sum(total.values(), Usage()), len(spent)),
        "by_operation": {op: _shared(usage, len(spent)) for op, usage in total.items()},
        "by_conversation": {
            name: {op: asdict(usage) for op, usage in sorted(one.items())}
            for name, one in spent.items()
            if one
        },
    }


def _shared(usage: Usage, conversations: int) -> dict[str, float]:
    tokens = usage.prompt_tokens + usage.completion_tokens
    per = {"calls": usage.calls, "tokens": tokens}
    per |= {name: count for name, count in asdict(usage).items() if name != "calls"}
    return {name: round(count / max(1, conversations), 1) for name, count in per.items()}


def latency(answers: Sequence[Line]) -> dict[str, float | None]:
    """Seconds: `retrieval_s` with the question's vector at hand, `llm_s` of the call, among others."""
    told: dict[str, float | None] = {}
    for name in ("retrieval_s", "llm_s"):
        taken = [line[name] for line in answers if name in line]
        for percent in (50, 95):
            value = round(float(np.percentile(taken, percent)), 4) if taken else None
            told[f"{name}_p{percent}"] = value
    return told
