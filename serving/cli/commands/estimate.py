"""`undertow estimate`: what consolidation would cost, before any LLM call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from undertow.engine.base.model import Format, PolicyName, as_embedded
from undertow.serving.cli import options as opt
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.output import put_json, put_table, put_text
from undertow.serving.cli.progress import Bar, Problems

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings
    from undertow.engine.base.model import Turn
    from undertow.engine.base.results import IngestReport
    from undertow.engine.encoders.token_count import TokenCount
    from undertow.engine.estimate.estimate import Ranges
    from undertow.engine.estimate.stand_ins import TenantLog

EMBEDDED_AT_A_TIME = 256

PolicyChoice = Literal[PolicyName, "all"]
PolicyOption = Annotated[PolicyChoice, typer.Option("--policy", help="Count its calls; all: side by side.")]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FOLDER",
        help="The LLM's tokenizer, to count tokens. Default: the encoder's, which is accurate enough for "
        "English only.",
    ),
]
PriceIn = Annotated[float | None, typer.Option("--price-in", min=0, help="Price of a million prompt tokens.")]
PriceOut = Annotated[
    float | None, typer.Option("--price-out", min=0, help="Price of a million completion tokens.")
]


def estimate(
    paths: opt.Paths,
    policy: PolicyOption = "all",
    format: opt.LogFormat = "auto",
    tenant: opt.Owner = None,
    thresholds: opt.Thresholds = opt.NO_THRESHOLDS,
    encoder: opt.EncoderName = None,
    tokenizer: TokenizerFolder = None,
    vectors: opt.KeptIn = None,
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    as_json: opt.AsJson = False,
) -> None:
    """How many LLM calls and tokens these logs would need, before any is made. Stores nothing.

    The engine runs over the logs in a temporary store, with the logs' own vectors and assumed replies of an
    LLM. Each figure is low, expected and high. Answers to questions cost extra.
    """
    if (price_in is None) != (price_out is None):
        raise WrongUsage("a price needs both: give --price-in and --price-out.")
    from undertow.engine.encoders.token_count import token_count

    settings = opt.settings_of(
        policy=None if policy == "all" else policy, llm="off", encoder=encoder, **asdict(thresholds)
    )
    opt.check_settings(settings)
    tokens = token_count(settings, tokenizer)
    turns, report = _turns(paths, format, tenant, settings)
    logs = _logs(turns, settings, vectors)
    prices = None if price_in is None or price_out is None else (price_in, price_out)
    wanted = [name for name in get_args(PolicyName) if policy in (name, "all")]
    document = _document(logs, settings, tokens, wanted, prices, report)
    if as_json:
        put_json(document)
    elif turns or not report.errors:
        _put(document)
    raise typer.Exit(Exit.INPUT if report.errors else Exit.DONE)


def _document(
    logs: list[TenantLog],
    settings: Settings,
    tokens: TokenCount,
    policies: Sequence[PolicyName],
    prices: tuple[float, float] | None,
    report: IngestReport,
) -> dict[str, Any]:
    """The ranges by policy, with everything that they depend on."""
    from undertow.engine.estimate.estimate import assumptions, price
    from undertow.engine.estimate.estimate import estimate as measure

    found = {name: measure(logs, settings.under(name), tokens) for name in policies}
    priced = {} if prices is None else {name: price(ranges, *prices) for name, ranges in found.items()}
    return {
        "tenants": len(logs),
        "turns": sum(len(log.turns) for log in logs),
        "encoder": settings.encoder,
        "theta_sim": settings.similarity_threshold,
        "theta_merge": settings.merge_threshold,
        "theta_count": settings.recurrence_count,
        "theta_share": settings.sim_share,
        "window_messages": settings.window_messages,
        "management": settings.management,
        "ablation": settings.ablation,
        "calls": settings.call_form,
        "tokens": tokens.name,
        "errors": report.errors,
        "warnings": report.warnings,
        "policies": found,
        **({"price": priced} if priced else {}),
        "assumptions": assumptions(),
    }


def _turns(
    paths: list[str], format: Format, tenant: str | None, settings: Settings
) -> tuple[dict[str, list[Turn]], IngestReport]:
    """Each tenant's turns in order of arrival without duplicates, as ingestion would store them."""
    from undertow.engine.base.results import IngestReport
    from undertow.engine.estimate.estimate import dated
    from undertow.engine.readers import read

    problems, report = Problems(), IngestReport()
    turns: dict[str, dict[str, Turn]] = {}
    for log in opt.logs_at(paths, tenant):
        for record in read(log, format, max_message_bytes=settings.max_message_bytes):
            report.errors += len(record.errors)
            report.warnings += len(record.warnings)
            for problem in record.errors:
                problems.error(problem)
            for warning in record.warnings:
                problems.warning(warning)
            for turn in record.turns:
                turns.setdefault(turn.tenant, {}).setdefault(turn.dedupe_key, turn)
    problems.tell_rest(report)
    return {tenant: dated(own.values()) for tenant, own in turns.items()}, report


def _logs(turns: dict[str, list[Turn]], settings: Settings, vectors: Path | None) -> list[TenantLog]:
    """The turns with their vectors. Embedding takes most of the time."""
    import numpy as np

    from undertow.bench.quality.vectors import KeptVectors
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.estimate.stand_ins import TenantLog

    encoder = KeptVectors(make_encoder(settings), vectors)
    total, done = sum(map(len, turns.values())), 0
    logs = []
    with Bar() as bar:
        for own in turns.values():
            parts = []
            for some in (own[n : n + EMBEDDED_AT_A_TIME] for n in range(0, len(own), EMBEDDED_AT_A_TIME)):
                texts = [as_embedded(turn.text, turn.timestamp, settings.embed_timestamp) for turn in some]
                parts.append(encoder.encode(texts))
                done += len(some)
                bar.show(f"{done:,} of {total:,} turns embedded", done, total)
            logs.append(TenantLog(own, np.concatenate(parts).astype(np.float32)))
    encoder.save()
    return logs


def _told(document: dict[str, Any]) -> str:
    """theta_sim, and the share of pairs that it is to link after a tenant's first turns."""
    share = document["theta_share"]
    return f"{document['theta_sim']}" + ("" if share is None else f" at first, then {share:.1%} of pairs")


def _put(document: dict[str, Any]) -> None:
    from undertow.engine.estimate.estimate import FIGURES

    title = (
        f"{document['turns']:,} turns of {document['tenants']:,} tenants, theta_sim {_told(document)}, "
        f"theta_count {document['theta_count']}; expected (low to high)"
    )
    put_table(list(_rows(document["policies"])), ("policy", "operation", *FIGURES), title=title)
    put_text(f"Tokens counted by: {document['tokens']}. Assumed replies: see --json, and docs/cost.md.")
    for policy, cost in document.get("price", {}).items():
        put_text(f"Price, {policy}: {cost['expected']} ({cost['low']} to {cost['high']})")


def _rows(policies: dict[str, Ranges]) -> Iterator[dict[str, str]]:
    for policy, ranges in policies.items():
        for operation, figures in ranges.items():
            shown = {
                name: f"{r['expected']:,} ({r['low']:,} to {r['high']:,})" for name, r in figures.items()
            }
            yield {"policy": policy, "operation": operation, **shown}
