"""What has happened to tenants' memories, read from the journal behind a cursor: nothing is kept beside it.

The journal has no time of a commit: `time` is that of what was said, or of the erasure. What was deleted
before it is read is told as its deletion alone, and of an erased life the erasure alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import orjson

from undertow.engine.api.report_format import Withheld, bad_cursor, check_limit
from undertow.engine.base.queries import EventsQuery, TenantEventsQuery
from undertow.engine.base.results import EventPage, Page, Report
from undertow.engine.storage.journal import Journal, Kind, Row
from undertow.engine.storage.row_codec import control_of, job_of, memory_of, spoken_in, turn_id
from undertow.engine.tenants.catalog import TenantCatalog

TOLD: Final[tuple[Kind, ...]] = ("turn", "episode", "fact", "job", "control", "tombstone")
REMEMBERED = ("turn", "episode", "fact")
MAX_EVENTS, MAX_PAGE_BYTES = 1_000, 1 << 20
# a cursor behind what there is, for those that want only what is to come
LATEST = "latest"
EVENT_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class EventIds:
    """The ids of one tenant's events at one journal: an lsn, sealed, as it would tell how much others do."""

    hash_key: str
    home: str
    tenant_key: str

    def of(self, lsn: int) -> str:
        """The id of the event of a row, and the cursor behind it; the same whenever it is asked for."""
        tag = self._digest(f"{self.home}\x1f{self.tenant_key}\x1f{lsn}".encode(), b"event tag")
        return f"{tag:016x}{self._pad(tag) ^ lsn + 1:016x}"

    def lsn(self, text: str) -> int:
        """The lsn of an id; -1, before all, if it is of another journal: the tenant has moved."""
        tag, sealed = int(text[:16], 16), int(text[16:], 16)
        lsn = (self._pad(tag) ^ sealed) - 1
        return lsn if self.of(lsn) == text else -1

    def _pad(self, tag: int) -> int:
        return self._digest(tag.to_bytes(8), b"event pad")

    def _digest(self, text: bytes, person: bytes) -> int:
        made = blake2b(text, key=bytes.fromhex(self.hash_key), digest_size=8, person=person)
        return int.from_bytes(made.digest())


def standing(journal: Journal, query: EventsQuery) -> EventPage | None:
    """The answer where none needs to be read: nothing is new, or only the position is wanted."""
    end, after = journal.next_lsn - 1, query.after.get(query.home)
    return EventPage((), end) if after == end or (after is None and not query.limit) else None


def store_events(journal: Journal, tenants: TenantCatalog, query: EventsQuery) -> EventPage:
    """The next events of all tenants, or of those with these keys, at this journal.

    With a limit of 0: no event, and which tenants have news. After a cursor beyond the journal, which was
    replaced by an older copy, all is told again.
    """
    if (page := standing(journal, query)) is not None:
        return page
    after = query.after.get(query.home, -1)
    after = -1 if after >= journal.next_lsn else after
    if not query.limit:
        return _changed(journal, query.keys, after)
    check_limit("events", query.limit, MAX_EVENTS)
    rows, at = _next_rows(journal, query.keys, after, query.limit)
    return EventPage(tuple(_told(journal, tenants, rows, query.home, query.text)), at)


def tenant_events(journal: Journal, tenants: TenantCatalog, query: TenantEventsQuery) -> Page:
    """The next events of one tenant, also of one that was erased. `after` is always a cursor. InputError."""
    check_limit("events", query.limit, MAX_EVENTS)
    tenants.require_here([query.tenant])
    key = journal.info.tenant_key(query.tenant)
    ids = EventIds(journal.info.hash_key, query.home, key)
    if query.after == LATEST:
        return Page((), ids.of(journal.next_lsn - 1))
    if query.after is not None and not EVENT_ID.fullmatch(query.after):
        raise bad_cursor("events", query.after)
    after = -1 if query.after is None else ids.lsn(query.after)
    rows, at = _next_rows(journal, [key], -1 if after >= journal.next_lsn else after, query.limit)
    told = _told(journal, tenants, rows, query.home, query.text)
    return Page(tuple({**event, "tenant": query.tenant} for _, event in told), ids.of(at))


def _changed(journal: Journal, keys: Collection[str] | None, after: int) -> EventPage:
    journal.settle()
    at, named = journal.moved_until - 1, None if keys is None else sorted(keys)
    batches = journal.batches(tenant_keys=named, kinds=TOLD, vectors=False, after_lsn=after)
    changed = {key for batch in batches for key in batch.column("tenant_key").unique().to_pylist()}
    return EventPage((), max(at, after), frozenset(changed))


