"""`undertow estimate`: what consolidation would cost, before any LLM call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from undertow.engine.base.model import InputError, PolicyName, as_embedded
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.options import (
    AsJson,
    EncoderName,
    KeptIn,
    LogFormat,
    LogFormatName,
    Paths,
    Profile,
    ThetaCount,
    ThetaMerge,
    ThetaSim,
)
from undertow.serving.cli.output import put_json, put_table, put_text
from undertow.serving.cli.progress import Bar, Problems
from undertow.serving.cli.settings import check_settings, settings_of

if TYPE_CHECKING:
    from undertow.engine.api.ingest_files import IngestReport
    from undertow.engine.base.config import Settings
    from undertow.engine.base.model import Turn
    from undertow.engine.encoders.base import Encoder
    from undertow.engine.estimate.estimate import Ranges, TenantLog

EMBEDDED_AT_A_TIME = 256

PolicyChoice = Literal[PolicyName, "all"]
PolicyOption = Annotated[
    PolicyChoice, typer.Option("--policy", help="Whose calls are counted; all: side by side.")
]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FOLDER",
        help="Of the LLM that is to be asked: counts its tokens. Left out: the encoder's tokenizer, which is "
        "near for English only.",
    ),
]
PriceIn = Annotated[float | None, typer.Option("--price-in", min=0, help="Price of a million prompt tokens.")]
PriceOut = Annotated[
    float | None, typer.Option("--price-out", min=0, help="Price of a million completion tokens.")
]


def estimate(
    paths: Paths,
    policy: PolicyOption = "all",
    format: LogFormat = LogFormatName.AUTO,
    profile: Profile = None,
    theta_sim: ThetaSim = None,
    theta_merge: ThetaMerge = None,
    theta_count: ThetaCount = None,
    encoder: EncoderName = None,
    tokenizer: TokenizerFolder = None,
    vectors: KeptIn = None,
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    as_json: AsJson = False,
) -> None:
    """How many LLM calls and tokens these logs would need, before any is made. Stores nothing.

    The gate is run over the logs' own vectors, and the real prompts are built around stand-in memories. What
    an LLM would reply is assumed: each figure is low, expected and high. Answers to questions cost extra.
    """
    if (price_in is None) != (price_out is None):
        raise WrongUsage("a price needs both: give --price-in and --price-out.")
    from undertow.bench.quality.vectors import KeptVectors
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.encoders.token_count import token_count
    from undertow.engine.estimate.estimate import assumptions, price
    from undertow.engine.estimate.estimate import estimate as measure

    settings = settings_of(
        policy=None if policy == "all" else policy,
        llm="off",
        encoder=encoder,
        profile=profile and profile.value,
        theta_sim=theta_sim,
        theta_merge=theta_merge,
        theta_count=theta_count,
    )
    check_settings(settings)
    if settings.ablation is not None and settings.policy == "recmem":
        raise WrongUsage(
            f"the calls of RecMem's ablation {settings.ablation!r} are not estimated: "
            "unset UNDERTOW_ABLATION, and the whole policy is."
        )
    tokens = token_count(settings, tokenizer)
    turns, report = _turns(paths, format, settings)
    kept = KeptVectors(make_encoder(settings), vectors)
    logs = _logs(turns, kept, settings)
    kept.save()
    wanted = [name for name in get_args(PolicyName) if policy in (name, "all")]
    found = {name: measure(logs, settings.under(name), tokens) for name in wanted}
    about = {
        "tenants": len(logs),
        "turns": sum(len(log.turns) for log in logs),
        "encoder": settings.encoder,
        "theta_sim": settings.similarity_threshold,
        "theta_merge": settings.merge_threshold,
        "theta_count": settings.recurrence_count,
        "window_messages": settings.window_messages,
        "management": settings.management,
        "ablation": settings.ablation,
        "tokens": tokens.name,
        "errors": report.errors,
        "warnings": report.warnings,
    }
    prices = {}
    if price_in is not None and price_out is not None:
        prices = {"price": {name: price(ranges, price_in, price_out) for name, ranges in found.items()}}
    document = {**about, "policies": found, **prices, "assumptions": assumptions()}
    if as_json:
        put_json(document)
    else:
        _put(document)
    raise typer.Exit(Exit.INPUT if report.errors else Exit.DONE)


def _turns(
    paths: list[str], format: LogFormatName, settings: Settings
) -> tuple[dict[str, list[Turn]], IngestReport]:
    """Each tenant's turns in the order of arrival, each once, as ingestion would take them."""
    from undertow.engine.api.ingest_files import IngestReport
    from undertow.engine.estimate.estimate import dated
    from undertow.engine.readers import find_logs, read

    try:
        logs = list(find_logs(paths))
    except InputError as error:
        raise WrongUsage(str(error)) from None
    problems, report = Problems(), IngestReport()
    turns: dict[str, dict[str, Turn]] = {}
    for log in logs:
        for record in read(log, format.value, max_message_bytes=settings.max_message_bytes):
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


def _logs(turns: dict[str, list[Turn]], encoder: Encoder, settings: Settings) -> list[TenantLog]:
    """The turns with their vectors; to embed them is what takes the time."""
    import numpy as np

    from undertow.engine.estimate.estimate import TenantLog

    total = sum(map(len, turns.values()))
    done = 0
    logs = []
    with ExitStack() as stack:
        bar = stack.enter_context(Bar())
        for own in turns.values():
            parts = []
            for start in range(0, len(own), EMBEDDED_AT_A_TIME):
                some = own[start : start + EMBEDDED_AT_A_TIME]
                texts = [as_embedded(turn.text, turn.timestamp, settings.embed_timestamp) for turn in some]
                parts.append(encoder.encode(texts))
                done += len(some)
                if bar.is_due:
                    bar.show(f"{done:,} of {total:,} turns embedded", done, total)
            logs.append(TenantLog(own, np.concatenate(parts).astype(np.float32)))
    return logs


def _put(document: dict[str, Any]) -> None:
    from undertow.engine.estimate.estimate import FIGURES

    title = (
        f"{document['turns']:,} turns of {document['tenants']:,} tenants, theta_sim {document['theta_sim']}, "
        f"theta_count {document['theta_count']}; expected (low to high)"
    )
    put_table(list(_rows(document["policies"])), ("policy", "operation", *FIGURES), title=title)
    put_text(f"Tokens counted by: {document['tokens']}. What replies were assumed: --json, and docs/cost.md.")
    for policy, cost in document.get("price", {}).items():
        put_text(f"Price, {policy}: {cost['expected']} ({cost['low']} to {cost['high']})")


def _rows(policies: dict[str, Ranges]) -> Iterator[dict[str, str]]:
    for policy, ranges in policies.items():
        for operation, figures in ranges.items():
            shown = {
                name: f"{r['expected']:,} ({r['low']:,} to {r['high']:,})" for name, r in figures.items()
            }
            yield {"policy": policy, "operation": operation, **shown}
