"""Turns that are stored already, found by the dedupe keys under which they came."""

from __future__ import annotations

from collections.abc import Collection

import orjson

from undertow.engine.base.results import Report
from undertow.engine.storage.row_codec import key_hash, turn_id
from undertow.engine.tenants.tenant import Tenant


def turns_by_key(tenant: Tenant, keys: Collection[str]) -> dict[str, Report]:
    """What is stored of the turns that came under these keys, by key; keys of none are left out.

    Each with `id` and `seq`; and with its session, timestamp, messages and metadata, unless it was deleted
    since.
    """
    found: dict[str, Report] = {}
    for key in keys:
        seq = tenant.keys.get(key_hash(key))
        if seq is None:
            continue
        place = {"id": turn_id(tenant.name, tenant.incarnation, seq), "seq": seq}
        record = tenant.records[seq]
        if not isinstance(record, bytes):  # deleted: its key is known by the hash alone
            found[key] = place
            continue
        body = orjson.loads(record)
        if body.pop("key") == key:  # another's of the same hash is none of this key's
            found[key] = {**place, "timestamp": None, "metadata": {}, **body}
    return found
