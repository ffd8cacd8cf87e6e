"""The tenants of a shard: the catalog of all, and the live state of those that are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.gpu_shares import SETTING as SHARES_SETTING
from undertow.engine.base.model import UndertowError
from undertow.engine.storage.journal import SCHEMA, Journal, Row
from undertow.engine.storage.journal_rows import key_groups, to_rows
from undertow.engine.tenants.catalog import TenantCatalog
from undertow.engine.tenants.catalog import UnknownTenant as UnknownTenant
from undertow.engine.tenants.payload_file import PayloadFile
from undertow.engine.tenants.replay import StoredTurns, replay
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena

# What helps against a full arena besides more memory: for a batch, and for one tenant alone.
FEWER = "lower UNDERTOW_BATCH_TURNS, so that fewer tenants are needed at a time"
LATER = "ask again once the turns of other tenants are decided"


# Tenants by name, with their turns and their other rows, oldest first.
Fetched = Sequence[tuple[str, StoredTurns, Sequence[Row]]]


class ArenaFull(UndertowError):
    """What is needed at one time does not fit into the arena; nothing of it was stored."""


class TenantRegistry(TenantCatalog):
    """Owns the loaded tenants. A tenant is loaded from the journal on first use."""

    def __init__(self, journal: Journal, arena: Arena) -> None:
        super().__init__(journal)
        self._arena = arena
        # beside the journal: the folder for temporary files may lie in memory
        self.texts = PayloadFile(journal.location.folder if journal.writable else None)
        self._loaded: dict[str, Tenant] = {}
        self._pinned: frozenset[str] = frozenset()
        self.evictions = 0
        # what is fetched of them is what the journal has
        self._fetched: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._loaded or super().__contains__(name)

    def loaded(self) -> list[Tenant]:
        """The loaded tenants, least recently used first."""
        return list(self._loaded.values())

    def get(self, name: str) -> Tenant:
        """The tenant, loaded or new. ArenaFull."""
        return self.get_many([name])[0]

    def existing(self, name: str) -> Tenant:
        """The tenant, which must have something in the store. UnknownTenant, Moved, InTransit, ArenaFull."""
        if self.departed or name not in self._loaded:
            self.require(name)
        return self.get(name)

    def in_memory(self, name: str) -> Tenant | None:
        """The tenant, if it is loaded."""
        return self._loaded.get(name)

    def get_many(self, names: Sequence[str]) -> list[Tenant]:
        """Load the missing tenants with one read of the journal. ArenaFull.

        The tenants are pinned: `make_room` does not evict them before the next call, or `unpin`.
        """
        self._pinned = frozenset(names)
        self._fetched.difference_update(names)
        if absent := set(names).difference(self._loaded):
            missing, known = sorted(absent), self._known_names()
            self._load([n for n in missing if n in known])
            for name in missing:
                if name not in self._loaded:
                    self._loaded[name] = self._new(name)
                    known.add(name)
        for name in dict.fromkeys(names):
            self._loaded[name] = self._loaded.pop(name)  # most recently used
        return [self._loaded[n] for n in names]

    def unpin(self) -> None:
        """Allow evicting the tenants of the last `get_many`."""
        self._pinned = frozenset()

    def evict(self, name: str) -> None:
        """Drop a tenant's live state. The journal still has it all."""
        self.evictions += 1
        self._loaded.pop(name).release()

    def remove(self, name: str) -> None:
        """As TenantCatalog.remove, and drop its live state."""
        self._fetched.discard(name)
        if name in self._loaded:
            self.evict(name)
        super().remove(name)

    def make_room(self, enough: Callable[[], bool], may_evict: Callable[[Tenant], bool]) -> bool:
        """Evict tenants, least recently used first, until there is `enough`. Returns whether there is."""
        for tenant in self.loaded():
            if enough():
                return True
            if tenant.name not in self._pinned and may_evict(tenant):
                self.evict(tenant.name)
        return enough()

    def reserve(self, segments: NDArray[np.int64]) -> None:
        """Reserve arena memory for one more row per entry, int64 [n], of pinned tenants. ArenaFull."""
        try:
            self._arena.reserve(segments)
        except MemoryError as error:
            raise self._full(f"{len(segments)} more turns", error, FEWER) from error

    def _full(self, what: str, error: MemoryError, cure: str) -> ArenaFull:
        size = self._arena.capacity_bytes
        held = "" if size is None else f" of {size} bytes"
        return ArenaFull(
            f"the arena{held} has no room for {what}, even after every idle tenant was evicted: {error}. "
            f"Give it a larger share of the card ({SHARES_SETTING}), or {cure}."
        )

    def _new(self, name: str) -> Tenant:
        key = self._journal.info.tenant_key(name)
        return Tenant(name, key, self._arena, self.texts, self.incarnation_of(key))

    def expect(self, name: str) -> None:
        """From now on what is fetched of this tenant is for `load`, as long as it is not loaded otherwise."""
        self._fetched.add(name)

    def fetch(self, name: str) -> Fetched:
        """What the journal has of a tenant. Others may append: see Journal.beside_appends."""
        return self._fetch({self._journal.info.tenant_key(name): name})

    def load(self, fetched: Fetched) -> None:
        """Load a tenant from what `fetch` gave, unless it was loaded or removed since `expect`. ArenaFull."""
        names = [name for name, _, _ in fetched if name in self._fetched and name not in self._loaded]
        self._fetched.difference_update(names)
        with self._loading(names) as loaded:
            self._build([one for one in fetched if one[0] in names], loaded)

    def _load(self, names: Sequence[str]) -> None:
        by_key = {self._journal.info.tenant_key(n): n for n in names}
        with self._loading(names) as loaded:
            # in groups, to hold few tenants' rows beside their live state
            for keys in key_groups(list(by_key)):
                self._build(self._fetch({key: by_key[key] for key in keys or ()}), loaded)

    @contextmanager
    def _loading(self, names: Sequence[str]) -> Iterator[dict[str, Tenant]]:
        """Around the loading of tenants: all of them, by name, or none. ArenaFull."""
        loaded: dict[str, Tenant] = {}
        try:
            yield loaded
        except BaseException as error:
            for tenant in loaded.values():
                tenant.release()
            if not isinstance(error, MemoryError):
                raise
            what, cure = f"{len(names)} tenants from the journal", FEWER
            if len(names) == 1:
                what, cure = f"tenant {names[0]!r} from the journal", LATER
            raise self._full(what, error, cure) from error
        self._loaded |= loaded

    def _fetch(self, names: Mapping[str, str]) -> Fetched:
        """The rows of tenants, given by key."""
        turns: list[pa.RecordBatch] = []
        rows: dict[str, list[Row]] = {key: [] for key in names}
        for batch in self._journal.batches(tenant_keys=list(names)):
            is_turn = pc.equal(batch.column("kind"), "turn")
            turns.append(batch.filter(is_turn))
            for row in to_rows(batch.filter(pc.invert(is_turn))):
                if row.kind != "tombstone" and not self.is_erased(row):
                    rows[row.tenant_key].append(row)
        table = self.not_erased(pa.Table.from_batches(turns, SCHEMA), self.erased.keys() & names)
        of_tenants = StoredTurns.by_tenant(table, list(names), self._arena.dim)
        return [
            (name, stored, sorted(rows[key], key=attrgetter("lsn")))
            for (key, name), stored in zip(names.items(), of_tenants, strict=True)
        ]

    def _build(self, fetched: Fetched, loaded: dict[str, Tenant]) -> None:
        """Rebuild tenants, and add them to `loaded` by name."""
        for name, turns, rows in fetched:
            loaded[name] = tenant = self._new(name)
            replay(tenant, turns, rows, self._arena)
