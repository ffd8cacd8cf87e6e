"""Thresholds that follow from a share of a tenant's own pairs of turns: when and from what they are found."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from undertow.bench.mock.llm import MockLLM
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.pair_cosines import prior_theta
from undertow.engine.base.results import Report
from undertow.engine.tenants import log
from undertow.kernels.pair_cosines import pair_quantiles, sample_order

from ...support.engine import ENCODER, Run, both_ways, ingest, open_engine, settings_of
from ...support.oracles import pair_thetas
from ...support.policies.change import REPLIES, topical

BY_SHARE: dict[str, Any] = {"theta_share": 0.2, "theta_count": 3}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds every eight turns."""
    monkeypatch.setattr(log, "THETA_TURNS", 8)


def expected(seqs: range | list[int], share: float = 0.2) -> float | None:
    """By the oracle: turn n of `topical` stands at seq n."""
    turns = topical("ann", 60)
    rows = ENCODER.encode([turns[seq].text for seq in seqs]).astype(np.float64)
    whole = (rows * 2**24).astype(np.int64)
    return pair_thetas.least_linking(dict(zip(seqs, whole, strict=True)), share)


def told(engine: Engine) -> list[tuple[int, float]]:
    return [(since, kept.theta_sim) for since, kept in engine.tenants.get("ann").told_from]


def in_force(engine: Engine, seq: int) -> Report:
    found: Report = engine.explain("ann")[seq]["thresholds"]
    return found


def test_settings_state_a_share_unless_a_theta_is_given() -> None:
    shares = [(Settings(**given).sim_share, Settings(**given).merge_share) for given in (
        {}, {"profile": "assistant"}, {"profile": "paper"}, {"theta_share": 0.0}, {"theta_sim": 0.6},
        {"theta_merge": 0.6}, {"profile": "paper", "theta_share": 0.05},
    )]  # fmt: skip
    assert shares == [
        (0.02,) * 2,
        (0.1,) * 2,
        (None,) * 2,
        (None,) * 2,
        (None,) * 2,
        (0.02, None),
        (0.05,) * 2,
    ]
    assert Settings(theta_share=0.0).similarity_threshold == 0.7
    assert Settings().similarity_threshold == prior_theta("/models/all-MiniLM-L6-v2", 0.02) == 0.71
    assert prior_theta("hash:64", 0.02) == 0.71, "the generic prior"
    assert prior_theta("all-MiniLM-L6-v2", 0.0375) == 0.68, "half-way between 0.025 and 0.05"


# by hand: how many of n turns' pairs are a share of them, at least one
COUNTS = {2: (1, 1, 1, 1), 3: (1, 1, 2, 3), 20: (1, 19, 95, 190), 21: (1, 21, 105, 210)}


@pytest.mark.parametrize("count", COUNTS)
def test_a_quantile_is_the_cosine_that_the_share_reaches_exactly(count: int) -> None:
    vectors = ENCODER.encode([turn.text for turn in topical("ann", count)])
    exact = [[Fraction(float(x)) for x in row] for row in vectors]
    pairs = [sum(map(Fraction.__mul__, a, b), Fraction(0)) for n, a in enumerate(exact) for b in exact[:n]]
    for share, reached in zip((0.001, 0.1, 0.5, 0.999), COUNTS[count], strict=True):
        theta = sorted(pairs, reverse=True)[reached - 1]
        assert pair_quantiles(vectors, (share,)) == pytest.approx((min(1.0, float(theta)),), abs=0)
        assert pair_quantiles(torch.from_numpy(vectors), (share, 0.3))[0] == min(1.0, float(theta))


def test_the_order_of_a_sample_is_that_of_splitmix64() -> None:
    seqs = np.arange(3, 1_000, 7, dtype=np.int32)
    assert seqs[sample_order(seqs)].tolist() == sorted(seqs.tolist(), key=pair_thetas.mixed)


