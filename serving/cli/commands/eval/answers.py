"""`undertow eval` with an LLM: memories built, questions answered, answers judged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from undertow.serving.cli.commands.eval.evidence import interval
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
    """Do what is left of the plan and show its summary."""
    from undertow.bench.quality.run.evaluate import evaluate
    from undertow.serving.cli.progress import Bar

    with Bar() as bar:
        summary = evaluate(
            plan, lambda what, done, total: bar.show(f"{what}: {done:,} of {total:,}", done, total)
        )
    if as_json:
        put_json(summary)
    else:
        _put(summary, plan.folder)
    if summary["errors"] == summary["questions"] * summary["repeats"]:
        say(f"undertow: not one question was answered: {summary['first_error']}")
        raise typer.Exit(Exit.FAILED)


def _put(summary: dict[str, Any], folder: Path) -> None:
    repeats = summary["repeats"]
    title = f"{summary['policy']} on {summary['benchmark']}, {repeats} run{'s' * (repeats > 1)}"
    put_table(list(_rows(summary)), _COLUMNS, title=title)
    construction = summary["construction"]["per_conversation"]
    put_pairs(
        {
            **{f"construction {name} a conversation": value for name, value in construction.items()},
            **{name.replace("_per_", " a "): value for name, value in summary["query"].items()},
            **{f"{name}, this machine": value for name, value in summary["latency_on_this_machine"].items()},
            **{
                f"evidence shown, {place.replace('_', ' ')}": share
                for place, share in summary["evidence_shown"].items()
            },
        }
    )
    for line in _left_out(summary):
        say(line)
    if taught := summary.get("taught"):
        _put_taught(taught)
    say(f"Every answer and verdict: {folder}")


def _put_taught(taught: dict[str, Any]) -> None:
    """What the same questions got from the notes that they had revised."""
    put_table(list(_rows(taught)), _COLUMNS, title="From the notes that the questions have revised")
    for name, label in _SCORES.items():
        differs = taught[f"{name}_difference"]
        if differs["mean"] is not None:
            say(f"{label} against the notes before: {interval(differs)}")
    teaching = taught["teaching"]
    say(
        f"Of {teaching['questions']:,} questions the notes missed {teaching['missed']:,}: "
        f"{teaching['notes_before']:,} notes became {teaching['notes_after']:,}."
    )
    for line in _left_out(taught):
        say(line)


def _left_out(summary: dict[str, Any]) -> Iterator[str]:
    if count := summary["errors"]:
        yield (
            f"warning: {count:,} questions got no answer and count as wrong, with an F1 of 0; "
            f"the first: {summary['first_error']}. The same command asks them again."
        )
    if count := summary["unjudged"]:
        yield f"{count:,} answers got no verdict of the judge's and are in no share."
    if count := summary.get("built", {}).get("complaints"):
        yield f"{count:,} errors were logged by {summary['policy']} and not raised: memories may be missing."
    if count := summary.get("built", {}).get("dead_letters"):
        yield f"{count:,} jobs of the construction got no usable reply: their memories are missing."


def _rows(summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, of in [*summary["by_category"].items(), ("all", summary)]:
        yield {
            "category": name,
            **{name: of[figure]["mean"] for figure, name in _SCORES.items()},
            **{f"{name} spread": of[figure]["spread"] for figure, name in _SCORES.items()},
            **{f"{name} std. error": of[figure]["standard_error"] for figure, name in _SCORES.items()},
            "BLEU-1": of["bleu_1"]["mean"],
            **{count: of[count] for count in _COUNTS},
        }
