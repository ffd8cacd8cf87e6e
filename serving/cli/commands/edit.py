"""The commands that change memories or their store: update, delete, jobs, import, reindex, repair."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.serving.cli import options as opt
from undertow.serving.cli.drain import drain
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.output import console, put_figures, put_json, put_records, put_result, put_text, say
from undertow.serving.cli.stores import all_reports, open_memory, refuse_root, stores_of

if TYPE_CHECKING:
    from rich.status import Status

    from undertow.engine.base.config import Settings
    from undertow.engine.storage.location import Location

# the advice where `reindex` is given a cluster's root
STOP_FIRST = (
    "stop them (`undertow cluster drain --stop`), then add --ray with the same address, which checks "
    "that none runs; --ray local where there is no Ray cluster"
)


def update(
    memory_id: opt.MemoryId,
    text: Annotated[str, typer.Argument(help="The new words.")],
    store: opt.Store,
    tenant: opt.InTenant = None,
    models: opt.Models = opt.NO_MODELS,
    ray: opt.Ray = None,
    as_json: opt.AsJson = False,
) -> None:
    """Reword one memory.

    An episode or fact gets a new version; its history stays. A turn is deleted, and a new turn with this
    single message by its first speaker replaces it, under a new id; memories made from the old turn are
    made again, which needs an LLM: without one that work stays pending.
    """
    if not text.strip():
        raise WrongUsage("the text is empty. Give the memory some words, or delete it.")
    with open_memory(store, models.settings(), ray) as memory:
        updated = memory.update(memory_id, text, tenant=tenant)
        settled, code = drain(memory)
    replaced = "." if updated.id == memory_id else f": it is replaced by {updated.id}."
    put_result(
        {**asdict(updated), "updated": True, "settled": settled},
        f"Updated {updated.kind} {memory_id}{replaced}",
        as_json=as_json,
    )
    raise typer.Exit(code)


def delete(
    memory_id: opt.MemoryId,
    store: opt.Store,
    tenant: opt.InTenant = None,
    models: opt.Models = opt.NO_MODELS,
    ray: opt.Ray = None,
    as_json: opt.AsJson = False,
) -> None:
    """Delete one memory.

    The words of a turn are gone from every answer at once, and memories made from it are made again
    without it, which needs an LLM: without one that work stays pending. Deleting an episode or fact
    changes nothing else.
    """
    # the encoder is loaded without an LLM too: facts may be embedded again
    with open_memory(store, models.settings(), ray) as memory:
        kind = memory.delete(memory_id, tenant=tenant)
        settled, code = drain(memory)
    document = {"id": memory_id, "kind": kind, "deleted": True, "settled": settled}
    put_result(document, f"Deleted {kind} {memory_id}.", as_json=as_json)
    raise typer.Exit(code)


def jobs(
    store: opt.Store,
    replay: Annotated[
        bool, typer.Option("--replay", help="Run the parked jobs again (needs an LLM).")
    ] = False,
    models: opt.Models = opt.NO_MODELS,
    ray: opt.Ray = None,
    as_json: opt.AsJson = False,
) -> None:
    """List LLM jobs that are pending (waiting for a server) or parked (no usable reply)."""
    if ray is not None and not replay:
        raise typer.BadParameter("--ray goes with --replay: the list is read from what is stored")
    code = _replay(store, models.settings(), ray) if replay else Exit.DONE
    with all_reports(store) as shards:
        records = [job for reports in shards for job in reports.jobs()]
    records.sort(key=lambda job: (job["tenant"], job["seq"]))
    columns = ("tenant", "seq", "state", "operation", "cluster_seqs", "reason")
    put_records(records, columns, title=f"{len(records)} open jobs", as_json=as_json)
    raise typer.Exit(code)


def _replay(store: Location, settings: Settings, ray: str | None) -> Exit:
    """Run the parked jobs again, until everything that follows is decided."""
    if settings.llm_url is None:
        raise typer.BadParameter("--replay needs an LLM server: give --llm URL or set UNDERTOW_LLM_URL")
    with open_memory(store, settings, ray, resume=True) as memory:
        say(f"{memory.replay_jobs()} parked jobs run again.")
        _, code = drain(memory)
        return code


def import_(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="An export.")],
    tenant: opt.Tenant,
    store: opt.ImportStore,
    models: opt.Models = opt.NO_MODELS,
    ray: opt.Ray = None,
    as_json: opt.AsJson = False,
) -> None:
    """Import what `undertow export` wrote, as a tenant that has nothing here, under any name.

    If one record is refused, nothing is stored. Texts are embedded again. Records that were undecided are
    decided here, which may need an LLM: without one that work stays pending.
    """
    from undertow.engine.api.transfer.record_lines import RecordLines

    settings = models.settings()
    with file.open("rb") as lines:
        records = RecordLines.read(lines, settings.max_import_bytes)
    with open_memory(store, settings, ray, create=True) as memory:
        imported = memory.import_(tenant, records)
        settled, code = drain(memory)
    counts = {"tenant": tenant, **asdict(imported), "settled": settled}
    put_figures(counts, title=f"{file} in {store}", as_json=as_json)
    raise typer.Exit(code)


def reindex(
    store: opt.Store,
    encoder: Annotated[str, typer.Option("--encoder", metavar="NAME", help="The new embedding model.")],
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS|local",
            help="For a cluster's root: the Ray where its shards ran, to check that they have ended.",
        ),
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Embed a whole store again with another encoder. Past decisions stay.

    An interrupt leaves the store as it was, and the same command continues where it stopped. The shards of
    a cluster are embedded one after the other; an interrupt leaves some of them done.
    """
    if ray is None:
        refuse_root(store, STOP_FIRST)
    else:
        from undertow.serving.cli.ray_session import refuse_running

        refuse_running(store, ray)
    count = _reindex(stores_of(store), opt.settings_of(llm="off", encoder=encoder))
    text = f"{count:,} vectors made with {encoder}. From now on use --encoder {encoder} with this store."
    put_result({"encoder": encoder, "embedded": count}, text, as_json=as_json)


