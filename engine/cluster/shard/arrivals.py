"""What has come to a shard and was not taken up: commands, and calls that add turns."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.shard.call_queue import CallQueues, CallStamp, SessionStart, TurnCall
from undertow.engine.cluster.shard.commands import Command, NotYet
from undertow.engine.cluster.shard.quick import is_at_hand, may_be_held, read_keys, takes_turns
from undertow.engine.step.admission import QueueFull

Arrival = Command | TurnCall


class ShardClosed(UndertowError):
    """The shard has ended: it was closed, or met an unexpected error."""

    def __init__(self, shard: str) -> None:
        super().__init__(shard)
        self.shard = shard

    def __str__(self) -> str:
        return f"shard {self.shard} was closed. Open it again."


class Arrivals:
    """A queue that any thread puts into, and the engine's rounds take from."""

    def __init__(self, shard: str, queue_turns: int) -> None:
        self._shard = shard
        self._waiting: deque[Arrival] = deque()
        # commands that have begun, or that prepare a tenant, and have little left to do: they come first
        self.parts: deque[Command] = deque()
        # guards all of this, but for taking from the queue's front
        self._lock = threading.Lock()
        self._queue_turns = queue_turns
        self._sessions = CallQueues(queue_turns)
        self.closed = False
        # accepted and not stored yet
        self.turns = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    # ---- from any thread

    def put(self, command: Command) -> None:
        with self._lock:
            self._put(command)

    def offer(self, call: TurnCall, stamp: CallStamp) -> None:
        """Take a call of a session. StaleSession; all other errors are set on the call's future."""
        with self._lock:
            self._accept(self._sessions.accept(call, stamp, self.turns))

    def offer_next(self, call: TurnCall) -> None:
        """Take a call of this process. QueueFull."""
        with self._lock:
            if self.turns and self.turns + len(call) > self._queue_turns:
                raise QueueFull(f"{self._queue_turns} turns wait to be stored. Try again in a moment.")
            self._accept([call])

    def trial(self, client: str) -> str | None:
        """See CallQueues.trial."""
        with self._lock:
            return self._sessions.trial(client, self.turns)

    def _accept(self, calls: Sequence[TurnCall]) -> None:
        """With the lock held."""
        self.turns += sum(map(len, calls))
        for call in calls:
            self._put(call)

    def _put(self, arrival: Arrival, to: deque[Any] | None = None) -> None:
        """With the lock held."""
        if self.closed:
            arrival.future.set_exception(ShardClosed(self._shard))
        else:
            (self._waiting if to is None else to).append(arrival)

    def put_part(self, command: Command) -> None:
        """Put it before all that has arrived."""
        with self._lock:
            self._put(command, self.parts)

    # ---- from a round

    def take(self) -> Arrival:
        """The first one. IndexError."""
        return self._waiting.popleft()

    def put_first(self, arrivals: Sequence[Arrival]) -> None:
        """These come next, in their order."""
        with self._lock:
            self._waiting.extendleft(reversed(arrivals))

    def release(self, turns: int) -> None:
        """So many turns do not wait any more."""
        with self._lock:
            self.turns -= turns

    def begin_session(self, client: str, map_version: int) -> SessionStart:
        with self._lock:
            token = self._sessions.begin(client)
        return SessionStart(token, map_version, self._sessions.process)

    def end_sessions(self) -> Sequence[TurnCall]:
        """The calls that wait, as later ones would be out of order; commands stay."""
        with self._lock:
            self._sessions.end_all()
            waiting, self._waiting = self._waiting, deque()
            self._waiting.extend(one for one in waiting if isinstance(one, Command))
            return [one for one in waiting if isinstance(one, TurnCall)]

    def close(self) -> Sequence[Arrival]:
        """What waits; all that comes later fails."""
        with self._lock:
            self.closed, self.turns = True, 0
            waiting, self._waiting = self._waiting, deque()
            while self.parts:  # a round may take one meanwhile
                waiting.append(self.parts.popleft())
            return waiting


class HeldCalls:
    """These calls, in order, with what must not overtake them. Other calls and commands do."""

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._open_engine = open_engine
        self._held: list[Arrival] = []
        # of what is held
        self._tenants: set[str] = set()
        self._preparing: set[str] = set()
        # whether a tenant was made ready since the last `take`
        self.may_go_on = False

    def hold(self, engine: Engine | None, call: TurnCall) -> Sequence[Command]:
        """Hold a call. Returns the commands that prepare its tenants; none: it cannot be held, or was."""
        if call.held or engine is None or not may_be_held(engine, call):
            return []
        call.held = True
        self._hold(call)
        missing = [tenant for tenant in call.tenants if not takes_turns(engine, tenant)]
        self._preparing.update(missing)
        return [
            Command(
                partial(self._prepare, tenant),
                Future(),
                partial(is_at_hand, tenant=tenant),
                wait=True,
                tenant=tenant,
                loads=True,
                rests=False,
            )
            for tenant in missing
        ]

    def _prepare(self, tenant: str) -> NotYet | bool:
        """Read some dedupe keys of a tenant. What is raised, the held calls meet again."""
        ready = True
        try:
            ready = read_keys(self._open_engine(), tenant)
        finally:
            if ready:
                self._preparing.discard(tenant)
                self.may_go_on = True
        return ready or NotYet.SOON

    def keep(self, arrival: Arrival) -> bool:
        """Hold what adds to a held call's tenant too, or edits or erases it. False: it is none of these."""
        is_change = not isinstance(arrival, Command) or arrival.settles
        if not is_change or self._tenants.isdisjoint(_tenants_of(arrival)):
            return False
        self._hold(arrival)
        return True

    def _hold(self, arrival: Arrival) -> None:
        self._held.append(arrival)
        self._tenants |= _tenants_of(arrival)

    def take(self, *, all_of_them: bool = False) -> Sequence[Arrival]:
        """What need not wait any more, in order: it shares no tenant, even through others, with what does."""
        held, free = self._held, list[Arrival]()
        self._held, self._tenants, self.may_go_on = [], set(), False
        waiting, size = set() if all_of_them else set(self._preparing), -1
        # earlier calls of these tenants stay too: once taken, `keep` would put them behind the later ones
        while len(waiting) > size:
            size = len(waiting)
            waiting.update(*(ts for ts in map(_tenants_of, held) if not waiting.isdisjoint(ts)))
        for arrival in held:
            if waiting.isdisjoint(_tenants_of(arrival)):
                free.append(arrival)
            else:
                self._hold(arrival)
        return free


def _tenants_of(arrival: Arrival) -> frozenset[str]:
    return frozenset([arrival.tenant]) if isinstance(arrival, Command) else arrival.tenants
