"""How fast turns become searchable and consolidated, and what they wait for: `undertow bench ingest`.

The turns come as fast as the engine's queue takes them. A turn's waits begin when it is put into the queue;
"consolidated" is that it was decided: its cluster's or episode's memories are stored, or it needs none.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from undertow.bench.machine import peak_rss_bytes
from undertow.bench.mock.server import spawn_server
from undertow.bench.system.parts import percentiles
from undertow.engine.api.engine import WAIT_FOR_REPLY_S, Engine, make_llm
from undertow.engine.api.ingest_files import obstacles
from undertow.engine.api.views.stats import store_usage
from undertow.engine.base.config import Settings
from undertow.engine.base.model import LINKED_PAIRS, Turn, as_embedded
from undertow.engine.base.trace import Observer, Phase, Trace
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.estimate.calibrate import PairCosines
from undertow.engine.llm.client import ServerRefused
from undertow.engine.step.admission import Ticket

QUEUE_TURNS = 2_048
"""So many turns wait to be stored, at most: more would be waits of the measurement's own making."""

MOCK_REFUSALS = 0.3
"""Share of merges that the mock LLM does not grant."""

_WARM_UP_TURNS = 24
_SAMPLE_S = 0.05
_MOST_SAMPLES = 600
_CALIBRATION_TURNS = 1_500
_TOLD = (
    *("consolidations", "merges", "merge_refusals", "dead_letters"),
    *("llm_calls", "prompt_tokens", "completion_tokens"),
)