def _reindex(stores: Sequence[Location], settings: Settings) -> int:
    """Embed the stores with the settings' encoder; returns the number of vectors made."""
    from undertow.engine.api.transfer.reindex import reindex as embed_again
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.storage.store_info import read_info

    for store in stores:
        read_info(store)
    opt.check_settings(settings)
    with console(stderr=True).status("reading") as status:
        encoder, stamped = make_encoder(settings), settings.embed_timestamp
        return sum(
            embed_again(store, encoder, embed_timestamp=stamped, on_rows=partial(_show_rows, status, store))
            for store in stores
        )


def _show_rows(status: Status, store: Location, done: int, total: int) -> None:
    status.update(f"{done:,} of {total:,} rows of {store}")


def repair(
    store: opt.Store,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Give up the rows of a damaged write-ahead log that cannot be read, and no others.

    A store in which nothing is damaged stays as it is. In a cluster, name the store of the shard:
    ROOT/shards/NAME.
    """
    from undertow.engine.api.repair import repair as give_up
    from undertow.engine.policies.base import Thresholds

    if as_json and not yes:
        raise typer.BadParameter("--json cannot ask: add --yes")
    refuse_root(store, "name the store of its shard, ROOT/shards/NAME")
    if not yes:
        typer.confirm(f"Give up the damaged rows of {store}, if there are any?", abort=True, err=True)
    s = opt.settings_of(llm="off")
    done = give_up(store, Thresholds.of(s))
    if as_json:
        put_json(asdict(done))
        return
    for damage in done.damages:
        put_text(str(damage))
    for tenant, seqs in done.lost.items():
        put_text(f"{tenant}: {len(seqs)} records are gone and count as deleted turns")
    if not (done.damages or done.lost):
        put_text("Nothing is damaged.")
