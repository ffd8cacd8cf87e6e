"""A run's summary, from its lines: scores by category and overall, over runs, and what they have cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import sqrt
from statistics import fmean, stdev
from typing import Any

import numpy as np

from undertow.bench.quality.json_lines import Key, key_of
from undertow.bench.quality.run.judging import RIGHT, UNJUDGED
from undertow.engine.base.model import Usage

SUMMARY = "summary.json"
UNCLEAR = "not distinguishable"
RESAMPLES = 5_000

Line = Mapping[str, Any]

Value = tuple[Key, float]
"""One question's value in one run."""


def scores(answers: Sequence[Line], verdicts: Sequence[Line] | None, repeats: int) -> dict[str, Any]:
    """Of all runs: `f1`, `bleu_1`, `judge` as `over_runs` tells them, counts, `by_category`.

    `verdicts`: None without a judge. An error counts as 0 and as not right: left out, it would raise the
    score of a system that fails. What the judge gave no verdict on is neither right nor wrong and left out.
    """
    return {
        **_scores(answers, verdicts, repeats),
        "by_category": {
            name: _scores(_of(answers, name), None if verdicts is None else _of(verdicts, name), repeats)
            for name in sorted({line["category"] for line in answers})
        },
    }


def _of(lines: Sequence[Line], category: str) -> list[Line]:
    return [line for line in lines if line["category"] == category]


def _scores(answers: Sequence[Line], verdicts: Sequence[Line] | None, repeats: int) -> dict[str, Any]:
    return {
        "questions": len({line["question_id"] for line in answers}),
        "errors": sum("answer" not in line for line in answers),
        "unjudged": sum(line["verdict"] == UNJUDGED for line in verdicts or ()),
        **{figure: over_runs(_overlaps(answers, figure), repeats) for figure in ("f1", "bleu_1")},
        "judge": over_runs(judged(answers, verdicts), repeats),
    }


def _overlaps(answers: Sequence[Line], figure: str) -> list[Value]:
    return [(key_of(line), line.get(figure, 0.0)) for line in answers]


def judged(answers: Iterable[Line], verdicts: Iterable[Line] | None) -> list[Value]:
    """1 where the judge found the answer right, 0 where wrong or none; without those that it left open.

    A question that failed and was answered later has a verdict, which comes after the failure.
    """
    if verdicts is None:
        return []
    failed = [(key_of(line), 0.0) for line in answers if "answer" not in line]
    told = (line for line in verdicts if line["verdict"] != UNJUDGED)
    return failed + [(key_of(line), float(line["verdict"] == RIGHT)) for line in told]


def over_runs(values: Sequence[Value], repeats: int) -> dict[str, float | None]:
    """`mean` of the runs' means and `spread`, their sample standard deviation.

    `standard_error`: that of the mean over questions, each with its mean over the runs. None: too little.
    """
    by_run = [mean([value for (of, _), value in values if of == run]) for run in range(1, repeats + 1)]
    told = [mean_of_run for mean_of_run in by_run if mean_of_run is not None]
    by_question: defaultdict[str, list[float]] = defaultdict(list)
    for (_, question), value in values:
        by_question[question].append(value)
    each = [fmean(of) for of in by_question.values()]
    return {
        "mean": round(fmean(told), 4) if told else None,
        "spread": round(stdev(told), 4) if len(told) > 1 else None,
        "standard_error": round(stdev(each) / sqrt(len(each)), 4) if len(each) > 1 else None,
    }


def difference(values: Sequence[float]) -> dict[str, Any]:
    """The mean of paired differences, one a question, and the interval that holds it in 95 of 100 cases.

    By bootstrap over questions. `verdict`: "better" or "worse" where the interval excludes zero, else "not
    distinguishable".
    """
    if len(values) < 2:
        return {"mean": mean(values), "low": None, "high": None, "verdict": UNCLEAR}
    drawn = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values)[drawn].mean(axis=1), (2.5, 97.5)).tolist()
    verdict = "better" if low > 0 else "worse" if high < 0 else UNCLEAR
    return {"mean": round(fmean(values), 4), "low": round(low, 4), "high": round(high, 4), "verdict": verdict}


def paired(base: Mapping[Key, float], other: Mapping[Key, float]) -> dict[str, Any]:
    """The `difference` from the base, of what both have, each question with its mean over the runs."""
    by_question: defaultdict[str, list[float]] = defaultdict(list)
    for key in sorted(base.keys() & other.keys()):
        by_question[key[1]].append(other[key] - base[key])
    return difference([fmean(of) for of in by_question.values()])


Lines = tuple[Sequence[Line], Sequence[Line] | None]
"""A run's answers and verdicts; None without a judge."""


def differences(before: Lines, after: Lines) -> dict[str, Any]:
    """`f1_difference` and `judge_difference`, question by question."""
    f1s = (dict(_overlaps(answers, "f1")) for answers, _ in (before, after))
    verdicts = (dict(judged(*lines)) for lines in (before, after))
    return {"f1_difference": paired(*f1s), "judge_difference": paired(*verdicts)}


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def evidence_shown(answers: Sequence[Line]) -> dict[str, float | None]:
    """The share of a scored question's evidence, averaged: in shown turns, and in those behind memories.

    The two are apart because an episode of many turns has much behind it that it need not tell. None:
    nothing of the kind was shown, or the system cannot tell where it is from.
    """
    scored = [line for line in answers if line["is_scored"]]
    return {place: _evidence_share(scored, place) for place in ("in_turns", "behind_memories")}


def _evidence_share(scored: Sequence[Line], place: str) -> float | None:
    if not any(line[place] for line in scored):
        return None
    shares = [len(set(line["evidence"]) & set(line[place])) / len(line["evidence"]) for line in scored]
    return round(fmean(shares), 4)


def query_cost(answers: Sequence[Line]) -> dict[str, float | None]:
    """Calls and tokens a question, errors included: they cost too."""
    used = [line["tokens"] for line in answers]
    names = ("calls", "prompt_tokens", "cached_prompt_tokens", "completion_tokens")
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
    """Seconds: `retrieval_s` of a question's first search, in which only a peer embeds it; `llm_s` of a call
    among others."""
    told: dict[str, float | None] = {}
    for name in ("retrieval_s", "llm_s"):
        taken = [line[name] for line in answers if name in line]
        for percent in (50, 95):
            value = round(float(np.percentile(taken, percent)), 4) if taken else None
            told[f"{name}_p{percent}"] = value
    return told
