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
from undertow.engine.estimate.calibrate import PairCosines, Vectors, calibrate, walk

LOCOMO = Path(__file__).resolve().parents[4] / "shared" / "data" / "locomo_dev.json"

X, Y = (1.0, 0.0), (0.0, 1.0)
Z = (0.8, 0.6)


def vectors(*rows: tuple[float, float]) -> Vectors:
    return np.array(rows, np.float32)


def test_a_turn_near_a_cluster_merges_and_leaves_the_gate() -> None:
    rows = vectors(X, X, Y, Y, X, Y, X)
    assert list(walk(rows, 0.9, 2, merge=True)) == [(), (0, 1), (), (2, 3), None, None, None]
    assert list(walk(rows, 0.9, 2)) == [(), (0, 1), (), (2, 3), (), (), (4, 6)]


def test_a_merge_moves_the_centroid() -> None:
    # cos(y, x) is 0, and cos(y, centroid of x, x, z, z) is 0.32
    assert list(walk(vectors(X, X, Z, Z, Y), 0.3, 2, merge=True))[-1] is None
    assert list(walk(vectors(X, X, Y), 0.3, 2, merge=True))[-1] == ()


def test_a_proposal_counts_fires_with_and_without_merges() -> None:
    reports: Any = SimpleNamespace(turn_vectors=lambda tenant: vectors(*[X] * 7))
    proposals = calibrate(reports, 0.5, 3, tenant="ann")["proposals"]
    # 3 fire, 3 fire, 1 waits; with merges 3 fire and 4 are near their centroid
    counts = {"triggers": 2, "consolidated_turns": 6, "proxy_triggers": 1, "proxy_merges": 4}
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
    assert [cluster for cluster in walk(rows, theta, 4) if cluster] == fired


def test_on_real_turns_a_share_is_the_share_that_its_theta_links(sample: Sample) -> None:
    rows, pairs = pairs_of(sample)
    cosines = (rows @ rows.T)[np.triu_indices(len(rows), 1)]
    for share in (0.005, 0.02, 0.1):
        theta = pairs.quantile(1 - share)
        assert np.mean(cosines >= theta) == pytest.approx(share, abs=0.001)
