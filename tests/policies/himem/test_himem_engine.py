"""HiMem in an engine: sessions, flushes and questions in one log, replays and deletions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undertow.bench.mock.replies import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn

from ...support.engine import (
    ENCODER,
    MARKER,
    RecordingLLM,
    assert_same,
    bytes_hold,
    construction,
    open_engine,
    oracle_of_log,
    read_back,
    rows_of,
    settings_of,
    turn_of,
)
from ...support.policies.himem import Judging

HIMEM: dict[str, Any] = {"policy": "himem"}
BEST = {**HIMEM, "answer_mode": "best_effort"}


# no notes are sufficient, so that questions change them
REPLIES = Judging(1, 0.3, 0.1, malformed_rate=0.06, malformed_sticky=True, lines=())
TOPICS = ("boat harbour sail mast", "violin bow string tune", "garden tomato seed soil")


def talk(tenant: str, count: int, seed: int, *, words: int = 0) -> list[Turn]:
    """Sessions of one to five turns on few topics, so that notes are said again."""
    rng = np.random.default_rng(seed)
    turns: list[Turn] = []
    session = 0
    while len(turns) < count:
        session += 1
        for _ in range(int(rng.integers(1, 6))):
            n = len(turns)
            topic = TOPICS[int(rng.integers(3))]
            stamp = f"2026-04-{1 + int(rng.integers(28)):02d}T10:00:00" if rng.random() < 0.8 else None
            text = f"{topic} {int(rng.integers(3))} " + "and so on " * words
            turns.append(replace(turn_of(tenant, n, text, timestamp=stamp), session_id=f"s{session}"))
    return turns[:count]


@pytest.mark.parametrize("options", [{"himem_align_notes": False}, {"himem_align_episodes": True}])
def test_with_alignment_elsewhere_and_a_short_context(options: dict[str, Any], tmp_path: Path) -> None:
    turns = {"ann": talk("ann", 20, 5, words=60)}
    every = {**HIMEM, **options, "context_tokens": 2_000, "reply_tokens": 256}
    llm = RecordingLLM(REPLIES)
    with open_engine(tmp_path, llm, **every) as engine:
        engine.add_batch([replace(turn, session_id="one") for turn in turns["ann"]])
        assert engine.flush("ann")
    run = read_back(tmp_path, construction(llm.prompts))
    sessionless = {"ann": [replace(turn, session_id="one") for turn in turns["ann"]]}
    assert_same(run, oracle_of_log(tmp_path, settings_of(**every), ENCODER, REPLIES, sessionless))
    fired = [d for d in run.decisions["ann"] if d.cluster]
    assert len(fired) > 2, "one session of several windows"
    assert [s for d in fired for s in d.cluster] == list(range(20))


def episodes_hold(engine: Engine, tenant: str) -> list[int]:
    return sorted(s for m in engine.get_all(tenant) if m.kind == "episode" for s in m.source_seqs)


def test_parked_windows_are_made_up_for_by_a_replay(tmp_path: Path) -> None:
    sick = MockReplies(2, malformed_rate=0.35, malformed_sticky=True)
    with open_engine(tmp_path, RecordingLLM(sick), **HIMEM, k_sub=99) as engine:
        engine.add_batch(talk("ann", 30, 7))
        assert engine.flush("ann")
        parked = engine.stats()["dead_letters"]
        held = episodes_hold(engine, "ann")
        assert parked > 1 and 0 < len(held) < 30
        assert {hit.source_seqs[0] for hit in engine.recall("ann", "boat").turns} == {*range(30)} - {*held}, (
            "what no episode holds is found as it was said"
        )
    with open_engine(tmp_path, RecordingLLM(MockReplies(2)), **HIMEM) as engine:
        assert engine.replay_jobs() == parked
        assert engine.drain()
        assert engine.stats()["dead_letters"] == 0
        assert episodes_hold(engine, "ann") == list(range(30)), "each turn in one episode"


def test_of_a_deleted_turn_no_byte_is_left_nor_of_what_questions_made_of_it(tmp_path: Path) -> None:
    texts = [f"{MARKER} has a boat", "the boat and the harbour", "the boat at sea", "a violin"]
    turns = [replace(turn_of("ann", n, text), session_id=f"s{n // 3}") for n, text in enumerate(texts)]
    with open_engine(tmp_path, RecordingLLM(Judging(2, lines=())), **BEST) as engine:
        receipts = engine.add_batch(turns)
        assert engine.flush("ann")
        for n in range(6):
            engine.answer("ann", f"Whose boat is number {n}?")
            assert engine.drain()
        changed = [row for row in rows_of(tmp_path, "fact") if row.seq > 4 and MARKER.encode() in row.payload]
        assert changed, "a question has made something of it"
        assert receipts[0].id is not None
        engine.delete(receipts[0].id)
        assert engine.drain()
        live = engine.get_all("ann")
        assert MARKER not in repr(live) and episodes_hold(engine, "ann") == [1, 2, 3]
        engine.purge()
    assert not bytes_hold(tmp_path, MARKER)
    with open_engine(tmp_path, **BEST) as engine:
        assert engine.get_all("ann") == live
        assert engine.erase("ann", now=True) is not None
    assert not bytes_hold(tmp_path, "harbour")


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_counts_for_the_deletion_behind_it_whether_or_not_both_are_read_at_once(
    streamed: bool, tmp_path: Path
) -> None:
    turns = [replace(turn_of("ann", n, f"Ann tells of book{n}"), session_id=f"s{n}") for n in range(4)]
    with open_engine(tmp_path, RecordingLLM(MockReplies()), **HIMEM) as engine:
        receipts = engine.add_batch(turns)
        assert engine.flush("ann")
        notes = [m for m in engine.get_all("ann") if m.kind == "fact"]
    with open_engine(tmp_path, RecordingLLM(MockReplies()), **HIMEM, himem_max_notes=2) as engine:
        engine._log("ann", "used", [{"fact_ids": [notes[0].id]}])
        if streamed:
            assert engine.drain()
        assert receipts[3].id is not None
        engine.delete(receipts[3].id)
        assert engine.drain()
        kept = [m.id for m in engine.get_all("ann") if m.kind == "fact"]
    assert len(notes) > 3 and kept == [notes[0].id, notes[-2].id], "the oldest, as it was used"
