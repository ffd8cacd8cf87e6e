"""Which tenants are in the arena: who is put out to make room, and who is taken up when there is some."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf
from weakref import WeakSet

import torch

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.step.scheduler import Scheduler
from undertow.engine.tenants.registry import ArenaFull, TenantRegistry
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena, make_arena
from undertow.kernels.device import resolve

# of a pool on a card, kept free between steps: evicting and packing little by little would cost more
POOL_SPARE = 1 / 16
# of a pool, filled with undecided tenants of earlier runs at most: each grows by the memories it makes
TAKE_UP_SHARE = 1 / 4
# tenants that are taken up at a time where a pool bounds them
TENANTS_AT_A_TIME = 64

# this process's pools on the card; a closed arena counts as none
_pools: WeakSet[Arena] = WeakSet()


class ArenaResidency:
    """The tenants of one engine in its arena, of `arena_bytes` where no pool bounds it.

    A tenant with work under way stays. One that the scheduler puts out before all is decided comes back
    from the journal when there is room, as does what earlier runs left undecided.
    """

    def __init__(self, tenants: TenantRegistry, arena: Arena, scheduler: Scheduler, arena_bytes: int) -> None:
        self._tenants = tenants
        self._arena = arena
        self._scheduler = scheduler
        self._arena_bytes = arena_bytes
        # tenants with undecided records that the arena has had no room for, in order
        self._behind: dict[str, None] = {}
        arena.reclaim = self._reclaim
        scheduler.put_out = self._put_out

    @property
    def complete(self) -> bool:
        """Whether every tenant with undecided records has been taken up."""
        return not self._behind

    def lacks(self, name: str) -> bool:
        """Whether the tenant waits to be taken up."""
        return name in self._behind

    def prepare(self) -> None:
        """Between steps: put out idle tenants while the arena is over its bound, and take up others."""
        self._tenants.let_go()
        if not self._has_room:
            self._make_room(lambda: self._has_room)
        self._take_up_behind()

    def take_up(self, behind: Sequence[str]) -> None:
        """Have these tenants' undecided records decided: as many as there is room for, then the rest."""
        self._behind |= dict.fromkeys(behind)
        self._take_up_behind()

    def _take_up_behind(self) -> None:
        """Load tenants that are behind as far as the arena has room; the rest when these are decided.

        Nobody while turns wait for room: what comes free is theirs, however many are behind.
        """
        if self._scheduler.lacks_room:
            return
        at_a_time = self._at_a_time(len(self._behind))
        while self._behind and (self._room_for_work > 0 or self._scheduler.idle):
            names = list(islice(self._behind, at_a_time))
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
                # the arena does not hold it even by itself; the others go on
                self._forget(names)
                self._scheduler.blocked[names[0]] = str(error)
                continue
            room = self._room_for_work
            while len(tenants) > 1 and self._bytes_of(tenants) > room:
                self._tenants.evict(tenants.pop().name)
            self._forget([tenant.name for tenant in tenants])
            for tenant in tenants:
                self._scheduler.wake(tenant)

    def _needs_nothing(self, name: str) -> bool:
        """Whether the tenant is at work again, or has been erased or moved away, since it fell behind."""
        return self._scheduler.at_work(name) or name not in self._tenants

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            del self._behind[name]

    def _at_a_time(self, count: int) -> int:
        """How many of `count` tenants to load at a time: all with one read, unless a pool bounds them."""
        return max(1, count if self._arena.capacity_bytes is None else min(count, TENANTS_AT_A_TIME))

    @property
    def _room_for_work(self) -> float:
        """Bytes for tenants to be taken up: a part of a pool, as they stay until decided and will grow.

        Idle tenants do not count against it: they go when the room is needed, not before.
        """
        pool = self._arena.capacity_bytes
        if pool is None:
            return inf
        return int(pool * TAKE_UP_SHARE) - self._bytes_of(self._scheduler.tenants_at_work())

    def _bytes_of(self, tenants: Iterable[Tenant]) -> int:
        return self._arena.bytes_of([segment for tenant in tenants for segment in tenant.segments])

    @property
    def _room_bytes(self) -> int:
        """What the arena may hold between steps."""
        pool = self._arena.capacity_bytes
        return self._arena_bytes if pool is None else int(pool * (1 - POOL_SPARE))

    @property
    def _has_room(self) -> bool:
        return self._arena.nbytes <= self._room_bytes

    def _reclaim(self, rows: int) -> bool:
        """The arena has no room for a segment of `rows` rows: evict some idle tenants. False: none is."""
        before = self._arena.nbytes
        enough = before - max(rows * self._arena.row_bytes, int(self._room_bytes * POOL_SPARE))
        self._make_room(lambda: self._arena.nbytes <= enough)
        return self._arena.nbytes < before

    def _make_room(self, enough: Callable[[], bool]) -> bool:
        """Put out idle tenants until there is `enough` room; last those who have turns in the queue."""
        waits = self._scheduler.inbox.holds
        return self._tenants.make_room(
            enough, lambda tenant: not waits(tenant.name) and self._may_go(tenant)
        ) or self._tenants.make_room(enough, self._may_go)

    def _may_go(self, tenant: Tenant) -> bool:
        """Whether nobody holds the tenant's live state."""
        if self._scheduler.at_work(tenant.name):
            return False
        decided = tenant.cursor >= tenant.next_seq or tenant.name in self._scheduler.blocked
        return decided or not self._scheduler.deciding

    def _put_out(self, tenant: Tenant) -> None:
        self._tenants.evict(tenant.name)
        if tenant.cursor < tenant.next_seq:
            self._behind[tenant.name] = None


def arena_of(settings: Settings, dim: int) -> Arena:
    """The arena where the settings put it, on a card its share of it. UndertowError where it cannot be."""
    try:
        device = resolve(settings.device)
    except ValueError as error:
        raise UndertowError(str(error)) from None
    if device == "cpu":
        return make_arena(dim, device)
    # torch keeps what was freed, as the pool of a closed engine, from the driver's figure
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    pools_bytes = sum(arena.capacity_bytes or 0 for arena in _pools)
    own_bytes = torch.cuda.memory_reserved() - pools_bytes
    nbytes = settings.shares.arena_bytes(total_bytes, free_bytes, own_bytes, pools_bytes)
    try:
        arena = make_arena(dim, device, nbytes)
    except MemoryError as error:
        raise UndertowError(str(error)) from None
    _pools.add(arena)
    return arena
