"""`undertow eval`: how well memories are found, on the benchmarks of the field."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.bench.quality import Benchmark
from undertow.serving.cli.errors import WrongUsage
from undertow.serving.cli.opening import AsJson, EncoderName, check_settings, settings_of
from undertow.serving.cli.output import put_json, put_table, say

if TYPE_CHECKING:
    from undertow.bench.quality.datasets import Sample

Data = Annotated[
    Path, typer.Option("--data", metavar="FILE", help="The benchmark's published file.", show_default=False)
]
EvidenceOnly = Annotated[
    bool, typer.Option("--evidence-only", help="Only how much of the evidence a search finds: no LLM.")
]
Only = Annotated[
    list[str] | None,
    typer.Option("--sample", metavar="ID", help="Only this conversation or question; may be given again."),
]
KeptIn = Annotated[
    Path | None,
    typer.Option("--vectors", metavar="FILE", help="Keep the vectors here: the next run takes seconds."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FOLDER", help="What each question found; default: eval-BENCHMARK."),
]


def evaluate(
    benchmark: Annotated[Benchmark, typer.Argument(help="Whose questions and evidence the file has.")],
    data: Data,
    evidence_only: EvidenceOnly = False,
    only: Only = None,
    vectors: KeptIn = None,
    out: Out = None,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """How well memories are found: the share of each question's evidence in the best 5, 10 and 20 turns.

    Evidence is a question's messages in LoCoMo, its answer sessions in LongMemEval.
    """
    if not evidence_only:
        raise WrongUsage("answers are not judged yet. Give --evidence-only.")
    from undertow.bench.quality.datasets import load
    from undertow.bench.quality.evidence import retrieve
    from undertow.bench.quality.report import write_evidence
    from undertow.bench.quality.vectors import KeptVectors
    from undertow.engine.encoder import make_encoder
    from undertow.engine.engine import Engine
    from undertow.serving.cli.progress import Bar

    began_s = time.perf_counter()
    settings = settings_of(llm="off", encoder=encoder)
    check_settings(settings)
    samples = _chosen(list(load(data, benchmark, settings.max_message_bytes)), only)
    questions = sum(len(s.questions) for s in samples)
    scored = sum(q.is_scored for s in samples for q in s.questions)
    about: dict[str, Any] = {
        "benchmark": benchmark,
        "data": data.name,
        "samples": len(samples),
        "turns": sum(len(s.turns) for s in samples),
        "left_out": questions - scored,
        "encoder": settings.encoder,
        "search": settings.search,
    }
    folder = out or Path(f"eval-{benchmark}")
    kept = KeptVectors(make_encoder(settings), vectors)
    with ExitStack() as stack:
        store = Path(stack.enter_context(TemporaryDirectory(prefix="undertow-eval-")))
        engine = stack.enter_context(Engine(store, settings, kept))
        bar = stack.enter_context(Bar())
        done = iter(range(1, scored + 1))

        def show() -> None:
            count = next(done)
            if bar.is_due:
                bar.show(f"{count:,} of {scored:,} questions", count, scored)

        told = write_evidence(retrieve(engine, kept, samples, show), folder, about)
    kept.save()
    _put(told | {"elapsed_s": round(time.perf_counter() - began_s, 1)}, folder, as_json=as_json)


def _chosen(samples: list[Sample], only: list[str] | None) -> list[Sample]:
    if unknown := set(only or ()) - {s.tenant for s in samples}:
        names = ", ".join(s.tenant for s in samples[:20])
        raise WrongUsage(f"--sample {sorted(unknown)[0]!r:.80}: the file has {names}.")
    return [s for s in samples if only is None or s.tenant in only]


def _put(told: dict[str, Any], folder: Path, *, as_json: bool) -> None:
    if as_json:
        put_json(told)
        return
    rows = list(_rows(told))
    put_table(rows, [name for name in rows[0] if name != "questions"] + ["questions"])
    say(f"What was found for each question: {folder}")


def _rows(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    figures = ("questions", *(name for name in told if name.startswith("evidence_recall_")), "mrr")
    for name, means in [*told["by_category"].items(), ("all", told)]:
        yield {"category": name, **{figure: means[figure] for figure in figures}}
