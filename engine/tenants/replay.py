"""Replay: rebuilds tenants' live state from their journal rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.model import Memory
from undertow.engine.storage.journal import JournalError, Row
from undertow.engine.storage.row_codec import Control, control_of, job_of, memory_of, usage_from_json
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena


class StoredTurns(NamedTuple):
    """The turns of one tenant: `seqs`, int64 [n], ascending; their vectors, float16 [n, dim], zeros if none.

    `missing`, bool [n]: the turns whose row has no vector. Payload i is bytes offsets[i] to offsets[i + 1] of
    `payloads`; offsets int64 [n + 1].
    """

    seqs: NDArray[np.int64]
    vectors: NDArray[np.float16]
    missing: NDArray[np.bool_]
    payloads: memoryview
    offsets: NDArray[np.int64]

    def part(self, start: int, stop: int) -> tuple[memoryview, Sequence[int]]:
        """The payloads [start, stop) one after the other, and their lengths."""
        offsets = self.offsets[start : stop + 1]
        return self.payloads[offsets[0] : offsets[-1]], np.diff(offsets).tolist()

    def completed(self, later: Sequence[Row]) -> Self:
        """With the vectors of these rows, which were made later than the turns were stored."""
        made = {row.seq: row.vector for row in later if row.vector is not None}
        places = np.flatnonzero(self.missing & np.isin(self.seqs, list(made)))
        if not len(places):
            return self
        vectors, missing = self.vectors.copy(), self.missing.copy()
        vectors[places] = [made[seq] for seq in self.seqs[places].tolist()]
        missing[places] = False
        return self._replace(vectors=vectors, missing=missing)

    @classmethod
    def by_tenant(cls, turns: pa.Table, keys: Sequence[str], dim: int) -> Iterator[Self]:
        """The turns of each tenant, in the order of `keys`, from their rows in any order.

        `turns` has the columns of journal.SCHEMA. Of two rows with one seq the later counts.
        """
        owners = pc.index_in(turns["tenant_key"], pa.array(keys, pa.string())).to_numpy()
        seqs, lsns = turns["seq"].to_numpy(), turns["lsn"].to_numpy()
        order = np.lexsort((lsns, seqs, owners))
        owners, seqs = owners[order], seqs[order]
        latest = np.ones(len(order), np.bool_)
        latest[:-1] = (owners[1:] != owners[:-1]) | (seqs[1:] != seqs[:-1])
        order, seqs = order[latest], seqs[latest]
        payloads, offsets = _gathered(turns["payload"], order)
        blank = pa.scalar(bytes(2 * dim), pa.large_binary())
        vectors, _ = _gathered(pc.fill_null(turns["vector"].cast(pa.large_binary()), blank), order)
        matrix = np.frombuffer(vectors, "<f2").reshape(len(order), dim)
        missing = turns["vector"].is_null().to_numpy()[order]
        ends = np.searchsorted(owners[latest], np.arange(len(keys)), side="right")
        start = 0
        for end in ends.tolist():
            part = slice(start, end)
            yield cls(seqs[part], matrix[part], missing[part], payloads, offsets[start : end + 1])
            start = end


def _gathered(column: pa.ChunkedArray, order: NDArray[np.int64]) -> tuple[memoryview, NDArray[np.int64]]:
    """The values of a binary column in this order, one after the other, and their offsets, int64 [n + 1]."""
    values = column.cast(pa.large_binary()).combine_chunks().take(pa.array(order))
    offsets = np.frombuffer(values.buffers()[1], np.int64)[: len(values) + 1]
    return memoryview(values.buffers()[2] or b"").cast("B"), offsets


def replay(tenant: Tenant, turns: StoredTurns, rows: Sequence[Row], arena: Arena) -> None:
    """Rebuild a tenant: first the log in seq order, then decisions, then memories.

    `rows`: the other ones, oldest first. Decisions define the generations, and so the place of each memory. A
    turn whose row was purged after its deletion is restored from the delete record. Of two records with one
    seq the later counts: it is redacted.
    """
    turns = turns.completed([row for row in rows if row.kind == "vector"])
    _replay_log(tenant, turns, [control_of(row) for row in rows if row.kind == "control"], arena)
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


def _replay_log(tenant: Tenant, turns: StoredTurns, controls: Sequence[Control], arena: Arena) -> None:
    deleted = {c.body["turn_seq"] for c in controls if c.kind == "delete" and "turn_seq" in c.body}
    by_seq = {control.seq: control for control in controls if control.seq >= 0}
    for control in controls:
        if control.seq < 0:
            tenant.add_control(control)
    purged = deleted.difference(turns.seqs.tolist())
    others = np.array(sorted({*by_seq, *purged}), np.int64)
    _check_complete(tenant.name, np.union1d(turns.seqs, others))
    start = 0
    for seq, stop in zip(others.tolist(), np.searchsorted(turns.seqs, others).tolist(), strict=True):
        tenant.load_turns(*turns.part(start, stop))
        start = stop
        if seq in by_seq:
            tenant.add_control(by_seq[seq])
        else:
            tenant.counts["deleted"] += 1  # a turn whose deletion is in the log
            tenant.load_turns(b"", [0])
    tenant.load_turns(*turns.part(start, len(turns.seqs)))
    tenant.awaiting = dict.fromkeys(turns.seqs[turns.missing].tolist())
    _extend(arena, tenant, turns, len(purged))
    for seq in deleted:
        tenant.redact_turn(seq)


def _check_complete(name: str, seqs: NDArray[np.int64]) -> None:
    """JournalError if the seqs of a log, ascending, are not 0, 1, 2, ..."""
    gaps = np.flatnonzero(seqs != np.arange(len(seqs)))
    if len(gaps):
        raise JournalError(
            f"the log of tenant {name!r} misses record {gaps[0]}. Restore a backup, or have "
            "`undertow repair` mark it as deleted."
        )


def _extend(arena: Arena, tenant: Tenant, turns: StoredTurns, purged: int) -> None:
    """Append the turns' vectors to the arena, and zeros for the purged ones. MemoryError."""
    vectors = turns.vectors
    if purged:
        vectors = np.zeros((len(tenant.seq_by_row), arena.dim), np.float16)
        vectors[np.frombuffer(tenant.row_by_seq, np.int32)[turns.seqs]] = turns.vectors
    if len(vectors):
        arena.extend(np.full(len(vectors), tenant.turns_segment), vectors, live=True)
