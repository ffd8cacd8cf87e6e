"""Calls of many turns inside a shard: their order, and the outcome of each turn."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from undertow.engine.base.model import PackedTurn, UndertowError
from undertow.engine.base.results import Receipt
from undertow.engine.base.trace import current_traceparent
from undertow.engine.cluster.wire import (
    Outcome,
    Status,
    check_turns,
    receipts_table,
    tenants_of,
    unpack,
    unpack_receipts,
)
from undertow.engine.step.admission import Block, Inbox, QueueFull, Ticket
from undertow.engine.tenants.turn_columns import TurnColumns

# the turns of a call of so many or more go to the engine as a block of columns
BLOCK_TURNS = 128

# clients whose sessions a shard keeps; a forgotten one begins a new session
CLIENTS = 4_096

# a trial lapses after this time unless its client renews or uses it
TRIAL_S = 5.0


@dataclass(frozen=True, slots=True)
class CallStamp:
    """The position of a call in its client's session: Ray keeps no order of calls to a concurrent actor.

    `token`: that of the session; `number`: counts its calls, from 0. `map_version`: of the map by which the
    call was sent to this shard, or of a newer one. `trial`: the token by which the call is alone in the
    shard (see CallQueues.trial); empty: it need not be.
    """

    client: str
    token: str
    number: int
    map_version: int
    trial: str = ""


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A shard's answer to a client's hello: the token of its session, and the version of the shard's map.

    `process` names the shard's process: if it has changed, the former one is dead.
    """

    token: str
    map_version: int
    process: str


class StaleSession(UndertowError):
    """The shard does not know this client's session: it was restarted. Say hello, then send again."""


