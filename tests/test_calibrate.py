"""`calibrate`: its gate decides as the engine does, and its shares are those that it links."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from undertow.bench.mock_llm import MockLLM, MockReplies
from undertow.bench.quality.datasets import load
from undertow.engine.calibrate import PairCosines, Step, walk
from undertow.engine.config import Settings
from undertow.engine.encoder import HashingEncoder
from undertow.engine.engine import Engine
from undertow.engine.reports import Reports

LOCOMO = Path(__file__).resolve().parents[2] / "shared" / "data" / "locomo_dev.json"

# x and y are two topics; z is near x, and nearer to the middle of x and z
X, Y = (1.0, 0.0), (0.0, 1.0)
Z = (0.8, 0.6)


def vectors(*rows: tuple[float, float]) -> np.ndarray:
    return np.array(rows, np.float32)


def test_a_turn_is_asked_to_join_the_nearest_cluster_and_goes_to_the_gate_when_refused() -> None:
    rows = vectors(X, X, Y, Y, X, Y, X)
    answers = iter([True, False, False])
    steps = list(walk(rows, 0.9, 2, theta_merge=0.9, grants=lambda: next(answers)))
    assert steps == [
        Step(0),
        Step(1, cluster=(0, 1)),
        Step(2),
        Step(3, cluster=(2, 3)),
        Step(4, asked=0, merged=True),
        Step(5, asked=1),  # refused: it waits, live
        Step(6, asked=0),  # refused too, and what merged before it is no longer live
    ]


def test_a_refused_turn_can_fire() -> None:
    steps = list(walk(vectors(X, X, X, X), 0.9, 2, theta_merge=0.9, grants=lambda: False))
    assert [step.cluster for step in steps] == [(), (0, 1), (), (2, 3)]
    assert [step.asked for step in steps] == [None, None, 0, 0]


def test_a_merge_moves_the_centroid() -> None:
    # cos(y, x) is 0 and cos(y, centre of x, x, z, z) is 0.35
    asked = [step.asked for step in walk(vectors(X, X, Z, Z, Y), 0.9, 2, theta_merge=0.3)]
    assert asked == [None, None, 0, 0, 0]
    assert [step.asked for step in walk(vectors(X, X, Y), 0.9, 2, theta_merge=0.3)] == [None, None, None]


def test_without_merges_no_cluster_is_asked() -> None:
    assert {step.asked for step in walk(vectors(X, X, X, X, X), 0.9, 2)} == {None}


@pytest.fixture(scope="module")
def sample():  # type: ignore[no-untyped-def]
    if not LOCOMO.exists():
        pytest.skip(f"no LoCoMo data at {LOCOMO}")
    return next(iter(load(LOCOMO, "locomo", 1_000_000)))


def test_on_real_turns_the_simulated_gate_fires_the_clusters_of_the_engine(sample, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    encoder = HashingEncoder(384)
    rows = encoder.encode([turn.text for turn in sample.turns]).astype(np.float32)
    pairs = PairCosines()
    pairs.add(rows)
    theta = pairs.quantile(0.98)
    settings = Settings(encoder="hash:384", device="cpu", llm_url=None, theta_sim=theta, theta_count=4)
    with (
        MockLLM(MockReplies(refusal_rate=1.0)) as llm,
        Engine(tmp_path / "store", settings, encoder, llm=llm) as engine,
    ):
        engine.add_batch(sample.turns)
        assert engine.drain()
        decisions = Reports(engine.journal, engine.tenants).explain(sample.tenant)
    fired = [tuple(d["cluster_seqs"]) for d in decisions if d["decision"] == "fired"]
    assert len(fired) > 3
    assert [step.cluster for step in walk(rows, theta, 4) if step.cluster] == fired


def test_on_real_turns_a_share_is_the_share_that_its_theta_links(sample) -> None:  # type: ignore[no-untyped-def]
    rows = HashingEncoder(384).encode([turn.text for turn in sample.turns]).astype(np.float32)
    pairs = PairCosines()
    pairs.add(rows)
    cosines = (rows @ rows.T)[np.triu_indices(len(rows), 1)]
    for share in (0.005, 0.02, 0.1):
        theta = pairs.quantile(1 - share)
        assert np.mean(cosines >= theta) == pytest.approx(share, abs=0.001)
        assert pairs.share_above(theta) == pytest.approx(share, abs=0.001)
