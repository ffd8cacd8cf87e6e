"""`calibrate`: its gate decides as the engine does, and its shares are those that it links."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.quality.datasets import Sample, load
from undertow.engine.api.engine import Engine
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.estimate.calibrate import PairCosines, Vectors, calibrate, calibrate_memories, walk

LOCOMO = Path(__file__).resolve().parents[4] / "shared" / "data" / "locomo_dev.json"

X, Y = (1.0, 0.0), (0.0, 1.0)


def vectors(*rows: tuple[float, float]) -> Vectors:
    return np.array(rows, np.float32)


def test_turns_that_have_fired_leave_the_gate() -> None:
    assert list(walk(vectors(X, X, Y, Y, X, Y, X), 0.9, 2)) == [(0, 1), (2, 3), (4, 6)]


def test_a_proposal_counts_the_clusters_that_fire_and_their_turns() -> None:
    reports: Any = SimpleNamespace(turn_vectors=lambda tenant: vectors(*[X] * 7))
    proposals = calibrate(reports, 0.5, 3, tenant="ann")["proposals"]
    counts = {"triggers": 2, "consolidated_turns": 6}  # 3 fire, 3 fire, 1 waits
    assert all(counts.items() <= proposal.items() for proposal in proposals)


@pytest.fixture(scope="module")
def sample() -> Sample:
    if not LOCOMO.exists():
        pytest.skip(f"no LoCoMo data at {LOCOMO}")
    return next(iter(load(LOCOMO, "locomo", 1_000_000)))


def pairs_of(sample: Sample) -> tuple[Vectors, PairCosines]:
    rows = HashingEncoder(384).encode([turn.text for turn in sample.turns]).astype(np.float32)
    pairs = PairCosines()
    pairs.add(rows)
    return rows, pairs


def test_on_real_turns_the_simulated_gate_fires_the_clusters_of_the_engine(
    sample: Sample, tmp_path: Path
) -> None:
    rows, pairs = pairs_of(sample)
    theta = pairs.quantile(0.98)
    settings = Settings(encoder="hash:384", device="cpu", llm_url=None, theta_sim=theta, theta_count=4)
    with (
        MockLLM(MockReplies(refusal_rate=1.0)) as llm,
        Engine(tmp_path / "store", settings, HashingEncoder(384), llm=llm) as engine,
    ):
        engine.add_batch(sample.turns)
        assert engine.drain()
        decisions = Reports(engine.journal, engine.tenants).explain(sample.tenant)
    fired = [tuple(d["cluster_seqs"]) for d in decisions if d["decision"] == "fired"]
    assert len(fired) > 3
    assert list(walk(rows, theta, 4)) == fired


def test_on_real_turns_a_share_is_the_share_that_its_theta_links(sample: Sample) -> None:
    rows, pairs = pairs_of(sample)
    cosines = (rows @ rows.T)[np.triu_indices(len(rows), 1)]
    for share in (0.005, 0.02, 0.1):
        theta = pairs.quantile(1 - share)
        assert np.mean(cosines >= theta) == pytest.approx(share, abs=0.001)


def test_thresholds_between_memories_link_a_share_of_their_own_pairs() -> None:
    """An episode with the turns that it does not rest on, and facts with episodes and facts of others."""
    episode = {"id": "e", "source_seqs": [0]}
    near, far = vectors(X, X, Y), vectors(Y, X)
    facts = [fact("a", far[1], "e"), fact("b", far[0], "other")]
    stored: dict[str, Any] = {"episode": [(episode, near[0])], "fact": facts}
    reports: Any = SimpleNamespace(
        memory_vectors=lambda tenant, kind: iter(stored[kind]),
        turns_with_vectors=lambda tenant: enumerate(near),
    )
    found = calibrate_memories(reports, 0.5, tenant="ann")
    assert (found["turn_episode_pairs"], found["episode_fact_pairs"], found["fact_pairs"]) == (2, 1, 1)
    assert found["theta_merge"] == pytest.approx(0.0, abs=0.001)
    assert found["theta_evoke"] == pytest.approx(0.0, abs=0.001), "the fact of the episode does not count"
    assert found["theta_compare"] == pytest.approx(0.0, abs=0.001)
    stored["episode"] = []
    without = calibrate_memories(reports, 0.5, tenant="ann")
    assert without["theta_merge"] is without["theta_evoke"] is None
    assert without["fact_pairs"] == 1, "facts need no episode"


def test_facts_of_one_episode_are_not_compared_with_each_other() -> None:
    """A distillation's facts are compared with those stored before. Facts may lack an episode."""
    rows = [fact("a", X, "e"), fact("b", X, "e"), fact("c", Y, "f"), fact("d", Y, None), fact("g", Y, None)]
    reports: Any = SimpleNamespace(memory_vectors=lambda tenant, kind: iter(rows if kind == "fact" else ()))
    found = calibrate_memories(reports, 0.3, tenant="ann")
    assert found["fact_pairs"] == 9, "ten pairs, one of them of one episode"
    assert found["theta_compare"] == pytest.approx(1.0, abs=0.001), "three of nine pairs are alike"
    assert calibrate_memories(reports, 0.4, tenant="ann")["theta_compare"] == pytest.approx(0.0, abs=0.001)
    some = calibrate_memories(reports, 0.3, tenant="ann", sample_memories=3)
    assert some["fact_pairs"] == 2, "a, b and c"


def fact(name: str, vector: Any, episode: str | None) -> tuple[dict[str, Any], Any]:
    return {"id": name, "episode_id": episode}, np.array(vector, np.float16)
