"""Commands to a shard's engine, and those among them that wait for their turn on a thread."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from undertow.engine.api.engine import Engine
from undertow.engine.base.pacing import Pacing
from undertow.engine.base.trace import current_traceparent
from undertow.engine.tenants.registry import Fetched

# Commands are taken on a loop, and those that wait are repeated, for so long in one round.
REPEATED_S = 0.002
# The latter let answers of calls be sent first, for so long.
HELD_S = 0.02
# So many cancelled commands of a tenant may stay in the queue. A move of the log takes about so long.
MOST_GONE, MOVE_S = 32, 0.02


class NotYet(Enum):
    """The result of a command that waits and has done a part of its work. It goes on in the next rounds.

    GO_ON: once answers of other calls were sent. SOON: it has little left to do, and comes first.
    """

    GO_ON = "go on"
    SOON = "soon"


@dataclass(slots=True, eq=False)
class Command:
    """Something to do with the engine. `wait`: repeated until its result is neither None nor NotYet.

    `is_quick`: whether the engine does it within some milliseconds. It runs in the trace of its caller: see
    engine/base/trace.py.
    """

    run: Callable[[], Any]
    future: Future[Any]
    is_quick: Callable[[Engine], bool]
    wait: bool = False
    # whose memories it is about; empty: those of the store
    tenant: str = ""
    # whether it reads what is in memory, and changes nothing
    searches: bool = False
    # whether it reads the journal, and of memory what there is of its tenant, and changes nothing of either
    reads: bool = False
    # whether it reads the journal, or purges it, and of memory reads only which tenants there are
    reads_journal: bool = False
    # whether it needs its tenant in memory
    loads: bool = False
    # of one that loads: what was read of its tenant; None: that was not tried, empty: it is used or failed
    fetched: Fetched | None = None
    # whether it reads rows of the journal and changes others, so that the log is to move to Lance before
    settles: bool = False
    # the lsn behind what it is to see in Lance, and how often that was to move there
    sees_until: int | None = None
    moves: int = 0
    # whether it waits while its tenant rests: not once it has begun, nor where calls wait for it
    rests: bool = True
    # whether it erases its tenant: how long it rests depends on its tenant's erasures alone
    erases: bool = False
    # whether it changes its tenant; so does what `settles`
    changes: bool = False
    # whether it has begun: its caller cannot cancel it any more
    begun: bool = False
    traceparent: str | None = field(default_factory=current_traceparent)

    def begin(self) -> bool:
        """Whether it is to run, for the first time or again: its caller has not cancelled it before."""
        self.rests = False
        self.begun = self.begun or self.future.set_running_or_notify_cancel()
        return self.begun

    def passes(self, other: Command) -> bool:
        """Whether it goes before this one of its tenant, which came first.

        What has begun passes what rests, but a change does not pass an erasure, which ends it. An erasure
        passes what changes nothing, as does what never rests: no change is overtaken.
        """
        if not other.rests:
            return False
        if self.begun:
            return not (self.changes and other.erases)
        return (self.erases or not self.rests) and not (other.changes or other.settles)

    def forget(self) -> None:
        """What was read of its tenant is used at once, or not at all, and so is how far the log had moved."""
        self.sees_until, self.moves = None, 0
        if self.fetched is not None:
            self.fetched = ()


class FairQueue:
    """Commands for a thread. Their tenants take turns; one that has used it for long rests, see Pacing."""

    def __init__(self, pacing: Pacing, erasing: Pacing) -> None:
        self.pacing, self.erasing = pacing, erasing
        self._by_tenant: OrderedDict[str, deque[Command]] = OrderedDict()

    def pacing_of(self, command: Command) -> Pacing:
        return self.erasing if command.erases else self.pacing

    @property
    def rest_s(self) -> float | None:
        """How long until `pop` gives one; None: none is there."""
        return min(map(self._rest_s, self._by_tenant), default=None)

    def append(self, command: Command) -> None:
        """Behind the others of its tenant, but for those that it passes."""
        waiting = self._by_tenant.setdefault(command.tenant, deque())
        if len(waiting) >= MOST_GONE:
            self._drop_gone(command.tenant)
        at = len(waiting)
        while at and command.passes(waiting[at - 1]):
            at -= 1
        waiting.insert(at, command)

    def put_back(self, command: Command) -> None:
        """What `pop` has given is to be the next one again."""
        self._by_tenant.setdefault(command.tenant, deque()).appendleft(command)
        self._by_tenant.move_to_end(command.tenant, last=False)

    def pop(self) -> Command | None:
        """The next one; None: there is none that may run now."""
        for tenant, waiting in list(self._by_tenant.items()):
            self._drop_gone(tenant)
            if waiting and self._rest_s(tenant):
                continue
            del self._by_tenant[tenant]
            if waiting:
                command = waiting.popleft()
                command.rests = False
                if waiting:
                    self._by_tenant[tenant] = waiting
                return command
        return None

    def take(self) -> list[Command]:
        """All of them; none is left."""
        waiting = [command for of_tenant in self._by_tenant.values() for command in of_tenant]
        self._by_tenant.clear()
        return waiting

    def _drop_gone(self, tenant: str) -> None:
        """Forget what its caller has cancelled. If the log has moved for it, that counts for the tenant."""
        waiting = self._by_tenant[tenant]
        if gone := [command for command in waiting if command.future.cancelled()]:
            self.pacing.worked(tenant, MOVE_S * sum(command.moves for command in gone))
            for command in gone:
                waiting.remove(command)

    def _rest_s(self, tenant: str) -> float:
        """Of a tenant with waiting commands: 0 if calls wait for one of them, as they keep their order."""
        waiting = self._by_tenant[tenant]
        if not tenant or not waiting[0].rests or any(not c.rests and not c.begun for c in waiting):
            return 0.0
        return self.pacing_of(waiting[0]).rest_s(tenant)


class Waiting(deque[Command]):
    """Commands that are repeated until they have a result."""

    repeated_s = 0.0

    def repeat(self, run: Callable[[Command], None], may_run: Callable[[Command], bool]) -> None:
        """Run each once that may, for a short time; who waits on is appended again."""
        self.repeated_s = time.monotonic()
        for _ in range(len(self)):
            if time.monotonic() > self.repeated_s + REPEATED_S:
                return
            command = self.popleft()
            (run if may_run(command) else self.append)(command)

    @property
    def gives_way(self) -> bool:
        """Whether it was repeated so recently that answers of other calls may be sent first."""
        return time.monotonic() < self.repeated_s + HELD_S

    def put_off(self, is_quick: Callable[[Command], bool], until: FairQueue) -> None:
        """Move commands that are no longer quick to those for a thread."""
        for _ in range(len(self)):
            command = self.popleft()
            (self if is_quick(command) else until).append(command)
