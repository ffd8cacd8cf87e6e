"""Which policy a store keeps to, and the ablations of section 4.3, as settings of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from undertow.bench.mock_llm import MockReplies
from undertow.engine.config import Settings
from undertow.engine.engine import Engine
from undertow.engine.retrieval import Window
from undertow.engine.store import DESCRIPTION, StoreError, read_info

from .engine_harness import (
    ALONE,
    ENCODER,
    MARKER,
    HeldLLM,
    RecordingLLM,
    bytes_hold,
    open_engine,
    rows_of,
    settings_of,
    turn_of,
    turns_of,
)
from .fault_harness import reports

# ---- a store and its policy


def test_a_store_remembers_the_policy_and_refuses_to_be_written_by_another(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(MockReplies()), policy="eager") as engine:
        engine.add_batch(turns_of("ann", 3))
        assert engine.drain()
    assert read_info(tmp_path).policy == "eager"
    with pytest.raises(StoreError, match=r"'eager'.*'recmem'.*UNDERTOW_POLICY=eager"):
        open_engine(tmp_path)
    with Engine(tmp_path, settings_of(), ENCODER, writable=False) as reader:
        assert reader.search("ann", "word1").facts, "who only reads may have any policy"
    with open_engine(tmp_path, policy="eager") as engine:
        assert engine.get_all("ann")


def test_a_store_without_the_mark_is_recmems(tmp_path: Path) -> None:
    open_engine(tmp_path).close()
    info = orjson.loads((tmp_path / DESCRIPTION).read_bytes())
    assert info.pop("policy") == "recmem"
    (tmp_path / DESCRIPTION).write_bytes(orjson.dumps(info))
    with open_engine(tmp_path) as engine:
        assert engine.add_batch(turns_of("ann", 1))
    with pytest.raises(StoreError, match="made by the policy 'recmem'"):
        open_engine(tmp_path, policy="eager")


def test_the_settings_name_policies_and_their_ablations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_POLICY", "eager")
    assert Settings().policy == "eager"
    with pytest.raises(ValidationError, match="'direct-extraction' leaves out a part of"):
        Settings(ablation="direct-extraction")
    with pytest.raises(ValidationError):
        Settings(policy="lazy")  # type: ignore[arg-type]


# ---- the eager policy in an engine


def test_eager_reads_every_turn_and_gates_none(tmp_path: Path) -> None:
    llm = RecordingLLM(MockReplies(3, empty_rate=0.3))
    with open_engine(tmp_path, llm, policy="eager", theta_count=99) as engine:
        engine.add_batch(turns_of("ann", 12, text="the boat sails {n} miles"))
        assert engine.drain()
        assert not [m for m in engine.get_all("ann") if m.kind == "episode"]
    operations = [p.operation for p in llm.prompts["ann"]]
    assert operations.count("extract") == 12
    assert 0 < operations.count("reconcile") < 12
    decisions = [orjson.loads(row.payload) for row in rows_of(tmp_path, "decision")]
    assert all("score" not in body and "relevant" not in body for body in decisions)
    spent = [body["usage"] for body in decisions]
    assert all(usage["extract"][0] == 1 for usage in spent)
    with reports(tmp_path) as of:
        told = of.explain("ann")
    made = [record["fact_ids"] for record in told]
    assert any(made) and not all(made)
    assert [record["consolidated_at_seq"] for record in told] == [n if made[n] else None for n in range(12)]


@pytest.mark.parametrize("in_flight", [False, True])
def test_of_a_deleted_turn_the_eager_policy_leaves_no_byte(in_flight: bool, tmp_path: Path) -> None:
    """Updates and deletions of facts included, which keep what was said before in their history."""
    llm = HeldLLM(MockReplies(2)) if in_flight else RecordingLLM(MockReplies(2))
    texts = ["the boat and the harbour", f"the boat of the {MARKER}", *[f"the boat {n}" for n in range(6)]]
    with open_engine(tmp_path, llm, policy="eager") as engine:
        receipts = engine.add_batch([turn_of("ann", n, text) for n, text in enumerate(texts)])
        if isinstance(llm, HeldLLM):
            while MARKER not in llm.prompts["ann"][-1].user:
                llm.release()
                engine.step()
        else:
            assert engine.drain()
            assert MARKER in repr([row.payload for row in rows_of(tmp_path, "fact")])
            assert any(orjson.loads(row.payload).get("deleted") for row in rows_of(tmp_path, "fact"))
        assert receipts[1].id is not None
        engine.delete(receipts[1].id)
        while not engine.idle:
            if isinstance(llm, HeldLLM):
                llm.release()
            engine.step()
        live = engine.get_all("ann")
        assert live and MARKER not in repr(live)
        engine.purge()
    assert not bytes_hold(tmp_path, MARKER)
    with open_engine(tmp_path, policy="eager") as engine:
        assert engine.get_all("ann") == live


# ---- ablations


def made(store: Path, **options: Any) -> tuple[set[str], set[str]]:
    """Kinds of memories and operations of twelve turns on one topic."""
    llm = RecordingLLM(MockReplies(1))
    with open_engine(store, llm, **ALONE, **options) as engine:
        engine.add_batch(turns_of("ann", 12, text="the boat sails {n} miles"))
        assert engine.drain()
        return {m.kind for m in engine.get_all("ann")}, {p.operation for p in llm.prompts["ann"]}


def test_each_ablation_makes_what_it_leaves(tmp_path: Path) -> None:
    assert made(tmp_path / "whole") == ({"episode", "fact"}, {"episode", "refine"})
    assert made(tmp_path / "direct", ablation="direct-extraction") == ({"fact"}, {"direct"})
    assert made(tmp_path / "facts", ablation="without-facts") == ({"episode"}, {"episode"})


def test_k_leaves_a_tier_out_and_keeps_the_budget_of_the_others(tmp_path: Path) -> None:
    """Without subconscious and without episodic memory (section 4.3) need no more than this."""
    assert (Settings().k_sem, Settings(k_epi=3).k_sem) == (10, 6)
    with open_engine(tmp_path, RecordingLLM(MockReplies(1)), **ALONE) as engine:
        engine.add_batch(turns_of("ann", 12, text="the boat sails {n} miles"))
        assert engine.drain()
        whole = engine.search("ann", "boat")
    with open_engine(tmp_path, k_epi=0, k_sem=10) as engine:
        found = engine.search("ann", "boat")
        assert (found.episodes, found.facts, found.turns) == ((), whole.facts, whole.turns)
    with open_engine(tmp_path, k_sub=0) as engine:
        found = engine.search("ann", "boat")
        assert (found.episodes, found.facts, found.turns) == (whole.episodes, whole.facts, ())
    assert (len(whole.episodes), len(whole.facts), len(whole.turns)) == (5, 10, 10)


def found_turns(engine: Engine, words: str = "boat") -> set[int]:
    return {hit.source_seqs[0] for hit in engine.search("ann", words, k_sub=100).turns}


@pytest.mark.parametrize("ivf_rows", [1, 1_000_000])
def test_consolidated_turns_leave_search_and_no_others(ivf_rows: int, tmp_path: Path) -> None:
    """As in the released code. Turns that wait, and those of a parked job, stay."""
    topics = ["boat sails harbour"] * 4 + ["violin bow string"] * 2
    turns = [turn_of("ann", n, text) for n, text in enumerate(topics)]
    options: dict[str, Any] = {"theta_sim": 0.6, "theta_merge": 1.0, "theta_count": 3, "ivf_rows": ivf_rows}
    broken = MockReplies(malformed_rate=1.0, malformed_sticky=True)
    with open_engine(tmp_path, RecordingLLM(broken), retain_consolidated=False, **options) as engine:
        engine.add_batch(turns[:3])
        assert engine.drain()
        assert engine.stats()["dead_letters"] == 1
        assert found_turns(engine) == {0, 1, 2}, "of a parked job"
    with open_engine(tmp_path, RecordingLLM(MockReplies()), retain_consolidated=False, **options) as engine:
        engine.add_batch(turns[3:])
        assert engine.replay_jobs() == 1
        assert engine.drain()
        assert found_turns(engine) == {3, 4, 5}
        assert found_turns(engine, "violin") == {3, 4, 5}
        by_vector = engine.retrieval.search(
            engine.tenants.get("ann"),
            np.asarray(ENCODER.encode(["boat"])[0]),
            k_sub=100,
            k_epi=0,
            k_sem=0,
            window=Window(),
        )
        assert {hit.source_seqs[0] for hit in by_vector.turns} == {3, 4, 5}
    with open_engine(tmp_path, **options) as engine:
        assert found_turns(engine) == set(range(6)), "they stay stored, and by default searchable"
