"""Opens a shard's engine from its journal, and reopens it without the turns that made it fail."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from undertow.engine.api.engine import WAIT_FOR_REPLY_S, Engine, make_llm
from undertow.engine.base.config import Settings
from undertow.engine.base.model import PackedTurn, UndertowError
from undertow.engine.base.pacing import Pacing
from undertow.engine.base.trace import STEP, Observer, Trace
from undertow.engine.cluster.resharding.participant import ReshardingParticipant
from undertow.engine.cluster.root import SharedRoot
from undertow.engine.cluster.shard.call_queue import TurnCall, outcome_of
from undertow.engine.cluster.shard.quarantine import Quarantine, reason_of
from undertow.engine.cluster.shard.shard_metrics import ShardMetrics
from undertow.engine.cluster.shard_map import Removed, ShardMap
from undertow.engine.cluster.wire import Status
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.llm.client import LLMClient
from undertow.engine.step.admission import Ticket
from undertow.engine.step.batch_size import MOST_TURNS
from undertow.engine.step.decision_queue import TenantFault
from undertow.engine.step.scheduler import StepReport
from undertow.engine.step.warm_up import warm_up
from undertow.engine.storage.journal import Fenced
from undertow.engine.storage.location import StoreError
from undertow.engine.tenants.registry import ArenaFull

log = logging.getLogger(__name__)

# between attempts to open a journal that could not be opened
RETRY_S = 5.0

# what code in Python raises, and what ends it
NO_PANICS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)

# if so many turns fail one by one, the engine is to blame, not the turns
SICK_TURNS = 8

Suspect = tuple[TurnCall, int, PackedTurn]


class EnginePanic(RuntimeError):
    """A library of another language has failed in a way that no `except Exception` sees."""


class contained:
    """A library's panic as an exception: the engine is opened anew, as after any other. EnginePanic."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, panic: BaseException | None, __: object) -> None:
        if panic is not None and not isinstance(panic, NO_PANICS):
            raise EnginePanic(f"{type(panic).__name__}: {panic}") from panic


class EngineUnusable(UndertowError):
    """The engine fails with any turn; a new process may help, as with a lost device."""


