"""Dedupe keys: a turn is stored once, whatever the hashes, however turns arrive, and after each reload."""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.bench.mock.replies import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Message, Turn
from undertow.engine.base.queries import TurnsByKeyQuery
from undertow.engine.storage.row_codec import turn_id
from undertow.engine.tenants import payload_file
from undertow.engine.tenants.log import RecordLog
from undertow.engine.tenants.payload_file import PayloadFile
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import make_arena
from undertow.kernels.key_table import add_keys

from ...support.engine import NEVER, RecordingLLM, open_engine, read_back, turns_of
from .test_payload_file import full, segment_bytes

TENANTS = ("ann", "bob")
THETA: dict[str, Any] = {"theta_sim": 0.3, "theta_merge": 0.5, "theta_count": 3}
HASHES: dict[str, Callable[[str], int]] = {
    "64 bits": hash,
    "8 bits": lambda key: hash(key) & 0xFF,
    "none": lambda key: 7,
}
# tenant, key, session, whether it has a timestamp
ARRIVALS = st.tuples(st.sampled_from(TENANTS), st.integers(0, 30), st.integers(0, 1), st.booleans())
# a batch of turns; the deletion of a turn; the eviction of a tenant
STEPS = st.lists(
    st.one_of(st.lists(ARRIVALS, max_size=12), st.integers(0, 30), st.sampled_from(TENANTS)), max_size=8
)
# of each tenant: key, text, effective timestamp; None for a deleted turn
Model = dict[str, list[tuple[str, str, str | None] | None]]


def arrival(number: int, tenant: str, key: int, session: int, dated: bool) -> Turn:
    stamp = f"2026-03-01T10:00:{number % 60:02d}" if dated else None
    return Turn(tenant, (Message("user", f"word{number}"),), f"key {key}", f"s{session}", stamp)


class Plain:
    """The same by dictionaries of keys."""

    def __init__(self) -> None:
        self.logs: Model = {name: [] for name in TENANTS}
        self.keys: dict[str, set[str]] = {name: set() for name in TENANTS}
        self.latest: dict[tuple[str, str], str] = {}

    def add(self, turn: Turn) -> None:
        if turn.dedupe_key in self.keys[turn.tenant]:
            return
        self.keys[turn.tenant].add(turn.dedupe_key)
        place = turn.tenant, turn.session_id
        stamp = turn.timestamp or self.latest.get(place)
        if stamp is not None:
            self.latest[place] = stamp
        self.logs[turn.tenant].append((turn.dedupe_key, turn.messages[0].content, stamp))


def logs_of(engine: Engine) -> Model:
    found: Model = {name: [] for name in TENANTS}
    for name in (name for name in TENANTS if name in engine.tenants):
        tenant = engine.tenants.get(name)
        for seq in tenant.seq_by_row:
            body = orjson.loads(tenant.payload(seq)) if tenant.exists(seq) else None
            words = body and (body["key"], body["messages"][0]["content"], body.get("timestamp"))
            found[name].append(words)
    return found


