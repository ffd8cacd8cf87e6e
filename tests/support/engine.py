"""What the engine tests share: a recording LLM, runs of the engine, and the journal read back as values."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, PolicyName, Turn
from undertow.engine.encoders.base import Encoder, Fingerprint
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import Completion, LLMClient
from undertow.engine.step.admission import Ticket
from undertow.engine.step.batch_size import MOST_TURNS
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.location import Location
from undertow.engine.storage.row_codec import control_of, memory_of
from undertow.prompts.builders import Prompt
from undertow.prompts.operations import QUERY_OPERATIONS

from .oracles.a_mem import OracleAMem
from .oracles.eager import OracleEager
from .oracles.himem import OracleHiMem
from .oracles.memory_os import OracleMemoryOS
from .oracles.nemori import OracleNemori
from .oracles.recmem import OracleRecMem
from .oracles.run import Oracle, OracleDecision, OracleMemory

# each policy written once more, straight on
ORACLES: Mapping[PolicyName, Callable[..., Oracle]] = {
    "recmem": OracleRecMem,
    "eager": OracleEager,
    "nemori": OracleNemori,
    "himem": OracleHiMem,
    "a-mem": OracleAMem,
    "memory-os": OracleMemoryOS,
}


class RecordingLLM(MockLLM):
    """The mock, with the prompts of each tenant in the order they were sent."""

    def __init__(self, replies: MockReplies, *, latency_s: float = 0.0, jitter_s: float = 0.0) -> None:
        super().__init__(replies, latency_s=latency_s, jitter_s=jitter_s)
        self.prompts: defaultdict[str, list[Prompt]] = defaultdict(list)

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        self.prompts[tenant].append(prompt)
        return super().submit(prompt, tenant=tenant)


class HeldLLM(RecordingLLM):
    """A mock whose replies come when the test says so: `release` lets them go, oldest first."""

    def __init__(self, replies: MockReplies | None = None) -> None:
        super().__init__(replies or MockReplies())
        self.held: list[tuple[str, Prompt, Future[Completion]]] = []

    @property
    def in_flight(self) -> int:
        return len(self.held)

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        self.prompts[tenant].append(prompt)
        future: Future[Completion] = Future()
        self.held.append((tenant, prompt, future))
        return future

    def release(self, most: int | None = None) -> None:
        """Answer all that is held and not cancelled, or the oldest so many."""
        count = len(self.held) if most is None else most
        held, self.held = self.held[:count], self.held[count:]
        for tenant, prompt, future in held:
            if not future.cancelled():
                MockLLM.submit(self, prompt, tenant=tenant).add_done_callback(partial(_pass_on, future))


def settle(engine: Engine) -> None:
    """Step until nothing is left to do; what the LLM holds back is answered before each step."""
    while not engine.idle:
        if isinstance(engine._llm, HeldLLM):
            engine._llm.release()
        engine.step(0.01)


def step_until_paused(engine: Engine) -> None:
    """Step until turns wait for the tenants that fill the arena."""
    while not engine.scheduler.admission_paused:
        engine.step(0.01)


def _pass_on(future: Future[Completion], answer: Future[Completion]) -> None:
    if (error := answer.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(answer.result())


class DeafLLM(HeldLLM):
    """A held mock that does not cancel: replies to work that is gone come all the same."""

    def cancel(self, future: Future[Completion]) -> None:
        pass


class SilentLLM(HeldLLM):
    """A held mock of a server that has not replied for an hour."""

    @property
    def unreachable_s(self) -> float | None:
        return 3_600.0 if self.held else None

    @property
    def last_error(self) -> str | None:
        return "connection refused"


class TableEncoder:
    """Vectors by table; a text that is not in it borrows one by its hash, so near ties abound."""

    def __init__(self, table: Mapping[str, NDArray[np.float16]], pool: NDArray[np.float16]) -> None:
        self._table = table
        self._pool = pool
        self.dim = int(pool.shape[1])
        self.fingerprint = Fingerprint("table", "table-1", self.dim, "float16", "cpu")

    def encode(self, texts: Sequence[str]) -> NDArray[np.float16]:
        out = np.empty((len(texts), self.dim), np.float16)
        for i, text in enumerate(texts):
            known = self._table.get(text)
            # not hash(): that differs from process to process
            out[i] = self._pool[sum(text.encode()) % len(self._pool)] if known is None else known
        return out


@dataclass
class Run:
    """What came of a run, by tenant."""

    decisions: dict[str, list[OracleDecision]] = field(default_factory=dict)
    versions: dict[str, list[OracleMemory]] = field(default_factory=dict)
    prompts: dict[str, list[Prompt]] = field(default_factory=dict)


def settings_of(**values: Any) -> Settings:
    return Settings(device="cpu", **values)


def turn_of(tenant: str, n: int, text: str, *, timestamp: str | None = "2026-03-01T10:00:00") -> Turn:
    messages = (Message("user", text), Message("assistant", "I see."))
    return Turn(tenant, messages, f"{tenant}:{n}", "s", timestamp)


def interleaved(turns: Mapping[str, Sequence[Turn]], seed: int | None) -> list[Turn]:
    """All turns, each tenant's in its order; tenants in random turns (None: one after the other)."""
    if seed is None:
        return [turn for of_tenant in turns.values() for turn in of_tenant]
    names = [name for name, of_tenant in turns.items() for _ in of_tenant]
    random.Random(seed).shuffle(names)
    lines = {name: iter(of_tenant) for name, of_tenant in turns.items()}
    return [next(lines[name]) for name in names]


