"""Requests begin in turns, so that no tenant makes the others wait. Used on the event loop only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from math import inf, log2
from time import perf_counter
from typing import Any, TypeVar

from starlette.types import Message, Receive, Scope

from undertow.engine.base.pacing import SERVED_S, Pacing, Served
from undertow.serving.http.middleware.admission import leave

T = TypeVar("T")

# The requests that begin in one iteration of the loop are expected to take so long.
ITERATION_S = 0.001
# Requests that are refused in one iteration: each takes half a millisecond from those that are served.
REFUSED_AT_ONCE = 1
# What one counts as, though it takes less: a tenant may not have a thousand in a second.
REFUSAL_S = 0.001
# So many wait to be refused, each for at most so long: they take memory, and who asks is to hear soon.
MOST_RESTING, LONGEST_REST_S = 1_024, 1.0
# What a request takes at least, with what is done before and after its turn.
LEAST_S = 0.0005
# Tenants that have used the loop about alike, by this power of two, take turns.
NEAR = 2.0
# A tenant has used far more than another: by this power of two. A request of the lighter one holds its own
# for so long: it may take much longer, without the loop.
FAR_MORE, HELD_S = 3.0, 0.02
# Work that gives way to them looks so often whether they have ended.
GIVE_WAY_S = 0.001
# What a tenant has used of the loop counts half after this time.
HALF_LIFE_S = 1.0
# Tenants whose use is kept; those that were idle longest are forgotten.
MOST_TENANTS = 4_096


@dataclass(slots=True, eq=False)
class _Use:
    """What a tenant uses of the loop.

    `rank`: the logarithm of the seconds used, decayed. Since all decay alike, it is that of moment 0, and
    the order of ranks is the order of uses at any moment.
    """

    rank: float = -inf
    typical_s: float = LEAST_S
    # held by the next part of long work, and when one last gave way for as long as it may
    part: asyncio.Lock = field(default_factory=asyncio.Lock)
    gave_way_s: float = -inf

    def add(self, seconds: float, now_s: float) -> None:
        now = now_s / HALF_LIFE_S
        self.rank = log2(max(2 ** (self.rank - now) + seconds, LEAST_S / 8)) + now

    def follow(self, seconds: float, now_s: float) -> None:
        """A request took so long, of which `typical_s` was added when it began."""
        self.add(seconds - self.typical_s, now_s)
        self.typical_s += (seconds - self.typical_s) / 8


class _Line:
    """Requests that wait. Tenants with a rank near the lowest take turns, each with its oldest request."""

    def __init__(self) -> None:
        # in the order of their turns; a tenant's rank is that of the moment when it came to the front
        self._ranks: dict[str, float] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    def __bool__(self) -> bool:
        return bool(self._ranks)

    @property
    def next_tenant(self) -> str:
        near = self.lowest_rank + NEAR
        return next(tenant for tenant, rank in self._ranks.items() if rank <= near)

    @property
    def lowest_rank(self) -> float:
        return min(self._ranks.values())

    async def wait(self, tenant: str, rank: float, on_lost: Callable[[], None] = lambda: None) -> None:
        """`on_lost`: called if the turn has come to one that was cancelled."""
        turn = asyncio.get_running_loop().create_future()
        if tenant not in self._waiting:
            self._waiting[tenant] = deque()
            self._ranks[tenant] = rank
        self._waiting[tenant].append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                on_lost()
            raise

    def call(self, tenant: str, rank: float) -> bool:
        """Let the tenant's oldest one go on; `rank`: of the tenant. False: it was cancelled."""
        turn = self._waiting[tenant].popleft()
        del self._ranks[tenant]
        if self._waiting[tenant]:
            self._ranks[tenant] = rank
        else:
            del self._waiting[tenant]
        if turn.done():
            return False
        turn.set_result(None)
        return True


