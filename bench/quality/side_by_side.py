"""Evaluations of the same questions side by side, such as ablations: a table, and one picture.

    python -m undertow.bench.quality.side_by_side FOLDER... --out docs/results/ablations

Takes the folders that `undertow eval` has written (`--out`), and calls each by its folder's name. The first
is what the others are compared with, question by question. Writes FILE.json, with the summaries, and
FILE.png, and prints the table.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from undertow.bench.machine import commit, describe
from undertow.bench.quality.figures import Value, over_runs
from undertow.engine.model import UndertowError

ALIKE = ("benchmark", "data_digest", "only", "questions_per_sample", "encoder", "llm_model", "judge_model")
"""What must be the same for scores to be compared."""

Summary = dict[str, Any]


def read(folders: Sequence[Path]) -> dict[str, Summary]:
    """Each folder's summary, by the folder's name, `f1_difference` from the first added.

    UndertowError: one has none, two have one name, or what must be alike is not.
    """
    found: dict[str, Summary] = {}
    base: dict[tuple[int, str], float] = {}
    for folder in folders:
        try:
            summary: Summary = orjson.loads((folder / "summary.json").read_bytes())
        except FileNotFoundError:
            cure = "Name folders of finished evaluations."
            raise UndertowError(f"{folder} has no summary.json. {cure}") from None
        for name in ALIKE:
            if found and summary.get(name) != (first := next(iter(found.values()))).get(name):
                raise UndertowError(
                    f"{folder}: its {name} is {summary.get(name)!r}, the first one's is {first.get(name)!r}. "
                    "Compare evaluations of the same questions, encoder and models."
                )
        if folder.name in found:
            raise UndertowError(f"{folder}: there is a {folder.name} already. Give each a name of its own.")
        f1 = _f1_by_question(folder / "answers.jsonl")
        base = base or f1
        pairs = [Value(run, question, f1[run, question] - was) for (run, question), was in base.items()]
        summary["f1_difference"] = over_runs(pairs, summary["repeats"])
        found[folder.name] = summary
    return found


def _f1_by_question(path: Path) -> dict[tuple[int, str], float]:
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    return {(line["run"], line["question_id"]): line.get("f1", 0.0) for line in lines}


def table(summaries: Mapping[str, Summary]) -> str:
    """Markdown: mean and standard error over questions; tokens of construction and of a question."""
    rows = [
        "| | judge | F1 | F1, difference | construction tokens | prompt tokens a question |",
        "|---|---|---|---|---|---|",
    ]
    for n, (name, of) in enumerate(summaries.items()):
        built = sum(op["tokens"] for op in of["construction"]["by_operation"].values())
        cells = [
            *(f"`{name}`", _told(of["judge"]), _told(of["f1"])),
            *(_told(of["f1_difference"], sign="+") if n else "", f"{built:,.0f}"),
            f"{of['query']['prompt_tokens_per_question']:,.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _told(of: Mapping[str, float | None], sign: str = "") -> str:
    if of["mean"] is None:
        return ""
    error = of["standard_error"]
    return f"{of['mean']:{sign}.3f}" + ("" if error is None else f" ± {error:.3f}")


def draw(summaries: Mapping[str, Summary], path: Path, title: str) -> None:
    """Judge and F1 with their standard errors, and what a question shows the model, as bars."""
    from matplotlib.figure import Figure

    names = list(summaries)[::-1]
    figure = Figure(figsize=(11, 1.4 + 0.5 * len(names)), layout="constrained")
    figure.suptitle(title)
    quality, cost = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    offsets = defaultdict(float, judge=0.2, f1=-0.2)
    for score, label in (("judge", "judge"), ("f1", "F1")):
        scores = [summaries[name][score] for name in names]
        quality.barh(
            [n + offsets[score] for n in range(len(names))],
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
    about = {"machine": describe(), "commit": commit(), **{name: first.get(name) for name in ALIKE}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    told = {**about, "evaluations": summaries}
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    args.out.with_suffix(".json").write_bytes(orjson.dumps(told, option=options))
    of = f"{first['questions']} questions of {', '.join(first['only'] or [first['data']])}"
    draw(summaries, args.out.with_suffix(".png"), f"{first['benchmark']}, {of}, {first['answering_model']}")
    print(table(summaries))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
