"""The commands about what makes memories, and when: policy, flush."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from undertow.engine.base.model import PolicyName
from undertow.serving.cli import options as opt
from undertow.serving.cli.drain import drain
from undertow.serving.cli.drain import flush as flush_tenants
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.output import put_figures, put_json, put_pairs
from undertow.serving.cli.stores import all_reports, open_memory, refuse_root, tenant_reports


def policy(
    tenant: opt.Tenant,
    store: opt.Store,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The new policy; left out: show it only.")
    ] = None,
    drop_edits: Annotated[
        bool, typer.Option("--drop-edits", help="Discard updates and deletions of memories by hand.")
    ] = False,
    models: opt.Models = opt.NO_MODELS,
    ray: opt.Ray = None,
    as_json: opt.AsJson = False,
) -> None:
    """Show which policy makes a tenant's memories, or give the tenant another.

    With another, the LLM reads all its turns again, which costs its calls for each. Until that is done
    searches find the former memories; these stay in the history. After an interrupt, or without an LLM,
    the rest waits: the same command continues.
    """
    code = Exit.DONE
    if name is None:
        if ray is not None or drop_edits:
            raise typer.BadParameter("--ray and --drop-edits go with a NAME: what is stored is only read")
        with tenant_reports(store, tenant) as reports:
            report = reports.policy(tenant)
    else:
        if name not in get_args(PolicyName):
            raise WrongUsage(
                f"there is no policy {name!r:.80}. Give one of {', '.join(get_args(PolicyName))}."
            )
        with open_memory(store, models.settings(), ray, resume=True) as memory:
            memory.set_policy(tenant, name, drop_edits=drop_edits)
            _, code = drain(memory)
            report = memory.policy(tenant)
    if as_json:
        put_json(report)
    else:
        shown = {"policy": report["policy"], "generation": report["generation"]}
        if change := report["change"]:
            shown["changing to"] = f"{change['policy']}, {change['decided']} of {change['records']} records"
        put_pairs(shown, title=f"{tenant} in {store}")
    raise typer.Exit(code)


def flush(
    store: opt.Store,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose conversations have ended; left out: all.")
    ] = None,
    models: opt.Models = opt.NO_MODELS,
    ray: opt.Ray = None,
    as_json: opt.AsJson = False,
) -> None:
    """Consolidate now the turns that wait for more turns, as their conversation has ended.

    NEMORI gathers turns until its window is full, HiMem until a session ends: after an ingest the last ones
    of each tenant wait. RecMem reads the most informative of the last turns. Others have nothing to do.
    """
    settings = models.settings()
    if ray is None:
        refuse_root(store)
    if tenant is not None:
        names = [tenant]
    else:
        with all_reports(store) as shards:
            names = sorted({name for reports in shards for name in reports.catalog.names()})
    with open_memory(store, settings, ray, resume=True) as memory:
        settled, code = flush_tenants(memory, names)
    figures = {"tenants": len(names), "settled": settled}
    put_figures(figures, title=f"Flushed in {store}", as_json=as_json)
    raise typer.Exit(code)
