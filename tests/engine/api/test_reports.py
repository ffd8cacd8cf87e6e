"""Reports against the engine's own live state: two independent readings of one journal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import patch

import numpy as np
import orjson
import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.api.transfer.reindex import reindex
from undertow.engine.api.views.reports import Reports
from undertow.engine.api.views.stats import store_stats, store_usage, tenant_stats
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.estimate.calibrate import PairCosines
from undertow.engine.storage.journal import Journal
from undertow.kernels.arena.arena import Arena

from ...support.cli import conversation, write_log

SETTINGS = Settings(
    encoder="hash:384",
    device="cpu",
    theta_sim=0.5,
    theta_merge=0.55,
    theta_count=3,
    batch_turns=16,
    llm_url=None,
)
# parks, refusals, empty replies: every kind of decision occurs
REPLIES = MockReplies(3, refusal_rate=0.3, empty_rate=0.3, malformed_rate=0.15, malformed_sticky=True)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", conversation("ada", 60))


@pytest.fixture
def engine(tmp_path: Path, log: Path) -> Iterator[Engine]:
    with Engine(tmp_path / "s", SETTINGS, HashingEncoder(384), llm=MockLLM(REPLIES)) as opened:
        work = Ingest(opened)
        work.feed([log])
        assert work.settle()
        yield opened


def reports_of(engine: Engine) -> Reports:
    return Reports(Journal.open(engine.journal.location, writable=False))


def test_explain_has_the_contracts_fields_and_says_which_turns_still_count_in_gates(engine: Engine) -> None:
    tenant = engine.tenants.get("ada")
    why = reports_of(engine).explain("ada")
    assert {"waits", "fired", "merged", "parked"} == {r["decision"] for r in why}
    live = (engine.arena.flags(tenant.turns_segment) & Arena.LIVE).astype(bool)
    parked = {seq for r in why if r["decision"] == "parked" for seq in r["cluster_seqs"]}
    fields = (
        "seq decision merge_asked nearest_episode score cluster_seqs consolidated_at_seq "
        "episode_ids fact_ids thresholds"
    )
    grounds = ("relevant", "relevant_scores", "reason", "usage")
    for record in why:
        assert [name for name in record if name not in grounds] == fields.split()
        assert ("usage" in record) >= bool(record["episode_ids"])
        asked = record["score"] is not None and record["score"] >= SETTINGS.merge_threshold
        assert record["merge_asked"] == asked
        out_of_gates = record["consolidated_at_seq"] is not None or record["seq"] in parked
        assert live[record["seq"]] == (not out_of_gates)
        at = record["consolidated_at_seq"]
        if at is not None:
            assert at >= record["seq"]
            assert record["seq"] in why[at]["cluster_seqs"]
            assert why[at]["decision"] in ("fired", "merged")
    refired = [r for r in why if r["decision"] == "fired" and not r["episode_ids"]]
    assert refired, "an empty reply leaves its turns live"


def test_replaying_a_parked_job_consolidates_its_turns_at_the_replay_s_seq(engine: Engine) -> None:
    before = reports_of(engine)
    parked = before.jobs()
    turns = len(before.turns("ada"))
    assert parked
    engine._llm = engine.scheduler.llm_calls.llm = MockLLM(MockReplies(3))
    assert engine.replay_jobs() == len(parked)
    assert engine.drain()
    after = reports_of(engine)
    why = after.explain("ada")
    assert after.jobs() == []
    assert len(why) == turns, "control records are no turns"
    fired = {seq for job in parked if job["operation"] == "episode" for seq in job["cluster_seqs"]}
    assert fired
    assert all((why[seq]["consolidated_at_seq"] or 0) >= turns for seq in fired)


def test_memories_are_those_the_engine_holds(engine: Engine) -> None:
    reports = reports_of(engine)
    tenant, why = engine.tenants.get("ada"), reports.explain("ada")
    for kind in ("episode", "fact"):
        current = [(m.id, m.version, m.text) for m in tenant.current(kind)]
        assert [(m["id"], m["version"], m["text"]) for m in reports.memories("ada", kind)] == current
        every = reports.memories("ada", kind, every=True)
        assert {m["id"] for m in every} == {i for i, _, _ in current}
        assert all(m["id"] in why[m["made_at_seq"]][f"{kind}_ids"] for m in every)
        for memory_id in {m["id"] for m in every}:
            versions = [m for m in every if m["id"] == memory_id]
            assert [m["version"] for m in versions] == list(range(1, len(versions) + 1))
            replaced_at = [m["superseded_at_seq"] for m in versions]
            assert replaced_at == [*(m["made_at_seq"] for m in versions[1:]), None]
            assert reports.history(memory_id) == versions


def test_what_a_crash_left_of_a_deleted_turn_is_never_shown(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows stay, as after a kill between the deletion and the removal of what it deletes."""
    monkeypatch.setattr(engine.journal, "delete_rows", lambda lsns: None)
    engine._llm = engine.scheduler.llm_calls.llm = MockLLM(MockReplies(3))
    before = reports_of(engine)
    seq = next(m["source_seqs"][0] for m in before.memories("ada", "episode") if m["version"] > 1)
    turn = before.turns("ada")[seq]
    engine.delete(turn["id"])
    assert engine.drain()

    after = reports_of(engine)
    left = list(after._journal.read(kinds=["turn", "episode", "fact"], vectors=False))
    assert turn["id"] in [row.id for row in left], "the crash left nothing to hide"
    on_it = [row for row in left if row.kind != "turn" and seq in orjson.loads(row.payload)["source_seqs"]]
    exported = [m for m in after.export("ada") if m["kind"] in ("turn", "episode", "fact")]
    assert turn["id"] not in [m["id"] for m in exported]
    assert not any(seq in m["source_seqs"] and not m["deleted"] for m in exported if m["kind"] != "turn")
    for row in on_it:
        assert not any(seq in m["source_seqs"] and m["text"] for m in after.history(str(row.id)))
    for kind in ("episode", "fact"):
        assert not any(seq in m["source_seqs"] for m in after.memories("ada", kind, every=True))
    with pytest.raises(UndertowError, match="no memory has the id"):
        after.history(turn["id"])
    assert turn["text"] not in [t.get("text") for t in after.turns("ada", every=True)]
    assert len(list(after.turn_vectors("ada"))) == len(after.turns("ada")) == 59
    assert after.tenant_sizes() == [{"tenant": "ada", "turns": 59}]


