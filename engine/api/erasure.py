"""Erasing a tenant: buried at once, purged in batches, certified after the purge."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson

from undertow.engine.api.report_format import Withheld, deleted_turn_ids
from undertow.engine.base.model import Memory, UndertowError
from undertow.engine.base.results import OUT_OF_REACH, Certificate
from undertow.engine.search.analyzer import forget_words
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.row_codec import control_of, memory_of
from undertow.engine.tenants.generations import is_change
from undertow.engine.tenants.registry import TenantRegistry

# where the purge could not be sure to be alone: without a lock, so on every object store
ALSO_OUT_OF_REACH = (
    "files of appends that were cut off in the ten minutes before the purge, until the next one",
    "versions and unfinished uploads that a bucket keeps of deleted objects",
)


class NotCertified(UndertowError):
    """The tenant is erased, and its bytes are still at the shard that it has come from."""

    def __str__(self) -> str:
        return (
            "The tenant is erased. Its last bytes go with the end of the resharding that moved it: "
            "ask again then for the certificate."
        )


def bury(journal: Journal, tenants: TenantRegistry, name: str) -> None:
    """Write the tombstone: from here on the tenant's older rows count for nothing.

    What it counts comes from the journal: a tenant that the arena has no room for is erased like any.
    """
    key = journal.info.tenant_key(name)
    turns, memories, changes = _counts(tenants, name)
    earlier = tenants.erased.get(key)  # an earlier life whose bytes are still there counts too
    unpurged = earlier if earlier is not None and not earlier["purged"] else {}
    tombstone = {
        "generation": tenants.incarnation_of(key) + changes,
        "erased_at": _now(),
        "rows": journal.count([key]) + unpurged.get("rows_elsewhere", 0),
        "turns": turns + unpurged.get("turns", 0),
        "episodes": memories["episode"] + unpurged.get("episodes", 0),
        "facts": memories["fact"] + unpurged.get("facts", 0),
        "purged": False,
        "lsn": journal.next_lsn,  # what comes later belongs to a new life under the same name
    }
    journal.append([Row("tombstone", "", key, -1, orjson.dumps(tombstone))])
    tenants.add_tombstone(name, tombstone)


def _counts(tenants: TenantRegistry, name: str) -> tuple[int, Counter[str], int]:
    """A tenant's turns, deleted ones included, its memories of all generations by kind, changes of policy."""
    turns: set[int] = set()
    latest: dict[str, Memory] = {}
    changes = 0
    for row in tenants.stored(name, "turn", "control", "episode", "fact"):
        if row.kind == "turn":
            turns.add(row.seq)
        elif row.kind == "control":  # of a deleted turn there may be nothing else
            changes += is_change(row)
            body = control_of(row).body
            turns |= {body["turn_seq"]} if "turn_seq" in body else set()
        else:
            memory = memory_of(row)
            latest[memory.id] = memory
    kinds: Counter[str] = Counter(memory.kind for memory in latest.values() if not memory.deleted)
    return len(turns), kinds, changes


@dataclass(frozen=True, slots=True)
class Removal:
    """What a purge has removed from a journal, by tenant key its tombstones. `alone`: see Journal.purge."""

    journal: Journal
    tombstones: Mapping[str, Mapping[str, Any]]
    alone: bool


def purge(journal: Journal, tenants: TenantRegistry) -> dict[str, Certificate]:
    """Remove the rows of all buried tenants and every old version of the store's files.

    Certificates by tenant key. A purge that was cut off is done again by the next one: the counts are
    those of the tombstones, so that a certificate does not depend on how many attempts it took. A tenant
    that has come from another shard waits until the resharding has ended: that one has its bytes too.
    """
    return certify(tenants, remove_bytes(journal, tenants))


def remove_bytes(journal: Journal, tenants: TenantRegistry) -> Removal:
    """The part of `purge` that takes long. Turns may be stored beside it: see Journal.beside_appends."""
    due = {
        key: stone
        for key, stone in tenants.erased.items()
        if not stone["purged"] and key not in tenants.arrived
    }
    for key, stone in due.items():
        journal.delete([key], before_lsn=stone["lsn"])
    journal.delete_rows(left_behind(journal, tenants))
    return Removal(journal, due, journal.purge())


def certify(tenants: TenantRegistry, removal: Removal) -> dict[str, Certificate]:
    """The rest of `purge`: certificates by tenant key; none if a tombstone was replaced since."""
    forget_words()
    done = {"purged": True, "alone": removal.alone, "purged_at": _now()}
    due = removal.tombstones.items()
    purged = {key: {**stone, **done} for key, stone in due if tenants.erased.get(key) is stone}
    rows = [Row("tombstone", "", key, -1, orjson.dumps(stone)) for key, stone in purged.items()]
    removal.journal.append(rows)
    tenants.erased.update(purged)
    return {key: certificate_of(key, stone) for key, stone in purged.items()}


def certificate_of(key: str, stone: Mapping[str, Any]) -> Certificate:
    counts = (stone["rows"], stone["turns"], stone["episodes"], stone["facts"])
    out_of_reach = OUT_OF_REACH if stone["alone"] else (*OUT_OF_REACH, *ALSO_OUT_OF_REACH)
    return Certificate(key, stone["erased_at"], stone["purged_at"], *counts, out_of_reach)


def left_behind(journal: Journal, tenants: TenantRegistry) -> list[int]:
    """Lsns of the rows with a deleted turn's words that a crash left behind (see Withheld), of all tenants.

    The purge removes those of erased lives: the seqs of one life are those of the next.
    """

    def alive(**which: Any) -> list[Row]:
        return [row for row in journal.read(**which, vectors=False) if not tenants.is_erased(row)]

    controls = alive(kinds=["control"])
    if not (ids := deleted_turn_ids(controls)):
        return []
    rows_of: dict[str, list[Row]] = defaultdict(list)
    for row in sorted([*controls, *alive(kinds=["episode", "fact"])], key=lambda row: row.lsn):
        rows_of[row.tenant_key].append(row)
    left = [row.lsn for row in alive(kinds=["turn", "vector"], ids=ids)]
    for rows in rows_of.values():
        withheld = Withheld(rows)
        left += [row.lsn for row in rows if row in withheld]
    return left


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
