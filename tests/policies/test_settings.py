"""Which policy a store keeps to, and the ablations of section 4.3, as settings of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import pytest
from pydantic import ValidationError

from undertow.bench.mock.llm import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.api.transfer.reindex import reindex
from undertow.engine.base.config import Settings
from undertow.engine.base.model import PolicyName
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.policies.base import Tiers
from undertow.engine.policies.registry import tiers_of
from undertow.engine.search.ranking import Window
from undertow.engine.storage.store_info import DESCRIPTION, StoreError, read_info

from ..support.engine import (
    ALONE,
    ENCODER,
    RecordingLLM,
    bytes_hold,
    open_engine,
    put,
    rows_of,
    settings_of,
    turn_of,
    turns_of,
)
from ..support.faults.harness import reports

# ---- a store and its policy


def test_a_store_remembers_the_policy_and_refuses_to_be_written_by_another(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(MockReplies()), policy="eager") as engine:
        engine.add_batch(turns_of("ann", 3))
        assert engine.drain()
    assert read_info(tmp_path).policy == "eager"
    with pytest.raises(StoreError, match=r"'eager'.*'nemori'.*Leave UNDERTOW_POLICY out"):
        open_engine(tmp_path, policy="nemori")
    with open_engine(tmp_path, RecordingLLM(MockReplies())) as engine:  # settings that name none
        assert engine.add_batch(turns_of("bob", 2)) and engine.drain()
        assert engine.search("bob", "word1").facts
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
    with pytest.raises(StoreError, match="use the policy 'recmem'"):
        open_engine(tmp_path, policy="eager")


def test_the_settings_name_policies_and_their_ablations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_POLICY", "eager")
    assert Settings().policy == "eager"
    with pytest.raises(ValidationError, match="'direct-extraction' leaves out a part of"):
        Settings(ablation="direct-extraction")
    with pytest.raises(ValidationError, match="management is a setting of the policy 'nemori'"):
        Settings(management="append")
    with pytest.raises(
        ValidationError, match=r"'fixed-chunks' .*policy 'nemori', and the policy is 'recmem'"
    ):
        Settings(policy="recmem", ablation="fixed-chunks")
    assert Settings(policy="nemori", ablation="fixed-chunks", management="summary").window_messages == 20
    with pytest.raises(ValidationError):
        Settings(policy="lazy")  # type: ignore[arg-type]


def test_every_policy_goes_past_what_another_has_had_logged(tmp_path: Path) -> None:
    missed = {"question": "What does Ann play?", "episode_ids": ["0" * 32]}
    for policy in get_args(PolicyName):
        llm = RecordingLLM(MockReplies())
        with open_engine(tmp_path / policy, llm, policy=policy) as engine:
            engine.add_batch(turns_of("ann", 1))
            engine._log("ann", "used", [{"fact_ids": ["0" * 32]}])
            engine._log("ann", "reconsolidate", [missed])
            assert engine.drain()
            assert "supplement" not in {prompt.operation for prompt in llm.prompts["ann"]}
            assert engine.tenants.get("ann").cursor == 3


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
    assert all(body["usage"]["extract"][0] == 1 for body in decisions)
    with reports(tmp_path) as of:
        told = of.explain("ann")
    made = [record["fact_ids"] for record in told]
    assert any(made) and not all(made)
    assert [record["consolidated_at_seq"] for record in told] == [n if made[n] else None for n in range(12)]


# ---- NEMORI in an engine

NEMORI: dict[str, Any] = {"policy": "nemori", "window_messages": 6}


def test_repairs_of_partitions_are_counted_wherever_the_log_is_read_from(tmp_path: Path) -> None:
    """Each reply misses a message, names one twice, and one that is not there; some windows are parked."""
    replies = MockReplies(6, refusal_rate=1.0, malformed_rate=0.1, malformed_sticky=True)
    with open_engine(tmp_path / "a", RecordingLLM(replies), **NEMORI) as engine:
        engine.add_batch(turns_of("ann", 24, text="the boat sails {n} miles"))
        assert engine.drain()
        stats = engine.stats()
        records = engine.export_page("ann").items
    bodies = [orjson.loads(row.payload) for row in rows_of(tmp_path / "a", "decision")]
    repairs = [(body["decision"], body["repairs"]) for body in bodies if body.get("repairs")]
    assert {decision for decision, _ in repairs} == {"fired", "parked"}
    assert min(count for _, count in repairs) >= 3
    assert stats["partition_repairs"] == sum(count for _, count in repairs)
    with open_engine(tmp_path / "a", **NEMORI) as engine:
        assert engine.stats() == stats
    with open_engine(tmp_path / "b", **NEMORI) as engine:
        engine.import_("bob", records)
        assert engine.tenant_stats("bob")["partition_repairs"] == stats["partition_repairs"]


def test_an_answer_is_given_the_words_of_the_best_episodes_and_the_turns_that_wait(tmp_path: Path) -> None:
    llm = RecordingLLM(MockReplies(1))
    with open_engine(tmp_path, llm, **NEMORI, raw_of_best=1) as engine:
        engine.add_batch(turns_of("ann", 7, text="the boat sails {n} miles"))
        assert engine.drain()
        found = engine.recall("ann", "boat miles")
        assert len(engine.search("ann", "boat miles").turns) == 7, "a search looks at every turn"
        best = next(m for m in engine.get_all("ann") if m.id == found.episodes[0].id)
        *raw, waiting = sorted(found.turns, key=lambda hit: hit.source_seqs)
        assert waiting.source_seqs == (6,)
        said = [line for hit in raw for line in hit.memory.split("\n")]
        turns = {seq: engine.tenants.get("ann").turn(seq) for seq in best.source_seqs}
        assert said == [turns[seq].messages[line] for seq, line in sorted(best.source_messages)]
        assert {hit.score for hit in raw} == {found.episodes[0].score}
        assert found.quoted == {*best.source_seqs}, "which are told from the turns that were found"
        engine.answer("ann", "Who sails?")
    asked = llm.prompts["ann"][-1]
    assert asked.operation == "answer" and all(line in asked.user for line in said)


@pytest.mark.parametrize(
    "options", [{"management": "a-mem"}, {"management": "memory-os"}, {"nemori_index": "messages"}]
)
def test_no_word_of_a_deleted_turn_is_left(options: dict[str, Any], tmp_path: Path) -> None:
    parts = {**NEMORI, **options, "short_term_pages": 1, "heat_threshold": 0.5}
    with open_engine(tmp_path, RecordingLLM(MockReplies(3)), **parts) as engine:
        said = [f"the boat sails {'xylophonist' if n == 1 else n} miles" for n in range(12)]
        put(engine, [turn_of("ann", n, text) for n, text in enumerate(said)])
        assert engine.drain()
        versions = [row.payload.decode() for kind in ("episode", "fact") for row in rows_of(tmp_path, kind)]
        assert sum("xylophonist" in payload for payload in versions) > 1
        engine.delete(engine.search("ann", "xylophonist", k_sub=1).turns[0].id)
        assert engine.drain()
        assert {m.kind for m in engine.get_all("ann")} == {"episode", "fact"}
        engine.purge()
    assert not bytes_hold(tmp_path, "xylophonist")


def test_an_answer_is_given_what_the_host_of_the_facts_gives(tmp_path: Path) -> None:
    for management, kinds in (("a-mem", {None}), ("memory-os", {"page", "segment", "profile"})):
        options = {**NEMORI, "management": management, "short_term_pages": 1, "heat_threshold": 0.5}
        with open_engine(
            tmp_path / management, RecordingLLM(MockReplies(3)), **options, k_sem=3, answer_tokens=0
        ) as engine:
            put(engine, turns_of("ann", 24, text="the boat sails {n} miles"))
            assert engine.drain()
            stored = {m.id: m for m in engine.get_all("ann")}
            found = engine.recall("ann", "boat miles")
            assert not found.episodes and any(m.kind == "episode" for m in stored.values())
            shown = {hit.id for hit in found.facts}
            assert {m.fact_kind for m in stored.values() if m.kind == "fact"} >= kinds
            assert shown >= {m.id for m in stored.values() if m.fact_kind == "profile"}
            assert shown >= {
                i for hit in found.facts[:1] for i in stored[hit.id].links if management == "a-mem"
            }
            assert len(shown) > 3, "links, or the profile"
    assert tiers_of(settings_of(policy="nemori", management="a-mem")).k_epi == 0, "with a budget too"


@pytest.mark.parametrize("answer_tokens", [0, 5_000])
def test_an_answer_is_given_the_messages_of_its_episodes(answer_tokens: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "nemori_retrieve": "messages",
        "k_epi": 2,
        "k_sub": 0,
        "answer_tokens": answer_tokens,
    }
    with open_engine(tmp_path, RecordingLLM(MockReplies(1)), **NEMORI, **options) as engine:
        put(engine, turns_of("ann", 24, text="the boat sails {n} miles"))
        assert engine.drain()
        best = {hit.id for hit in engine.search("ann", "boat miles", k_epi=2).episodes}
        found = engine.recall("ann", "boat miles")
        sources = {s for m in engine.get_all("ann") if m.id in best for s in m.source_seqs}
        assert len(best) == 2 and not found.episodes and not found.quoted
        assert {s for hit in found.turns for s in hit.source_seqs} == sources


def test_an_episode_is_found_by_its_messages_also_after_a_reindex_or_import(tmp_path: Path) -> None:
    options: dict[str, Any] = {**NEMORI, "nemori_index": "messages", "search": "dense"}

    def check(engine: Engine, tenant: str) -> None:
        for m in engine.get_all(tenant):
            if m.kind == "episode":
                turns = {seq: engine.tenants.get(tenant).turn(seq) for seq in m.source_seqs}
                assert m.index_text == "\n".join(turns[s].messages[line] for s, line in m.source_messages)
                best = engine.search(tenant, m.index_text, k_epi=1).episodes[0]
                assert (best.memory, round(best.score, 2)) == (m.text, 1.0)

    with open_engine(tmp_path / "a", RecordingLLM(MockReplies(1)), **options) as engine:
        put(engine, turns_of("ann", 12, text="the boat sails {n} miles"))
        assert engine.drain()
        check(engine, "ann")
        engine.import_("bob", engine.export_page("ann").items)
        check(engine, "bob")
    other = HashingEncoder(96)
    assert reindex(tmp_path / "a", other)
    with Engine(tmp_path / "a", settings_of(**options), other) as engine:
        check(engine, "ann")


# ---- ablations


def test_k_leaves_a_tier_out_and_keeps_the_budget_of_the_others(tmp_path: Path) -> None:
    """Without subconscious and without episodic memory (section 4.3) need no more than this."""
    assert (tiers_of(Settings()).k_sem, tiers_of(Settings(k_epi=3)).k_sem) == (10, 6)
    assert tiers_of(Settings(policy="nemori")) == Tiers(10, 10, 20, 2, consolidated=False)
    assert tiers_of(Settings(policy="nemori", k_epi=0, k_sem=5, raw_of_best=1)).raw_of_best == 1
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
        by_vector = engine.ranker.rank(
            engine.tenants.get("ann"),
            np.asarray(ENCODER.encode(["boat"])[0]),
            k_sub=100,
            k_epi=0,
            k_sem=0,
            window=Window(),
        )
        assert {seq for _, seq in by_vector.turns} == {3, 4, 5}
    with open_engine(tmp_path, **options) as engine:
        assert found_turns(engine) == set(range(6)), "they stay stored, and by default searchable"
