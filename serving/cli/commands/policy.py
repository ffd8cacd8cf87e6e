"""The commands about what makes memories, and when: policy, flush."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from undertow.serving.cli.cluster_root import every_reports, open_reports, refuse_root, store_of
from undertow.serving.cli.errors import Exit
from undertow.serving.cli.open_store import ADD_RAY, open_memory
from undertow.serving.cli.options import AsJson, EncoderName, Llm, Model, Ray, Store, Tenant
from undertow.serving.cli.output import put_json, put_pairs
from undertow.serving.cli.settings import settings_of
from undertow.serving.cli.settling import flush_all, settle

if TYPE_CHECKING:
    from undertow.engine.base.results import Report
    from undertow.engine.storage.location import Location


def policy(
    tenant: Tenant,
    store: Store,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The new one; left out: nothing is changed.")
    ] = None,
    drop_edits: Annotated[
        bool,
        typer.Option("--drop-edits", help="Go on though memories were reworded or deleted by hand."),
    ] = False,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Show which policy makes a tenant's memories, or give the tenant another.

    With another, all its turns are read again by the LLM, which costs its calls for each. Until that is done
    searches find the former memories; these stay in the history. Interrupted, or without an LLM, the rest
    waits: the same command goes on with it.
    """
    code = Exit.DONE
    if name is None:
        if ray is not None or drop_edits:
            raise typer.BadParameter("--ray and --drop-edits go with a NAME: what is stored is only read")
        told = _read(store, tenant)
    else:
        settings = settings_of(llm=llm, model=model, encoder=encoder)
        with open_memory(store, settings, ray, resume=True) as memory:
            memory.set_policy(tenant, name, drop_edits=drop_edits)
            _, code = settle(memory)
            told = memory.policy(tenant)
    if as_json:
        put_json(told)
    else:
        change = told["change"]
        shown = {"policy": told["policy"], "generation": told["generation"]}
        if change is not None:
            shown["changing to"] = f"{change['policy']}, {change['decided']} of {change['records']} records"
        put_pairs(shown, title=f"{tenant} in {store}")
    raise typer.Exit(code)


def _read(store: Location, tenant: str) -> Report:
    with open_reports(store_of(store, tenant)) as reports:
        return reports.policy(tenant)


def flush(
    store: Store,
    tenant: Annotated[
        str | None, typer.Option("--tenant", help="Whose conversations have ended; left out: everybody's.")
    ] = None,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Have turns that wait for others to come consolidated now, as their conversation has ended.

    NEMORI gathers turns until its window is full, HiMem until a session ends: after an ingest the last ones
    of each tenant wait. Under RecMem and the eager policy no turn waits for others.
    """
    settings = settings_of(llm=llm, model=model, encoder=encoder)
    if ray is None:
        refuse_root(store, ADD_RAY)
    names = [tenant] if tenant is not None else _tenants(store)
    with open_memory(store, settings, ray, resume=True) as memory:
        settled, code = flush_all(memory, names)
    if as_json:
        put_json({"tenants": len(names), "settled": settled})
    else:
        put_pairs({"tenants": len(names), "settled": settled}, title=f"Flushed in {store}")
    raise typer.Exit(code)


def _tenants(store: Location) -> list[str]:
    with every_reports(store) as shards:
        return sorted({name for reports in shards for name in reports.tenants.names()})
