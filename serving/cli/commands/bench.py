"""`undertow bench`: measurements of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.engine.base.model import PolicyName
from undertow.serving.cli import options as opt
from undertow.serving.cli.commands.eval.eval import Only, chosen_samples
from undertow.serving.cli.errors import WrongUsage, wrong_usage
from undertow.serving.cli.output import put_json, put_pairs, put_table, say

if TYPE_CHECKING:
    from undertow.bench.quality.sweeps import Sweeps
    from undertow.engine.base.config import Settings

bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure this machine."""


@bench.command()
def gpu(
    as_json: opt.AsJson = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repeats and shorter runs, of the same sizes.")
    ] = False,
    only: Annotated[
        str | None, typer.Option("--only", metavar="PARTS", help="Some of gate,topk,encoder,ingest.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the JSON here, a table beside it; a folder will do.")
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option(
            "--encoder", metavar="FOLDER", help="The model of encoder and ingest; else the settings'."
        ),
    ] = None,
) -> None:
    """What the GPU path reaches on this card, against measured limits and targets (docs/gpu.md).

    Minutes; nothing else should use the card. Exit code 1: a part failed or gave wrong results.
    """
    from undertow.bench.gpu.figures import PARTS, NotMeasured
    from undertow.bench.gpu.run import Options, check, parts_of, report

    options = Options(quick, PARTS if only is None else parts_of(only), out, encoder)
    try:
        with wrong_usage():
            check(options)
    except NotMeasured as error:
        raise WrongUsage(str(error)) from error
    raise typer.Exit(report(options, as_json=as_json))


@bench.command()
def sweep(
    data: Annotated[
        Path, typer.Option("--data", metavar="FILE", help="LoCoMo's published file.", show_default=False)
    ],
    policy: Annotated[PolicyName, typer.Option("--policy", help="Whose settings to sweep.")] = "recmem",
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="For sweep-POLICY.json and sweep-POLICY.png.")
    ] = Path("sweeps"),
    only: Only = None,
    vectors: opt.KeptIn = None,
    encoder: opt.EncoderName = None,
    as_json: opt.AsJson = False,
) -> None:
    """What a policy's window and thresholds cost on LoCoMo, and what its k find.

    One setting at a time, with a mock LLM.

    Deterministic: the same file, encoder and settings give the same figures.
    """
    from undertow.bench.quality.ablations import whole
    from undertow.bench.quality.sweeps import SWEPT, runs
    from undertow.bench.quality.sweeps import sweep as run
    from undertow.bench.quality.vectors import KeptVectors
    from undertow.engine.encoders.factory import make_encoder
    from undertow.serving.cli.progress import Bar

    settings = whole(opt.settings_of(llm="off", encoder=encoder), policy)
    opt.check_settings(settings)
    samples = chosen_samples(data, "locomo", settings, only)
    kept = KeptVectors(make_encoder(settings), vectors)
    with Bar() as bar:
        done, total = count(1), runs(SWEPT[policy])

        def show() -> None:
            n = next(done)
            bar.show(f"{n} of {total} runs", n, total)

        sweeps = run(samples, settings, kept, show)
    kept.save()
    about = {"data": data.name, "samples": [sample.tenant for sample in samples]}
    document = _written(sweeps, about, settings, out)
    if as_json:
        put_json(document)
        return
    figures = ("consolidated_share", "consolidations", "merges", "episodes", "facts")
    for name, points in sweeps.construction.items():
        put_table(
            [_row(point, name, figures) for point in points], [name, *figures, "calls", "prompt_tokens"]
        )
    for name, points in sweeps.search.items():
        put_table(points, [name, "evidence_recall", "turns_behind", "questions"])
    say(f"All figures and the picture: {out}")


def _written(sweeps: Sweeps, about: dict[str, Any], settings: Settings, out: Path) -> dict[str, Any]:
    """Write the figures and the picture into `out`; returns the figures."""
    from undertow.bench.quality.json_lines import write_json
    from undertow.bench.quality.sweep_plot import draw
    from undertow.bench.quality.sweeps import in_force

    document = {
        **about,
        "policy": settings.policy,
        "encoder": settings.encoder,
        "where_not_varied": in_force(settings),
        "llm": "mock, which agrees to every merge",
        **sweeps.construction,
        **sweeps.search,
    }
    out.mkdir(parents=True, exist_ok=True)
    file = out / f"sweep-{settings.policy}"
    write_json(file.with_suffix(".json"), document)
    model, conversations = settings.encoder.rpartition("/")[2], len(about["samples"])
    title = f"{settings.policy}: {about['data']}, {conversations} conversations, {model}, mock LLM"
    draw(sweeps, file.with_suffix(".png"), title)
    return document


def _row(point: dict[str, Any], name: str, figures: tuple[str, ...]) -> dict[str, Any]:
    totals = {total: sum(point[total].values()) for total in ("calls", "prompt_tokens")}
    return {key: point[key] for key in (name, *figures)} | totals


@bench.command()
def ingest(
    data: Annotated[
        Path,
        typer.Option("--data", metavar="LOG", help="In any format of `undertow ingest`.", show_default=False),
    ],
    tenants: Annotated[int, typer.Option("--tenants", min=1, help="So many, each with one conversation.")],
    turns: Annotated[
        int | None,
        typer.Option("--turns", min=1, metavar="N", help="Of each tenant; left out: the whole conversation."),
    ] = None,
    salted: Annotated[
        bool,
        typer.Option(
            "--salted/--copies", help="No text repeats across tenants, or all have plain copies of the log."
        ),
    ] = True,
    latency_s: Annotated[
        float, typer.Option("--llm-latency", min=0.0, metavar="SECONDS", help="Of the mock LLM.")
    ] = 0.2,
    llm: Annotated[
        str | None, typer.Option("--llm", metavar="URL", help="A real server in place of the mock.")
    ] = None,
    model: opt.Model = None,
    encoder: opt.EncoderName = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="The figures, a picture and a Chrome trace."),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Turns/s until searchable and until consolidated, what a turn waits, and where the time goes.

    A new store in a temporary folder. Nothing else should run. docs/peers.md says how to read it.
    """
    from undertow.bench.system.throughput_report import Load, run

    load = Load(data, tenants, turns, salted=salted)
    settings = opt.settings_of(llm=llm or "off", model=model, encoder=encoder)
    opt.check_settings(settings)
    result = run(load, settings, latency_s, out)
    if as_json:
        put_json(result)
        return
    put_pairs({name: value for name, value in result.items() if not isinstance(value, dict)})
    for name in ("wait_s", "time_s"):
        put_pairs(_flat(result[name]), title=f"\n{name}")


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """One level of names: {"a": {"b": 1}} as {"a b": 1}."""
    inner = {name: value if isinstance(value, dict) else {"": value} for name, value in values.items()}
    return {f"{name} {of}".strip(): value for name, values in inner.items() for of, value in values.items()}
