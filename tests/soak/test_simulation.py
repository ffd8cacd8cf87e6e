"""A thousand seeds of the simulated cluster (tests/support/cluster/simulation)."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.machine import commit

from ..support.cluster.simulation.run import Failed, run
from ..support.soak.runs import report

SEEDS = int(os.environ.get("SOAK_SEEDS", "1000"))
COMMAND = f"SOAK_SEEDS={SEEDS} SOAK_OUT=docs/results pytest -m soak tests/soak/test_simulation.py"


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_a_thousand_seeds_find_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Set SOAK_SEEDS_STATE to a file to go on where an earlier run of the same commit ended."""
    state = Path(os.environ.get("SOAK_SEEDS_STATE", tmp_path / "seeds.jsonl"))
    done: dict[int, dict[str, Any]] = {}
    for line in state.read_text().splitlines() if state.exists() else ():
        if (result := json.loads(line))["commit"] == commit():
            done[result["seed"]] = result
    for seed in (seed for seed in range(SEEDS) if seed not in done):
        try:
            done[seed] = asdict(run(seed))
        except Failed as failed:
            done[seed] = {"seed": seed, "failed": str(failed).splitlines()[-2:]}
        with state.open("a") as file:
            file.write(json.dumps({"commit": commit(), **done[seed]}) + "\n")
    failed_seeds = {seed: result["failed"] for seed, result in done.items() if "failed" in result}
    counts = sum((Counter(result.get("counts", {})) for result in done.values()), Counter[str]())
    virtual_s = sum(result.get("virtual_s", 0.0) for result in done.values())
    figures = {"seeds": len(done), "failed": failed_seeds, "virtual_s": round(virtual_s), **counts}
    report(capsys, "simulation", COMMAND, **figures)
    assert not failed_seeds
