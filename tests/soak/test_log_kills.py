"""A thousand kills of writers: no acknowledged row is lost, none is there twice."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections import Counter
from pathlib import Path

import pytest

from undertow.engine.storage.journal import Journal

from ..support.faults.writers import DIM, Kills
from ..support.soak.runs import report, soak_round

ROOT = str(Path(__file__).parents[2])
KILLS = int(os.environ.get("SOAK_KILLS", "1000"))
# a new store after so many, so that the check reads no more than these have written
KILLS_PER_STORE = 25
FAULTS = ("lost", "doubled", "disordered")


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_a_thousand_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    counts, first = Counter[str](), KILLS * soak_round()
    while counts["kills"] < KILLS:
        counts += killed(tmp_path / f"store{counts['kills']}", first + counts["kills"], KILLS_PER_STORE)
        assert not any(counts[fault] for fault in FAULTS), counts
    report(**{**dict.fromkeys(FAULTS, 0), **counts})


def test_a_few_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    counts = killed(tmp_path / "store", 7, 12)
    assert counts["kills"] >= 12 and counts["acknowledged"] > 100
    assert not any(counts[fault] for fault in FAULTS), counts


def killed(store: Path, seed: int, kills: int) -> Counter[str]:
    """Kill so many writers of a new store, every other one with fsync."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["undertow.engine.storage.journal"])
    rng = random.Random(seed)
    Journal.create(store, DIM, {"model": "none"})
    run = Kills(context, store, rng, rng.choice(["commit", "fsync"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)  # where the processes find their code
        while run.kills < kills:
            run.kill()
    return Counter(
        {"kills": run.kills, "overtaken": run.overtaken, f"{run.durability}_runs": 1} | run.check()
    )
