"""`undertow import`: what `undertow export` has written becomes a tenant."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from undertow.serving.cli.open_store import open_memory
from undertow.serving.cli.options import AsJson, EncoderName, Llm, Model, Ray, Store, Tenant
from undertow.serving.cli.output import put_json, put_pairs
from undertow.serving.cli.settings import settings_of
from undertow.serving.cli.settling import settle


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
    with file.open("rb") as lines:
        records = read_records(lines, settings.max_import_bytes)
    with open_memory(store, settings, ray, create=True) as memory:
        imported = memory.import_(tenant, records)
        settled, code = settle(memory)
    counts = {"tenant": tenant, **asdict(imported), "settled": settled}
    if as_json:
        put_json(counts)
    else:
        put_pairs(counts, title=f"{file} in {store}")
    raise typer.Exit(code)
