"""The operations that can run as a job: flush, import and erase. Each may be repeated safely."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from undertow.engine.api.erasure import NotCertified
from undertow.engine.api.transfer.import_ import ImportNeedsAdmin
from undertow.engine.api.transfer.record_lines import RecordLines
from undertow.engine.base.queries import EraseCommand, FlushCommand, ImportCommand
from undertow.engine.base.results import Certificate
from undertow.engine.tenants.registry import UnknownTenant
from undertow.serving.auth.key_file import KeyFileError, utc_now
from undertow.serving.auth.principal import Scope
from undertow.serving.http.jobs.queue import Operation, ServiceJob, Work

if TYPE_CHECKING:
    from undertow.serving.http.service import Service

log = logging.getLogger(__name__)

OUT_OF_REACH = (
    "lines of the audit log, and the record of the erasure itself, which name the tenant by its keyed hash",
    "prefixes in the key file, which are of groups of tenants",
    "other erasures of the tenant that still wait, which hold its name until they have ended",
)
NAMED_IN_KEYS = "keys that name the tenant, if its memories were deleted and not the tenant erased"
KEYS_OUT_OF_REACH = "the key file, which could not be changed and may still name the tenant"


def works(service: Service) -> Mapping[Operation, Work]:
    """The function that carries out each operation."""

    async def import_job(job: ServiceJob) -> Mapping[str, Any]:
        body = await asyncio.to_thread(service.jobs.body_of(job).read_bytes)
        admin = await asyncio.to_thread(_is_admin, service, job.key_id)
        return await import_(service, _tenant(job), body, job.key_id, as_admin=admin, again=job.again)

    return {
        "flush": lambda job: flush(service, _tenant(job), again=job.again),
        "import": import_job,
        "erase": lambda job: erase(service, _tenant(job), job.key_id),
    }


def _tenant(job: ServiceJob) -> str:
    assert job.tenant is not None, "an open job knows its tenant"
    return job.tenant


async def flush(service: Service, tenant: str, *, again: bool = False) -> dict[str, Any]:
    """Wait until every stored record of a tenant is decided."""
    return {"decided": await service.memories.call(FlushCommand(tenant, again=again))}


def _is_admin(service: Service, key_id: str) -> bool:
    """Whether the key of a job has the scope admin as the job runs."""
    if service.key_file is None:
        return True
    key = service.key_file.read().get(key_id)
    return key is not None and key.state(utc_now()) == "active" and Scope.ADMIN in key.scopes


async def import_(
    service: Service, tenant: str, body: bytes, by: str, *, as_admin: bool, again: bool = False
) -> dict[str, Any]:
    """Import the body of an export. InputError names the record; TenantExists.

    `by`: a key's id. `as_admin`: the export may set a policy and thresholds, which the audit log tells; else
    ImportNeedsAdmin.
    """
    records = await asyncio.to_thread(RecordLines, body)
    command = ImportCommand(tenant, records, as_admin, again=again)
    if as_admin:
        async with service.audited("import", by, tenant):
            report = await service.memories.call(command)
        return asdict(report)
    try:
        report = await service.memories.call(command)
    except ImportNeedsAdmin:
        await service.refused("import", by, tenant)
        raise
    return asdict(report)


async def erase(service: Service, tenant: str, by: str) -> dict[str, Any]:
    """Erase a tenant from the store, bytes included, and from the service's files; returns the certificate.

    A tenant that was erased or deleted before gets that certificate. UnknownTenant: it never existed.
    NotCertified: it was moved to another shard, and some bytes are still at the former one. `by`: a key's id.
    """
    key = service.memories.tenant_key(tenant)
    async with service.audited("erase", by, tenant) as entry:
        # first the jobs: an import among them would bring memories back
        entry.counts["jobs_dropped"] = await service.jobs.forget(key)
        try:
            certificate = await service.memories.call(EraseCommand(tenant, now=True, again=True))
        except NotCertified:  # the tenant is erased all the same; the caller repeats the request
            await _forget(service, tenant, key)
            raise
        if certificate is None:
            raise UnknownTenant(tenant)
        return certified(certificate, await _forget(service, tenant, key))


async def delete_all(service: Service, tenant: str, by: str, *, again: bool = False) -> None:
    """Delete a tenant's memories, and what the service keeps of them, but leave its keys. UnknownTenant."""
    key = service.memories.tenant_key(tenant)
    async with service.audited("delete_all", by, tenant) as entry:
        entry.counts["jobs_dropped"] = await service.jobs.forget(key)
        await service.memories.call(EraseCommand(tenant, again=again))
        await service.once.forget(key)
        await service.state.scrub()


def certified(certificate: Certificate, more: tuple[str, ...] = OUT_OF_REACH) -> dict[str, Any]:
    """A certificate as callers see it, with what is out of the service's reach."""
    return {**asdict(certificate), "out_of_reach": [*certificate.out_of_reach, *more]}


async def _forget(service: Service, tenant: str, key: str) -> tuple[str, ...]:
    """Remove an erased tenant from the service's own files; returns what is out of reach."""
    await service.once.forget(key)
    await service.state.scrub()
    if service.key_file is None:
        return OUT_OF_REACH
    try:
        await asyncio.to_thread(service.key_file.forget, lambda name: name == tenant)
    except KeyFileError as error:  # the tenant is erased all the same
        log.error("the keys may still name an erased tenant: %s", error)
        return (*OUT_OF_REACH, KEYS_OUT_OF_REACH)
    return OUT_OF_REACH
