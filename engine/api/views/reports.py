"""What a store holds and why, read from its journal: no encoder, no LLM, no writer's lock.

Every report is plain data (str, int, float, list, dict, None), ready to be written as JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.api.policy_change import policy_report
from undertow.engine.api.report_format import (
    Withheld,
    check_limit,
    deleted_turn_ids,
    deleted_turns,
    job_report,
    memory_report,
    row_report,
    thresholds_in_force,
    turn_report,
    versions_of,
)
from undertow.engine.api.transfer.export import (
    EXPORTED,
    MAX_PAGE_BYTES,
    MAX_PAGE_RECORDS,
    ExportBroken,
    ExportCursor,
    ExportTrailer,
    exported,
    head,
    stay_of,
)
from undertow.engine.base.model import Decision, MemoryKind, UnknownMemory, unknown_memory
from undertow.engine.base.results import Page, Report
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.row_codec import control_of, job_of, memory_of
from undertow.engine.tenants.catalog import TenantCatalog
from undertow.engine.tenants.generations import BEFORE_LOG, is_change, shown_generation, since_reread

if TYPE_CHECKING:
    from undertow.engine.tenants.registry import TenantRegistry

MADE_IDS = ("episode_ids", "fact_ids")
# Of a decision, where it has them.
GROUNDS = ("salient_seqs", "relevant", "relevant_scores", "reason", "usage")
# A cluster that made something has left the gates, and one without use that was settled.
TAKEN_OUT = (*MADE_IDS, "settled")
# control records that make memories of turns
DECIDING = ("replay", "flush")
CONSOLIDATING = (Decision.MERGED, Decision.FIRED)


class Reports:
    """The reports of one open journal."""

    def __init__(self, journal: Journal, tenants: TenantRegistry | None = None) -> None:
        """`tenants`: those of an engine that has the journal open."""
        self._journal = journal
        self.catalog: TenantCatalog = TenantCatalog(journal) if tenants is None else tenants
        self._tenants = tenants

    @property
    def tenants(self) -> TenantRegistry:
        """The tenants with their live state, which few reports need: loading them takes torch."""
        if self._tenants is None:
            from undertow.engine.tenants.registry import TenantRegistry
            from undertow.kernels.arena.arena import Arena

            self.catalog = self._tenants = TenantRegistry(self._journal, Arena(self._journal.info.dim))
        return self._tenants

    @property
    def encoder_digest(self) -> str:
        """Names the encoder of the store's vectors."""
        digest: str = self._journal.info.encoder["digest"]
        return digest

    def tenant_sizes(self) -> list[Report]:
        """One record a tenant, by name: how many turns it has, deleted ones left out. Loads no tenant."""
        table = self._journal.columns(["tenant", "tenant_key", "lsn"], kinds=["turn"])
        counted = self.catalog.alive(table).group_by("tenant").aggregate([("lsn", "count")])
        sizes: Counter[str] = Counter(dict.fromkeys(self.catalog.names(), 0))
        sizes.update(dict(zip(counted["tenant"].to_pylist(), counted["lsn_count"].to_pylist(), strict=True)))
        sizes.subtract(row.tenant for row in self._deleted_but_stored())
        return [{"tenant": name, "turns": turns} for name, turns in sorted(sizes.items())]

    def _deleted_but_stored(self) -> list[Row]:
        """Rows of deleted turns that a crash left behind."""
        ids = deleted_turn_ids(self._alive(self._journal.read(kinds=["control"], vectors=False)))
        return self._alive(self._journal.read(kinds=["turn"], ids=ids, vectors=False)) if ids else []

    def turns(self, tenant: str, *, every: bool = False) -> list[Report]:
        """The turns in seq order. `every`: with a stub for each deleted one, whose words are gone."""
        rows = self._rows(tenant, ["turn", "control"])
        deleted = deleted_turns(rows)
        turns = {row.seq: turn_report(row) for row in rows if row.kind == "turn"}
        if every:
            for seq, row in deleted.items():
                body = control_of(row).body
                turns[seq] = {
                    "id": body["id"],
                    "kind": "turn",
                    "tenant": tenant,
                    "seq": seq,
                    "made_at_seq": seq,
                    "superseded_at_seq": row.seq,
                    "deleted": True,
                }
        return [turns[seq] for seq in sorted(turns)]

    def turn_vectors(self, tenant: str) -> Iterator[NDArray[np.float16]]:
        """The vectors of a tenant's turns, float16 [dim] each, as they were made; streamed."""
        return (vector for _, vector in self.turns_with_vectors(tenant))

    def turns_with_vectors(self, tenant: str) -> Iterator[tuple[int, NDArray[np.float16]]]:
        """As `turn_vectors`, each with its turn's seq."""
        withheld = Withheld(self._rows(tenant, ["control"]))
        key = self._journal.info.tenant_key(tenant)
        rows = self._journal.read(tenant_keys=[key], kinds=["turn", "vector"])
        shown = (row for row in rows if self._is_alive(row) and row not in withheld)
        return ((row.seq, row.vector) for row in shown if row.vector is not None)

    def memory_vectors(self, tenant: str, kind: MemoryKind) -> Iterator[tuple[Report, NDArray[np.float16]]]:
        """The current episodes or facts of a tenant with their vectors, float16 [dim], in order of birth."""
        key = self._journal.info.tenant_key(tenant)
        rows = self._alive(self._journal.read(tenant_keys=[key], kinds=[kind]))
        newest = {row.id: row.vector for row in rows}
        for memory in self.memories(tenant, kind):
            if (vector := newest[memory["id"]]) is not None:
                yield memory, vector

    def memories(self, tenant: str, kind: MemoryKind, *, every: bool = False) -> list[Report]:
        """Episodes or facts in order of birth.

        `every`: with all their earlier versions, and those of generations that are not searched.
        """
        versions = [m for m in versions_of(self._rows(tenant, [kind])) if not m.deleted]
        if not every:
            number = self._shown_generation(tenant)
            versions = [m for m in versions if m.superseded_at_seq is None and m.generation == number]
        versions.sort(key=lambda m: (m.generation, m.born_at_seq, m.ordinal, m.version))
        return [memory_report(m) for m in versions]

    def _shown_generation(self, tenant: str) -> int:
        """See generations.shown_generation."""
        if not any(map(is_change, self._every_row(tenant, ["control"]))):
            return 1
        return shown_generation(self._every_row(tenant, ["control", "decision"]))

    def policy(self, tenant: str) -> Report:
        """See policy_change.policy_report. UnknownTenant."""
        return policy_report(self.tenants.existing(tenant), self._journal.info.policy)

    def explain(self, tenant: str, *, limit: int | None = None, after_seq: int = -1) -> list[Report]:
        """One record a turn in seq order: what was decided, on what grounds, and what it made.

        Of those behind record `after_seq`, the first `limit`, or the last `-limit`; None: all.

        `consolidated_at_seq` is the log record that took the turn out of the gates by a merge or a
        fire (of a flush or a replay of a parked job too, the remaking after a deletion not). Where salient
        turns were read, `salient_seqs` names them; their facts are among `fact_ids`. `relevant`: the
        earlier turns that reach theta_sim, nearest first, and `relevant_scores` their cosines. `reason`: why
        it is parked. `usage`: by operation its calls and its prompt, cached prompt and completion tokens.
        Deleted turns say so.
        `thresholds` are those in force, see `thresholds_in_force`. While a log is read again for a change of
        policy, it is told what that decides.
        """
        rows = since_reread(self._rows(tenant, ["turn", "control", "decision", "job"]))
        rows = [row for row in rows if row.kind != "decision" or row.seq != BEFORE_LOG]
        decisions = {row.seq: orjson.loads(row.payload) for row in rows if row.kind == "decision"}
        cursor = max(decisions, default=-1) + 1
        pending = {row.seq for row in rows if row.kind == "job" and job_of(row).state == "pending"}
        other = {row.seq for row in rows if row.kind == "control" and control_of(row).kind not in DECIDING}
        consolidated = {
            seq: at
            for at, body in sorted(decisions.items())
            if body["decision"] in CONSOLIDATING and at not in other and any(map(body.get, TAKEN_OUT))
            for seq in body.get("cluster_seqs", ())
        }
        deleted = deleted_turns(rows)
        stated = [control_of(row) for row in rows if row.kind == "control"]
        records, in_force = [], thresholds_in_force(stated, decisions)
        seqs = sorted({row.seq for row in rows if row.kind == "turn"} | set(deleted))
        seqs = [seq for seq in seqs if seq > after_seq]
        for seq in seqs[limit:] if limit is not None and limit < 0 else seqs[:limit]:
            undecided = Decision.PENDING if seq == cursor and seq in pending else Decision.UNDECIDED
            body = decisions.get(seq, {"decision": undecided.value})
            record = {**_explanation(seq, body, consolidated.get(seq)), "thresholds": in_force(seq)}
            records.append({**record, "deleted": True} if seq in deleted else record)
        return records

    def history(self, memory_id: str, tenant_key: str | None = None) -> list[Report]:
        """Every version of one memory, its deletion included, oldest first. UndertowError: unknown id.

        `tenant_key`: whose it is, where that is known; it is then found without looking at all tenants.
        """
        rows = self._rows_of(memory_id, tenant_key)
        if rows and rows[0].kind == "turn":
            return [turn_report(rows[0])]
        if not rows:
            raise UnknownMemory(
                f"no memory has the id {memory_id!r}. `undertow list` shows the ids; a deleted turn has none."
            )
        return [memory_report(m) for m in versions_of(rows)]

    def ids_from(self, beginning: str) -> set[str]:
        """The ids of memories that begin so. It reads all ids."""
        table = self._journal.columns(["id", "lsn"], kinds=["turn", "episode", "fact"])
        found: set[str] = set(table["id"].filter(pc.starts_with(table["id"], beginning)).to_pylist())
        return found

    def get(self, memory_id: str, tenant_key: str | None = None) -> Report:
        """One memory as it stands, in the form of `history`. UndertowError: unknown id, or deleted."""
        return row_report(self.row(memory_id, tenant_key))

    def row(self, memory_id: str, tenant_key: str | None = None) -> Row:
        """The newest version of a memory, without its vector. UndertowError: unknown id, or deleted."""
        rows = self._rows_of(memory_id, tenant_key)
        if not rows or (rows[-1].kind != "turn" and memory_of(rows[-1]).deleted):
            raise unknown_memory(memory_id)
        return rows[-1]

    def _rows_of(self, memory_id: str, tenant_key: str | None) -> list[Row]:
        """The rows of one memory that may be shown, oldest first."""
        keys, kinds = None if tenant_key is None else [tenant_key], ["turn", "episode", "fact"]
        found = self._journal.read(tenant_keys=keys, ids=[memory_id], kinds=kinds, vectors=False)
        rows = self._alive(found)
        if not rows:
            return []
        of_tenant = self._journal.read(tenant_keys=[rows[0].tenant_key], kinds=["control"], vectors=False)
        withheld = Withheld([*self._alive(of_tenant), *rows])
        return [row for row in rows if row not in withheld]

    def export(self, tenant: str, *, vectors: bool = False) -> Iterator[Report]:
        """Everything of a tenant in the order of its commits, every version; streamed.

        `kind` is turn, episode, fact, decision, control or job, between the head and the end of the export
        (engine/api/transfer/export.py); `vector` is a list of floats.
        """
        self.catalog.require(tenant)
        return self._export(tenant, vectors)

    def _export(self, tenant: str, vectors: bool) -> Iterator[Report]:
        seal = ExportTrailer()
        yield head(tenant)
        known = self._every_row(tenant, ["control", "episode", "fact"])
        for _, record in exported(self._exported_rows(tenant, vectors), known, vectors=vectors):
            seal.add(record)
            yield record
        yield seal.end(tenant)

    def export_page(
        self, tenant: str, *, after: str | None = None, limit: int = 1000, vectors: bool = False
    ) -> Page:
        """Some of `export`: at most `limit` records and a few megabytes, from where the page before ended.

        Pages in a row, read by whatever process, make one export. What is added meanwhile is in it; what is
        deleted meanwhile may be, with the record of its deletion, if its page had been read: an import leaves
        it out. InputError; ExportBroken.
        """
        check_limit("export", limit, MAX_PAGE_RECORDS)
        known = self._every_row(tenant, ["control", "episode", "fact"])
        stay = stay_of(self._journal, known)
        mark = ExportCursor(stay) if after is None else ExportCursor.parse(after)
        if mark.stay != stay:
            raise ExportBroken(
                f"{tenant!r} has moved or was erased since its export began. Begin the export again."
            )
        items, seal, size = [head(tenant)] if after is None else [], mark.seal, 0
        rows = self._exported_rows(tenant, vectors, after_lsn=mark.lsn)
        for taken, (lsn, record) in enumerate(exported(rows, known, vectors=vectors), 1):
            items.append(record)
            size += seal.add(record)
            if taken == limit or size >= MAX_PAGE_BYTES:
                return Page(tuple(items), str(ExportCursor(stay, lsn, seal)))
        return Page((*items, seal.end(tenant)), None)

    def _exported_rows(self, tenant: str, vectors: bool, *, after_lsn: int = -1) -> Iterator[Row]:
        key = self._journal.info.tenant_key(tenant)
        later = self._journal.read(tenant_keys=[key], kinds=["vector"]) if vectors else ()
        made = {row.seq: row.vector for row in filter(self._is_alive, later)}
        rows = self._journal.read(tenant_keys=[key], kinds=EXPORTED, vectors=vectors, after_lsn=after_lsn)
        for row in filter(self._is_alive, rows):
            if row.kind == "turn" and row.vector is None:
                row.vector = made.get(row.seq)
            yield row

    def jobs(self) -> list[Report]:
        """Pending and parked jobs of all tenants, by tenant and seq."""
        latest: dict[str, Row] = {}
        for row in self._alive(self._journal.read(kinds=["job"], vectors=False)):
            if row.id is not None:
                latest[row.id] = row
        pending = {row.tenant_key for row in latest.values() if job_of(row).state == "pending"}
        decided = self._decided(sorted(pending))
        open_jobs = [
            job_report(row)
            for row in latest.values()
            if (state := job_of(row).state) == "parked"
            or (state == "pending" and row.lsn > decided.get((row.tenant_key, row.seq), -1))
        ]
        return sorted(open_jobs, key=lambda job: (job["tenant"], job["seq"]))

    def _decided(self, tenant_keys: Sequence[str]) -> dict[tuple[str, int], int]:
        """The lsn of the last decision on each record of these tenants, by key and seq."""
        if not tenant_keys:
            return {}
        table = self.catalog.alive(self._journal.columns(["tenant_key", "seq", "lsn"], kinds=["decision"]))
        table = table.filter(pc.is_in(table["tenant_key"], pa.array(tenant_keys, pa.string())))
        places = zip(table["tenant_key"].to_pylist(), table["seq"].to_pylist(), strict=True)
        return dict(zip(places, table["lsn"].to_pylist(), strict=True))

    def _rows(self, tenant: str, kinds: Sequence[str]) -> list[Row]:
        """A tenant's rows of some kinds that may be shown, oldest first. UnknownTenant."""
        rows = self._every_row(tenant, [*kinds, "control"])
        withheld = Withheld(rows)
        return [row for row in rows if row.kind in kinds and row not in withheld]

    def _every_row(self, tenant: str, kinds: Sequence[str]) -> list[Row]:
        """As `_rows`, with those that are withheld. `kinds`: with control, of which every log has some."""
        self.catalog.require(tenant)
        key = self._journal.info.tenant_key(tenant)
        rows = self._alive(self._journal.read(tenant_keys=[key], kinds=kinds, vectors=False))
        if not rows:  # its first turn came after the read had begun
            raise self.catalog.unknown(tenant)
        return rows

    def _alive(self, rows: Iterator[Row]) -> list[Row]:
        return sorted((row for row in rows if self._is_alive(row)), key=lambda row: row.lsn)

    def _is_alive(self, row: Row) -> bool:
        return row.tenant_key not in self.catalog.departed and not self.catalog.is_erased(row)


def _explanation(seq: int, body: Mapping[str, Any], consolidated_at_seq: int | None) -> Report:
    return {
        "seq": seq,
        "decision": body["decision"],
        "merge_asked": bool(body.get("merge_asked", False)),
        "nearest_episode": body.get("nearest_episode"),
        "score": body.get("score"),
        "cluster_seqs": body.get("cluster_seqs", []),
        "consolidated_at_seq": consolidated_at_seq,
        **{name: body.get(name, []) for name in MADE_IDS},
        **{name: body[name] for name in GROUNDS if name in body},
    }
