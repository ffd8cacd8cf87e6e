"""The commands to try Undertow out and to set it up: calibrate, doctor, demo."""

from __future__ import annotations

from typing import Annotated

import typer

from undertow.engine.base.model import LINKED_PAIRS
from undertow.engine.storage.location import Location
from undertow.serving.cli import options as opt
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.output import console, put_json, put_pairs, put_table, put_text
from undertow.serving.cli.stores import open_reports, tenant_reports

PROPOSAL_FIELDS = ("share", "theta_sim", "links_per_turn", "triggers", "consolidated_turns")


def calibrate(
    store: opt.Store,
    share: Annotated[
        float, typer.Option("--share", help="Share of a tenant's pairs of turns to link, 0 to 1.")
    ] = LINKED_PAIRS,
    tenant: opt.OnlyTenant = None,
    profile: opt.Profile = None,
    theta_count: opt.ThetaCount = None,
    sample_turns: Annotated[
        int, typer.Option("--sample-turns", min=2, help="Size of the sample, in turns.")
    ] = 5_000,
    as_json: opt.AsJson = False,
) -> None:
    """Propose the thresholds of a store's policies, with the number of triggers that theta_sim would give.

    The gate runs over the sample in order, as if no LLM call were refused and no merge happened. theta_merge
    (RecMem), theta_evoke and theta_compare (NEMORI) are proposed once there are episodes and facts.
    """
    from undertow.engine.estimate.calibrate import calibrate as measure
    from undertow.engine.estimate.calibrate import calibrate_memories

    if not 0.0 < share < 1.0:
        raise WrongUsage(f"--share is {share}; give the part of pairs to link, between 0 and 1, such as 0.02")
    settings = opt.settings_of(llm="off", profile=profile, theta_count=theta_count)
    with open_reports(store) as reports:
        found = measure(reports, share, settings.recurrence_count, tenant=tenant, sample_turns=sample_turns)
        found["memories"] = calibrate_memories(reports, share, tenant=tenant, sample_memories=sample_turns)
    if as_json:
        put_json(found)
        return
    put_pairs({f"{p} %": value for p, value in found["percentiles"].items()}, title="Pair cosines")
    title = f"{found['turns']:,} turns of {found['tenants']:,} tenants, theta_count {found['theta_count']}"
    put_table(found["proposals"], PROPOSAL_FIELDS, title=title)
    put_pairs(found["memories"], title="Between memories")
    if not any(proposal["triggers"] for proposal in found["proposals"]):
        put_text("No threshold is proposed: with none of these would a topic recur in these turns.")
        return
    put_text(
        f"Use: undertow ingest ... --theta-sim {found['theta_sim']} --theta-count {found['theta_count']}; or "
        f"--theta-share {share}, so that each tenant's own pairs tell its theta."
    )


AUDITED = {
    "repeats": ("An earlier memory says the same", ("cosine", "text", "earlier_text")),
    "contradictions": ("Other numbers, or a negation more", ("cosine", "text", "earlier_text")),
    "never_shown": ("Not found even by the turns that it rests on", ("rank", "kind", "text")),
    "single_source": ("Resting on one turn", ("kind", "source_seqs", "text")),
}
AUDIT_ROWS = 20


def audit(
    tenant: opt.Tenant,
    store: opt.Store,
    k: Annotated[int, typer.Option("-k", min=1, help="How many of a kind a search is taken to show.")] = 10,
    as_json: opt.AsJson = False,
) -> None:
    """List a tenant's doubtful memories: repeats, contradictions, never shown ones, and those of one turn.

    It compares vectors, words, numbers and negations, without an LLM. Of what it calls a contradiction, a
    person has to judge; one that only exchanges a name is not seen.
    """
    from undertow.engine.api.views.audit import audit as found_in

    with tenant_reports(store, tenant) as reports:
        found = found_in(reports, tenant, k)
    if as_json:
        put_json(found)
        return
    counts = {name: len(value) if name in AUDITED else value for name, value in found.items()}
    put_pairs(counts, title=f"Memories of {tenant}")
    for name, (title, columns) in AUDITED.items():
        rows = [{**item, "earlier_text": item.get("earlier", {}).get("text")} for item in found[name]]
        if rows:
            more = f" (the first {AUDIT_ROWS}; --json has all)" if len(rows) > AUDIT_ROWS else ""
            put_table(rows[:AUDIT_ROWS], columns, title=f"{title}: {len(rows):,}{more}")


def doctor(
    store: Annotated[Location | None, opt.store_option("Also check this store.")] = None,
    models: opt.Models = opt.NO_MODELS,
    as_json: opt.AsJson = False,
) -> None:
    """Check the machine, the encoder, the store and the LLM server."""
    from undertow.serving.doctor import examine

    findings = examine(models.settings(), store)
    works = all(f.ok or not f.needed for f in findings)
    if as_json:
        put_json({"ok": works, "findings": [f._asdict() for f in findings]})
    else:
        for finding in findings:
            put_text(f"{'ok        ' if finding.ok else 'attention '} {finding.what}: {finding.text}")
    raise typer.Exit(Exit.DONE if works else Exit.FAILED)


def demo(models: opt.Models = opt.NO_MODELS, as_json: opt.AsJson = False) -> None:
    """Ingest a small conversation, show its memories as they appear, and ask three questions.

    Without --llm or UNDERTOW_LLM_URL a local vLLM server is started (see `make demo`).
    """
    from undertow.serving.demo.demo import run

    settings = models.settings()
    opt.check_settings(settings)
    figures = run(settings, console(stderr=as_json))
    if as_json:
        put_json(figures)


def quickstart(encoder: opt.EncoderName = None, as_json: opt.AsJson = False) -> None:
    """Store a small conversation without an LLM, search it, and see why it was found and what recurs."""
    from undertow.serving.demo.quickstart import run

    settings = opt.settings_of(llm="off", encoder=encoder, salience_turns=0)
    opt.check_settings(settings)
    figures = run(settings, console(stderr=as_json))
    if as_json:
        put_json(figures)
