"""One call of many turns inside a shard: which of them are fed to the engine, and what became of each."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from undertow.engine.base.model import PackedTurn, UndertowError
from undertow.engine.base.results import Receipt
from undertow.engine.base.trace_context import current_traceparent
from undertow.engine.cluster.wire import Status, check_turns, receipts_table, unpack
from undertow.engine.step.admission import Inbox, QueueFull, Ticket

Outcome = tuple[Status, str | None, int | None, str | None]

# clients that a shard keeps in mind; one that was forgotten says hello again
CLIENTS = 4_096

# how long who has a shard to itself may take to send its call, or to ask for it again
TRIAL_S = 5.0


@dataclass(frozen=True, slots=True)
class CallStamp:
    """The place of a call in its client's line: Ray keeps no order of calls to a concurrent actor.

    `token` is what the shard said at the last hello; `number` counts the calls from there on, from 0.
    `map_version` is that of the map by which the call was sent to this shard, or of a newer one. `trial`:
    the call is to be alone in the shard, as `CallQueues.trial` has granted; empty: others may be there too.
    """

    client: str
    token: str
    number: int
    map_version: int
    trial: str = ""


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A shard's answer to a client's first call: the token of its line, and the map that it goes by.

    `process` names the shard's process: where it has changed, the one before is no more.
    """

    token: str
    map_version: int
    process: str


class StaleSession(UndertowError):
    """The shard knows nothing of this client's line: it has been restarted. Say hello, send again."""


class TurnCall:
    """Turns that came together, and their receipts. Several calls are fed to the engine as one line."""

    def __init__(self, table: pa.Table, map_version: int = 0) -> None:
        """`map_version`: the shard is to go by this map at least. ValueError for a table of no turns."""
        check_turns(table)
        self.map_version = map_version
        # no other call is in the shard until this one is over
        self.alone = False
        self.future: Future[pa.Table] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._traceparent = current_traceparent()
        self._table: pa.Table | None = table
        self._outcomes: list[Outcome | None] = [None] * len(table)
        self._tickets: list[tuple[int, Ticket]] = []
        self._pending = deque(range(len(table)))

    def __len__(self) -> int:
        return len(self._outcomes)

    @cached_property
    def turns(self) -> list[PackedTurn]:
        """Made when they are needed, by the thread that needs them: the thread that takes calls in would
        do it while the engine's waits for it."""
        table, self._table = self._table, None
        assert table is not None, "a call is unpacked once"
        return unpack(table)

    @cached_property
    def tenants(self) -> frozenset[str]:
        return frozenset(turn.tenant for turn in self.turns)

    def feed(self, inbox: Inbox, refuse: Callable[[PackedTurn], Outcome | None] | None) -> bool:
        """Offer the turns, in order, while there is room. Whether all have been offered.

        `refuse` says what becomes of a turn that is not for this engine; None: all are for it.
        """
        turns, pending, room = self.turns, self._pending, inbox.room
        while pending and room > 0:
            place = pending.popleft()
            outcome = None if refuse is None else refuse(turns[place])
            if outcome is None:
                self._tickets.append((place, inbox.put(turns[place], self._traceparent)))
                room -= 1
            else:
                self._outcomes[place] = outcome
        return not pending

    def settle(self) -> bool:
        """Give the receipts, once every turn has one. Whether the call is over."""
        if self.future.done():
            return True
        if self._pending or any(ticket.receipt is None for _, ticket in self._tickets):
            return False
        self._collect()
        self.future.set_result(receipts_table([outcome for outcome in self._outcomes if outcome is not None]))
        return True

    def _collect(self) -> None:
        for place, ticket in self._tickets:
            if ticket.receipt is not None:
                self._outcomes[place] = outcome_of(ticket.receipt)
        self._tickets = [(place, ticket) for place, ticket in self._tickets if ticket.receipt is None]

    def recall(self) -> list[int]:
        """The engine has lost its queue: the places of the turns that were in it without a receipt."""
        self._collect()
        lost = [place for place, _ in self._tickets]
        self._tickets = []
        return lost

    def restore(self, places: Sequence[int]) -> None:
        """Turns that were recalled are offered again, before all others."""
        self._pending.extendleft(reversed(places))

    def set(self, place: int, outcome: Outcome) -> None:
        self._outcomes[place] = outcome

    def withdraw(self, tenant: str, outcome: Outcome) -> None:
        """The engine has dropped what it had in its queue of a tenant: that is what became of it."""
        self._collect()
        for place, ticket in self._tickets:
            if ticket.turn.tenant == tenant:
                self._outcomes[place] = outcome
        self._tickets = [(place, t) for place, t in self._tickets if t.turn.tenant != tenant]

    def fail(self, error: Exception) -> None:
        """Nothing more is acknowledged of this call."""
        if not self.future.done():
            self.future.set_exception(error)


