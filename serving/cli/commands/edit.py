"""The commands that change a store: update, delete, erase, jobs, reindex."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.serving.cli.auditing import audited, forget_names
from undertow.serving.cli.cluster_root import every_reports, refuse_root, stores_of
from undertow.serving.cli.errors import Exit, WrongUsage
from undertow.serving.cli.open_store import ADD_RAY, open_engine, open_memory
from undertow.serving.cli.options import (
    AsJson,
    EncoderName,
    Llm,
    MemoryId,
    Model,
    OfTenant,
    Ray,
    Store,
    Tenant,
)
from undertow.serving.cli.output import (
    console,
    put_json,
    put_json_lines,
    put_pairs,
    put_table,
    put_text,
    say,
)
from undertow.serving.cli.settings import check_settings, settings_of
from undertow.serving.cli.settling import settle

if TYPE_CHECKING:
    from rich.status import Status

    from undertow.engine.base.config import Settings
    from undertow.engine.base.results import Certificate
    from undertow.engine.storage.location import Location

REPLAYED = "{} parked jobs run again."
# what to do where `reindex` is given a cluster's root
STOP_FIRST = (
    "end them (`undertow cluster drain --stop`), then add --ray with the same address, which makes sure "
    "that none runs; --ray local where there is no Ray cluster"
)


def update(
    memory_id: MemoryId,
    text: Annotated[str, typer.Argument(help="The new words.")],
    store: Store,
    tenant: OfTenant = None,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Put other words in the place of one memory.

    An episode or fact has a new version; its history stays. A turn is deleted, and one with this single
    message by its first speaker takes its place, under an id of its own; what rested on the old turn is
    remade, which needs an LLM: without one that work stays pending.
    """
    if not text.strip():
        raise WrongUsage("the text is empty. Give the memory some words, or delete it.")
    settings = settings_of(llm=llm, model=model, encoder=encoder)
    with open_memory(store, settings, ray) as memory:
        updated = memory.update(memory_id, text, tenant=tenant)
        settled, code = settle(memory)
    if as_json:
        put_json({**asdict(updated), "updated": True, "settled": settled})
    elif updated.id == memory_id:
        put_text(f"Updated {updated.kind} {memory_id}.")
    else:
        put_text(f"Updated {updated.kind} {memory_id}: in its place is {updated.id}.")
    raise typer.Exit(code)


