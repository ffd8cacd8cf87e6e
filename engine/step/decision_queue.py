"""The order of decisions: a tenant's log in seq order, one LLM job at a time, and tenants in turn."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from undertow.engine.base.model import UndertowError, Usage
from undertow.engine.base.pacing import Pacing
from undertow.engine.base.trace import current_traceparent
from undertow.engine.llm.client import BadReply, Completion
from undertow.engine.policies.base import Decide, Effect, PolicyResult, ReadGate
from undertow.engine.step.lag import LagTracker
from undertow.engine.tenants.tenant import Tenant

# Between tries of a tenant that the LLM servers refuse, as between probes of such a server; and how many of
# them try again in one step once a server answers.
REFUSED_PAUSE_S, RETRIED_AT_A_TIME = 60.0, 64


class TenantFault(UndertowError):
    """An unexpected exception while deciding a record of one tenant."""

    def __init__(self, tenant: str, seq: int, reason: str) -> None:
        super().__init__(tenant, seq, reason)
        self.tenant, self.seq, self.reason = tenant, seq, reason

    def __str__(self) -> str:
        return (
            f"deciding record {self.seq} of tenant {self.tenant!r} failed: {self.reason}. Please report it."
        )


@dataclass(slots=True)
class DecisionRun:
    """A policy coroutine that decides one record of one tenant's log.

    `operation` names the last LLM call, `usage` holds the tokens so far by operation, and `call` is the
    call in flight. `traceparent` belongs to the request that brought the record.
    """

    tenant: Tenant
    seq: int
    steps: Decide
    operation: str = ""
    usage: dict[str, Usage] = field(default_factory=dict)
    model: str | None = None
    call: Future[Completion] | None = None
    traceparent: str | None = None

    def resume(self, value: Any) -> Effect | PolicyResult:
        """Send a result to the coroutine. Returns its next effect or its decision. TenantFault."""
        try:
            if isinstance(value, BadReply):
                return self.steps.throw(value)
            return self.steps.send(value)
        except StopIteration as stop:
            outcome: PolicyResult = stop.value
            return outcome
        except Exception as error:
            raise TenantFault(self.tenant.name, self.seq, repr(error)) from error

    def add_usage(self, usage: Usage) -> None:
        """Count the tokens of a reply to the last call."""
        self.usage[self.operation] = self.usage.get(self.operation, Usage()) + usage


Begun = tuple[DecisionRun, Effect | PolicyResult]


class DecisionQueue:
    """Owns the ready, running, waiting and blocked tenants. A tenant is in at most one of the four.

    Waiting: the next turn to decide has no vector yet.
    """

    def __init__(self, begin: Callable[[Tenant, int], Decide]) -> None:
        """`begin` returns the coroutine that decides record `seq` of a tenant."""
        self._begin = begin
        self.lag_tracker = LagTracker()
        # The reason why a tenant is blocked, by name.
        self.blocked: dict[str, str] = {}
        # Those of them that the LLM servers refuse, and when they did last (time.monotonic), oldest first.
        self.refused: dict[str, float] = {}
        # When one of them may try whether the servers still refuse; 0: one has answered.
        self._probe_at_s = 0.0
        self._ready: OrderedDict[str, Tenant] = OrderedDict()
        self._running: dict[str, DecisionRun] = {}
        self._waiting: dict[str, Tenant] = {}
        # Those with turns that have no vector yet, whatever else they are, by name.
        self.awaiting: OrderedDict[str, Tenant] = OrderedDict()

    @property
    def ready_count(self) -> int:
        return len(self._ready)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def active_count(self) -> int:
        return len(self._ready) + len(self._running) + len(self._waiting)

    def active_tenants(self) -> list[Tenant]:
        """Ready, running and waiting tenants. Their live state must stay in memory."""
        running = [run.tenant for run in self._running.values()]
        return [*self._ready.values(), *running, *self._waiting.values()]

    def is_active(self, name: str) -> bool:
        """Whether the tenant is ready, running or waiting."""
        return name in self._running or name in self._ready or name in self._waiting

    def running(self, name: str) -> DecisionRun | None:
        """The tenant's running decision."""
        return self._running.get(name)

    def is_running(self, run: DecisionRun) -> bool:
        """Whether this run was neither finished nor removed."""
        return self._running.get(run.tenant.name) is run

    def add(self, tenant: Tenant) -> None:
        """Make a tenant with undecided records ready or waiting, unless it is running or blocked."""
        if tenant.awaiting:
            self.awaiting[tenant.name] = tenant
        if tenant.cursor >= tenant.next_seq:
            return
        self.lag_tracker.note(tenant.name, tenant.next_seq - 1, current_traceparent())
        if tenant.name not in self._running and tenant.name not in self.blocked:
            waits = tenant.cursor >= tenant.decidable_end
            (self._waiting if waits else self._ready)[tenant.name] = tenant

    def begin_ahead(self, most_per_tenant: int, records: int, pacing: Pacing | None) -> list[Begun]:
        """Begin the next records of the ready tenants, an equal share each, in log order.

        Returns each run with its first effect or decision. Their tenants leave the queue: the first `records`
        of it, or all if it has fewer. Those that rest, by `pacing`, go to its end.
        """
        begun: list[Begun] = []
        share = max(1, min(most_per_tenant, records // len(self._ready)))
        for _ in range(min(records, len(self._ready))):
            name, tenant = self._ready.popitem(last=False)
            if pacing is not None and pacing.rest_s(name):
                self._ready[name] = tenant
                continue
            for seq in tenant.upcoming(share):
                run = DecisionRun(tenant, seq, self._begin(tenant, seq))
                effect = run.resume(None)
                begun.append((run, effect))
                if not isinstance(effect, ReadGate | PolicyResult) or tenant.control(seq) is not None:
                    break  # a control record may change what later records see
        return begun

    def start(self, runs: Iterable[DecisionRun]) -> None:
        """Mark decisions as running: they wait for more than the gate."""
        for run in runs:
            self._running[run.tenant.name] = run
            self._ready.pop(run.tenant.name, None)  # settling earlier records has made the tenant ready

    def finish(self, run: DecisionRun) -> None:
        """Remove a run. The caller adds the tenant again, or evicts it."""
        self._running.pop(run.tenant.name, None)

    def finish_all(self) -> list[DecisionRun]:
        """Remove all runs and return them."""
        runs = list(self._running.values())
        self._running.clear()
        return runs

    def block(self, name: str, reason: str) -> None:
        """Decide nothing of a tenant until the engine is opened again. Its turns are still stored."""
        self._ready.pop(name, None)
        self.blocked[name] = reason

    def refuse(self, name: str, reason: str) -> None:
        """Block a tenant that the LLM servers refuse, until `retries`."""
        self.block(name, reason)
        self.refused[name] = time.monotonic()
        self._probe_at_s = time.monotonic() + REFUSED_PAUSE_S

    def answered(self) -> None:
        """A server has answered: those that were refused may try again, each after its pause."""
        self._probe_at_s = 0.0

    @property
    def retry_is_due(self) -> bool:
        first_s = next(iter(self.refused.values()), math.inf)
        return time.monotonic() >= max(self._probe_at_s, first_s + REFUSED_PAUSE_S)

    def retries(self) -> list[str]:
        """Unblock those that try again now: one of all in each pause; or some, if a server answers. Names."""
        if not self.retry_is_due:
            return []
        before_s = time.monotonic() - REFUSED_PAUSE_S
        most = 1 if self._probe_at_s else RETRIED_AT_A_TIME
        names = [name for name, at_s in islice(self.refused.items(), most) if at_s <= before_s]
        for name in names:
            del self.refused[name]
            self.blocked.pop(name, None)
        if self._probe_at_s:
            self._probe_at_s = time.monotonic() + REFUSED_PAUSE_S
        return names

    def unready(self, name: str) -> None:
        """Take a tenant out of the ready queue, and out of those that wait."""
        for queue in (self._ready, self._waiting, self.awaiting):
            queue.pop(name, None)

    def awaited(self, most: int) -> list[tuple[Tenant, int]]:
        """At most so many turns without a vector, by seq: an equal share of each tenant, in order."""
        tenants = list(islice(self.awaiting.values(), most))
        for tenant in tenants:
            self.awaiting.move_to_end(tenant.name)
        share = max(1, most // max(1, len(tenants)))
        return [(tenant, seq) for tenant in tenants for seq in islice(tenant.awaiting, share)]

    def wake(self) -> None:
        """Go on with tenants whose next turn has its vector now, or was deleted."""
        for tenant in [tenant for tenant in self.awaiting.values() if not tenant.awaiting]:
            del self.awaiting[tenant.name]
        for tenant in [t for t in self._waiting.values() if t.cursor < t.decidable_end]:
            del self._waiting[tenant.name]
            self.add(tenant)

    def remove(self, name: str) -> DecisionRun | None:
        """Remove a tenant from every queue. Returns its run, which the caller closes."""
        self.unready(name)
        self.blocked.pop(name, None)
        self.refused.pop(name, None)
        self.lag_tracker.forget(name)
        return self._running.pop(name, None)