def no_observers(settings: Settings) -> Sequence[Observer]:
    """No observers beside the shard's own metrics."""
    return ()


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Makes an engine's encoder, LLM client and observers: module-level functions, as they are pickled.

    The encoder and the observers live as long as the shard; each engine gets a new client and closes it.
    """

    encoder: Callable[[Settings], Encoder] = make_encoder
    llm: Callable[[Settings], LLMClient | None] = make_llm
    observers: Callable[[Settings], Sequence[Observer]] = no_observers


class ShardSupervisor:
    """One shard's engine, or why there is none now. Not thread-safe."""

    def __init__(
        self, root: SharedRoot, shard: str, settings: Settings, parts: EngineParts, life: str
    ) -> None:
        """`life`: see engine/storage/fencing.py."""
        self.engine: Engine | None = None
        self.failure: Exception | None = None
        self.root = root
        self._shard = shard
        self._settings = settings
        self._parts = parts
        self._life = life
        self._encoder: Encoder | None = None
        self._warm = False
        self._shard_metrics = ShardMetrics()
        self.trace = Trace(observers=[self._shard_metrics, *parts.observers(settings)])
        self._quarantine: Quarantine | None = None
        self._resharding: ReshardingParticipant | None = None
        # why no engine may be opened here any more: fenced, or removed from the cluster
        self._ended: Exception | None = None
        # tenants whose decisions have failed, and why: blocked until the shard is restarted
        self._faults: dict[str, str] = {}
        self._tried_s = -RETRY_S
        self.reopened_count = 0
        # how long the last opening took
        self.opened_s = 0.0

    @property
    def dim(self) -> int | None:
        """How many values the encoder's vectors have; None: no engine was opened yet."""
        return None if self._encoder is None else self._encoder.dim

    @property
    def has_work(self) -> bool:
        return self.engine is not None and not self.engine.idle

    @property
    def quarantine(self) -> Quarantine:
        assert self._quarantine is not None, "it comes with the engine"
        return self._quarantine

    @property
    def resharding(self) -> ReshardingParticipant:
        assert self._resharding is not None, "it comes with the engine"
        return self._resharding

    def open(self) -> Engine:
        """The engine; opened if necessary, with its undecided turns queued. UndertowError."""
        if self._ended is not None:
            raise self._ended
        if self.engine is None:
            self._tried_s = time.monotonic()
            try:
                self.engine = self._opened()
                self.opened_s = time.monotonic() - self._tried_s
            except Exception as error:
                self.failure = error
                raise
            self.failure = None
        return self.engine

    @property
    def due(self) -> bool:
        """Whether it is time to try again to open what could not be opened."""
        return self.engine is None and self._ended is None and self._tried_s + RETRY_S <= time.monotonic()

    def _opened(self) -> Engine:
        newest = self.newest_map()
        if self._quarantine is None:
            self._quarantine = Quarantine(self.root.location, self._shard, newest.tenant_key)
        if self._encoder is None:
            self._encoder = self._parts.encoder(self._settings)
        engine = self._made(self._encoder, newest.hash_key)
        try:
            if not self._warm:
                warm_up(self._encoder, engine.arena)
                self._warm = True
                for warning in engine.warnings:  # of the encoder, which stays: once
                    log.warning("shard %s: %s", self._shard, warning)
            # not `newest`: before this writer took over, another may have moved tenants by a newer map
            with_journal = self.newest_map()
            self._resharding = ReshardingParticipant(engine, self._shard, self.root.stores, with_journal)
            engine.resume()
            engine.tenants.names()  # read now, as an event loop may not wait for it later
            for tenant, why in self._faults.items():
                engine.scheduler.decisions.block(tenant, why)
        except BaseException:
            engine.close()
            raise
        return engine

    def _made(self, encoder: Encoder, hash_key: str) -> Engine:
        settings = self.root.settings(self._settings)
        llm = self._parts.llm(settings)
        try:
            return Engine(
                self.root.store(self._shard),
                settings,
                encoder,
                llm=llm,
                takeover=self.root.takeover,
                life=self._life,
                hash_key=hash_key,
                trace=self.trace,
            )
        except BaseException:
            if llm is not None:
                llm.close()
            raise

    def step(
        self, engine: Engine, calls: int = 0, wait_s: float = 0.0, *, pacing: Pacing | None = None
    ) -> StepReport:
        """A step of the engine, counted. `calls`: that wait for receipts; the others: see Engine.step.

        While more turns wait than a step stores, decisions take a tenth of the time, as in a bulk load of
        one process.
        """
        with contained(), self.trace.span(STEP, calls=calls):
            report = engine.step(wait_s, storing=len(engine.scheduler.inbox) > MOST_TURNS, pacing=pacing)
        self._shard_metrics.stepped(report)
        return report

    def begin_step(self, engine: Engine, calls: int, *, pacing: Pacing | None) -> None:
        """As `step`, up to its commit."""
        with contained(), self.trace.span(STEP, calls=calls):
            engine.begin_step(storing=len(engine.scheduler.inbox) > MOST_TURNS, pacing=pacing)

    def end_step(self, engine: Engine) -> StepReport:
        """The rest of a step, once it is committed."""
        with contained():
            report = engine.end_step()
        self._shard_metrics.stepped(report)
        return report

    def keep_up(self, map_version: int) -> None:
        """Adopt the newest map if the shard's is older than this version. StoreError; Removed."""
        if map_version > self.resharding.map.version:
            self.resharding.adopt(self.newest_map())

    def newest_map(self) -> ShardMap:
        """The root's newest map. StoreError; Removed: this shard is not in it, and its engine was closed."""
        newest = self.root.newest_map()
        try:
            newest.require(self._shard)
        except Removed as removed:
            self._discard(removed)
            raise
        return newest

    def close(self) -> None:
        """Close the engine. Unwritten work is done again from the journal."""
        engine, self.engine = self.engine, None
        if engine is not None:
            try:
                engine.close()
            except UndertowError as error:
                log.warning("shard %s: its engine could not be closed properly: %s", self._shard, error)

    # ---- when it fails

    def inspect(self, error: Exception) -> bool:
        """After a failed command: whether the engine was closed for it, with its queue."""
        if isinstance(error, ValueError) or (
            isinstance(error, UndertowError) and not isinstance(error, StoreError)
        ):
            return False
        return self._discard(error)

    def isolate(self, error: Exception, suspects: Sequence[Suspect]) -> Exception | None:
        """After a failed step: store the queued turns, and park those that make the engine fail.

        Returns an error that no turn is to blame for, or one of quarantine; then some turns may be neither
        stored nor parked.
        """
        if isinstance(error, ArenaFull | EncoderDown):  # the engine is sound, and has dropped them
            return error
        self._discard(error)
        if _is_environment(error):
            return error
        guilty: list[tuple[Suspect, Exception]] = []
        if (failure := self._narrow(suspects, guilty)) is not None or not guilty:
            return failure
        if (sickness := self._sickness(guilty, len(suspects))) is not None:
            return sickness
        try:
            for suspect, error in guilty:
                self._park(suspect, error)
        except UndertowError as failure:
            return failure
        return None

    def _narrow(
        self, suspects: Sequence[Suspect], guilty: list[tuple[Suspect, Exception]]
    ) -> Exception | None:
        """Store the turns by bisection; those that fail go into `guilty`, each with its error."""
        error = self._attempt(suspects)
        if error is None or _is_environment(error) or not suspects:
            return error
        if len(suspects) == 1:
            guilty.append((suspects[0], error))
            return None
        middle = len(suspects) // 2
        return self._narrow(suspects[:middle], guilty) or self._narrow(suspects[middle:], guilty)

    def _sickness(self, guilty: Sequence[tuple[Suspect, Exception]], suspects: int) -> EngineUnusable | None:
        """The error of an engine that fails with any turn; None if the turns are to blame."""
        if (without := self._attempt([])) is None and (suspects < SICK_TURNS or len(guilty) < suspects):
            try:
                assert self._encoder is not None, "an engine was opened with it"
                self._encoder.encode(["hello"])
                return None
            except Exception as failure:  # noqa: BLE001 - as in _attempt
                without = failure
        error = without or guilty[-1][1]
        return EngineUnusable(f"shard {self._shard} fails on every input ({error!r}). It is to be restarted.")

    def _attempt(self, suspects: Sequence[Suspect]) -> Exception | None:
        """Store these turns with the engine, reopened if necessary; the error, or None."""
        while True:
            try:
                self._store(self.open(), suspects)
                return None
            except TenantFault as fault:
                self._discard(fault)  # retry with the tenant blocked
            except Exception as error:  # noqa: BLE001 - any error is what this looks for
                if not isinstance(error, ArenaFull | EncoderDown):
                    self._discard(error)
                return error

    def _store(self, engine: Engine, suspects: Sequence[Suspect]) -> None:
        tickets: list[Ticket] = []
        for _, _, turn in suspects:
            while not engine.scheduler.inbox.has_room_for(turn.tenant):
                self.step(engine)
            tickets.append(engine.scheduler.inbox.put(turn))
        self.step(engine)
        while any(ticket.receipt is None for ticket in tickets):
            self.step(engine, wait_s=WAIT_FOR_REPLY_S)
            if engine.server_lost:
                raise UndertowError(f"no room, and the LLM server does not answer: {engine.llm_error}")
        for (call, location, _), ticket in zip(suspects, tickets, strict=True):
            if ticket.receipt is not None:
                call.set(location, outcome_of(ticket.receipt))

    def _park(self, suspect: Suspect, error: Exception) -> None:
        call, location, turn = suspect
        reason = reason_of(error)
        log.error("shard %s: a turn makes the engine fail and is parked: %s", self._shard, reason)
        self.quarantine.park(turn, reason, error)
        call.set(location, (Status.PARKED, None, None, reason))

    def park_all(self, turns: Sequence[PackedTurn], reason: str) -> int:
        """Quarantine turns at a router's request; their number."""
        for turn in turns:
            self.quarantine.park(turn, reason)
        return len(turns)

    def _discard(self, error: Exception) -> bool:
        """Close the engine, as its memory may be ahead of the journal. Whether there was one."""
        if isinstance(error, Fenced | Removed):
            self._ended = error
        if isinstance(error, TenantFault):
            self._faults[error.tenant] = error.reason
        self.failure = error
        if self.engine is None:
            return False
        self.reopened_count += 1
        self.close()
        return True

    def report(self) -> dict[str, Any]:
        """The engine's state as plain data."""
        engine = self.engine
        state: dict[str, Any] = {
            "state": "failed" if engine is None else "serving",
            "failure": None if self.failure is None else f"{type(self.failure).__name__}: {self.failure}",
            "reopened": self.reopened_count,
            "pid": os.getpid(),
            "parked": self._quarantine.report() if self._quarantine is not None else [],
            "faulty_tenants": dict(self._faults),
            "tally": self._shard_metrics.report(),
        }
        if engine is None:
            return state
        return state | {
            "map_version": self.resharding.map.version,
            **asdict(engine.lag),
            "blocked": dict(Counter(engine.scheduler.blocked.values())),
            "llm_in_flight": engine.llm_in_flight,
            "llm_error": engine.llm_error,
            "llm_silent_s": engine.llm_silent_s,
            "arena_bytes": engine.arena.nbytes,
            "opened_s": round(self.opened_s, 3),
            "journal_rows": engine.journal.row_count,
        }


def _is_environment(error: Exception) -> bool:
    """Whether a disk, a server or a lost right to write is to blame: other turns would fail too."""
    return isinstance(error, UndertowError) and not isinstance(error, TenantFault)
