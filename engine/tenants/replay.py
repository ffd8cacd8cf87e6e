"""Replay: rebuilds a tenant's live state from its journal rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import Memory
from undertow.engine.storage.journal import JournalError, Row
from undertow.engine.storage.row_codec import control_of, job_of, key_hash, memory_of, usage_from_json
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena


def replay(tenant: Tenant, rows: Sequence[Row], arena: Arena) -> None:
    """Rebuild a tenant: first the log in seq order, then decisions, then memories.

    Decisions define the generations, and so the place of each memory. A turn whose row was purged after its
    deletion is restored from the delete record. Of two records with one seq the later counts: it is redacted.
    """
    _replay_log(tenant, rows, arena)
    memories: dict[str, tuple[Memory, NDArray[np.float16] | None]] = {}
    for row in rows:
        if row.kind in ("episode", "fact"):
            memory = memory_of(row)
            memories[memory.id] = (memory, row.vector)
    for row in rows:
        match row.kind:
            case "decision":
                tenant.add_decision(row.seq, orjson.loads(row.payload))
            case "job":
                tenant.add_job(job_of(row))
            case "usage":
                for operation, usage in usage_from_json(orjson.loads(row.payload)).items():
                    tenant.add_usage(operation, usage)
    for memory, vector in sorted(memories.values(), key=lambda m: (m[0].born_at_seq, m[0].ordinal)):
        tenant.set_memory(memory, vector)


def _replay_log(tenant: Tenant, rows: Sequence[Row], arena: Arena) -> None:
    turns = {row.seq: row for row in rows if row.kind == "turn"}
    controls = [control_of(row) for row in rows if row.kind == "control"]
    deletions = {c.body["turn_seq"]: c for c in controls if c.kind == "delete" and "turn_seq" in c.body}
    by_seq = {c.seq: c for c in controls if c.seq >= 0}
    for control in controls:
        if control.seq < 0:
            tenant.add_control(control)
    zero = np.zeros(arena.dim, dtype=np.float16)
    vectors = []
    for seq in range(1 + max([*turns, *by_seq, *deletions], default=-1)):
        if seq in by_seq:
            tenant.add_control(by_seq[seq])
        elif (row := turns.get(seq)) is not None:
            body = orjson.loads(row.payload)
            tenant.add_turn(row.payload, key_hash(body["key"]), body["session"], row.timestamp)
            vectors.append(zero if row.vector is None else row.vector)
        elif seq in deletions:
            body = deletions[seq].body
            tenant.add_turn(None, key_hash(body["key"]), body["session"], body["timestamp"])
            vectors.append(zero)
        else:
            raise JournalError(
                f"the log of tenant {tenant.name!r} misses record {seq}. Restore a backup, or have "
                "`undertow repair` mark it as deleted."
            )
    if vectors:
        segments = np.full(len(vectors), tenant.turns_segment, dtype=np.int64)
        arena.extend(segments, np.stack(vectors), live=True)
    for deleted in deletions:
        tenant.redact_turn(deleted)
