"""`undertow import`: what `undertow export` has written becomes a tenant."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.engine.storage.location import Location
from undertow.serving.cli.cluster_root import refuse_root
from undertow.serving.cli.commands.edit import ADD_RAY, settle
from undertow.serving.cli.commands.ingest import Ray
from undertow.serving.cli.errors import Exit
from undertow.serving.cli.open_store import (
    AsJson,
    EncoderName,
    Llm,
    Model,
    Store,
    Tenant,
    open_engine,
    settings_of,
)
from undertow.serving.cli.output import put_json, put_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from undertow.engine.api.transfer.import_ import ImportReport
    from undertow.engine.api.views.reports import Report
    from undertow.engine.base.config import Settings


def import_(
    file: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="What `undertow export` has written."),
    ],
    tenant: Tenant,
    store: Store,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Take an export in as a tenant that has nothing here yet, under its old name or another.

    All of it or, where a record cannot be taken, nothing. Texts are embedded anew. What the tenant's log had
    undecided is decided here, which may need an LLM: without one that work stays pending.
    """
    from undertow.engine.api.transfer.import_ import read_records

    settings = settings_of(llm=llm, model=model, encoder=encoder)
    if ray is None:
        refuse_root(store, ADD_RAY)
    with file.open("rb") as lines:
        records = read_records(lines, settings.max_import_bytes)
    if ray is None:
        imported, settled, code = _import(store, settings, tenant, records)
    else:
        from undertow.serving.cli.on_ray import import_on_ray

        imported, settled, code = import_on_ray(store, settings, ray, tenant, records)
    counts = {"tenant": tenant, **asdict(imported), "settled": settled}
    if as_json:
        put_json(counts)
    else:
        put_pairs(counts, title=f"{file} in {store}")
    raise typer.Exit(code)


def _import(
    store: Location, settings: Settings, tenant: str, records: Sequence[Report]
) -> tuple[ImportReport, bool, Exit]:
    with open_engine(store, settings, create=True) as engine:
        imported = engine.import_(tenant, records)
        return imported, *settle(engine)