def test_a_parked_deletion_consolidates_nothing(engine: Engine) -> None:
    before = reports_of(engine)
    why = before.explain("ada")
    spoilt = MockReplies(3, malformed_rate=1.0, malformed_sticky=True)
    engine._llm = engine.scheduler.llm_calls.llm = MockLLM(spoilt)
    episode = next(m for m in before.memories("ada", "episode") if len(m["source_seqs"]) > 2)
    deleted = episode["source_seqs"][0]
    engine.delete(before.turns("ada")[deleted]["id"])
    assert engine.drain()
    after = reports_of(engine)
    assert len(after.jobs()) == len(before.jobs()) + 1, "the deletion was not parked"
    assert [r for r in after.explain("ada") if r["seq"] != deleted] == [r for r in why if r["seq"] != deleted]


def test_figures_are_the_same_loaded_or_not(engine: Engine) -> None:
    live = tenant_stats(engine.tenants.get("ada"))
    cold = reports_of(engine).tenants
    assert store_stats(cold) == {"tenants": 1, **live}
    assert cold.loaded() == []
    assert live["turns"] == 60
    usage = store_usage(cold)
    assert sum(u["calls"] for u in usage.values()) == live["llm_calls"]
    assert engine.stats() == {"tenants": 1, **live}
    assert [t.name for t in engine.tenants.loaded()] == ["ada"]


