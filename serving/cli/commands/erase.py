"""`undertow erase`: a tenant removed, with a certificate once its bytes are gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from undertow.serving.auth.audit import audited
from undertow.serving.cli import options as opt
from undertow.serving.cli.output import put_json, put_pairs, put_text, say
from undertow.serving.cli.stores import open_engine, open_memory, refuse_root

if TYPE_CHECKING:
    from undertow.engine.base.results import Certificate
    from undertow.engine.storage.location import Location

LATER = (
    "{!r} is gone from every answer. Its bytes remain on the disk until the next purge, "
    "which also issues the certificate: run this command again with --now."
)


def erase(
    tenant: opt.Tenant,
    store: opt.Store,
    now: Annotated[
        bool, typer.Option("--now", help="Remove the bytes at once, not at the next purge.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    ray: opt.Ray = None,
    as_json: opt.AsJson = False,
) -> None:
    """Erase a tenant: gone from every answer at once; --now removes every byte and prints a certificate."""
    if as_json and not yes:
        raise typer.BadParameter("--json cannot ask: add --yes")

    def ask() -> None:
        if not yes:
            typer.confirm(f"Erase all memories of {tenant!r} in {store}?", abort=True, err=True)

    if ray is None:
        issued = _erase_in_store(store, tenant, ask, now=now)
    else:
        issued = _erase_in_cluster(store, tenant, ray, ask, now=now)
    certificates = [asdict(certificate) for certificate in issued]
    document: dict[str, Any] = {"erased": True, "purged": now}
    if as_json:
        own = {**certificates[0], "also_purged": certificates[1:]} if certificates else {}
        put_json(document | own)
    elif certificates:
        for certificate in certificates:
            put_pairs(certificate, title="Certificate of erasure")
    else:
        put_text(LATER.format(tenant))


def _erase_in_store(store: Location, tenant: str, ask: Callable[[], None], *, now: bool) -> list[Certificate]:
    """With `now`, the tenant's certificate, then those of other tenants whose bytes went with it.

    A tenant that was erased before is certified without asking.
    """
    from undertow.engine.storage.parked_turns import forget as forget_parked

    refuse_root(store)
    with open_engine(store, opt.settings_of(llm="off"), encodes=False) as engine:
        tenant_key, tenants = engine.journal.info.tenant_key, engine.tenants
        key = tenant_key(tenant)
        buried = tenants.awaits_purge(tenant)
        if not buried:
            tenants.require(tenant)
            ask()
        with audited(store.folder, "erase", tenant_key=key) as entry:
            if buried:
                forget_parked(store, key)
            else:
                engine.erase(tenant)
            certificates = engine.purge() if now else {}
            entry.counts["tenants_purged"] = len(certificates)
        _forget_names(store, lambda name: tenant_key(name) in certificates and name not in tenants)
    return sorted(certificates.values(), key=lambda issued: issued.tenant_key != key)


def _erase_in_cluster(
    root: Location, tenant: str, ray: str, ask: Callable[[], None], *, now: bool
) -> list[Certificate]:
    """The tenant's certificate; none until its bytes are removed. Asks before it starts any shard."""
    from undertow.engine.api.erasure import NotCertified
    from undertow.engine.cluster.shard_map import load

    ask()
    certificate = None
    with (
        open_memory(root, opt.settings_of(), ray) as memory,
        audited(root.folder, "erase", tenant_key=load(root).tenant_key(tenant)),
    ):
        try:
            certificate = memory.erase(tenant, now=now)
        except NotCertified as later:
            say(str(later))
    if certificate is None:
        return []
    _forget_names(root, lambda name: name == tenant)
    return [certificate]


def _forget_names(store: Location, erased: Callable[[str], bool]) -> None:
    """Remove erased tenants from the keys in a store's folder, and say which keys named one."""
    from undertow.serving.auth.key_file import FILE_NAME, KeyFile, KeyFileError

    if not store.folder or not (store.folder / FILE_NAME).exists():
        return
    try:
        for key_id in KeyFile(store.folder / FILE_NAME).forget(erased):
            say(f"Key {key_id} no longer names the erased tenant; if it named no other, it is removed.")
    except KeyFileError as error:  # the tenant is erased all the same
        say(f"warning: the keys may still name the tenant: {error}")
