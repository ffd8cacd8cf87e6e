"""Which tenants are in the arena: evicts idle ones for memory, and loads undecided ones into free memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf
from weakref import WeakSet

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.step.scheduler import Scheduler
from undertow.engine.tenants.registry import ArenaFull, TenantRegistry
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena, make_arena
from undertow.kernels.device import resolve

# The part of a GPU pool that is kept free between steps. Evicting in larger batches is cheaper.
POOL_SPARE = 1 / 16
# The largest part of a GPU pool for loaded tenants with undecided records. Each grows as it makes memories.
LOAD_SHARE = 1 / 4
# Tenants loaded with one read where a GPU pool bounds them.
TENANTS_AT_A_TIME = 64

# This process's GPU pools. A closed arena has a capacity of 0.
_pools: WeakSet[Arena] = WeakSet()


class ArenaResidency:
    """Owns which tenants of one engine are loaded, within `arena_bytes` or the size of the GPU pool.

    Active tenants stay loaded. Tenants that were evicted with undecided records, or that earlier runs left
    undecided, wait here and are loaded from the journal when there is room.
    """

    def __init__(self, tenants: TenantRegistry, arena: Arena, scheduler: Scheduler, arena_bytes: int) -> None:
        self._tenants = tenants
        self._arena = arena
        self._scheduler = scheduler
        self._arena_bytes = arena_bytes
        # Tenants with undecided records that wait to be loaded, in order.
        self._waiting: dict[str, None] = {}
        arena.reclaim = self._reclaim
        scheduler.evict = self._evict

    @property
    def complete(self) -> bool:
        """Whether every tenant with undecided records has been loaded."""
        return not self._waiting

    def is_waiting(self, name: str) -> bool:
        """Whether the tenant waits to be loaded."""
        return name in self._waiting

    def prepare(self, *, may_read: bool = True) -> None:
        """Between steps: evict idle tenants while the arena exceeds its bound, and load waiting ones.

        Not if the journal may not be read: who is evicted may be needed in the same step.
        """
        self._tenants.unpin()
        if not may_read:
            return
        if not self._has_room:
            self._make_room(lambda: self._has_room)
        self._load_waiting()

    def load(self, behind: Sequence[str]) -> None:
        """Have these tenants' undecided records decided, as many tenants at a time as there is room for."""
        self._waiting |= dict.fromkeys(behind)
        self._load_waiting()

    def _load_waiting(self) -> None:
        """Load waiting tenants as far as the arena has room. The rest follow when these are decided.

        Loads nobody while turns wait for arena memory: freed memory is reserved for them.
        """
        if self._scheduler.waits_for_arena:
            return
        at_a_time = self._at_a_time(len(self._waiting))
        while self._waiting and (self._room_for_work > 0 or self._scheduler.idle):
            names = list(islice(self._waiting, at_a_time))
            if done := [name for name in names if self._needs_nothing(name)]:
                self._forget(done)
                continue
            try:
                tenants = self._tenants.get_many(names)
            except ArenaFull as error:
                if at_a_time > 1:
                    at_a_time //= 2
                    continue
                if not self._scheduler.idle:
                    return
                # The arena cannot hold even this tenant alone. The others go on.
                self._forget(names)
                self._scheduler.blocked[names[0]] = str(error)
                continue
            room = self._room_for_work
            while len(tenants) > 1 and self._bytes_of(tenants) > room:
                self._tenants.evict(tenants.pop().name)
            self._forget([tenant.name for tenant in tenants])
            for tenant in tenants:
                self._scheduler.decisions.add(tenant)

    def _needs_nothing(self, name: str) -> bool:
        """Whether the tenant has become active, was erased, or moved away while it waited."""
        return self._scheduler.decisions.is_active(name) or name not in self._tenants

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            del self._waiting[name]

    def _at_a_time(self, count: int) -> int:
        """How many of `count` tenants to load with one read: all, unless a GPU pool bounds them."""
        return max(1, count if self._arena.capacity_bytes is None else min(count, TENANTS_AT_A_TIME))

    @property
    def _room_for_work(self) -> float:
        """Bytes for tenants to be loaded. They stay until decided and will grow, so only a part of a pool.

        Idle tenants do not count against it: they are evicted when the memory is needed.
        """
        pool = self._arena.capacity_bytes
        if pool is None:
            return inf
        return int(pool * LOAD_SHARE) - self._bytes_of(self._scheduler.decisions.active_tenants())

    def _bytes_of(self, tenants: Iterable[Tenant]) -> int:
        return self._arena.bytes_of([segment for tenant in tenants for segment in tenant.segments])

    @property
    def _room_bytes(self) -> int:
        """The bound of the arena between steps."""
        pool = self._arena.capacity_bytes
        return self._arena_bytes if pool is None else int(pool * (1 - POOL_SPARE))

    @property
    def _has_room(self) -> bool:
        return self._arena.nbytes <= self._room_bytes

    def _reclaim(self, rows: int) -> bool:
        """Evict idle tenants for a segment of `rows` rows. False: none could be evicted."""
        before = self._arena.nbytes
        enough = before - max(rows * self._arena.stored_bytes, int(self._room_bytes * POOL_SPARE))
        self._make_room(lambda: self._arena.nbytes <= enough)
        return self._arena.nbytes < before

    def _make_room(self, enough: Callable[[], bool]) -> bool:
        """Evict idle tenants until there is `enough` room, those with queued turns last."""
        waits = self._scheduler.inbox.holds
        return self._tenants.make_room(
            enough, lambda tenant: not waits(tenant.name) and self._may_evict(tenant)
        ) or self._tenants.make_room(enough, self._may_evict)

    def _may_evict(self, tenant: Tenant) -> bool:
        """Whether nobody uses the tenant's live state."""
        if self._scheduler.decisions.is_active(tenant.name) or tenant.awaiting:
            return False
        decided = tenant.cursor >= tenant.next_seq or tenant.name in self._scheduler.blocked
        return decided or not self._scheduler.deciding

    def _evict(self, tenant: Tenant) -> None:
        self._tenants.evict(tenant.name)
        if tenant.cursor < tenant.next_seq:
            self._waiting[tenant.name] = None


def arena_of(settings: Settings, dim: int) -> Arena:
    """The arena on the device of the settings, with its share of GPU memory. UndertowError if impossible."""
    try:
        device = resolve(settings.device)
    except ValueError as error:
        raise UndertowError(str(error)) from None
    if device == "cpu":
        return make_arena(dim, device)
    import torch

    # torch caches freed memory, such as a closed engine's pool, which the driver then reports as used
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    pools_bytes = sum(arena.capacity_bytes or 0 for arena in _pools)
    own_bytes = torch.cuda.memory_reserved() - pools_bytes
    nbytes = settings.shares.arena_bytes(total_bytes, free_bytes, own_bytes, pools_bytes)
    try:
        arena = make_arena(dim, device, nbytes, settings.gate_int8)
    except MemoryError as error:
        raise UndertowError(str(error)) from None
    _pools.add(arena)
    return arena