def test_thetas_are_found_at_fixed_turns_and_hold_for_those_after(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(REPLIES), **BY_SHARE) as engine:
        ingest(engine, topical("ann", 30), 7)
        assert engine.drain()
        assert told(engine) == [(end, expected(range(end))) for end in (8, 16, 24)]
        prior = prior_theta("all-MiniLM-L6-v2", 0.2)
        assert in_force(engine, 7) | {"theta_sim": prior, "origin": "prior", "since_seq": 0} == in_force(
            engine, 7
        )
        now = in_force(engine, 20)
        assert (now["theta_sim"], now["theta_merge"]) == (expected(range(16)),) * 2
        assert (now["origin"], now["since_seq"], now["sim_share"]) == ("turns", 16, 0.2)
        decided = engine.tenants.get("ann").told_from
    with open_engine(tmp_path, None, **BY_SHARE) as engine:
        assert engine.tenants.get("ann").told_from == decided


def test_a_stated_theta_stays_and_a_new_share_is_told_by_the_next_turn(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(REPLIES), **BY_SHARE, theta_merge=0.9) as engine:
        ingest(engine, topical("ann", 10), 3)
        assert engine.drain()
        assert {kept.theta_merge for _, kept in engine.tenants.get("ann").told_from} == {0.9}
    with open_engine(tmp_path, MockLLM(REPLIES), theta_share=0.4, theta_count=3) as engine:
        ingest(engine, topical("ann", 5, start=10), 5)
        assert engine.drain()
        (since, _), (again, kept) = engine.tenants.get("ann").told_from
        assert (since, again) == (8, 12), "record 10 states the new share, 11 is the first turn after it"
        assert (kept.sim_share, kept.merge_share, kept.theta_sim) == (0.4, 0.4, kept.theta_merge)
        assert in_force(engine, 10)["origin"] == "prior"
    with open_engine(tmp_path, MockLLM(REPLIES), theta_sim=0.5, theta_count=3) as engine:
        ingest(engine, topical("ann", 9, start=15), 9)
        assert engine.drain()
        assert len(engine.tenants.get("ann").told_from) == 2
        assert in_force(engine, 20)["origin"] == "settings"


def test_a_deleted_turn_leaves_the_sample_and_what_it_has_told_stays(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(REPLIES), **BY_SHARE) as engine:
        receipts = engine.add_batch(topical("ann", 9))
        assert engine.drain()
        for seq in (2, 5):
            engine.delete(receipts[seq].id or "")
        assert engine.drain()
        before = told(engine)
        engine.add_batch(topical("ann", 8, start=9))
        assert engine.drain()
        rows = engine.tenants.get("ann").seq_by_row
        vectors = {s: engine.tenants.get("ann").turn(s).text for s in rows[:16] if s not in (2, 5)}
        whole = {
            s: (ENCODER.encode([t])[0].astype(np.float64) * 2**24).astype(np.int64)
            for s, t in vectors.items()
        }
        assert told(engine) == [*before, (18, pair_thetas.least_linking(whole, 0.2))]
        live = told(engine)
    with open_engine(tmp_path, None, **BY_SHARE) as engine:
        assert told(engine) == live


def test_a_change_of_policy_tells_them_anew(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(REPLIES), **BY_SHARE, policy="eager") as engine:
        ingest(engine, topical("ann", 20), 7)
        assert engine.drain()
        assert told(engine) == [], "the eager policy has no gate"
        engine.set_policy("ann", "recmem")
        assert engine.drain()
        assert told(engine) == [(8, expected(range(8))), (16, expected(range(16)))]


def test_turns_that_were_read_ahead_of_new_thetas_are_read_again(tmp_path: Path) -> None:
    def act(engine: Engine, pause: Any) -> None:
        for start in range(0, 40, 5):
            for turn in topical("ann", 5, start=start):
                engine.scheduler.inbox.put(turn)
            pause()

    run: Run = both_ways(tmp_path, settings_of(**BY_SHARE), REPLIES, act)
    assert sum(bool(d.thetas) for d in run.decisions["ann"]) == 5
