"""The tenants of a shard as its journal has them: names, incarnations, erasures and moves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from undertow.engine.base.model import UndertowError
from undertow.engine.storage.journal import Journal, Kind, Row
from undertow.engine.storage.row_codec import job_of
from undertow.engine.tenants.migration_records import Move, move_of


class UnknownTenant(UndertowError, KeyError):
    """No such tenant in this store."""


class TenantCatalog:
    """Which tenants have something in the store, and which of their rows count. Loads no tenant.

    `erased` holds the tombstone of the last erasure by tenant key. `departed` and `arrived` hold the moves of
    a resharding that has not ended, by tenant key.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.erased: dict[str, Mapping[str, Any]] = {}
        self.departed: dict[str, Move] = {}
        self.arrived: dict[str, Move] = {}
        for row in journal.read(kinds=["tombstone", "move"], vectors=False):
            if row.kind == "move":
                self.note_move(row.tenant_key, move_of(row))
            else:
                self.erased[row.tenant_key] = orjson.loads(row.payload)
        # Every tenant with something in the store; read on first use.
        self._known: set[str] | None = None

    # ---- which tenants there are

    def names(self) -> list[str]:
        """Every tenant that has something in the store, sorted."""
        return sorted(self._known_names())

    def __contains__(self, name: str) -> bool:
        return name in self._known_names()

    def awaits_purge(self, name: str) -> bool:
        """Whether the tenant is erased and the bytes of it are not: nothing came under its name since."""
        tombstone = self.erased.get(self._journal.info.tenant_key(name), {"purged": True})
        return name not in self and not tombstone["purged"]

    def require(self, name: str) -> None:
        """UnknownTenant if the tenant has nothing in the store; Moved or InTransit if it is leaving."""
        self.require_here([name])
        if name not in self:
            raise self.unknown(name)

    def unknown(self, name: str) -> UnknownTenant:
        where = self._journal.location
        return UnknownTenant(
            f"no tenant {name!r} in {where}. `undertow list --kind tenants --store STORE` shows them."
        )

    def require_incarnation(self, name: str, incarnation: int) -> None:
        """As `require`; UnknownTenant also if this incarnation of the name was erased."""
        self.require_here([name])
        if name not in self or self.incarnation(name) != incarnation:
            raise UnknownTenant(
                f"tenant {name!r} was erased meanwhile: nothing is known of what it was asked."
            )

    def require_here(self, names: Iterable[str]) -> None:
        """Moved or InTransit if one of the tenants has left this shard, or is leaving it."""
        for name in names if self.departed else ():
            if (move := self.departed.get(self._journal.info.tenant_key(name))) is not None:
                raise move.refusal(name)

    def incarnation(self, name: str) -> int:
        """As Tenant.incarnation, whether or not the tenant is loaded."""
        return self.incarnation_of(self._journal.info.tenant_key(name))

    def incarnation_of(self, key: str) -> int:
        """The incarnation of a tenant key: 1, and higher after each erasure.

        An incarnation uses one number for each generation of its memories.
        """
        return int(self.erased[key]["generation"]) + 1 if key in self.erased else 1

    def stored_keys(self) -> set[str]:
        """The key of every tenant with something in the journal; reads two of its columns."""
        return set(self._first_rows("tenant_key")["tenant_key"].to_pylist())

    def names_of(self, keys: Sequence[str]) -> dict[str, str]:
        """The names of these tenants by key, from the journal, without tenants that have nothing in it."""
        rows = self._journal.read(tenant_keys=keys, kinds=["control"], vectors=False)
        return {row.tenant_key: row.tenant for row in rows if not self.is_erased(row)}

    # ---- what the journal has of them

    def stored(self, name: str, *kinds: Kind) -> Iterator[Row]:
        """A tenant's rows of these kinds, without vectors and without those of erased incarnations."""
        key = self._journal.info.tenant_key(name)
        rows = self._journal.read(tenant_keys=[key], kinds=kinds, vectors=False)
        return (row for row in rows if not self.is_erased(row))

    def next_seq(self, name: str) -> int:
        """The seq of the next record of a tenant's log."""
        return 1 + max((row.seq for row in self.stored(name, "turn", "control")), default=-1)

    def parked_jobs(self) -> dict[str, list[str]]:
        """The ids of all parked jobs by tenant."""
        last = {
            job.id: (row.tenant, job.state)
            for row in self._journal.read(kinds=["job"], vectors=False)
            if row.tenant in self._known_names() and not self.is_erased(row)
            for job in [job_of(row)]
        }
        parked: dict[str, list[str]] = {}
        for job_id, (name, state) in last.items():
            if state == "parked":
                parked.setdefault(name, []).append(job_id)
        return dict(sorted(parked.items()))

    def behind(self) -> list[str]:
        """The tenants with undecided records, from a few narrow columns."""
        columns = ["tenant", "tenant_key", "seq", "lsn", "kind"]
        table = self.alive(self._journal.columns(columns, kinds=["turn", "control", "decision"]))
        decided = pc.equal(table["kind"], "decision")
        log = table.filter(pc.invert(decided)).group_by("tenant").aggregate([("seq", "max")])
        logged = dict(zip(log["tenant"].to_pylist(), log["seq_max"].to_pylist(), strict=True))
        # The last decision, which is not the highest while a log is being read again.
        ends = table.filter(decided).group_by("tenant", use_threads=False).aggregate([("seq", "last")])
        done = dict(zip(ends["tenant"].to_pylist(), ends["seq_last"].to_pylist(), strict=True))
        return sorted(name for name, seq in logged.items() if seq > done.get(name, -1))

    def is_erased(self, row: Row) -> bool:
        """Whether the row belongs to an erased incarnation of its tenant."""
        tombstone = self.erased.get(row.tenant_key)
        return tombstone is not None and row.lsn < tombstone["lsn"]

    def alive(self, table: pa.Table) -> pa.Table:
        """The rows that are not erased, nor of departed tenants. Needs `tenant_key` and `lsn`."""
        if self.departed:
            left = pa.array(list(self.departed), pa.string())
            table = table.filter(pc.invert(pc.is_in(table["tenant_key"], left)))
        unpurged = (key for key, tombstone in self.erased.items() if not tombstone["purged"])
        return self.not_erased(table, unpurged)

    def not_erased(self, table: pa.Table, keys: Iterable[str]) -> pa.Table:
        """The rows without those of erased incarnations of these tenants, some of which were erased."""
        for key in keys:
            before = self.erased[key]["lsn"]
            erased = pc.and_(pc.equal(table["tenant_key"], key), pc.less(table["lsn"], before))
            table = table.filter(pc.invert(erased))
        return table

    # ---- changes

    def add_tombstone(self, name: str, tombstone: Mapping[str, Any]) -> None:
        """The tenant was erased: it disappears from every answer, and its name may be used anew."""
        self.remove(name)
        self.erased[self._journal.info.tenant_key(name)] = tombstone

    def remove(self, name: str) -> None:
        """Forget a tenant that has left this shard or has nothing stored."""
        self._known_names().discard(name)

    def note_move(self, key: str, move: Move) -> None:
        """A move was committed and is in force."""
        (self.arrived if move.state == "arrived" else self.departed)[key] = move

    def add(self, names: Mapping[str, str], tombstones: Mapping[str, Mapping[str, Any]]) -> None:
        """Add tenants by key that came from elsewhere, with the tombstones of their earlier incarnations."""
        self._known_names().update(names.values())
        self.erased.update(tombstones)

    def _known_names(self) -> set[str]:
        if self._known is None:
            self._known = set(self._first_rows("tenant", "tenant_key")["tenant"].to_pylist())
        return self._known

    def _first_rows(self, *columns: str) -> pa.Table:
        """These columns, which include the key, of each tenant: one row or a few.

        Every log begins with a settings record, which stays when all turns are deleted.
        """
        table = self._journal.columns([*columns, "lsn"], kinds=["control"])
        return self.alive(table).group_by(list(columns)).aggregate([])