def delete(
    memory_id: MemoryId,
    store: Store,
    tenant: OfTenant = None,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Delete one memory.

    The words of a turn are gone from every answer at once, and what rests on it is remade without it,
    which needs an LLM: without one that work stays pending. An episode or fact goes alone.
    """
    settings = settings_of(llm=llm, model=model, encoder=encoder)
    with open_memory(store, settings, ray) as memory:  # without an LLM too, facts may be embedded again
        kind = memory.delete(memory_id, tenant=tenant)
        settled, code = settle(memory)
    if as_json:
        put_json({"id": memory_id, "kind": kind, "deleted": True, "settled": settled})
    else:
        put_text(f"Deleted {kind} {memory_id}.")
    raise typer.Exit(code)


def erase(
    tenant: Tenant,
    store: Store,
    now: Annotated[
        bool, typer.Option("--now", help="Remove the bytes at once, not at the next purge.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """Erase a tenant: gone from every answer at once; --now removes every byte and prints a certificate."""
    if as_json and not yes:
        raise typer.BadParameter("--json cannot ask: add --yes")

    def ask() -> None:
        if not yes:
            typer.confirm(f"Erase all memories of {tenant!r} in {store}?", abort=True, err=True)

    if ray is None:
        certificate, others = _erase_in_store(store, tenant, ask, now=now)
    else:
        certificate, others = _erase_in_cluster(store, tenant, ray, ask, now=now), []
    if as_json:
        document = {"erased": True, "purged": now}
        put_json(
            document if certificate is None else {**document, **asdict(certificate), "also_purged": others}
        )
    elif certificate is None:
        put_text(
            f"{tenant!r} is gone from every answer. Its bytes are still on the disk until the next purge, "
            "which also issues the certificate: run this command again with --now."
        )
    else:
        for issued in (asdict(certificate), *others):
            put_pairs(issued, title="Certificate of erasure")


def _erase_in_store(
    store: Location, tenant: str, ask: Callable[[], None], *, now: bool
) -> tuple[Certificate | None, list[dict[str, Any]]]:
    """With `now`, the tenant's certificate and those of other tenants that were purged with it."""
    refuse_root(store, ADD_RAY)
    with open_engine(store, settings_of(llm="off"), encodes=False) as engine:
        key = engine.journal.info.tenant_key(tenant)
        buried = (
            tenant not in engine.tenants and not engine.tenants.erased.get(key, {"purged": True})["purged"]
        )
        if not buried:
            engine.tenants.require(tenant)
            ask()
        with audited(store.folder, "erase", tenant_key=key) as entry:
            if not buried:
                engine.erase(tenant)
            certificates = engine.purge() if now else {}
            entry.counts["tenants_purged"] = len(certificates)
        tenant_key, living = engine.journal.info.tenant_key, engine.tenants
        forget_names(store, lambda name: tenant_key(name) in certificates and name not in living)
    certificate = certificates.pop(key, None)
    return certificate, [asdict(c) for c in certificates.values()]


def _erase_in_cluster(
    root: Location, tenant: str, ray: str, ask: Callable[[], None], *, now: bool
) -> Certificate | None:
    """The tenant's certificate; None until its bytes are removed. Asks before it starts any shard."""
    from undertow.engine.api.erasure import NotCertified
    from undertow.engine.cluster.shard_map import load

    ask()
    certificate = None
    with (
        open_memory(root, settings_of(), ray) as memory,
        audited(root.folder, "erase", tenant_key=load(root).tenant_key(tenant)),
    ):
        try:
            certificate = memory.erase(tenant, now=now)
        except NotCertified as later:
            say(str(later))
    if certificate is not None:
        forget_names(root, lambda name: name == tenant)
    return certificate


def jobs(
    store: Store,
    replay: Annotated[
        bool, typer.Option("--replay", help="Run the parked jobs again (needs an LLM).")
    ] = False,
    llm: Llm = None,
    model: Model = None,
    encoder: EncoderName = None,
    ray: Ray = None,
    as_json: AsJson = False,
) -> None:
    """List LLM jobs that are pending (waiting for a server) or parked (no usable reply)."""
    if ray is not None and not replay:
        raise typer.BadParameter("--ray goes with --replay: the list is read from what is stored")
    code = _replay(store, settings_of(llm=llm, model=model, encoder=encoder), ray) if replay else Exit.DONE
    with every_reports(store) as shards:
        records = sorted(
            (job for reports in shards for job in reports.jobs()), key=lambda job: (job["tenant"], job["seq"])
        )
    if as_json:
        put_json_lines(records)
    else:
        columns = ("tenant", "seq", "state", "operation", "cluster_seqs", "reason")
        put_table(records, columns, title=f"{len(records)} open jobs")
    raise typer.Exit(code)


def _replay(store: Location, settings: Settings, ray: str | None) -> Exit:
    """Run the parked jobs again, until all that follows is decided."""
    if settings.llm_url is None:
        raise typer.BadParameter("--replay needs an LLM server: give --llm URL or set UNDERTOW_LLM_URL")
    with open_memory(store, settings, ray, resume=True) as memory:
        say(REPLAYED.format(memory.replay_jobs()))
        _, code = settle(memory)
        return code


def reindex(
    store: Store,
    encoder: Annotated[str, typer.Option("--encoder", metavar="NAME", help="The new embedding model.")],
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS|local",
            help="Of a cluster's root: where its shards ran, to see that they have ended.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Embed a whole store again with another encoder. Decisions stay as they were made.

    Interrupted, the store is as before, and the same command goes on where it stopped. Of a cluster's root,
    the shards are done one after the other; interrupted, some of them are.
    """
    if ray is None:
        refuse_root(store, STOP_FIRST)
    else:
        from undertow.serving.cli.ray_session import refuse_running

        refuse_running(store, ray)
    count = _reindex(stores_of(store), settings_of(llm="off", encoder=encoder))
    if as_json:
        put_json({"encoder": encoder, "embedded": count})
    else:
        put_text(
            f"{count:,} vectors made with {encoder}. From now on use --encoder {encoder} with this store."
        )


def _reindex(stores: Sequence[Location], settings: Settings) -> int:
    """Give the stores vectors of the settings' encoder; how many they then have of those made here."""
    from undertow.engine.api.transfer.reindex import reindex as embed_again
    from undertow.engine.encoders.factory import make_encoder
    from undertow.engine.storage.store_info import read_info

    for store in stores:
        read_info(store)
    check_settings(settings)
    with console(stderr=True).status("reading") as status:
        encoder = make_encoder(settings)
        counts = [
            embed_again(
                store,
                encoder,
                embed_timestamp=settings.embed_timestamp,
                on_rows=partial(_show_rows, status, store),
            )
            for store in stores
        ]
    return sum(counts)


def _show_rows(status: Status, store: Location, done: int, total: int) -> None:
    status.update(f"{done:,} of {total:,} rows of {store}")
