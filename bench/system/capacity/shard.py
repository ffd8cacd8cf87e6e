"""One shard in simulated time: the engine's own Scheduler, Inbox, Tenant and RecMem, on modelled devices.

Journal, arena, encoder, gate and LLM are replaced by their times; what they would answer is replayed
from recorded lives of tenants, so that order, batches, jobs and queues are those of the real code.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.bench.system.capacity.clock import Clock, SimulatedLLM, SimulatedTrace
from undertow.bench.system.capacity.profile import (
    FIRED,
    FIRED_AFTER_REFUSAL,
    MERGED,
    REFUSED,
    LLMServer,
    Profile,
    episodes_of,
)
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Memory, Turn
from undertow.engine.policies.base import GateReading, Nearest, Scored, Thresholds
from undertow.engine.policies.recmem import KNOWN_FACTS
from undertow.engine.policies.registry import Policies
from undertow.engine.step.admission import Admission, Receipt, Ticket
from undertow.engine.step.batch_size import BatchSizer
from undertow.engine.step.effects import EffectReader
from undertow.engine.step.scheduler import Scheduler
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena
from undertow.prompts.builders import Prompt
from undertow.prompts.reply_schemas import (
    EpisodeDraft,
    EpisodesReply,
    FactDraft,
    FactsReply,
    MergeReply,
    Reply,
)

_SAID = "We talked about the garden, the new dance studio and who will look after the dog in June. "
_PAYLOAD = orjson.dumps({"key": "", "session": "", "messages": [{"role": "user", "content": 3 * _SAID}]})
_EPISODE = "The user described how the garden and the studio came along. "
# of a recorded life, left out when a tenant with a longer history goes through it again
_YOUTH = 1 / 4
_DIM = 4


@dataclass(frozen=True, slots=True)
class Arrival(Turn):
    """A turn that reaches the shard at `at_s`, of the tenant's `rank` in the traffic (0: no rank)."""

    at_s: float = 0.0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Memoir:
    """A tenant before the simulation: the life it repeats, turns stored so far, whether it is in memory."""

    life: str
    history: int = 0
    resident: bool = True

    def code(self, seq: int) -> str:
        """The letter of the turn `seq` of this simulation."""
        place = self.history + seq
        if place < len(self.life):
            return self.life[place]
        youth = int(len(self.life) * _YOUTH)
        return self.life[youth + (place - youth) % (len(self.life) - youth)]


Remember = Callable[[Arrival], Memoir]


class _Arena:
    """Segments without rows: a Tenant's bookkeeping needs no more."""

    def __init__(self) -> None:
        self._segments = 0

    def new_segment(self) -> int:
        self._segments += 1
        return self._segments

    def reserve(self, segments: NDArray[np.int64]) -> None: ...

    def extend(self, segments: NDArray[np.int64], vectors: NDArray[np.float16], live: bool) -> None: ...

    def write(self, handle: int, vector: NDArray[np.float16]) -> None: ...

    def set_live(self, handles: NDArray[np.int64], live: bool) -> None: ...


class _Resident:
    """A tenant in memory, with what the model adds to it."""

    def __init__(self, memoir: Memoir, tenant: Tenant) -> None:
        self.memoir, self.tenant = memoir, tenant
        self.arrived_s: list[float] = []
        self.former = Memory(f"{tenant.name}-former", "episode", tenant.name, 5 * _EPISODE, 1, -1, -1, 0, ())

    def current_episode(self) -> Memory:
        rows = self.tenant.tiers["episode"].rows
        return rows[-1] if rows and rows[-1] is not None else self.former