class TurnCall(ABC):
    """The turns of one call, and what has become of each."""

    def __init__(self, count: int, map_version: int = 0) -> None:
        """`map_version`: the shard must know this map or a newer one."""
        self.map_version = map_version
        # no other call is in the shard until this one is over
        self.alone = False
        # whether it has waited for its tenants to be loaded
        self.held = False
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._traceparent = current_traceparent()
        self._outcomes: list[Outcome | None] = [None] * count
        # of turns in the engine's queue: with a ticket each, or as a block, and the places of its turns
        self._tickets: list[tuple[int, Ticket]] = []
        self._block: Block | None = None
        self._block_places: list[int] = []
        self._pending = deque(range(count))

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    @abstractmethod
    def turns(self) -> Sequence[PackedTurn]: ...

    @property
    @abstractmethod
    def tenants(self) -> frozenset[str]: ...

    @abstractmethod
    def _columns(self) -> TurnColumns:
        """All turns as columns."""

    @abstractmethod
    def _answer(self, outcomes: Sequence[Outcome]) -> object:
        """The result of the future, from the outcome of each turn."""

    @property
    def is_fed(self) -> bool:
        """Whether all turns have been offered to the engine."""
        return not self._pending

    def feed(self, inbox: Inbox, refuse: Callable[[PackedTurn], Outcome | None] | None) -> None:
        """Offer the turns, in order, while there is room.

        `refuse` gives the outcome of a turn that is not for this engine; None: all are for it.
        """
        if refuse is None and len(self._pending) == len(self) >= BLOCK_TURNS:
            if inbox.has_room_for_block(len(self)):
                self._block = Block(self._columns(), traceparent=self._traceparent)
                self._block_places = list(self._pending)
                self._pending.clear()
                inbox.put_block(self._block)
            return
        turns, pending = self.turns, self._pending
        while pending:
            turn = turns[pending[0]]
            outcome = None if refuse is None else refuse(turn)
            if outcome is None:
                if not inbox.has_room_for(turn.tenant):
                    return
                self._tickets.append((pending[0], inbox.put(turn, self._traceparent)))
            else:
                self._outcomes[pending[0]] = outcome
            pending.popleft()

    def settle(self, release: Callable[[int], None]) -> bool:
        """Answer once every turn has an outcome, and `release` so many before. Whether the call is over."""
        if self.future.done():
            release(len(self))
            return True
        if self._pending or any(ticket.receipt is None for _, ticket in self._tickets):
            return False
        self._collect()
        if self._block_places:
            return False
        answer = self._answer([outcome for outcome in self._outcomes if outcome is not None])
        release(len(self))
        self.future.set_result(answer)
        return True

    def _collect(self) -> None:
        for place, ticket in self._tickets:
            if ticket.receipt is not None:
                self._outcomes[place] = outcome_of(ticket.receipt)
        self._tickets = [(place, ticket) for place, ticket in self._tickets if ticket.receipt is None]
        if self._block is not None:
            stored, self._block.stored = self._block.stored, []
            for place, (id, seq) in zip(self._block_places, stored, strict=False):
                status = Status.DUPLICATE if id is None else Status.STORED
                self._outcomes[place] = status, id, seq, None
            del self._block_places[: len(stored)]

    def recall(self) -> list[int]:
        """The engine has lost its queue: the positions of the turns that were in it without a receipt."""
        self._collect()
        lost = [*self._block_places, *(place for place, _ in self._tickets)]
        self._tickets, self._block_places = [], []
        return lost

    def restore(self, places: Sequence[int]) -> None:
        """Offer recalled turns again, before all others."""
        self._pending.extendleft(reversed(places))

    def set(self, place: int, outcome: Outcome) -> None:
        self._outcomes[place] = outcome

    def withdraw(self, tenant: str, outcome: Outcome) -> None:
        """The engine has dropped a tenant's queued turns: set their outcome."""
        self._collect()
        dropped = [place for place, ticket in self._tickets if ticket.turn.tenant == tenant]
        self._tickets = [(place, t) for place, t in self._tickets if t.turn.tenant != tenant]
        if self._block_places and tenant in self.tenants:
            theirs = {place for place in self._block_places if self.turns[place].tenant == tenant}
            dropped += sorted(theirs)
            self._block_places = [place for place in self._block_places if place not in theirs]
        for place in dropped:
            self._outcomes[place] = outcome

    def fail(self, error: Exception) -> None:
        """Fail the call; none of its turns is acknowledged any more."""
        if not self.future.done():
            self.future.set_exception(error)


class TableCall(TurnCall):
    """Turns as a table of wire.TURNS, from another process; the result is a table of wire.RECEIPTS."""

    def __init__(self, table: pa.Table, map_version: int = 0, dim: int | None = None) -> None:
        """`dim`, ValueError: see check_turns."""
        check_turns(table, dim)
        super().__init__(len(table), map_version)
        self._table = table

    @cached_property
    def turns(self) -> Sequence[PackedTurn]:
        """Unpacked when first needed, in a round, so that the thread that takes calls is free."""
        return unpack(self._table)

    @cached_property
    def tenants(self) -> frozenset[str]:
        return frozenset(tenants_of(self._table))

    def _columns(self) -> TurnColumns:
        return TurnColumns.of_table(self._table)

    def _answer(self, outcomes: Sequence[Outcome]) -> pa.Table:
        return receipts_table(outcomes)


class PackedCall(TurnCall):
    """A few turns from another process; the result is the outcome of each, as in a row of wire.RECEIPTS."""

    def __init__(self, turns: Sequence[PackedTurn], map_version: int = 0) -> None:
        super().__init__(len(turns), map_version)
        self._turns = turns

    @property
    def turns(self) -> Sequence[PackedTurn]:
        return self._turns

    @cached_property
    def tenants(self) -> frozenset[str]:
        return frozenset(turn.tenant for turn in self._turns)

    def _columns(self) -> TurnColumns:
        return TurnColumns.of(self._turns)

    def _answer(self, outcomes: Sequence[Outcome]) -> object:
        return outcomes


