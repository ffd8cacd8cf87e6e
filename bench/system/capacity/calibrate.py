"""A profile of this machine: the engine timed phase by phase on short runs, and costs fitted to that."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from undertow.bench.machine import describe
from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import MockReplies
from undertow.bench.system.capacity.profile import (
    FIRED,
    FIRED_AFTER_REFUSAL,
    MERGED,
    PHASES,
    REFUSED,
    WAITS,
    Cost,
    LLMServer,
    Profile,
    Sample,
    fitted,
)
from undertow.bench.system.ingest import CachedVectors, settings
from undertow.bench.system.throughput_load import copies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Decision, Turn
from undertow.engine.base.trace import Trace
from undertow.engine.llm.client import LLMClient
from undertow.engine.readers import read
from undertow.engine.step.admission import Inbox
from undertow.engine.storage.journal import COMMITS_PER_COMPACTION

NEVER_FIRES: dict[str, Any] = {"theta_count": 1000, "theta_merge": 1.0}
_COLD_GROUPS = (1, 1, 1, 4, 4, 16, 16)
_QUEUED_TURNS = 1_000
_QUEUED_TIMES = 5


class Stopwatch(Trace):
    """Times each phase by itself, without the phases inside it, against what it had to do."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self.outer_s = 0.0
        self.engine: Engine | None = None
        self.asked = 0  # prompts sent; an instant mock has replied to them by the next step
        self._inner_s: list[float] = []
        self._tenants = self._queries = self._running = 0
        self._commits = 0

    @contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        (count,) = (int(str(value)) for value in args.values())
        if name == "decide":
            self._tenants, self._running = count, self._running_count
        self._inner_s.append(0.0)
        began_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - began_s
            own_s = spent_s - self._inner_s.pop()
            if self._inner_s:
                self._inner_s[-1] += spent_s
            else:
                self.outer_s += spent_s
            self._note(name, count, own_s, queries="queries" in args)

    def _note(self, name: str, count: int, own_s: float, *, queries: bool) -> None:
        extra = 0.0
        if queries:
            self._queries = count
        if name == "decide":
            count, extra = self._queries, max(0, self._running_count - self._running)
        elif name in ("gate", "nearest"):
            extra = (self._tenants if queries else count) * self._tenant_bytes
        elif name == "submit":
            self.asked += count
        elif name == "commit" and count:
            self._commits += 1
            if self._commits % COMMITS_PER_COMPACTION == 0:
                name = "compact"
        if count:
            self.samples[name].append(Sample(count, extra, own_s))

    @property
    def _running_count(self) -> int:
        return 0 if self.engine is None else self.engine.scheduler.running_count

    @property
    def _tenant_bytes(self) -> float:
        """Arena bytes of a tenant; the calibration's tenants are of one size."""
        if self.engine is None:
            return 0.0
        return self.engine.arena.used_bytes / max(1, len(self.engine.tenants.loaded()))