@pytest.mark.parametrize("hashes", HASHES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_logs_are_those_of_a_dictionary_of_keys(
    hashes: str, monkeypatch: pytest.MonkeyPatch, steps: list[list[tuple[str, int, int, bool]] | int | str]
) -> None:
    monkeypatch.setattr(RecordLog, "key_hash", staticmethod(HASHES[hashes]))
    plain, number = Plain(), 0
    with TemporaryDirectory() as folder, open_engine(Path(folder), **NEVER) as engine:
        for step in steps:
            if isinstance(step, str):
                engine.drain()
                if engine.tenants.in_memory(step) is not None:
                    engine.tenants.evict(step)
            elif isinstance(step, int):
                name = TENANTS[step % 2]
                if (row := step // 2) < len(plain.logs[name]) and plain.logs[name][row] is not None:
                    (place,) = engine.call(TurnsByKeyQuery(name, [plain.logs[name][row][0]])).values()  # type: ignore[index]
                    engine.delete(place["id"])
                    plain.logs[name][row] = None
                    engine.drain()
            else:
                turns = [arrival(number + n, *one) for n, one in enumerate(step)]
                number += len(turns)
                engine.add_batch(turns)
                for turn in turns:
                    plain.add(turn)
            assert logs_of(engine) == plain.logs
        for name in (name for name in TENANTS if name in engine.tenants):
            known = engine.call(TurnsByKeyQuery(name, [f"key {n}" for n in range(31)]))
            assert known.keys() == plain.keys[name]
    assert not engine.tenants.texts.segments, "a closed engine keeps no payload"


def test_duplicates_give_the_same_memories_however_they_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [*turns_of("ann", 14), *turns_of("bob", 8), *turns_of("ann", 16, 4)]
    runs = []
    for name, key_hash, chunk in (("plain", hash, 1), ("alike", HASHES["8 bits"], 7), ("at once", hash, 999)):
        monkeypatch.setattr(RecordLog, "key_hash", staticmethod(key_hash))
        with open_engine(tmp_path / name, RecordingLLM(MockReplies()), **THETA) as engine:
            for start in range(0, len(turns), chunk):
                engine.add_batch(turns[start : start + chunk])
                engine.drain()
                if engine.tenants.in_memory("ann") is not None:
                    engine.tenants.evict("ann")
            engine.drain()
        runs.append(read_back(tmp_path / name, {}))
    assert len(runs[0].decisions["ann"]) == 20 and runs[0].versions["ann"]
    assert runs[1:] == runs[:1] * 2


@pytest.mark.parametrize("how", ["evict", "erase", "delete"])
def test_no_byte_of_what_is_gone_stays_in_a_segment(tmp_path: Path, how: str) -> None:
    with open_engine(tmp_path, **NEVER) as engine:
        turns = [turn for pair in zip(turns_of("ann", 30), turns_of("bob", 30), strict=True) for turn in pair]
        turns[0] = turns_of("ann", 1, text="xylophonist")[0]
        engine.add_batch(turns)
        assert b"xylophonist" in segment_bytes(engine.tenants.texts)
        if how == "delete":
            (place,) = engine.call(TurnsByKeyQuery("ann", [turns[0].dedupe_key])).values()
            engine.delete(place["id"])
        elif how == "erase":
            engine.erase("ann", now=True)
        else:
            engine.tenants.evict("ann")
        left = segment_bytes(engine.tenants.texts)
        assert b"xylophonist" not in left
        assert (b"ann:1" in left) == (how == "delete") and b"bob:1" in left


def test_on_a_full_disk_payloads_are_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = turns_of("ann", 5), turns_of("ann", 1, 5, text="word " * 2_000)
    monkeypatch.setattr(payload_file, "SEGMENT_BYTES", (1 << 13, 1 << 13))
    with open_engine(tmp_path, **NEVER) as engine:
        engine.add_batch(first)
        monkeypatch.setattr(os, "posix_fallocate", full)
        engine.add_batch(second)
        assert [receipt.duplicate for receipt in engine.add_batch([*first, *second])] == [True] * 6


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 1 << 40), st.integers(0, 1 << 62))
def test_a_tenant_hashes_ids_like_the_journal(name: str, incarnation: int, seq: int) -> None:
    tenant = Tenant(name, "key", make_arena(8, "cpu"), PayloadFile(), incarnation)
    assert tenant.turn_id(seq) == turn_id(name, incarnation, seq)


def test_a_turn_costs_few_bytes_of_the_heap() -> None:
    """About 50 bytes a turn after a load and 75 after additions, for tenants of 100 turns."""
    arena, texts = make_arena(8, "cpu"), PayloadFile()
    payloads, sessions = [bytes(500)] * 100, [f"s{n // 20}" for n in range(100)]

    def tenant(number: int) -> Tenant:
        made = Tenant(f"tenant{number}", "key", arena, texts)
        keys = made.keys
        made.add_turns(payloads, sessions, [f"2026-03-{n:02d}" for n in range(100)])
        add_keys([keys], np.zeros(100, np.int64), np.arange(100))
        return made

    tenant(0)
    gc.collect()
    tracemalloc.start()
    held = [tenant(number) for number in range(50)]
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / (100 * len(held)) < 100