class LocalCall(PackedCall):
    """Turns of this process; the result is a receipt for each."""

    def _answer(self, outcomes: Sequence[Outcome]) -> list[Receipt]:
        return unpack_receipts(outcomes, (turn.tenant for turn in self._turns))


def sent_call(turns: Sequence[PackedTurn] | pa.Table, stamp: CallStamp, dim: int | None = None) -> TurnCall:
    """The call of turns from another process. A list was checked where it was packed.

    `dim`, ValueError, of a table: see check_turns.
    """
    if isinstance(turns, pa.Table):
        return TableCall(turns, stamp.map_version, dim)
    return PackedCall(turns, stamp.map_version)


def outcome_of(receipt: Receipt) -> Outcome:
    """The outcome of a turn that the engine took."""
    status = Status.DUPLICATE if receipt.duplicate else Status.STORED
    return status, receipt.id, receipt.seq, None


@dataclass(slots=True)
class _Session:
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
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._trial: _Trial | None = None

    def begin(self, client: str) -> str:
        """Begin a client's session: its token. Early calls of its former session are refused."""
        self._refuse_ahead(self._sessions.pop(client, None))
        token = secrets.token_hex(8)
        self._sessions[client] = _Session(token)
        while len(self._sessions) > CLIENTS:
            self._refuse_ahead(self._sessions.popitem(last=False)[1])
        return token

    def trial(self, client: str, waiting_turns: int) -> str | None:
        """Reserve the shard for one call of a client: the token for its stamp. None: ask again.

        From the first request on no other call is taken, so that those under way can end. The trial lapses
        after TRIAL_S unless the client asks again or sends its call.
        """
        until_s = self._clock_s() + TRIAL_S
        if (trial := self._trial_under_way()) is None:
            trial = self._trial = _Trial(client, until_s)
        if trial.client != client:
            return None
        trial.until_s = until_s
        return None if waiting_turns else trial.token

    def accept(self, call: TurnCall, stamp: CallStamp, waiting_turns: int) -> list[TurnCall]:
        """The calls that are due now, in order; a call that came too early waits for its predecessors.

        StaleSession; QueueFull, set on the call: send it again, its successors wait for it.
        """
        session = self._sessions.get(stamp.client)
        if session is None or session.token != stamp.token or stamp.number < session.next:
            raise StaleSession("this shard was restarted, or has forgotten the client")
        self._sessions.move_to_end(stamp.client)
        trial = self._trial_under_way()
        if stamp.trial:
            if trial is None or trial.token != stamp.trial:
                raise StaleSession("the call was to be alone in this shard, and came too late for that")
            trial.call, call.alone = call, True
        session.ahead[stamp.number] = call
        ready: list[TurnCall] = []
        while (following := session.ahead.get(session.next)) is not None:
            if trial is not None and following is not trial.call:
                self._refuse(session.ahead.pop(session.next), "Another call is to be alone in this shard.")
                break
            if waiting_turns and waiting_turns + len(following) > self._bound:
                self._refuse(session.ahead.pop(session.next), f"{self._bound} turns wait at this shard.")
                break
            ready.append(session.ahead.pop(session.next))
            waiting_turns += len(following)
            session.next += 1
        return ready

    def end_all(self) -> None:
        """End all sessions: their clients have to begin new ones."""
        while self._sessions:
            self._refuse_ahead(self._sessions.popitem()[1])

    def _trial_under_way(self) -> _Trial | None:
        if self._trial is not None and self._trial.over(self._clock_s()):
            self._trial = None
        return self._trial

    @staticmethod
    def _refuse(call: TurnCall, reason: str) -> None:
        call.fail(QueueFull(f"{reason} Try again in a moment."))

    @staticmethod
    def _refuse_ahead(session: _Session | None) -> None:
        for call in session.ahead.values() if session is not None else ():
            call.fail(StaleSession("the client has begun a new session"))
