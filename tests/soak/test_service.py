"""The service under load in a process of its own, run by `make soak` only; see bench/system/service.py.

    SOAK_SECONDS=300 pytest -m soak tests/soak/test_service.py

SOAK_SECONDS: for how long its memory is watched. How fast it is, the benchmark says; here is what must hold
at any speed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from undertow.bench.system.service import kill_part, memory_part, overload_part

from ..support.soak.runs import soak_s

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3_600)]

# requests a second that this code keeps up with on two shared cores, and a stretch of each load in seconds
RATE, STRETCH_S = 40.0, 15.0
# what is stored meanwhile (vector, text, keys and marks, see docs/operations.md), and noise
BYTES_A_TURN, NOISE_MIB_PER_MIN = 4_096, 2.0


def test_beyond_what_it_can_do_it_refuses_and_recovers(tmp_path: Path) -> None:
    told = overload_part(tmp_path, STRETCH_S, 4 * RATE)  # 320 a second, then 640, then 80
    for stretch in (*told["beyond"], told["after"]):
        assert set(stretch["statuses"]) <= {"200", "429"}, stretch["statuses"]
        assert stretch["statuses"].get("200"), "nobody was served any more"
    assert told["beyond"][-1]["statuses"].get("429"), "it took all: not beyond what this machine can do"
    after = told["after"]["statuses"]
    assert after["200"] >= 0.95 * sum(after.values()), after


def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    told = kill_part(tmp_path, STRETCH_S, 2 * RATE)
    assert told["acknowledged_turns"], "nothing was stored before the kill"
    assert told["statuses"].get("0"), "the kill came after the load"
    assert told["lost_turns"] == told["doubled_turns"] == 0
    assert set(told["statuses"]) <= {"200", "429", "0"}, told["statuses"]


def test_memory_is_flat_but_for_what_is_stored(tmp_path: Path) -> None:
    told = memory_part(tmp_path, soak_s(), RATE)
    allowed = NOISE_MIB_PER_MIN + told["added_turns_per_min"] * BYTES_A_TURN / 2**20
    assert told["slope_mib_per_min"] <= allowed, told
