"""The service under load in a process of its own, run by `make soak` only; see bench/system/service.

    make soak PROOF=memory     # or overload, service-kills

SOAK_SECONDS: for how long its memory is watched. How fast it is, the benchmark says; here is what must hold
at any speed.
"""

from __future__ import annotations

import pytest

from undertow.bench.system.service.parts import Filled, Mix, kill_part, memory_part, overload_part
from undertow.bench.system.service.served import Checkout
from undertow.bench.system.service.world import World

from ..support.soak.runs import report, soak_s

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7_200)]

WORLD = World(turns=20, tenants=1_000)
MIX, DURABILITY = Mix(1, 1), "commit"
# requests a second that this code keeps up with on two shared cores, and a stretch of each load in seconds
RATE, STRETCH_S = 40.0, 15.0
# what is stored meanwhile (vector, text, keys and marks, see docs/operations.md), and noise
BYTES_A_TURN, NOISE_MIB_PER_MIN = 4_096, 2.0


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    # no topic may recur, not within an hour: there is no LLM
    return Filled.make(Checkout(theta_count=1_000), WORLD, tmp_path_factory.mktemp("service") / "filled")


def test_beyond_what_it_can_do_it_refuses_and_recovers(filled: Filled) -> None:
    told = overload_part(filled, MIX, DURABILITY, STRETCH_S)
    for stretch in (told["beyond"], told["after"]):
        assert set(stretch["statuses"]) <= {"200", "429"}, stretch["statuses"]
        assert stretch["statuses"].get("200"), "nobody was served any more"
    assert told["beyond"]["statuses"].get("429"), "it took all: not beyond what this machine can do"
    after = told["after"]["statuses"]
    assert after["200"] >= 0.9 * sum(after.values()), after
    statuses = {name: told[name]["statuses"] for name in ("beyond", "after")}
    report(overloads=1, statuses=statuses)


def test_a_kill_loses_nothing_that_was_acknowledged(filled: Filled) -> None:
    told = kill_part(filled, MIX, DURABILITY, STRETCH_S)
    assert told["of_them_under_load"], "nothing was stored before the kill"
    assert told["statuses"].get("0"), "the kill came after the load"
    assert told["lost_turns"] == told["doubled_turns"] == 0
    assert set(told["statuses"]) <= {"200", "429", "0"}, told["statuses"]
    figures = {name: told[name] for name in ("acknowledged_turns", "lost_turns", "doubled_turns")}
    report(service_kills=1, **figures)


def test_memory_is_flat_but_for_what_is_stored(filled: Filled) -> None:
    told = memory_part(filled, MIX, DURABILITY, soak_s(), RATE)
    allowed = NOISE_MIB_PER_MIN + told["added_turns_per_min"] * BYTES_A_TURN / 2**20
    assert told["statuses"].get("200", 0) >= 0.99 * sum(told["statuses"].values()), told
    assert told["slope_mib_per_min"] <= allowed, told
    report(minutes=int(soak_s() // 60), allowed=allowed, **told)