@pytest.mark.parametrize("batch_turns", [1, 7, 64])
def test_an_ingest_cut_short_anywhere_resumes_to_the_same_store(
    tmp_path: Path, engine: Engine, log: Path, batch_turns: int
) -> None:
    """Each run is stopped a little later than the one before: in the reading, then in the deciding."""
    store = tmp_path / "cut"
    settings = SETTINGS.model_copy(update={"batch_turns": batch_turns})
    stored = runs = 0
    done = False
    while not done:
        runs += 1
        with Engine(store, settings, HashingEncoder(384), llm=MockLLM(REPLIES)) as cut:
            answers = chain(repeat(False, 20 * runs), repeat(True))
            work = Ingest(cut, resume=True, stop=answers.__next__)
            cut.resume()
            work.feed([log])
            stored += work.report.new_turns
            assert work.report.read_turns == work.report.new_turns, "no turn was offered twice"
            done = not work.report.interrupted and work.settle()
    assert runs > 2
    assert stored == 60
    whole, pieces = reports_of(engine), Reports(Journal.open(store, writable=False))
    assert pieces.explain("ada") == whole.explain("ada")
    assert pieces.turns("ada") == whole.turns("ada")
    for kind in ("episode", "fact"):
        assert pieces.memories("ada", kind, every=True) == whole.memories("ada", kind, every=True)


class FailingEncoder(HashingEncoder):
    """An encoder of other vectors that gives up after some calls."""

    def __init__(self, calls: int) -> None:
        super().__init__(64)
        self._left, self.texts = calls, 0

    def encode(self, texts: Sequence[str]) -> Float16:
        if self._left == 0:
            raise OSError("the machine went down")
        self._left -= 1
        self.texts += len(texts)
        return super().encode(texts)


def test_a_reindex_cut_short_leaves_the_store_and_goes_on_later(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undertow.engine.api.transfer.reindex.ROWS_PER_STEP", 10)
    before = list(reports_of(engine).export("ada"))
    engine.journal.close()
    store = engine.journal.location
    with pytest.raises(OSError, match="went down"):
        reindex(store, FailingEncoder(4))
    old = Journal.open(store, writable=False)
    assert (old.info.dim, list(Reports(old).export("ada"))) == (384, before)
    rest = FailingEncoder(10_000)
    monkeypatch.setattr("undertow.engine.api.transfer.reindex.ROWS_PER_COMMIT", 25)
    with patch.object(Journal, "append_copies", autospec=True, side_effect=Journal.append_copies) as append:
        embedded = reindex(store, rest)
    commits = [len(call.args[1]) for call in append.call_args_list]
    assert commits[1:] and 20 < min(commits[:-1]) <= max(commits) <= 34, "a commit for several steps"
    new = Journal.open(store, writable=False)
    assert new.info.dim == 64
    assert list(Reports(new).export("ada")) == before
    assert sum(m["kind"] in ("turn", "episode", "fact") for m in before) == embedded
    assert 0 < rest.texts < embedded, "what was embedded before the cut was kept"
    for line in Reports(new).export("ada", vectors=True):
        if "vector" in line:
            text = line["text"]
            assert line["vector"] == HashingEncoder(64).encode([text])[0].tolist()
    assert reindex(store, FailingEncoder(0)) == 0


def test_a_half_made_reindex_is_thrown_away_when_the_store_has_changed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undertow.engine.api.transfer.reindex.ROWS_PER_STEP", 10)
    engine.journal.close()
    store = engine.journal.location
    with pytest.raises(OSError, match="went down"):
        reindex(store, FailingEncoder(4))
    with Engine(store, SETTINGS, HashingEncoder(384)) as writer:
        first = Reports(writer.journal).turns("ada")[0]["id"]
        writer.delete(first)
    rest = FailingEncoder(10_000)
    assert rest.texts == 0
    assert reindex(store, rest) == rest.texts, "everything was embedded anew"
    assert first not in [t["id"] for t in Reports(Journal.open(store, writable=False)).turns("ada")]


def test_pair_cosines_give_the_exact_quantile() -> None:
    vectors = np.random.default_rng(5).normal(size=(700, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    pairs = PairCosines()
    pairs.add(vectors)
    exact = (vectors @ vectors.T)[np.triu_indices(700, 1)]
    assert pairs.total == 700 * 699 // 2
    for q in (0.01, 0.5, 0.98):
        assert pairs.quantile(q) == pytest.approx(np.quantile(exact, q), abs=3e-4)
