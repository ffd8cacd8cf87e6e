"""Erasing a tenant: buried at once, purged in batches, certified after the purge."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

import orjson

from undertow.engine.journal import Journal, Row
from undertow.engine.tenants import Tenant, Tenants

OUT_OF_REACH = (
    "caches and logs of the LLM server that has seen the prompts",
    "backups, exports and trace files made before the erasure",
    "blocks that the file system or the disk keeps of deleted files",
)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What an erasure removed. It names the tenant by its keyed hash alone."""

    tenant_key: str
    erased_at: str
    purged_at: str
    rows_removed: int
    turns_removed: int
    episodes_removed: int
    facts_removed: int
    out_of_reach: tuple[str, ...] = OUT_OF_REACH


def bury(journal: Journal, tenants: Tenants, tenant: Tenant) -> None:
    """Write the tombstone: from here on the tenant's older rows count for nothing."""
    tombstone = {
        "generation": tenant.generation,
        "erased_at": _now(),
        "turns": len(tenant.seq_by_row),
        "episodes": len(tenant.current("episode")),
        "facts": len(tenant.current("fact")),
        "purged": False,
        "lsn": journal.next_lsn,  # what comes later belongs to a new life under the same name
    }
    journal.append([Row("tombstone", "", tenant.key, -1, orjson.dumps(tombstone))])
    tenants.bury(tenant.name, tombstone)


def purge(journal: Journal, tenants: Tenants) -> dict[str, Certificate]:
    """Remove the rows of all buried tenants and every old version of the store's files."""
    certificates: dict[str, Certificate] = {}
    due = {key: stone for key, stone in tenants.erased.items() if not stone["purged"]}
    rows = []
    for key, stone in due.items():
        removed = journal.delete([key], before_lsn=stone["lsn"])
        certificates[key] = Certificate(
            key, stone["erased_at"], _now(), removed, stone["turns"], stone["episodes"], stone["facts"]
        )
        tenants.erased[key] = {**stone, "purged": True}
        rows.append(Row("tombstone", "", key, -1, orjson.dumps(tenants.erased[key])))
    journal.purge()
    journal.append(rows)
    return certificates


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
