"""`undertow eval` with an LLM: memories built, questions answered, answers judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from undertow.serving.cli.errors import Exit
from undertow.serving.cli.output import put_json, put_pairs, put_table, say

if TYPE_CHECKING:
    from undertow.bench.quality.run.plan import Plan

_SCORES = {"judge": "judge", "f1": "F1"}
_COUNTS = ("questions", "errors", "unjudged")
_COLUMNS = (
    "category",
    *(name + part for name in _SCORES.values() for part in ("", " spread", " std. error")),
    "BLEU-1",
    *_COUNTS,
)


def measure_answers(plan: Plan, *, as_json: bool) -> None:
    """Do what is left of the plan, and tell its summary."""
    from undertow.bench.quality.run.evaluate import evaluate
    from undertow.serving.cli.progress import Bar

    with Bar() as bar:
        told = evaluate(
            plan, lambda what, done, total: bar.show(f"{what}: {done:,} of {total:,}", done, total)
        )
    if as_json:
        put_json(told)
    else:
        _put(told, plan.folder)
    if told["errors"] == told["questions"] * told["repeats"]:
        say(f"undertow: not one question was answered: {told['first_error']}")
        raise typer.Exit(Exit.FAILED)


def _put(told: dict[str, Any], folder: Path) -> None:
    title = f"{told['policy']} on {told['benchmark']}, {told['repeats']} run{'s' * (told['repeats'] > 1)}"
    put_table(list(_rows(told)), _COLUMNS, title=title)
    construction = told["construction"]["per_conversation"]
    put_pairs(
        {
            **{f"construction {name} a conversation": value for name, value in construction.items()},
            **{name.replace("_per_", " a "): value for name, value in told["query"].items()},
            **{f"{name}, this machine": value for name, value in told["latency_on_this_machine"].items()},
            **{
                f"evidence shown, {place.replace('_', ' ')}": share
                for place, share in told["evidence_shown"].items()
            },
        }
    )
    for line in _left_out(told):
        say(line)
    say(f"Every answer and verdict: {folder}")


def _left_out(told: dict[str, Any]) -> Iterator[str]:
    if count := told["errors"]:
        yield (
            f"warning: {count:,} questions got no answer and count as wrong, with an F1 of 0; "
            f"the first: {told['first_error']}. The same command asks them again."
        )
    if count := told["unjudged"]:
        yield f"{count:,} answers got no verdict of the judge's and are in no share."
    if count := told.get("built", {}).get("complaints"):
        yield f"{count:,} errors were logged by {told['policy']} and not raised: memories may be missing."
    if count := told.get("built", {}).get("dead_letters"):
        yield f"{count:,} jobs of the construction got no usable reply: their memories are missing."


def _rows(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, of in [*told["by_category"].items(), ("all", told)]:
        yield {
            "category": name,
            **{name: of[figure]["mean"] for figure, name in _SCORES.items()},
            **{f"{name} spread": of[figure]["spread"] for figure, name in _SCORES.items()},
            **{f"{name} std. error": of[figure]["standard_error"] for figure, name in _SCORES.items()},
            "BLEU-1": of["bleu_1"]["mean"],
            **{count: of[count] for count in _COUNTS},
        }