class FairTurns:
    """Of the tenants with waiting requests, those that have used the loop least take turns.

    A few requests begin in one iteration of the loop, which reads new ones in between. Those of a tenant that
    has used it far more than another one whose request has just begun wait for a moment, or for its end.
    """

    def __init__(self, clock_s: Callable[[], float] = perf_counter) -> None:
        self._clock_s = clock_s
        self._seen = Served(clock_s)
        self._pacing, self._refusing = Pacing(self._seen, clock_s), Pacing(None, clock_s)
        self._resting = 0
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self._line, self._left_s, self._is_due = _Line(), ITERATION_S, False
        # what is being served, and since when
        self._served: dict[Turn, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._refusals: deque[asyncio.Future[None]] = deque()
        self._refusals_left = REFUSED_AT_ONCE
        # for the thread
        self._aside, self._is_busy = _Line(), False

    def turn(self, tenant: str, scope: Scope | None = None) -> Turn:
        """That of a new request, whose wait is over when its turn has come."""
        return Turn(self, tenant, scope or {})

    async def refusal(self, sender: str) -> None:
        """Wait to refuse a request: few are refused in one iteration, which slows down who asks on.

        `sender`: whose requests are refused; of one there are few in a second.
        """
        rest_s = self._refusing.rest_s(sender)
        self._refusing.worked(sender, REFUSAL_S)
        if rest_s and self._resting < MOST_RESTING:
            self._resting += 1
            try:
                await asyncio.sleep(min(rest_s, LONGEST_REST_S))
            finally:
                self._resting -= 1
        self._schedule()
        if self._refusals_left:
            self._refusals_left -= 1
        else:
            self._refusals.append(turn := asyncio.get_running_loop().create_future())
            await turn

    async def aside(self, tenant: str, run: Callable[..., T], *args: Any, paced: bool = True) -> T:
        """Run what would hold the loop on a thread, one at a time: more of them would share its lock.

        `paced`: whether it waits while the tenant rests.
        """
        while True:
            while paced and (rest_s := self._pacing.rest_s(tenant)):
                await asyncio.sleep(min(rest_s, SERVED_S))
            if not self._is_busy:
                break
            await self._aside.wait(tenant, self.use_of(tenant).rank, on_lost=self._next_aside)
            if not (paced and self._pacing.rest_s(tenant)):
                break
            self._next_aside()  # it is to rest after what it had before
        self._is_busy = True
        timed = self._pacing.measured(tenant)(partial(run, *args))
        work = asyncio.ensure_future(asyncio.to_thread(timed))
        work.add_done_callback(self._next_aside)
        return await asyncio.shield(work)  # a thread cannot be cancelled

    def _next_aside(self, _: object = None) -> None:
        """The thread is free: it stays taken if another one is called."""
        self._is_busy = False
        while self._aside and not self._is_busy:
            tenant = self._aside.next_tenant
            self._is_busy = self._aside.call(tenant, self.use_of(tenant).rank)

    def use_of(self, tenant: str) -> _Use:
        if (use := self._uses.get(tenant)) is not None:
            self._uses.move_to_end(tenant)
            return use
        use = self._uses[tenant] = _Use()
        if len(self._uses) > MOST_TENANTS:
            self._uses.popitem(last=False)
        return use

    async def begin(self, turn: Turn) -> None:
        """Wait for it; `end` follows."""
        self._seen.note(turn.tenant)
        use = self.use_of(turn.tenant)
        if use.rank + NEAR < self._line.lowest_rank if self._line else self._left_s > 0:
            self._begin(use)
        else:
            await self._line.wait(turn.tenant, use.rank)
        self._served[turn] = self._clock_s()

    async def give_way(self, tenant: str, used_s: float = 0.0) -> None:
        """Between parts of long work: others' callbacks run, and lighter requests that began just now.

        One part of a tenant begins in an iteration. `used_s`: what no Turn counts of the part before.
        """
        use = self.use_of(tenant)
        if used_s:
            use.add(used_s, self._clock_s())
        async with use.part:
            await asyncio.sleep(0)
            until_s = self._clock_s() + HELD_S
            while use.gave_way_s + HELD_S < self._clock_s() and self._held_s(use) > 0:
                if self._clock_s() >= until_s:
                    use.gave_way_s = until_s  # then its parts go on for as long
                else:
                    await asyncio.sleep(GIVE_WAY_S)

    def end(self, turn: Turn, seconds: float) -> None:
        """The request has ended, and used the loop for so long."""
        if self._served.pop(turn, None) is not None:
            self.use_of(turn.tenant).follow(seconds, self._clock_s())
            if self._line:
                self._schedule()

    def _begin(self, use: _Use) -> None:
        self._left_s -= max(use.typical_s, LEAST_S)
        use.add(use.typical_s, self._clock_s())
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_iteration)

    def _next_iteration(self) -> None:
        self._is_due, self._left_s, self._refusals_left = False, ITERATION_S, REFUSED_AT_ONCE
        while self._refusals and self._refusals_left:
            self._schedule()
            if not (turn := self._refusals.popleft()).done():
                turn.set_result(None)
                self._refusals_left -= 1
        while self._line:
            use = self.use_of(tenant := self._line.next_tenant)
            if self._left_s < ITERATION_S and self._left_s < use.typical_s:
                return  # another iteration is due
            if (held_s := self._held_s(use)) > 0:
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(held_s, self._go_on)
                return
            if self._line.call(tenant, use.rank):
                self._begin(use)

    def _held_s(self, use: _Use) -> float:
        """How long requests of lighter tenants, which began just now, hold one of this tenant."""
        began_s = [
            since_s
            for turn, since_s in self._served.items()
            if use.rank - self.use_of(turn.tenant).rank > FAR_MORE
        ]
        return max(began_s, default=-inf) + HELD_S - self._clock_s()

    def _go_on(self) -> None:
        self._timer = None
        self._schedule()


class Turn:
    """The turn of one request, once."""

    def __init__(self, turns: FairTurns, tenant: str, scope: Scope) -> None:
        self.tenant = tenant
        self._scope = scope
        self._turns = turns
        self._begun = False

    async def begin(self) -> None:
        """Wait for it."""
        if not self._begun:
            self._begun = True
            await self._turns.begin(self)
            leave(self._scope)

    def after_body(self, receive: Receive) -> Receive:
        """`receive`, where the last part of the request's body comes in turn."""

        async def receive_in_turn() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                await self.begin()
            return message

        return receive_in_turn

    def timed(self, work: Awaitable[None], beside_s: float = 0.0) -> _Timed:
        """The work for the request. Its use of the loop counts as the tenant's, and so does `beside_s`."""
        return _Timed(work, lambda seconds: self._turns.end(self, seconds + beside_s))


class _Timed:
    """An awaitable of some work, which tells how long the loop was used for it."""

    def __init__(self, work: Awaitable[None], used: Callable[[float], None]) -> None:
        """`used` is called at the end, with seconds."""
        self._steps = work.__await__()
        self._used = used

    def __await__(self) -> Generator[Any, Any, None]:
        total_s, step, given = 0.0, self._steps.send, None
        try:
            while True:
                began_s = perf_counter()
                try:
                    awaited = step(given)
                finally:
                    total_s += perf_counter() - began_s
                try:
                    given, step = (yield awaited), self._steps.send
                except BaseException as error:  # noqa: BLE001 - it goes to the work
                    given, step = error, self._steps.throw
        except StopIteration:
            return
        finally:
            del given  # an error, whose traceback has this frame
            self._used(total_s)
