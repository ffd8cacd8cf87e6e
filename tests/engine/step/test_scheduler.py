"""The step loop and what surrounds it: fairness, bounds, failure, budgets, settings, store formats."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import orjson
import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import Completion, ServerRefused
from undertow.engine.step.admission import QueueFull
from undertow.engine.step.decision_queue import REFUSED_PAUSE_S
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.store_info import StoreError
from undertow.prompts.builders import Prompt

from ...support.engine import (
    ALONE,
    ENCODER,
    MARKER,
    NEVER,
    HeldLLM,
    RecordingLLM,
    Run,
    SilentLLM,
    assert_same,
    cursors,
    open_engine,
    opened,
    oracle_run,
    put,
    read_back,
    settings_of,
    turn_of,
    turns_of,
)
from ...support.oracles.recmem import OracleRecMem

# ---- what is stored before an LLM is asked


class JournalReader(RecordingLLM):
    """Notes with each prompt what another process would find in the store."""

    def __init__(self, store: Path) -> None:
        super().__init__(MockReplies())
        self.store = store
        self.found: list[tuple[str, Counter[str]]] = []

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        with closing(Journal.open(self.store, writable=False)) as journal:
            key = journal.info.tenant_key(tenant)
            rows = journal.read(tenant_keys=[key], kinds=["turn", "job"], vectors=False)
            self.found.append((tenant, Counter(row.kind for row in rows)))
        return super().submit(prompt, tenant=tenant)


@pytest.mark.parametrize("batch_turns", [1, 7, 64])
def test_turns_and_the_job_are_stored_before_a_prompt_is_sent(tmp_path: Path, batch_turns: int) -> None:
    llm = JournalReader(tmp_path)
    with open_engine(tmp_path, llm, **ALONE, batch_turns=batch_turns) as engine:
        for n in range(12):
            engine.add_batch([turn_of(name, n, f"{name} word{n}") for name in ("ann", "bob")])
            for name, rows in llm.found:
                assert rows["turn"] == n + 1 and rows["job"] >= 1, name
            llm.found.clear()
            assert engine.drain()
            assert llm.prompts
            assert all(rows["turn"] == n + 1 and rows["job"] >= 1 for _, rows in llm.found)
            llm.found.clear()


# ---- fairness and bounds


def test_a_long_line_delays_another_tenant_by_at_most_one_step(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(), **NEVER, batch_turns=64) as engine:
        put(engine, turns_of("big", 2_000))
        engine.step()
        (ticket,) = put(engine, turns_of("small", 1))
        engine.step()
        assert ticket.receipt is not None
        assert cursors(engine, "small") == [1]
        assert engine.lag.undecided_turns or len(engine.scheduler.inbox) > 1_800


def test_undecided_turns_of_one_tenant_do_not_hold_up_another(tmp_path: Path) -> None:
    with open_engine(tmp_path, **NEVER, batch_turns=4_096, gate_lookahead_turns=16) as engine:
        put(engine, turns_of("big", 2_000))
        engine.step()
        assert cursors(engine, "big") == [16], "2,000 turns stored, an equal share of them decided"
        put(engine, turns_of("small", 1))
        engine.step()
        assert cursors(engine, "big", "small") == [32, 1]


def test_tenants_are_served_in_turn(tmp_path: Path) -> None:
    names = [f"t{n}" for n in range(7)]
    with open_engine(tmp_path, **NEVER, batch_turns=3) as engine:
        for name in names:
            put(engine, turns_of(name, 3))
        for round_number in range(1, 4):
            before = round_number * len(names)
            while len(engine.scheduler.inbox) > 3 * len(names) - before:
                engine.step()
            stored = [t.next_seq for t in engine.tenants.get_many(names)]
            assert max(stored) - min(stored) <= 1, stored
        while not engine.scheduler.idle:
            engine.step()
        assert cursors(engine, *names) == [3] * 7


def test_a_full_queue_refuses_and_has_taken_nothing(tmp_path: Path) -> None:
    with open_engine(tmp_path, **NEVER, queue_turns=5, batch_turns=2) as engine:
        put(engine, turns_of("a", 5))
        with pytest.raises(QueueFull, match=r"5 turns.*[Tt]ry again"):
            put(engine, turns_of("b", 1))
        assert len(engine.scheduler.inbox) == 5
        engine.step()
        put(engine, turns_of("b", 2))
        assert engine.drain()
        assert [t.next_seq for t in engine.tenants.get_many(["a", "b"])] == [5, 2]
        assert len(engine.add_batch(turns_of("c", 23))) == 23, "a call longer than the queue waits for room"


def test_at_most_one_job_a_tenant_is_in_flight(tmp_path: Path) -> None:
    llm = HeldLLM()
    with open_engine(tmp_path, llm, **ALONE, batch_turns=5) as engine:
        names = [f"t{n}" for n in range(6)]
        for name in names:
            put(engine, turns_of(name, 3))
        most = 0
        while not engine.scheduler.idle:
            engine.step(0.01)
            assert max(Counter(tenant for tenant, _, _ in llm.held).values(), default=0) <= 1
            most = max(most, llm.in_flight)
            if engine.scheduler.running_count and not len(engine.scheduler.inbox):
                llm.release()
        assert most == len(names), "all tenants at once"
        assert cursors(engine, *names) == [3] * 6
    for name in names:
        assert len(llm.prompts[name]) == len(set(llm.prompts[name])), "no prompt was sent twice"


def test_as_many_jobs_are_queued_as_end_in_a_step(tmp_path: Path) -> None:
    """Turns are still stored meanwhile; without that the server would run dry where steps are long."""
    llm = HeldLLM()
    with open_engine(tmp_path, llm, **ALONE, batch_turns=10, llm_in_flight=2) as engine:
        for n in range(60):
            put(engine, turns_of(f"t{n}", 1))
        engine.step()
        engine.step()
        assert engine.scheduler.running_count == llm.in_flight == 10, "that is enough, and storing goes first"
        llm.release(5)
        engine.step()
        assert engine.scheduler.running_count > 10
        engine.step()
        running = engine.scheduler.running_count
        engine.step()
        assert engine.scheduler.running_count == running < 60, "enough again"


# ---- failure of the LLM, budgets


def test_without_a_server_ingestion_and_search_go_on(tmp_path: Path) -> None:
    with open_engine(tmp_path, SilentLLM(), **ALONE) as engine:
        for n in range(4):
            assert engine.add_batch([turn_of("ann", n, f"the {MARKER} number{n}")])[0].seq == n
            assert not engine.drain(), "it gives up instead of waiting for ever"
        assert engine.search("ann", f"the {MARKER} number3").turns[0].source_seqs == (3,)
        assert (engine.stats()["pending_jobs"], engine.stats()["undecided_turns"]) == (1, 4)
        assert not engine.flush("ann")
    with open_engine(tmp_path, MockLLM(), **ALONE) as engine:
        assert engine.flush("ann")
        stats = engine.stats()
        assert (stats["pending_jobs"], stats["undecided_turns"], stats["consolidations"]) == (0, 0, 4)


def test_a_spent_budget_degrades_one_tenant_to_search_only_and_says_so(tmp_path: Path) -> None:
    turns = {name: turns_of(name, 6) for name in ("ann", "bo")}
    with open_engine(tmp_path, MockLLM(), **ALONE, tenant_token_budget=1) as engine:
        engine.add_batch(turns["ann"][:3])
        assert not engine.drain()
        assert "budget of 1 tokens" in engine.scheduler.blocked["ann"]
        assert cursors(engine, "ann") == [1], "the call that reached the budget is the last"
        engine.add_batch(turns["ann"][3:] + turns["bo"][:1])
        engine.drain()
        assert cursors(engine, "bo") == [1], "the budget is each tenant's own"
        assert len(engine.search("ann", "word5").turns) == 6
        assert engine.stats()["pending_jobs"] == 1
    with open_engine(tmp_path, MockLLM(), **ALONE) as engine:
        engine.add_batch(turns["bo"][1:])
        assert engine.drain()
    expected = oracle_run(settings_of(**ALONE), ENCODER, MockReplies(), turns)
    run = read_back(tmp_path, {})
    assert_same(Run(run.decisions, run.versions, expected.prompts), expected)


class Refusing(RecordingLLM):
    """Refuses the prompts of `refuses`, None: of all, as a server does whose key or model is wrong."""

    refuses: tuple[str, ...] | None = None
    refused = 0

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        if self.refuses is not None and tenant not in self.refuses:
            return super().submit(prompt, tenant=tenant)
        self.refused += 1
        reply: Future[Completion] = Future()
        reply.set_exception(ServerRefused("no such model"))
        return reply


class SecondRefused(Refusing):
    """Answers one prompt and refuses the next."""

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        self.refuses = (tenant,) if self.prompts[tenant] else ()
        return super().submit(prompt, tenant=tenant)


def test_tokens_of_a_job_that_could_not_be_finished_count(tmp_path: Path) -> None:
    with open_engine(tmp_path, SecondRefused(MockReplies()), **ALONE, calls="paper") as engine:
        engine.add_batch(turns_of("ann", 1))
        assert not engine.drain()
        assert "no such model" in engine.scheduler.blocked["ann"]
        spent = engine.tenants.get("ann").meter
    assert [usage.calls for usage in spent.values()] == [1]
    with open_engine(tmp_path, **ALONE) as engine:
        assert engine.tenants.get("ann").meter == spent


def test_refused_tenants_try_again_one_by_one_and_all_go_on_once_the_server_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = {name: turns_of(name, 2) for name in ("ann", "bo", "cy")}
    llm, now_s = Refusing(MockReplies()), [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with open_engine(tmp_path, llm, **ALONE) as engine:
        engine.add_batch([turn for of in turns.values() for turn in of])
        assert not engine.drain() and engine.scheduler.blocked.keys() == turns.keys()
        for tries in (3, 4, 5):
            assert not engine.drain() and engine.idle
            assert (llm.refused, len(engine.scheduler.blocked)) == (tries, 3)
            now_s[0] += REFUSED_PAUSE_S
        llm.refuses = ()
        assert not engine.idle and engine.drain()
        assert not engine.scheduler.blocked
    expected = oracle_run(settings_of(**ALONE), ENCODER, MockReplies(), turns)
    assert_same(read_back(tmp_path, llm.prompts), expected)


def test_a_tenant_that_alone_is_refused_tries_again_once_in_each_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, now_s = Refusing(MockReplies()), [1_000.0]
    llm.refuses = ("ann",)
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    with open_engine(tmp_path, llm, **ALONE) as engine:
        engine.add_batch(turns_of("ann", 1))
        for n in range(3):
            assert not engine.drain()
            engine.add_batch(turns_of("bo", 4, start=4 * n))
            assert not engine.drain()
            assert (llm.refused, len(llm.prompts["bo"]) > 4 * n) == (n + 1, True)
            now_s[0] += REFUSED_PAUSE_S


# ---- who may open the store


def test_a_store_of_a_newer_format_or_another_encoder_is_refused(tmp_path: Path) -> None:
    with open_engine(tmp_path, **NEVER) as engine:
        engine.add_batch(turns_of("ann", 1))
    with pytest.raises(StoreError, match="reindex"):
        Engine(tmp_path, settings_of(**NEVER), HashingEncoder(32))
    path = tmp_path / "store.json"
    stored = path.read_bytes()
    path.write_bytes(orjson.dumps({**orjson.loads(stored), "format_version": 99}))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(StoreError, match=r"version 99.*Install"):
        open_engine(tmp_path, **NEVER)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    path.write_bytes(stored)
    with open_engine(tmp_path, **NEVER) as engine:
        assert engine.stats()["turns"] == 1


# ---- settings


def test_changed_thresholds_hold_for_later_seqs_only(tmp_path: Path) -> None:
    """Turns that were stored under the old thresholds are decided by them, however late."""
    strict, loose = settings_of(**NEVER), settings_of(theta_sim=0.3, theta_merge=0.9, theta_count=3)
    early, late = turns_of("ann", 6, text="one topic{n}"), turns_of("ann", 6, start=6, text="one topic{n}")
    for first, second in ((strict, loose), (loose, strict)):
        store = tmp_path / f"{first.recurrence_count}"
        with opened(store, first, ENCODER, None) as engine:
            engine.add_batch(early)
            engine.drain()
        llm = RecordingLLM(MockReplies())
        with opened(store, second, ENCODER, llm) as engine:
            engine.add_batch(late)
            assert engine.drain()
        oracle = OracleRecMem("ann", ENCODER, MockLLM(), first)
        for seq, turn in enumerate(early):
            oracle.take(seq, turn)
        oracle.settings = second
        for seq, turn in enumerate(late, 7):  # record 6 is the change
            oracle.take(seq, turn)
        run = read_back(store, llm.prompts)
        decided = [d for d in run.decisions["ann"] if d.seq != 6]
        assert decided == oracle.decisions
        assert {d.decision for d in decided} >= {"waits", "fired"}
        assert run.prompts["ann"] == oracle.prompts
