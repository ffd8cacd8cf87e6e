"""The calls whose turns are not all stored yet: what is fed to the engine, and what is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import PackedTurn
from undertow.engine.cluster.shard.call_queue import TurnCall
from undertow.engine.cluster.shard.supervisor import ShardSupervisor, Suspect
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.cluster.wire import Outcome, Status
from undertow.engine.tenants.migration_records import InTransit, Moved


class TurnCalls:
    """The calls of turns under way in one shard, in order. Used within rounds alone."""

    def __init__(self, supervisor: ShardSupervisor) -> None:
        self._supervisor = supervisor
        self._calls: deque[TurnCall] = deque()
        # tenants known to be served here under this map, which moves nobody
        self._served: set[str] = set()
        self._served_by: ShardMap | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[TurnCall]:
        return iter(self._calls)

    def append(self, call: TurnCall) -> None:
        self._calls.append(call)

    def feed(self, engine: Engine) -> None:
        """Offer the calls' turns to the engine; none overtakes an earlier turn of its tenant."""
        waiting: set[str] = set()  # tenants with turns that had no room yet
        for call in self._calls:
            if waiting.isdisjoint(call.tenants):
                # else it might refuse a turn and take later ones
                self._supervisor.keep_up(call.map_version)
                call.feed(engine.scheduler.inbox, self._refusing(call))
            if not call.is_fed:
                waiting |= call.tenants

    def settle(self, release: Callable[[int], None]) -> None:
        """Answer the calls that are over, after their turns were released: who is answered may send more."""
        self._calls = deque(call for call in self._calls if not call.settle(release))

    def fail(self, error: Exception) -> int:
        """Fail all calls. How many turns those had."""
        turns = sum(map(len, self._calls))
        for call in self._calls:
            call.fail(error)
        self._calls.clear()
        return turns

    def suspects(self) -> list[Suspect]:
        """The turns that the engine has lost with its queue: one of them may have made it fail."""
        return [(call, place, call.turns[place]) for call in self._calls for place in call.recall()]

    def restore(self) -> None:
        """The engine has lost its queue for another reason: offer the turns again."""
        for call in self._calls:
            call.restore(call.recall())

    def _refusing(self, call: TurnCall) -> Callable[[PackedTurn], Outcome | None] | None:
        """What tells the outcome of a turn that is not to be stored here; None: all are."""
        elsewhere = {name: _refused(why) for name, why in self.refusals(call.tenants).items()}
        if elsewhere or self._supervisor.quarantine.concerns(call.tenants):
            return partial(self._refuse, elsewhere)
        return None

    def _refuse(self, elsewhere: dict[str, Outcome], turn: PackedTurn) -> Outcome | None:
        if (outcome := elsewhere.get(turn.tenant)) is not None:
            return outcome
        reason = self._supervisor.quarantine.reason(turn)
        return None if reason is None else (Status.PARKED, None, None, reason)

    # ---- resharding

    def reshard(self, method: str, *args: Any) -> Any:
        """One call of ReshardingParticipant; queued turns of sealed tenants are returned as IN_TRANSIT."""
        self._supervisor.root.check_moves()
        moving = self._supervisor.resharding
        if method != "seal":
            return getattr(moving, method)(*args)
        refusals = moving.refusals(moving.seal(*args))
        for call in self._calls:
            for tenant, refusal in refusals.items():
                call.withdraw(tenant, _refused(refusal))
        return None

    def refusals(self, tenants: frozenset[str]) -> dict[str, Moved | InTransit]:
        """See ReshardingParticipant.refusals; cached for served tenants until the map changes."""
        moving = self._supervisor.resharding
        if moving.map is not self._served_by:
            self._served, self._served_by = set(), moving.map
        names = tenants - self._served
        if not names:
            return {}
        refusals = moving.refusals(list(names))
        if moving.map.before is None:
            self._served |= names - refusals.keys()
        return refusals


def _refused(refusal: Moved | InTransit) -> Outcome:
    """The outcome of a turn whose tenant is not served here."""
    return Status.MOVED if isinstance(refusal, Moved) else Status.IN_TRANSIT, None, None, refusal.to