def _next_rows(
    journal: Journal, keys: Collection[str] | None, after: int, limit: int
) -> tuple[list[Row], int]:
    """At most `limit` rows behind `after`, and the lsn up to which there is no other."""
    journal.settle()
    at, named = journal.moved_until - 1, None if keys is None else sorted(keys)
    rows: list[Row] = []
    size = 0
    for row in journal.read(tenant_keys=named, kinds=TOLD, vectors=False, after_lsn=after):
        rows.append(row)
        size += len(row.payload)
        if len(rows) == limit or size >= MAX_PAGE_BYTES:
            return rows, row.lsn
    return rows, max(at, after, *(row.lsn for row in rows[-1:]))


def _told(
    journal: Journal, tenants: TenantCatalog, rows: Iterable[Row], home: str, text: bool
) -> Iterator[tuple[int, Report]]:
    """The events of rows, each with its lsn."""
    alive = [r for r in rows if r.tenant_key not in tenants.departed and not tenants.is_erased(r)]
    withheld = _withheld(journal, tenants, alive)
    for row in alive:
        if row.tenant_key in withheld and row in withheld[row.tenant_key]:
            continue
        if (told := _event(row, tenants, text)) is not None:
            head = {
                "id": EventIds(journal.info.hash_key, home, row.tenant_key).of(row.lsn),
                "type": told.pop("type"),
                "tenant": row.tenant or None,
                "tenant_key": row.tenant_key,
                "time": told.pop("time", row.timestamp),
            }
            yield row.lsn, head | told


def _withheld(journal: Journal, tenants: TenantCatalog, rows: Iterable[Row]) -> dict[str, Withheld]:
    """By tenant key: what of the rows has a deleted turn's words."""
    wanted = [row for row in rows if row.kind in REMEMBERED]
    if not wanted:
        return {}
    keys = sorted({row.tenant_key for row in wanted})
    ids = [row.id for row in wanted if row.kind != "turn" and row.id]
    known = [*journal.read(tenant_keys=keys, kinds=["control"], vectors=False)]
    if ids:
        known += journal.read(tenant_keys=keys, kinds=["episode", "fact"], ids=ids, vectors=False)
    of_key: dict[str, list[Row]] = {key: [] for key in keys}
    for row in sorted(known, key=lambda row: row.lsn):
        if not tenants.is_erased(row):
            of_key[row.tenant_key].append(row)
    return {key: Withheld(of) for key, of in of_key.items()}


def _event(row: Row, tenants: TenantCatalog, text: bool) -> dict[str, Any] | None:
    """What a row tells; None: nothing."""
    if row.kind == "turn":
        body = orjson.loads(row.payload)
        told = {"type": "memory.created", "memory_id": row.id, "kind": "turn", "seq": row.seq}
        told |= {"session_id": body["session"]} if body["session"] else {}
        return told | ({"text": spoken_in(body)} if text else {})
    if row.kind in ("episode", "fact"):
        memory = memory_of(row)
        change = "deleted" if memory.deleted else "created" if memory.version == 1 else "updated"
        told = {"type": f"memory.{change}", "memory_id": memory.id, "kind": memory.kind, "seq": row.seq}
        told |= {"version": memory.version, "generation": memory.generation}
        return told | ({"text": memory.text} if text and not memory.deleted else {})
    if row.kind == "control":
        control = control_of(row)
        if control.kind != "delete" or "turn_seq" not in control.body:
            return None  # what it does to an episode or a fact is a version of that
        told = {"type": "memory.deleted", "memory_id": control.body["id"], "kind": "turn"}
        return told | {"seq": control.body["turn_seq"]}
    if row.kind == "job":
        if (job := job_of(row)).state != "parked":
            return None
        life = tenants.incarnation_of(row.tenant_key)
        turns = [turn_id(row.tenant, life, seq) for seq in job.cluster]
        told = {"type": "turn.parked", "job_id": job.id, "operation": job.operation, "seq": job.seq}
        return told | {"turn_ids": turns} | ({"reason": job.reason} if text else {})
    stone = orjson.loads(row.payload)
    if stone["purged"] and "rows_elsewhere" not in stone:
        return None  # told when it was erased
    return {"type": "tenant.erased", "time": stone["erased_at"]}