class PhaseTimes(Observer):
    """The seconds spent in each phase itself, without the phases inside it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[float] = []

    def began(self, name: str) -> None:
        self._inside.append(0.0)

    def ended(self, phase: Phase) -> None:
        took_s = phase.ended_s - phase.began_s
        self.seconds[phase.name] += took_s - self._inside.pop()
        if self._inside:
            self._inside[-1] += took_s


@dataclass(slots=True)
class Watch:
    """Follows every turn from the queue to its decision, and the queues' lengths over time."""

    engine: Engine
    began_s: float
    waiting: list[tuple[Ticket, float]] = field(default_factory=list)
    undecided: defaultdict[str, deque[tuple[int, float]]] = field(default_factory=lambda: defaultdict(deque))
    searchable_s: list[float] = field(default_factory=list)
    consolidated_s: list[float] = field(default_factory=list)
    last_searchable_s: float = 0.0
    last_consolidated_s: float = 0.0
    samples: list[tuple[float, ...]] = field(default_factory=list)

    def offer(self, turns: Iterator[Turn]) -> None:
        """Fill the queue."""
        inbox = self.engine.scheduler.inbox
        room = self.engine.settings.queue_turns - len(inbox)
        for turn in islice(turns, room):
            self.waiting.append((inbox.put(turn), time.perf_counter()))

    def stepped(self) -> None:
        """Book what the step has stored and decided."""
        now_s = time.perf_counter()
        still = []
        for ticket, put_s in self.waiting:
            if ticket.receipt is None:
                still.append((ticket, put_s))
                continue
            self.searchable_s.append(now_s - put_s)
            self.last_searchable_s = now_s - self.began_s
            assert ticket.receipt.seq is not None
            self.undecided[ticket.receipt.tenant].append((ticket.receipt.seq, put_s))
        self.waiting = still
        self._settle(now_s)
        if not self.samples or now_s - self.began_s - self.samples[-1][0] >= _SAMPLE_S:
            self.sample(now_s)

    def _settle(self, now_s: float) -> None:
        for tenant in self.engine.tenants.loaded():
            line = self.undecided[tenant.name]
            while line and line[0][0] < tenant.cursor:
                _, put_s = line.popleft()
                self.consolidated_s.append(now_s - put_s)
                self.last_consolidated_s = now_s - self.began_s

    def sample(self, now_s: float) -> None:
        stored, decided = len(self.searchable_s), len(self.consolidated_s)
        in_flight, running = self.engine.llm_in_flight, self.engine.scheduler.running_count
        at_s = round(now_s - self.began_s, 3)
        self.samples.append((at_s, len(self.waiting), stored - decided, running, in_flight, stored, decided))

    def over_time(self) -> dict[str, list[float]]:
        """The samples by column, thinned out."""
        names = (
            *("at_s", "queued_turns", "undecided_turns", "jobs_running", "llm_in_flight"),
            *("searchable_turns", "consolidated_turns"),
        )
        step = -(-len(self.samples) // _MOST_SAMPLES)
        kept = [*self.samples[: -1 : max(1, step)], self.samples[-1]]
        return {name: list(column) for name, column in zip(names, zip(*kept, strict=True), strict=True)}


def settings_for(settings: Settings, log: Sequence[Turn]) -> Settings:
    """The settings, with a theta_sim for this encoder and these texts unless one was given.

    The papers' 0.7 belongs to other encoders, and to texts without salt, which all of a tenant's texts have
    in common. As `undertow calibrate` would, this takes what links the same share of pairs, here within the
    log's first tenants.
    """
    changes: dict[str, Any] = {"queue_turns": QUEUE_TURNS}
    if settings.theta_sim is None:
        changes["theta_sim"] = _linking_theta(log, make_encoder(settings), settings.embed_timestamp)
    return settings.model_copy(update=changes)


def _linking_theta(log: Sequence[Turn], encoder: Encoder, dated: bool) -> float | None:
    """theta_sim that links `LINKED_PAIRS` of the pairs within tenants, of the first some 1,500 turns.

    None where no tenant has two turns.
    """
    by_tenant: defaultdict[str, list[str]] = defaultdict(list)
    for turn in log:
        by_tenant[turn.tenant].append(as_embedded(turn.text, turn.timestamp, dated))
    pairs, room = PairCosines(), _CALIBRATION_TURNS
    for texts in by_tenant.values():
        pairs.add(encoder.encode(texts).astype(np.float32))
        room -= len(texts)
        if room <= 0:
            break
    return pairs.quantile(1.0 - LINKED_PAIRS) if pairs.total else None


def mock_llm(latency_s: float) -> AbstractContextManager[str]:
    """The URL of a mock server in a process of its own, whose every reply takes `latency_s`."""
    return spawn_server(latency_ms=latency_s * 1e3, refusal_rate=MOCK_REFUSALS)


def ingest(
    log: Sequence[Turn], settings: Settings, encoder: Encoder, trace_file: Path | None = None
) -> dict[str, Any]:
    """Take in the log with the LLM server of the settings, in a new store.

    ServerRefused: not all turns could be decided. `trace_file`: a Chrome trace of the run.
    """
    phases = PhaseTimes()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="undertow-bench-")))
        _warm_up(log[:_WARM_UP_TURNS], settings, encoder, folder / "warm")
        trace = Trace(trace_file, observers=[phases])
        engine = stack.enter_context(
            Engine(folder / "store", settings, encoder, llm=make_llm(settings), trace=trace)
        )
        cpu_s, watch = time.process_time(), Watch(engine, time.perf_counter())
        turns = iter(log)
        watch.offer(turns)
        while watch.waiting or not engine.idle:
            engine.step(WAIT_FOR_REPLY_S)
            watch.stepped()
            watch.offer(turns)
            if engine.server_lost:
                break
        elapsed_s, cpu_s = time.perf_counter() - watch.began_s, time.process_time() - cpu_s
        if reasons := obstacles(engine):
            raise ServerRefused(f"not all turns were decided: {'; '.join(reasons)}")
        watch.sample(time.perf_counter())
        stats = engine.stats()
        spent = {name: round(seconds, 3) for name, seconds in sorted(phases.seconds.items())}
        return {
            **_rates(watch, len(log)),
            "elapsed_s": round(elapsed_s, 2),
            "cpu_s": round(cpu_s, 2),
            "peak_rss_bytes": peak_rss_bytes(),
            "time_s": {**spent, "other": round(elapsed_s - sum(phases.seconds.values()), 3)},
            **{name: stats[name] for name in _TOLD},
            "usage": store_usage(engine.tenants),
            "over_time": watch.over_time(),
        }


def _warm_up(turns: Sequence[Turn], settings: Settings, encoder: Encoder, folder: Path) -> None:
    """Compile the kernels and load the libraries, the LLM client's too, outside the measurement.

    As one tenant's, turns that many tenants have alike make jobs.
    """
    with Engine(folder, settings, encoder, llm=make_llm(settings)) as engine:
        engine.add_batch([replace(turn, tenant="warm-up") for turn in turns])
        engine.drain()


def _rates(watch: Watch, turns: int) -> dict[str, Any]:
    return {
        "searchable_turns_per_s": round(turns / watch.last_searchable_s, 1),
        "consolidated_turns_per_s": round(turns / watch.last_consolidated_s, 1),
        "wait_s": {
            "searchable": percentiles(watch.searchable_s),
            "consolidated": percentiles(watch.consolidated_s),
        },
    }
