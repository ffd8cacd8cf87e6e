"""`calibrate`: its gate decides as the engine does, and its shares are those that it links."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.quality.datasets import Sample, load
from undertow.bench.system.estimates.calibrate_check import PAPER_MESSAGES, PAPER_THETA, check
from undertow.engine.api.engine import Engine
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.token_count import TokenCount
from undertow.engine.estimate.calibrate import PairCosines, Step, Vectors, walk

LOCOMO = Path(__file__).resolve().parents[4] / "shared" / "data" / "locomo_dev.json"

X, Y = (1.0, 0.0), (0.0, 1.0)
Z = (0.8, 0.6)


def vectors(*rows: tuple[float, float]) -> Vectors:
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
def sample() -> Sample:
    if not LOCOMO.exists():
        pytest.skip(f"no LoCoMo data at {LOCOMO}")
    return next(iter(load(LOCOMO, "locomo", 1_000_000)))


def test_on_real_turns_the_simulated_gate_fires_the_clusters_of_the_engine(
    sample: Sample, tmp_path: Path
) -> None:
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


def test_on_real_turns_a_share_is_the_share_that_its_theta_links(sample: Sample) -> None:
    rows = HashingEncoder(384).encode([turn.text for turn in sample.turns]).astype(np.float32)
    pairs = PairCosines()
    pairs.add(rows)
    cosines = (rows @ rows.T)[np.triu_indices(len(rows), 1)]
    for share in (0.005, 0.02, 0.1):
        theta = pairs.quantile(1 - share)
        assert np.mean(cosines >= theta) == pytest.approx(share, abs=0.001)
        assert pairs.share_above(theta) == pytest.approx(share, abs=0.001)


def test_the_check_runs_each_share_and_the_papers_threshold_and_scales_by_messages(sample: Sample) -> None:
    some = Sample(sample.tenant, sample.turns[:80], sample.holds[:80], ())
    settings = Settings(encoder="hash:384", device="cpu", llm_url=None, theta_count=3)
    words = TokenCount("words", lambda text: len(text.split()))
    found = check([some], settings, HashingEncoder(384), words, shares=(0.02, 0.1))
    messages = sum(len(turn.messages) for turn in some.turns)
    assert (found["turns"], found["messages"]) == (80, messages)
    rows = found["shares"]
    assert len(rows) == 3 and PAPER_THETA in {row["theta_sim"] for row in rows}
    assert [row["share"] for row in rows] == sorted(row["share"] for row in rows)
    thetas = [row["theta_sim"] for row in rows]
    assert thetas == sorted(thetas, reverse=True)
    assert rows[-1]["triggers_without_merges"] > rows[0]["triggers_without_merges"]
    assert rows[-1]["calls"] > rows[0]["calls"]
    # a call has the fixed text of its operation at least, some 250 words
    least = rows[-1]["calls"] * 250 * PAPER_MESSAGES / messages
    assert rows[-1]["tokens_per_588_messages"]["mock"] > least
