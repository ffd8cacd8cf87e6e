"""Evaluations of the same questions side by side, such as ablations: a table, and one picture.

    python -m undertow.bench.quality.side_by_side FOLDER... --out docs/results/ablations

Takes the folders that `undertow eval` has written (`--out`), and calls each by its folder's name. The first
is what the others are compared with, question by question: a difference comes with the interval that holds it
in 95 of 100 cases, by bootstrap over questions, and is called not distinguishable where that includes zero.
Writes FILE.json, with the summaries, and FILE.png, and prints the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import orjson

from undertow.bench.machine import commit, describe
from undertow.bench.quality.json_lines import Key, key_of, write_json
from undertow.bench.quality.run.evaluate import ANSWERS, VERDICTS
from undertow.bench.quality.run.summary import SUMMARY, UNCLEAR, judged, paired
from undertow.engine.base.model import UndertowError
from undertow.prompts.operations import QUERY_OPERATIONS

ALIKE = (
    *("benchmark", "data_digest", "only", "questions_per_sample", "repeats", "encoder"),
    *("llm_model", "judge_model", "judge_prompt.version"),
    *(f"prompt_versions.{operation}" for operation in sorted(QUERY_OPERATIONS)),
)
"""What must be the same for scores to be compared; after a dot, a field within a field. Of the prompts those
that make answers and verdicts: ones that make memories belong to what is compared."""

Summary = dict[str, Any]


def read(folders: Sequence[Path]) -> dict[str, Summary]:
    """Each folder's summary, by the folder's name; `f1_difference`, `judge_difference` from the first added.

    UndertowError: one has none, two have one name, what must be alike is not, or a question has no answer.
    """
    found: dict[str, Summary] = {}
    base: dict[Key, float] = {}
    judged_base: dict[Key, float] = {}
    for folder in folders:
        summary = _summary(folder)
        first = next(iter(found.values()), summary)
        _check_alike(folder, summary, first)
        if folder.name in found:
            raise UndertowError(f"{folder}: there is a {folder.name} already. Give each a name of its own.")
        f1, verdicts = _f1(folder, first["repeats"]), _judged(folder, first["repeats"])
        base, judged_base = (base, judged_base) if found else (f1, verdicts)
        _check_answered(folder, base.keys() - f1.keys(), folders[0])
        _check_answered(folders[0], f1.keys() - base.keys(), folder)
        summary["f1_difference"] = paired(base, f1)
        summary["judge_difference"] = paired(judged_base, verdicts)
        found[folder.name] = summary
    return found


def _summary(folder: Path) -> Summary:
    try:
        summary: Summary = orjson.loads((folder / SUMMARY).read_bytes())
    except FileNotFoundError:
        cure = "Name folders of finished evaluations."
        raise UndertowError(f"{folder} has no {SUMMARY}. {cure}") from None
    if "repeats" not in summary:
        raise UndertowError(f"{folder} has no answers. Name folders of evaluations without --evidence-only.")
    return summary


def _check_alike(folder: Path, summary: Summary, first: Summary) -> None:
    for name in ALIKE:
        if (value := _field(summary, name)) != (wanted := _field(first, name)):
            raise UndertowError(
                f"{folder}: its {name} is {value!r}, the first one's is {wanted!r}. Compare evaluations of "
                "the same questions, repeats, encoder, models and prompts of answers and judge."
            )


def _field(summary: Summary, name: str) -> Any:
    """None: there is none, as without a judge."""
    value: Any = summary
    for part in name.split("."):
        value = (value or {}).get(part)
    return value


def _f1(folder: Path, repeats: int) -> dict[Key, float]:
    """By run and question. Only the figure is kept: with their material lines may exceed the memory."""
    try:
        return {key_of(line): line.get("f1", 0.0) for line in _lines(folder / ANSWERS, repeats)}
    except FileNotFoundError:
        raise UndertowError(f"{folder} has no {ANSWERS}. Name folders as undertow eval wrote them.") from None


def _judged(folder: Path, repeats: int) -> dict[Key, float]:
    """As the summary's `judged`; {} without a judge."""
    verdicts = folder / VERDICTS
    if not verdicts.exists():
        return {}
    return dict(judged(_lines(folder / ANSWERS, repeats), _lines(verdicts, repeats)))