class SimulatedShard:
    """A scheduler with its models. `searchable_s` and `decided_s` hold (arrival, delay) of each turn, s."""

    def __init__(
        self,
        profile: Profile,
        settings: Settings,
        remember: Remember,
        *,
        servers: LLMServer | None = None,
        slowdown: float = 1.0,
        seed: int = 0,
        with_llm: bool = True,
    ) -> None:
        self._profile, self._remember = profile, remember
        self._episodes_per_turn, self._facts_per_turn = profile.made_per_turn
        self._theta = Thresholds(
            settings.similarity_threshold, settings.merge_threshold, settings.recurrence_count
        )
        self._arena = cast(Arena, _Arena())
        self._residents: dict[str, _Resident] = {}
        self._scanned = 0
        self._commits = self._facts = 0
        self.searchable_s: list[tuple[float, float]] = []
        self.decided_s: list[tuple[float, float]] = []
        self.llm = SimulatedLLM(servers or profile.llm, self._write, seed=seed)
        self.clock = Clock(profile, self.llm, slowdown)
        self.scheduler = Scheduler(
            cast(Journal, self),
            cast(Admission, self),
            cast(EffectReader, self),
            Policies(settings.under("recmem")),
            self.llm if with_llm else None,
            queue_turns=settings.queue_turns,
            batch_sizer=BatchSizer(settings.batch_turns, clock_s=lambda: self.clock.now_s),
            lookahead_turns=settings.gate_lookahead_turns,
            llm_in_flight=settings.llm_in_flight,
            token_budget=None,
            trace=SimulatedTrace(self.clock, self._take_scanned, lambda: self.scheduler.running_count),
        )

    def step(self) -> bool:
        """One step of the scheduler; whether it did anything."""
        before, heard = self.clock.charged, self.llm.delivered
        self.llm.delivered = 0
        self.scheduler.step()
        if self.clock.charged == before and not heard:
            return False
        self.clock.charge("step", heard)
        return True

    def finish(self) -> None:
        """Step until everything is decided, as `Engine.drain` does."""
        while not self.scheduler.idle:
            if not (self.step() or self.clock.wait(None) or self.scheduler.idle):
                raise RuntimeError("the simulated shard has work left and nothing to wait for")

    def put(self, arrival: Arrival) -> None:
        self.clock.charge("enqueue", 1)
        self.scheduler.inbox.put(arrival)

    # ---- what the scheduler asks of its journal, its admission and its readings

    def append(self, rows: Sequence[Row]) -> None:
        """Journal.append: the rows are stored; turns are searchable from now, decisions made."""
        if not rows:
            return
        self._commits += 1
        if self._commits % self._profile.commits_per_compaction == 0:
            self.clock.charge("compact", 1)
        # the span of the commit ends, and is charged, when this has returned
        cost = self._profile.cost("commit")
        now_s = self.clock.now_s + cost.seconds(len(rows))
        for row in rows:
            if row.kind in ("turn", "decision"):
                arrived_s = self._residents[row.tenant].arrived_s[row.seq]
                done = self.searchable_s if row.kind == "turn" else self.decided_s
                done.append((arrived_s, now_s - arrived_s))

    def admit(self, tickets: list[Ticket]) -> tuple[list[Row], list[Receipt], list[Tenant]]:
        """Admission.admit."""
        rows: list[Row] = []
        receipts: list[Receipt] = []
        touched: dict[str, Tenant] = {}
        cold: list[Memoir] = []
        for ticket in tickets:
            arrival = cast(Arrival, ticket.turn)
            resident = self._residents.get(arrival.tenant)
            if resident is None:
                resident = self._residents[arrival.tenant] = self._meet(arrival)
                cold += [] if resident.memoir.resident else [resident.memoir]
            tenant = touched[arrival.tenant] = resident.tenant
            rows.append(Row("turn", tenant.name, tenant.key, tenant.next_seq, b""))
            receipts.append(Receipt(tenant.name, None, tenant.next_seq, duplicate=False))
            tenant.add_turn(_PAYLOAD, tenant.next_seq, "", None)
            resident.arrived_s.append(arrival.at_s)
        if cold:
            stored = sum(memoir.history for memoir in cold)
            self.clock.charge("load", len(cold), stored * self._profile.bytes_per_turn)
        self.clock.charge("encode", len(tickets))
        self.clock.charge("append", len(tickets))
        return rows, receipts, list(touched.values())

    def _meet(self, arrival: Arrival) -> _Resident:
        tenant = Tenant(arrival.tenant, arrival.tenant, self._arena)
        tenant.thresholds_from.append((0, self._theta))
        return _Resident(self._remember(arrival), tenant)

    def gate(self, queries: Sequence[tuple[Tenant, int]]) -> list[GateReading]:
        """Readings.gate: what the tenant's life says of each turn."""
        for tenant in {id(tenant): tenant for tenant, _ in queries}.values():
            history = self._residents[tenant.name].memoir.history
            episodes = len(tenant.tiers["episode"].rows) + history * self._episodes_per_turn
            self._scan(history + len(tenant.seq_by_row) + episodes)
        return [self._reading(tenant, seq) for tenant, seq in queries]

    def _reading(self, tenant: Tenant, seq: int) -> GateReading:
        resident = self._residents[tenant.name]
        code = resident.memoir.code(seq)
        asks = code in MERGED + REFUSED + FIRED_AFTER_REFUSAL
        others = self._theta.theta_count - 1 if code in FIRED + FIRED_AFTER_REFUSAL else 0
        # the turns before; the first ones of a simulated tenant stand for others of its history
        relevant = tuple(max(seq - n - 1, 0) for n in range(others))
        score = 1.0 if asks else -1.0
        return GateReading(resident.current_episode(), score, relevant, (1.0,) * others, others)

    def embed(self, asks: Sequence[tuple[Tenant, tuple[str, ...]]]) -> list[NDArray[np.float16]]:
        """Readings.embed."""
        return [np.ones((len(texts), _DIM), np.float16) for _, texts in asks]

    def nearest(self, asks: Sequence[tuple[Tenant, Nearest]]) -> list[list[Scored]]:
        """Readings.nearest."""
        found = []
        for tenant, ask in asks:
            tier = tenant.tiers[ask.kind]
            history = self._residents[tenant.name].memoir.history
            self._scan(len(tier.rows) + history * self._facts_per_turn)
            found.append([Scored(m, 0.5) for m in tier.rows[-min(ask.k, KNOWN_FACTS) :] if m is not None])
        return found

    def _scan(self, rows: float) -> None:
        self._scanned += int(rows * self._profile.row_bytes)

    def _take_scanned(self) -> int:
        scanned, self._scanned = self._scanned, 0
        return scanned

    # ---- what the LLM writes

    def _write(self, prompt: Prompt, tenant: str) -> Reply:
        resident = self._residents[tenant]
        code = resident.memoir.code(resident.tenant.cursor)
        if prompt.operation == "merge":
            return MergeReply(same_story=code == MERGED, narrative=5 * _EPISODE if code == MERGED else "")
        if prompt.operation == "episode":
            drafts = [EpisodeDraft(text=f"{n}. {4 * _EPISODE}", turns=[]) for n in range(episodes_of(code))]
            return EpisodesReply(episodes=drafts)
        self._facts += 1
        before, after = ((self._facts + n) * self._profile.facts_per_refinement for n in (-1, 0))
        count = min(int(after) - int(before), 9)
        texts = [f"Fact {self._facts}.{n} of the user." for n in range(count)]
        return FactsReply(facts=[FactDraft(text=text, kind="user_event", replaces=None) for text in texts])


def life_of(lives: Sequence[str], tenant: str) -> str:
    """The life that a tenant repeats: by a hash of its name."""
    return lives[zlib.crc32(tenant.encode()) % len(lives)]


def delays(done: Iterable[tuple[float, float]], since_s: float) -> NDArray[np.float64]:
    """Delays of the turns that arrived at `since_s` or later, float64 [n]."""
    return np.array([delay for arrived_s, delay in done if arrived_s >= since_s])
