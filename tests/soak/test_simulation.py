"""Many seeds of the simulated cluster (tests/support/cluster/simulation)."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from ..support.cluster.simulation.run import run
from ..support.soak.runs import report, soak_round

SEEDS = int(os.environ.get("SOAK_SEEDS", "20"))


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_no_seed_finds_anything() -> None:
    """SOAK_SEEDS seeds, after those of earlier rounds. One that fails says how to repeat it."""
    counts: Counter[str] = Counter()
    for seed in range(soak_round() * SEEDS, (soak_round() + 1) * SEEDS):
        counts.update(run(seed).counts)
    report(seeds=SEEDS, **counts)