def _lines(path: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Of the summary's runs; an earlier command may have left more. Of two lines of a key the last counts."""
    with path.open("rb") as file:
        yield from (line for line in map(orjson.loads, file) if line["run"] <= repeats)


def _check_answered(folder: Path, lacking: Set[Key], other: Path) -> None:
    if lacking:
        run, question = min(lacking)
        raise UndertowError(
            f"{folder}: {ANSWERS} has no line of question {question} in run {run}, which {other} has; so it "
            f"is of {len(lacking)} in all. Give that evaluation's command again, which asks what is missing."
        )


def table(summaries: Mapping[str, Summary]) -> str:
    """Markdown: means with standard errors, differences with intervals; tokens to construct and to ask."""
    rows = [
        "| | judge | difference | F1 | difference | construction tokens | prompt tokens a question |",
        "|---|---|---|---|---|---|---|",
    ]
    for n, (name, of) in enumerate(summaries.items()):
        built = sum(op["tokens"] for op in of["construction"]["by_operation"].values())
        cells = [
            *(f"`{name}`", _told(of["judge"]), _differs(of["judge_difference"]) if n else ""),
            *(_told(of["f1"]), _differs(of["f1_difference"]) if n else "", f"{built:,.0f}"),
            f"{of['query']['prompt_tokens_per_question']:,.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _told(of: Mapping[str, float | None]) -> str:
    if of["mean"] is None:
        return ""
    error = of["standard_error"]
    return f"{of['mean']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def _differs(of: Mapping[str, Any]) -> str:
    if of["low"] is None:
        return "" if of["mean"] is None else f"{of['mean']:+.3f}"
    unclear = f", {UNCLEAR}" if of["verdict"] == UNCLEAR else ""
    return f"{of['mean']:+.3f} [{of['low']:+.3f}, {of['high']:+.3f}]{unclear}"


def draw(summaries: Mapping[str, Summary], path: Path, title: str) -> None:
    """Judge and F1 with their standard errors, and what a question shows the model, as bars."""
    from matplotlib.figure import Figure

    names = list(summaries)[::-1]
    figure = Figure(figsize=(11, 1.4 + 0.5 * len(names)), layout="constrained")
    figure.suptitle(title)
    quality, cost = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for score, label, offset in (("judge", "judge", 0.2), ("f1", "F1", -0.2)):
        scores = [summaries[name][score] for name in names]
        quality.barh(
            [n + offset for n in range(len(names))],
            [of["mean"] or 0.0 for of in scores],
            height=0.38,
            xerr=[of["standard_error"] or 0.0 for of in scores],
            label=label,
        )
    quality.set(xlim=(0, 1), xlabel="mean, with its standard error over questions")
    quality.set_yticks(range(len(names)), names)
    quality.legend(loc="lower right")
    cost.barh(range(len(names)), [summaries[n]["query"]["prompt_tokens_per_question"] for n in names])
    cost.set(xlabel="prompt tokens a question")
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.quality.side_by_side")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="of undertow eval --out")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="without an ending")
    args = parser.parse_args(argv)
    try:
        summaries = read(args.folders)
    except UndertowError as error:
        parser.exit(2, f"{error}\n")
    first = next(iter(summaries.values()))
    about = {"machine": describe(), "commit": commit(), **{name: _field(first, name) for name in ALIKE}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out.with_suffix(".json"), {**about, "evaluations": summaries})
    of = f"{first['questions']} questions of {', '.join(first['only'] or [first['data']])}"
    draw(summaries, args.out.with_suffix(".png"), f"{first['benchmark']}, {of}, {first['answering_model']}")
    print(table(summaries))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
