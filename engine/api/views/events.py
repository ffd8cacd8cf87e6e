"""What has happened to memories, read from the journal behind an lsn: nothing is kept beside it.

The journal has no time of a commit: `time` is that of what was said, or of the erasure. What was deleted
before it is read is told as its deletion alone, and of an erased life the erasure alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import orjson

from undertow.engine.api.report_format import Withheld
from undertow.engine.base.queries import EventPage, EventsQuery
from undertow.engine.base.results import Report
from undertow.engine.storage.journal import Journal, Kind, Row
from undertow.engine.storage.row_codec import control_of, job_of, memory_of, spoken_in, turn_id
from undertow.engine.tenants.catalog import TenantCatalog

MAX_PAGE_BYTES = 1 << 20
# the mark of a writer has the lsn of the row that follows it
ROWS = tuple(kind for kind in get_args(Kind) if kind != "epoch")


def standing(journal: Journal, query: EventsQuery) -> EventPage | None:
    """The answer where nothing needs to be read: there is nothing new, or only the end is asked for."""
    end = journal.next_lsn - 1
    return EventPage((), end) if not query.limit or query.after.get(query.home) == end else None


def store_events(journal: Journal, tenants: TenantCatalog, query: EventsQuery) -> EventPage:
    """The events of the next rows, at most `limit` and about a megabyte of them.

    From the start, if `after` lies beyond the end: the journal was replaced by an older copy.
    """
    if (page := standing(journal, query)) is not None:
        return page
    after = query.after.get(query.home, -1)
    at = after = after if after < journal.next_lsn else -1
    rows, size, is_cut = [], 0, False
    keys = None if query.keys is None else sorted(query.keys)
    for row in journal.read(tenant_keys=keys, kinds=ROWS, vectors=False, after_lsn=after):
        at, size = row.lsn, size + len(row.payload)
        if row.tenant_key not in tenants.departed and not tenants.is_erased(row):
            rows.append(row)
        if is_cut := len(rows) == query.limit or size >= MAX_PAGE_BYTES:
            break
    # without texts, that there was a memory may be told though its deletion follows
    withheld = _withheld(journal, tenants, rows) if query.text else frozenset()
    shown = (row for row in rows if row.lsn not in withheld)
    told = ((row.lsn, _event(row, tenants, query.text)) for row in shown)
    return EventPage(tuple((lsn, event) for lsn, event in told if event is not None), at, is_cut)


def _withheld(journal: Journal, tenants: TenantCatalog, rows: Sequence[Row]) -> frozenset[int]:
    """The lsns of rows with words that were deleted since: a turn's, or those of the memory itself."""
    keys = sorted({row.tenant_key for row in rows if row.kind in ("turn", "episode", "fact")})
    ids = [row.id for row in rows if row.kind in ("episode", "fact") and row.id]
    known = [*journal.read(tenant_keys=keys, kinds=["control"], vectors=False)]
    known += journal.read(tenant_keys=keys, kinds=["episode", "fact"], ids=ids, vectors=False) if ids else []
    known = sorted((row for row in known if not tenants.is_erased(row)), key=lambda row: row.lsn)
    of = {key: Withheld([row for row in known if row.tenant_key == key]) for key in keys}
    memories = (row for row in known if row.kind in ("episode", "fact"))
    deleted = {(row.tenant_key, row.id): row.lsn for row in memories if memory_of(row).deleted}
    return frozenset(
        row.lsn
        for row in rows
        if row in of.get(row.tenant_key, ()) or row.lsn < deleted.get((row.tenant_key, row.id), -1)
    )


def _event(row: Row, tenants: TenantCatalog, text: bool) -> Report | None:
    """What a row tells; None: nothing."""

    def event(type_: str, said: str | None = None, **ids: Any) -> Report:
        head = {"type": type_, "tenant": row.tenant or None, "tenant_key": row.tenant_key}
        return head | {"time": row.timestamp} | ids | ({"text": said} if text and said is not None else {})

    if row.kind == "turn":
        said = spoken_in(orjson.loads(row.payload)) if text else None
        return event("memory.created", said, memory_id=row.id, kind="turn", seq=row.seq)
    if row.kind in ("episode", "fact"):
        m = memory_of(row)
        change = "deleted" if m.deleted else "created" if m.version == 1 else "updated"
        ids = {"memory_id": m.id, "kind": m.kind, "seq": row.seq, "version": m.version}
        return event(f"memory.{change}", None if m.deleted else m.text, generation=m.generation, **ids)
    if row.kind == "control" and "turn_seq" in (body := control_of(row).body):
        # that of an episode or a fact is told by its last version
        return event("memory.deleted", memory_id=body["id"], kind="turn", seq=body["turn_seq"])
    if row.kind == "job" and (job := job_of(row)).state == "parked":
        life = tenants.incarnation_of(row.tenant_key)
        turns = [turn_id(row.tenant, life, seq) for seq in job.cluster]
        return event("turn.parked", job.reason, job_id=job.id, operation=job.operation, turn_ids=turns)
    if row.kind == "tombstone":
        stone = orjson.loads(row.payload)
        if not stone["purged"] or "rows_elsewhere" in stone:  # else it was told when it was erased
            return event("tenant.erased", time=stone["erased_at"])
    return None
