"""`undertow import`: an export becomes a tenant."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from undertow.serving.cli import options as opt
from undertow.serving.cli.drain import drain
from undertow.serving.cli.output import put_figures
from undertow.serving.cli.settings import settings_of
from undertow.serving.cli.stores import open_memory


def import_(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="An export.")],
    tenant: opt.Tenant,
    store: opt.Store,
    llm: opt.Llm = None,
    model: opt.Model = None,
    encoder: opt.EncoderName = None,
    ray: opt.Ray = None,
    as_json: opt.AsJson = False,
) -> None:
    """Import what `undertow export` wrote, as a tenant that has nothing here, under any name.

    If one record is refused, nothing is stored. Texts are embedded again. Records that were undecided are
    decided here, which may need an LLM: without one that work stays pending.
    """
    from undertow.engine.api.transfer.import_ import read_records

    settings = settings_of(llm=llm, model=model, encoder=encoder)
    with file.open("rb") as lines:
        records = read_records(lines, settings.max_import_bytes)
    with open_memory(store, settings, ray, create=True) as memory:
        imported = memory.import_(tenant, records)
        settled, code = drain(memory)
    counts = {"tenant": tenant, **asdict(imported), "settled": settled}
    put_figures(counts, title=f"{file} in {store}", as_json=as_json)
    raise typer.Exit(code)