def opened(store: Path, settings: Settings, encoder: Encoder, llm: LLMClient | None) -> Engine:
    """An engine that has taken up what earlier sessions left undecided; close it (`with`)."""
    engine = Engine(store, settings, encoder, llm=llm)
    engine.resume()
    return engine


def ingest(engine: Engine, turns: Iterable[Turn], chunk: int) -> None:
    """Add turns `chunk` at a time, without waiting for decisions."""
    line = list(turns)
    for start in range(0, len(line), chunk):
        engine.add_batch(line[start : start + chunk])


def engine_run(
    store: Path, settings: Settings, encoder: Encoder, replies: MockReplies, turns: Sequence[Turn]
) -> Run:
    """One session over all turns, added `batch_turns` at a time, or as many as a step may take."""
    llm = RecordingLLM(replies)
    with opened(store, settings, encoder, llm) as engine:
        ingest(engine, turns, settings.batch_turns or MOST_TURNS)
        assert engine.drain()
    return read_back(store, llm.prompts)


Act = Callable[[Engine, Callable[[], object]], None]


def both_ways(
    folder: Path,
    settings: Settings,
    replies: MockReplies,
    act: Act,
    *,
    batched: type[RecordingLLM] = RecordingLLM,
    reopened: bool = False,
) -> Run:
    """`act` with each of its pauses drained; it must give the same where it makes no pause.

    `batched`: the LLM that has everything in one go. `reopened`: all is logged before another engine decides.
    """
    llm = RecordingLLM(replies)
    with opened(folder / "streamed", settings, ENCODER, llm) as engine:
        act(engine, engine.drain)
        assert engine.drain()
    expected = read_back(folder / "streamed", llm.prompts)
    llm = batched(replies)
    with opened(folder / "batched", settings, ENCODER, llm) as engine:
        act(engine, lambda: None)
        if not reopened:
            settle(engine)
    if reopened:
        with opened(folder / "batched", settings, ENCODER, batched(replies)) as engine:
            settle(engine)
    run = read_back(folder / "batched", llm.prompts)
    if reopened:  # prompts that the first engine had sent are sent again
        run.prompts = expected.prompts
    assert_same(run, expected)
    return expected


def oracle_run(
    settings: Settings, encoder: Encoder, replies: MockReplies, turns: Mapping[str, Sequence[Turn]]
) -> Run:
    run = Run()
    for tenant, of_tenant in turns.items():
        oracle = ORACLES[settings.policy](tenant, encoder, MockLLM(replies), settings)
        for seq, turn in enumerate(of_tenant):
            oracle.take(seq, turn)
        run.decisions[tenant] = oracle.decisions
        run.versions[tenant] = oracle.versions
        run.prompts[tenant] = oracle.prompts
    return run


def oracle_of_log(
    store: Path,
    settings: Settings,
    encoder: Encoder,
    replies: MockReplies,
    turns: Mapping[str, Sequence[Turn]],
) -> Run:
    """The logs of a store, decided once more by the oracle, record by record; `turns` are those in them."""
    run = Run()
    logged = rows_of(store, "turn", "control")
    for tenant, of_tenant in turns.items():
        oracle = ORACLES[settings.policy](tenant, encoder, MockLLM(replies), settings)
        line = iter(of_tenant)
        mine = [row for row in logged if row.tenant == tenant and row.seq >= 0]
        for row in sorted(mine, key=lambda row: row.seq):
            _take(oracle, row, line)
        run.decisions[tenant] = oracle.decisions
        run.versions[tenant] = oracle.versions
        run.prompts[tenant] = oracle.prompts
    return run