class Calibration:
    """Times from any number of short runs, pooled."""

    def __init__(self, data: Path, turns_per_tenant: int) -> None:
        """`data`: conversations, as `undertow ingest` reads them; `turns_per_tenant`: of recorded lives."""
        self._data, self._turns = data, turns_per_tenant
        self._logs = sum(bool(record.turns) for record in read(data, max_message_bytes=1_000_000))
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self.lives: tuple[str, ...] = ()
        self._facts_per_refinement = 0.0
        self._row_bytes = self._arena_bytes = 0

    def round(self, folder: Path) -> None:
        """One round of the four runs, about 10 s; `folder` must be empty."""
        self._deciding(folder / "wide", tenants=60, turns=self._turns, batch=512)
        self._deciding(folder / "narrow", tenants=12, turns=70, batch=3)
        self._scanning(folder / "scan", tenants=32, turns=384)
        self._loading(folder / "scan")
        self._queueing()

    def absorb(self, other: Calibration) -> None:
        """Pool the times of another calibration, on the same data, with these."""
        for name, samples in other._samples.items():
            self._samples[name] += samples
        self.lives, self._facts_per_refinement = other.lives, other._facts_per_refinement
        self._row_bytes, self._arena_bytes = other._row_bytes, other._arena_bytes

    def profile(self) -> Profile:
        """The costs fitted to all rounds so far."""
        samples = self._samples
        costs = {
            name: fitted(samples[name], extra=name in ("decide", "gate", "nearest", "load"))
            for name in PHASES
            if name not in ("submit", "reply", "enqueue", "compact")
        }
        # an instant mock replies within `submit`; with a latency its own thread does that work
        reply = fitted(samples["submit"])
        costs["reply"] = Cost(per_item_s=reply.per_item_s, source="measured: the in-process mock's replies")
        costs["submit"] = Cost(source="measured: within reply")
        costs["enqueue"] = Cost(per_item_s=statistics.median(sample.seconds for sample in samples["enqueue"]))
        costs["compact"] = Cost(fixed_s=_mean(samples["compact"]))
        machine = describe()
        return Profile(
            name=f"{machine['cpu']}, {machine['cores']} cores; cached vectors, mock LLM",
            costs=costs,
            lives=self.lives,
            facts_per_refinement=self._facts_per_refinement,
            row_bytes=self._row_bytes,
            arena_bytes=self._arena_bytes,
            commits_per_compaction=COMMITS_PER_COMPACTION,
            llm=LLMServer.even(0.2),
        )

    # ---- the runs

    def _deciding(self, folder: Path, *, tenants: int, turns: int, batch: int) -> None:
        """To decided with an instant mock: all phases, in large steps or in small ones."""
        watch = Stopwatch()
        llm = MockLLM(MockReplies(refusal_rate=0.3))
        log, encoder = warmed(self._data, tenants, turns)
        with _engine(folder, encoder, llm, watch, batch_turns=batch) as engine:
            self._drive(engine, watch, log)
            if turns == self._turns:  # one tenant for each conversation: the rest are copies
                self._remember(engine, [f"tenant-{n}" for n in range(min(tenants, self._logs))])
        self._pool(watch)

    def _scanning(self, folder: Path, *, tenants: int, turns: int) -> None:
        """Gates alone, over tenants that grow: what a byte costs."""
        watch = Stopwatch()
        log, encoder = warmed(self._data, tenants, turns)
        with _engine(folder, encoder, None, watch, batch_turns=1024, **NEVER_FIRES) as engine:
            self._drive(engine, watch, log)
            self._row_bytes = engine.arena.row_bytes
            self._arena_bytes = engine.arena.capacity_bytes or engine.settings.arena_bytes
        self._samples["gate"] += watch.samples["gate"]

    def _drive(self, engine: Engine, watch: Stopwatch, log: Sequence[Turn]) -> None:
        """As `add_batch` and `drain` do; what no phase covers goes with the replies that a step hears."""
        for turn in log:
            engine.scheduler.inbox.put(turn)
        while not engine.idle:
            heard, covered_s, began_s = watch.asked, watch.outer_s, time.perf_counter()
            watch.asked = 0
            engine.step()
            rest_s = time.perf_counter() - began_s - (watch.outer_s - covered_s)
            self._samples["step"].append(Sample(heard, 0, rest_s))

    def _loading(self, folder: Path) -> None:
        """Tenants that come back from the journal, in groups of different size."""
        encoder = CachedVectors()
        with Engine(folder, settings(), encoder, writable=False) as engine:
            names = iter(engine.tenants.names())
            for group in _COLD_GROUPS:
                wanted = [name for _, name in zip(range(group), names, strict=False)]
                before, began_s = engine.arena.used_bytes, time.perf_counter()
                engine.tenants.get_many(wanted)
                spent_s = time.perf_counter() - began_s
                read = engine.arena.used_bytes - before
                self._samples["load"].append(Sample(len(wanted), read, spent_s))

    def _queueing(self) -> None:
        """What putting a turn into the queue costs."""
        log = list(copies(self._data, 10, _QUEUED_TURNS // 10))
        for _ in range(_QUEUED_TIMES):
            inbox = Inbox(len(log))
            began_s = time.perf_counter()
            for turn in log:
                inbox.put(turn)
            self._samples["enqueue"].append(Sample(1, 0, (time.perf_counter() - began_s) / len(log)))

    # ---- what they leave behind

    def _pool(self, watch: Stopwatch) -> None:
        for name, samples in watch.samples.items():
            self._samples[name] += samples

    def _remember(self, engine: Engine, names: Sequence[str]) -> None:
        """Record the lives of these tenants, and how many facts a refinement gives."""
        facts = calls = 0
        lives = []
        for tenant in engine.tenants.get_many(names):
            rows = engine.journal.read(tenant_keys=[tenant.key], kinds=["decision"], vectors=False)
            bodies = {row.seq: orjson.loads(row.payload) for row in rows}
            lives.append("".join(_letter(bodies[seq]) for seq in sorted(bodies)))
            facts += len(tenant.tiers["fact"].rows)
            calls += tenant.meter["refine"].calls if "refine" in tenant.meter else 0
        self.lives = tuple(lives)
        self._facts_per_refinement = facts / max(1, calls)


def _letter(body: dict[str, Any]) -> str:
    """The letter of a life (capacity_profile) for a decision row; a parked job counts as a wait."""
    decision, asked = body["decision"], body.get("merge_asked", False)
    if decision == Decision.MERGED:
        return MERGED
    if decision == Decision.FIRED:
        return (FIRED_AFTER_REFUSAL if asked else FIRED)[len(body.get("episode_ids", ()))]
    return REFUSED if asked else WAITS


def _engine(
    folder: Path, encoder: CachedVectors, llm: LLMClient | None, watch: Stopwatch, **changes: Any
) -> Engine:
    engine = Engine(folder, settings(device="cpu", **changes), encoder, llm=llm, trace=watch)
    watch.engine = engine
    return engine


def warmed(data: Path, tenants: int, turns: int) -> tuple[list[Turn], CachedVectors]:
    """Copies of the conversations, `turns` for each of `tenants`, and an encoder that knows them."""
    log, encoder = list(copies(data, tenants, turns)), CachedVectors()
    encoder.warm([turn.text for turn in log])
    return log, encoder


def _mean(samples: Sequence[Sample]) -> float:
    return sum(s.seconds for s in samples) / len(samples) if samples else 0.0
