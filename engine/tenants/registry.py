"""The tenants of a shard: which there are, and which are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.gpu_shares import SETTING as SHARES_SETTING
from undertow.engine.base.model import UndertowError
from undertow.engine.storage.journal import Journal, Kind, Row
from undertow.engine.storage.row_codec import job_of
from undertow.engine.tenants.migration_records import Move, move_of
from undertow.engine.tenants.replay import fold
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena

# what helps against a full arena beside more memory: a batch, and one tenant alone
FEWER = "lower UNDERTOW_BATCH_TURNS, so that fewer tenants are needed at a time"
LATER = "ask again once the turns of other tenants are decided"


class UnknownTenant(UndertowError, KeyError):
    """No such tenant in this store."""

    def __str__(self) -> str:
        return str(self.args[0])


class ArenaFull(UndertowError):
    """What is needed at one time does not fit into the arena; nothing of it was stored."""


class TenantRegistry:
    """All tenants of a shard: loaded from the journal on first touch."""

    def __init__(self, journal: Journal, arena: Arena) -> None:
        self._journal = journal
        self._arena = arena
        self._loaded: dict[str, Tenant] = {}
        self.erased: dict[str, Mapping[str, Any]] = {}
        # moves of a resharding that has not ended, by tenant key
        self.departed: dict[str, Move] = {}
        self.arrived: dict[str, Move] = {}
        for row in journal.read(kinds=["tombstone", "move"], vectors=False):
            if row.kind == "move":
                self.note_move(row.tenant_key, move_of(row))
            else:
                self.erased[row.tenant_key] = orjson.loads(row.payload)
        # every tenant with something in the store
        self._known: set[str] | None = None
        self._in_hand: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """Every tenant that has something in the store, sorted."""
        return sorted(self._known_names())

    def __contains__(self, name: str) -> bool:
        return name in self._loaded or name in self._known_names()

    def loaded(self) -> list[Tenant]:
        """The tenants in memory, least recently used first."""
        return list(self._loaded.values())

    def get(self, name: str) -> Tenant:
        """The tenant, loaded or new."""
        return self.get_many([name])[0]

    def existing(self, name: str) -> Tenant:
        """The tenant, which must have something in the store. UnknownTenant, Moved, InTransit."""
        self.require(name)
        return self.get(name)

    def require(self, name: str) -> None:
        """UnknownTenant unless the tenant has something in the store; Moved, InTransit where it leaves."""
        self.require_here([name])
        if name not in self:
            raise UnknownTenant(
                f"no tenant {name!r} in {self._journal.location}. `undertow list --kind tenants` shows them."
            )

    def require_life(self, name: str, life: int) -> None:
        """As `require`; UnknownTenant also where the name was erased in that life, and lives another."""
        self.require_here([name])
        if name not in self or self.life(name) != life:
            raise UnknownTenant(
                f"tenant {name!r} was erased meanwhile: nothing is known of what it was asked."
            )

    def life(self, name: str) -> int:
        """As Tenant.life, whether or not the tenant is in memory."""
        return self.generation(self._journal.info.tenant_key(name))

    def in_memory(self, name: str) -> Tenant | None:
        """The tenant, if it is loaded."""
        return self._loaded.get(name)

    def stored(self, name: str, *kinds: Kind) -> Iterator[Row]:
        """A tenant's rows of these kinds from the journal, without vectors and those of an erased life."""
        key = self._journal.info.tenant_key(name)
        rows = self._journal.read(tenant_keys=[key], kinds=kinds, vectors=False)
        return (row for row in rows if not self.buried(row))

    def next_seq(self, name: str) -> int:
        """Where a tenant's log goes on, from the journal alone."""
        return 1 + max((row.seq for row in self.stored(name, "turn", "control")), default=-1)

    def parked_jobs(self) -> dict[str, list[str]]:
        """The ids of all jobs that wait to be replayed, by tenant, from the journal alone."""
        last = {
            job.id: (row.tenant, job.state)
            for row in self._journal.read(kinds=["job"], vectors=False)
            if row.tenant in self._known_names() and not self.buried(row)
            for job in [job_of(row)]
        }
        parked: dict[str, list[str]] = {}
        for job_id, (name, state) in last.items():
            if state == "parked":
                parked.setdefault(name, []).append(job_id)
        return dict(sorted(parked.items()))

    def generation(self, key: str) -> int:
        """Which life of its name the tenant lives: 1, and more with each that was erased.

        A life takes one number for each generation of its memories.
        """
        return int(self.erased[key]["generation"]) + 1 if key in self.erased else 1

    def require_here(self, names: Iterable[str]) -> None:
        """Moved or InTransit when one of the tenants has left, or is about to."""
        for name in names if self.departed else ():
            if (move := self.departed.get(self._journal.info.tenant_key(name))) is not None:
                raise move.refusal(name)

    def get_many(self, names: Sequence[str]) -> list[Tenant]:
        """Load what is not loaded yet, with one read of the journal for all. ArenaFull.

        `make_room` leaves these tenants alone until the next call, or `let_go`.
        """
        self._in_hand = frozenset(names)
        missing = sorted({n for n in names if n not in self._loaded})
        known = self._known_names() if missing else set()
        stored = [n for n in missing if n in known]
        self._load(stored)
        for name in missing:
            if name not in self._loaded:
                self._loaded[name] = self._new(name)
                known.add(name)
        for name in dict.fromkeys(names):
            self._loaded[name] = self._loaded.pop(name)  # to the end: used last
        return [self._loaded[n] for n in names]

    def let_go(self) -> None:
        """Nobody uses the tenants of the last `get_many` any more, but who has work under way."""
        self._in_hand = frozenset()

    def evict(self, name: str) -> None:
        """Forget the live state; the journal still has it all."""
        self._loaded.pop(name).release()

    def make_room(self, enough: Callable[[], bool], may_go: Callable[[Tenant], bool]) -> bool:
        """Evict tenants, least recently used first, until there is `enough`; whether there is."""
        for tenant in self.loaded():
            if enough():
                return True
            if tenant.name not in self._in_hand and may_go(tenant):
                self.evict(tenant.name)
        return enough()

    def reserve(self, segments: NDArray[np.int64]) -> None:
        """Room for one more row in each of these segments, int64 [n], of tenants in hand. ArenaFull."""
        try:
            self._arena.reserve(segments)
        except MemoryError as error:
            raise self._full(f"{len(segments)} more turns", error, FEWER) from error

    def _full(self, what: str, error: MemoryError, cure: str) -> ArenaFull:
        """In words: the need, the size, and what to do about it."""
        size = self._arena.capacity_bytes
        held = "" if size is None else f" of {size} bytes"
        return ArenaFull(
            f"the arena{held} has no room for {what}, though every idle tenant was put out: {error}. "
            f"Give it a larger share of the card ({SHARES_SETTING}), or {cure}."
        )

    def bury(self, name: str, tombstone: Mapping[str, Any]) -> None:
        """The tenant disappears from every answer; its name may begin anew."""
        self._drop(name)
        self.erased[self._journal.info.tenant_key(name)] = tombstone

    def stored_keys(self) -> set[str]:
        """The key of every tenant that has something in the journal; a pass over two of its columns."""
        return set(self._beginnings("tenant_key")["tenant_key"].to_pylist())

    def names_of(self, keys: Sequence[str]) -> dict[str, str]:
        """The names of these tenants by key, from the journal; those that have nothing in it are left out."""
        rows = self._journal.read(tenant_keys=keys, kinds=["control"], vectors=False)
        return {row.tenant_key: row.tenant for row in rows if not self.buried(row)}

    def note_move(self, key: str, move: Move) -> None:
        """A move was committed: from here on it counts."""
        (self.arrived if move.state == "arrived" else self.departed)[key] = move

    def depart(self, name: str) -> None:
        """The tenant's log ends here: it disappears from every answer of this shard."""
        self._drop(name)

    def arrive(self, names: Mapping[str, str], tombstones: Mapping[str, Mapping[str, Any]]) -> None:
        """Tenants have come from another shard, by key, with the tombstones of their earlier lives."""
        self._known_names().update(names.values())
        self.erased.update(tombstones)

    def _drop(self, name: str) -> None:
        if name in self._loaded:
            self.evict(name)
        self._known_names().discard(name)

    def _new(self, name: str) -> Tenant:
        key = self._journal.info.tenant_key(name)
        tenant = Tenant(name, key, self._arena)
        tenant.life = self.generation(key)
        return tenant

    def _load(self, names: Sequence[str]) -> None:
        if not names:
            return
        by_key = {self._journal.info.tenant_key(n): n for n in names}
        rows: dict[str, list[Row]] = {n: [] for n in names}
        for row in self._journal.read(tenant_keys=list(by_key)):
            if row.kind != "tombstone" and not self.buried(row):
                rows[by_key[row.tenant_key]].append(row)
        loaded: dict[str, Tenant] = {}
        try:
            for name, of_tenant in rows.items():
                of_tenant.sort(key=lambda r: r.lsn)
                loaded[name] = self._new(name)
                fold(loaded[name], of_tenant, self._arena)
        except MemoryError as error:
            for tenant in loaded.values():
                tenant.release()
            what, cure = f"{len(names)} tenants from the journal", FEWER
            if len(names) == 1:
                what, cure = f"tenant {names[0]!r} from the journal", LATER
            raise self._full(what, error, cure) from error
        self._loaded |= loaded

    def buried(self, row: Row) -> bool:
        """Whether the row belongs to an erased life of its tenant."""
        stone = self.erased.get(row.tenant_key)
        return stone is not None and row.lsn < stone["lsn"]

    def alive(self, table: pa.Table) -> pa.Table:
        """The rows that are not buried, nor of tenants that leave; needs `tenant_key` and `lsn`."""
        if self.departed:
            left = pa.array(list(self.departed), pa.string())
            table = table.filter(pc.invert(pc.is_in(table["tenant_key"], left)))
        for key, stone in self.erased.items():
            if stone["purged"]:
                continue  # nothing of it is left
            buried = pc.and_(pc.equal(table["tenant_key"], key), pc.less(table["lsn"], stone["lsn"]))
            table = table.filter(pc.invert(buried))
        return table

    def _known_names(self) -> set[str]:
        if self._known is None:
            self._known = set(self._beginnings("tenant", "tenant_key")["tenant"].to_pylist())
        return self._known

    def _beginnings(self, *columns: str) -> pa.Table:
        """These columns, among them the key, of each tenant: one row, or a few.

        Each begins with a settings record, and keeps it when all its turns are deleted.
        """
        table = self._journal.columns([*columns, "lsn"], kinds=["control"])
        return self.alive(table).group_by(list(columns)).aggregate([])

    def behind(self) -> list[str]:
        """Tenants whose log is longer than what was decided last, from a few narrow columns."""
        columns = ["tenant", "tenant_key", "seq", "lsn", "kind"]
        table = self.alive(self._journal.columns(columns, kinds=["turn", "control", "decision"]))
        decided = pc.equal(table["kind"], "decision")
        log = table.filter(pc.invert(decided)).group_by("tenant").aggregate([("seq", "max")])
        logged = dict(zip(log["tenant"].to_pylist(), log["seq_max"].to_pylist(), strict=True))
        # the last one, which is not the highest where a log is being read again
        ends = table.filter(decided).group_by("tenant", use_threads=False).aggregate([("seq", "last")])
        done = dict(zip(ends["tenant"].to_pylist(), ends["seq_last"].to_pylist(), strict=True))
        return sorted(name for name, seq in logged.items() if seq > done.get(name, -1))