def _take(oracle: Oracle, row: Row, turns: Iterator[Turn]) -> None:
    if row.kind == "turn":
        oracle.take(row.seq, next(turns))
        return
    control = control_of(row)
    match control.kind:
        case "flush":
            oracle.flush(row.seq)
        case "used":
            oracle.used(row.seq, control.body["fact_ids"])
        case "reconsolidate":
            oracle.reconsolidate(row.seq, control.body["question"], control.body["episode_ids"])
        case kind:
            raise NotImplementedError(f"the oracles know no record {kind!r}")


def construction(prompts: Mapping[str, Sequence[Prompt]]) -> dict[str, list[Prompt]]:
    """Without those of answers, which are in no log."""
    return {name: [p for p in of if p.operation not in QUERY_OPERATIONS] for name, of in prompts.items()}


def rows_of(store: Path, *kinds: str) -> list[Row]:
    return list(Journal.open(store, writable=False).read(kinds=list(kinds) or None))


def read_back(store: Path, prompts: Mapping[str, list[Prompt]]) -> Run:
    """A run as the journal holds it; every tenant with a turn has its entry."""
    run = Run()
    for row in rows_of(store, "turn", "decision", "episode", "fact"):
        decisions = run.decisions.setdefault(row.tenant, [])
        versions = run.versions.setdefault(row.tenant, [])
        run.prompts.setdefault(row.tenant, list(prompts.get(row.tenant, [])))
        if row.kind == "decision":
            decisions.append(_decision(row.seq, orjson.loads(row.payload)))
        elif row.kind != "turn":
            versions.append(OracleMemory.of(memory_of(row)))
    return run


def _decision(seq: int, body: Mapping[str, Any]) -> OracleDecision:
    return OracleDecision(
        seq,
        body["decision"],
        body.get("merge_asked", False),
        body.get("nearest_episode"),
        body.get("score"),
        tuple(body.get("cluster_seqs", ())),
        tuple(body.get("settled", ())),
        tuple(sorted(body.get("thetas", {}).items())),
    )


def assert_same(run: Run, expected: Run) -> None:
    """Field by field and tenant by tenant, so that a failure names what differs first."""
    assert run.decisions.keys() == expected.decisions.keys()
    for tenant in expected.decisions:
        assert run.decisions[tenant] == expected.decisions[tenant], tenant
        assert by_birth(run.versions[tenant]) == by_birth(expected.versions[tenant]), tenant
        assert run.prompts[tenant] == expected.prompts[tenant], tenant


def by_birth(versions: Iterable[OracleMemory]) -> list[OracleMemory]:
    """A job's rows may be written in any order; versions of one memory may not."""
    return sorted(versions, key=lambda m: (m.kind, m.made_at_seq, m.born_at_seq, m.ordinal))


# ---- small worlds

ENCODER = HashingEncoder(64)
# each turn fires, none merges
ALONE: dict[str, Any] = {"theta_sim": 1.0, "theta_merge": 1.0, "theta_count": 1}
NEVER: dict[str, Any] = {"theta_sim": 1.0, "theta_merge": 1.0, "theta_count": 99}
MARKER = "xylophonist"


def open_engine(store: Path, llm: LLMClient | None = None, **settings: Any) -> Engine:
    return opened(store, settings_of(**settings), ENCODER, llm)


def turns_of(tenant: str, count: int, start: int = 0, text: str = "word{n} other{n}") -> list[Turn]:
    return [turn_of(tenant, n, text.format(n=n)) for n in range(start, start + count)]


def put(engine: Engine, turns: list[Turn]) -> list[Ticket]:
    return [engine.scheduler.inbox.put(turn) for turn in turns]


def cursors(engine: Engine, *tenants: str) -> list[int]:
    return [t.cursor for t in engine.tenants.get_many(tenants)]


def bytes_hold(store: Path | Location, text: str) -> bool:
    """Whether a text is in a file of the store, a part of it or a leftover."""
    place = Location.of(store)
    if place.folder is None:
        return any(text.encode() in (place.read(name) or b"") for name in place.list())
    return any(text.encode() in p.read_bytes() for p in place.folder.rglob("*") if p.is_file())
