"""Turns that are stored already, found by the dedupe keys under which they came."""

from __future__ import annotations

from collections.abc import Collection

import orjson

from undertow.engine.records import Control, key_hash, turn_id
from undertow.engine.shown import Report
from undertow.engine.tenants import Tenant

# a payload begins with its key
BEFORE_KEY, BEHIND_KEY = b'{"key":', b',"session":'


def turns_by_key(tenant: Tenant, keys: Collection[str]) -> dict[str, Report]:
    """What is stored of the turns that came under these keys, by key; keys of none are left out.

    Each with `id` and `seq`; and with its session, timestamp, messages and metadata, unless it was deleted
    since. Of keys that are not known it costs nothing; else it looks from the newest record on, as calls
    are repeated soon if ever.
    """
    known = [key for key in keys if key_hash(key) in tenant.keys]
    wanted = {BEFORE_KEY + orjson.dumps(key) for key in known}
    found: dict[str, Report] = {}
    for seq in range(tenant.next_seq - 1, -1, -1):
        if len(found) == len(wanted):
            break
        record = tenant.records[seq]
        if isinstance(record, Control):
            key = record.body.get("key") if record.kind == "delete" else None
            if key in known:
                found[key] = {"id": record.body["id"], "seq": record.body["turn_seq"]}
        elif record is not None:
            head = record[: record.index(BEHIND_KEY)]
            if head in wanted:
                body = orjson.loads(record)
                found[body.pop("key")] = {
                    "id": turn_id(tenant.name, tenant.generation, seq),
                    "seq": seq,
                    "timestamp": None,
                    "metadata": {},
                    **body,
                }
    return found