def outcome_of(receipt: Receipt) -> Outcome:
    """What became of a turn that the engine took."""
    status = Status.DUPLICATE if receipt.duplicate else Status.STORED
    return status, receipt.id, receipt.seq, None


@dataclass(slots=True)
class _ClientQueue:
    token: str
    next: int = 0
    ahead: dict[int, TurnCall] = field(default_factory=dict)


@dataclass(slots=True)
class _Trial:
    client: str
    until_s: float
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    call: TurnCall | None = None

    def over(self, now_s: float) -> bool:
        return now_s > self.until_s if self.call is None else self.call.future.done()


class CallQueues:
    """Puts each client's calls back in order. Not thread-safe."""

    def __init__(self, bound_turns: int, clock_s: Callable[[], float] = time.monotonic) -> None:
        """`bound_turns`: how many turns may wait before a call is refused."""
        self.process = secrets.token_hex(8)
        self._bound = bound_turns
        self._clock_s = clock_s
        self._lines: OrderedDict[str, _ClientQueue] = OrderedDict()
        self._trial: _Trial | None = None

    def begin(self, client: str) -> str:
        """A new line for a client: its token. Calls of an earlier one that came too early are refused."""
        self._refuse_ahead(self._lines.pop(client, None))
        token = secrets.token_hex(8)
        self._lines[client] = _ClientQueue(token)
        while len(self._lines) > CLIENTS:
            self._refuse_ahead(self._lines.popitem(last=False)[1])
        return token

    def trial(self, client: str, waiting_turns: int) -> str | None:
        """Let a client have the shard to itself for one call: the token of its stamp. None: ask again.

        From the first asking on no other call is taken, so that those under way come to their end. Who has
        it keeps it by asking again; who does neither that nor sends its call within TRIAL_S has lost it.
        """
        until_s = self._clock_s() + TRIAL_S
        if (trial := self._trial_under_way()) is None:
            trial = self._trial = _Trial(client, until_s)
        if trial.client != client:
            return None
        trial.until_s = until_s
        return None if waiting_turns else trial.token

    def accept(self, call: TurnCall, stamp: CallStamp, waiting_turns: int) -> list[TurnCall]:
        """The calls whose turn it is by now, in order; a call that came too early waits for those before.

        StaleSession; QueueFull: the same call is to be sent again, those behind it wait for that.
        """
        line = self._lines.get(stamp.client)
        if line is None or line.token != stamp.token or stamp.number < line.next:
            raise StaleSession("this shard was restarted, or has forgotten the client")
        self._lines.move_to_end(stamp.client)
        trial = self._trial_under_way()
        if stamp.trial:
            if trial is None or trial.token != stamp.trial:
                raise StaleSession("the call was to be alone in this shard, and came too late for that")
            trial.call, call.alone = call, True
        line.ahead[stamp.number] = call
        ready: list[TurnCall] = []
        while (following := line.ahead.get(line.next)) is not None:
            if trial is not None and following is not trial.call:
                self._refuse(line.ahead.pop(line.next), "Another call is to be alone in this shard.")
                break
            if waiting_turns and waiting_turns + len(following) > self._bound:
                self._refuse(line.ahead.pop(line.next), f"{self._bound} turns wait at this shard.")
                break
            ready.append(line.ahead.pop(line.next))
            waiting_turns += len(following)
            line.next += 1
        return ready

    def end_all(self) -> None:
        """No line goes on: its clients have to begin anew."""
        while self._lines:
            self._refuse_ahead(self._lines.popitem()[1])

    def _trial_under_way(self) -> _Trial | None:
        if self._trial is not None and self._trial.over(self._clock_s()):
            self._trial = None
        return self._trial

    @staticmethod
    def _refuse(call: TurnCall, reason: str) -> None:
        call.fail(QueueFull(f"{reason} Try again in a moment."))

    @staticmethod
    def _refuse_ahead(line: _ClientQueue | None) -> None:
        for call in line.ahead.values() if line is not None else ():
            call.fail(StaleSession("the client has begun a new line"))
