"""The commands that look rather than work: doctor, calibrate, and the demo."""

from __future__ import annotations

from typing import Annotated

import typer

from undertow.engine.base.model import LINKED_PAIRS
from undertow.engine.storage.location import Location
from undertow.serving.cli.cluster_root import open_reports
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.options import AsJson, EncoderName, Llm, Model, ProfileName, Store, location_of
from undertow.serving.cli.output import console, put_json, put_pairs, put_table, put_text
from undertow.serving.cli.settings import check_settings, settings_of

PROPOSAL_FIELDS = (
    "share",
    "theta_sim",
    "links_per_turn",
    "triggers",
    "consolidated_turns",
    "proxy_merges",
    "proxy_triggers",
)


def calibrate(
    store: Store,
    share: Annotated[
        float, typer.Option("--share", help="Share of a tenant's pairs of turns to link, 0 to 1.")
    ] = LINKED_PAIRS,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant's turns.")] = None,
    profile: Annotated[ProfileName | None, typer.Option("--profile", help="For its theta_count.")] = None,
    theta_count: Annotated[int | None, typer.Option("--theta-count", help="Turns that make a topic.")] = None,
    sample_turns: Annotated[
        int, typer.Option("--sample-turns", min=2, help="How many turns to look at.")
    ] = 5_000,
    as_json: AsJson = False,
) -> None:
    """Propose theta_sim for a store's encoder and turns, with the triggers that it would give.

    The gate is run over the sample in order, as if no LLM call were refused and no merge happened;
    merges are shown as a proxy only, with the centroids of clusters in the place of episodes.
    """
    from undertow.engine.estimate.calibrate import calibrate as measure

    if not 0.0 < share < 1.0:
        raise WrongUsage(f"--share is {share}; give the part of pairs to link, between 0 and 1, such as 0.02")
    settings = settings_of(llm="off", profile=profile and profile.value, theta_count=theta_count)
    with open_reports(store) as reports:
        found = measure(reports, share, settings.recurrence_count, tenant=tenant, sample_turns=sample_turns)
    if as_json:
        put_json(found)
        return
    put_pairs({f"{p} %": value for p, value in found["percentiles"].items()}, title="Pair cosines")
    title = f"{found['turns']:,} turns of {found['tenants']:,} tenants, theta_count {found['theta_count']}"
    put_table(found["proposals"], PROPOSAL_FIELDS, title=title)
    put_text("proxy: cluster centroids stand for episodes, and every merge is taken as granted.")
    put_text(
        f"Use: undertow ingest ... --theta-sim {found['theta_sim']} --theta-count {found['theta_count']}"
    )


def doctor(
    store: Annotated[
        Location | None,
        typer.Option("--store", parser=location_of, metavar="PLACE", help="Also look at this store."),
    ] = None,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Check the machine, the encoder, the store and the LLM server, in plain words."""
    from undertow.serving.doctor import examine

    findings = examine(settings_of(llm=llm, model=model, encoder=encoder), store)
    if as_json:
        put_json({"ok": all(f.ok for f in findings), "findings": [f._asdict() for f in findings]})
    else:
        for finding in findings:
            put_text(f"{'ok        ' if finding.ok else 'attention '} {finding.what}: {finding.text}")
    raise typer.Exit(Exit.DONE if all(f.ok or not f.needed for f in findings) else Exit.FAILED)


def demo(
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    as_json: AsJson = False,
) -> None:
    """Ingest a small conversation, watch its memories appear, and ask three questions.

    Without --llm or UNDERTOW_LLM_URL a local vLLM server is started (see `make demo`).
    """
    from undertow.serving.demo.demo import run

    settings = settings_of(llm=llm, model=model, encoder=encoder)
    check_settings(settings)
    figures = run(settings, console(stderr=as_json))
    if as_json:
        put_json(figures)
