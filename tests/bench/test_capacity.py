"""The capacity model: its arithmetic against hand-made cases, its scheduler against the lives it replays."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from undertow.bench.machine import LOCOMO
from undertow.bench.system.capacity import check as capacity_check
from undertow.bench.system.capacity import load as capacity_load
from undertow.bench.system.capacity import run as capacity
from undertow.bench.system.capacity.calibrate import Calibration, Stopwatch
from undertow.bench.system.capacity.check import CASES, TARGETS, WITHIN, Case, check, predict, ratios
from undertow.bench.system.capacity.load import Spread, Traffic, shard_map, tenant_name
from undertow.bench.system.capacity.plan import Assumptions, Size, flowing, plan, saturated
from undertow.bench.system.capacity.profile import PHASES, Cost, LLMServer, Profile, Sample, fitted
from undertow.bench.system.capacity.shard import Arrival, Memoir, SimulatedShard
from undertow.engine.base.config import Settings

ROUNDS = 7


def profile_of(lives: tuple[str, ...] = (".",), llm_s: float = 1.0, **costs: Cost) -> Profile:
    """Everything is free but what is named."""
    free = {name: Cost() for name in PHASES}
    return Profile(
        name="test",
        costs=free | costs,
        lives=lives,
        facts_per_refinement=1.0,
        row_bytes=1_000,
        arena_bytes=1 << 30,
        commits_per_compaction=256,
        llm=LLMServer.even(llm_s),
    )


def shard_of(profile: Profile, **more: Any) -> SimulatedShard:
    settings = Settings(device="cpu", batch_turns=10)
    return SimulatedShard(profile, settings, lambda a: Memoir(profile.lives[a.rank]), **more)


def fed(shard: SimulatedShard, tenants: int, turns: int) -> SimulatedShard:
    for n in range(turns):
        for tenant in range(tenants):
            shard.put(Arrival(f"t{tenant}", (), f"{tenant}-{n}", rank=tenant))
    shard.finish()
    return shard


# ---- profiles


def test_fitted_costs_are_those_that_made_the_times() -> None:
    """Through noise and a pause of the machine too, as long as there are many runs of a size."""
    rng = np.random.default_rng(3)
    samples = []
    for _ in range(4_000):
        items, extra = int(2 ** rng.uniform(0, 10)), int(2 ** rng.uniform(10, 26))
        seconds = (2e-3 + 5e-5 * items + 4e-10 * extra) * rng.uniform(0.8, 1.2)
        samples.append(Sample(items, extra, seconds))
    cost = fitted(samples, extra=True)
    assert cost.fixed_s == pytest.approx(2e-3, rel=0.1)
    assert cost.per_item_s == pytest.approx(5e-5, rel=0.1)
    assert cost.per_extra_s == pytest.approx(4e-10, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(0, 1)), min_size=1, max_size=30))
@hypothesis_settings(max_examples=50, deadline=None)
def test_no_fitted_cost_is_negative(times: list[tuple[int, float]]) -> None:
    cost = fitted([Sample(n, 0, s) for n, s in times])
    assert cost.fixed_s >= 0 and cost.per_item_s >= 0 and cost.per_extra_s == 0


def test_a_profile_comes_back_from_its_file_and_a_wrong_one_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = profile_of(("..m1",), commit=Cost(fixed_s=0.01, source="by hand"))
    profile.write(path)
    assert Profile.read(path) == profile
    body = orjson.loads(path.read_bytes())
    for change, named in (
        ({"row_bytes": 0}, "row_bytes"),
        ({"lives": ["..x"]}, r"lives\.0"),
        ({"costs": {k: v for k, v in body["costs"].items() if k != "gate"}}, "gate"),
    ):
        path.write_bytes(orjson.dumps({**body, **change}))
        with pytest.raises(ValueError, match=rf"profile\.json.*{named}"):
            Profile.read(path)
    with pytest.raises(ValueError, match="cannot be read"):
        Profile.read(tmp_path / "none.json")


def test_the_h100_figures_say_that_they_were_not_measured() -> None:
    base = profile_of()
    over = base.overlaid(capacity.H100)
    given_costs = {name for name in PHASES if over.cost(name) != base.cost(name)}
    assert {"encode", "gate"} <= given_costs
    for name in given_costs | {"llm"}:
        assert any(words in over.sources[name] for words in ("not measured", "assumed", "docs/")), name
    assert over.cost("commit") == base.cost("commit")
    assert over.cost("gate").per_extra_s * 7.68e9 == pytest.approx(2.95e-3, rel=0.01)


def test_calls_and_memories_of_a_life() -> None:
    """m: merge, refine. r: merge. 2: episode, two refinements. b: merge, episode, refine."""
    profile = profile_of((".m.r2.b...",))
    assert profile.calls_per_turn == {"merge": 0.3, "episode": 0.2, "refine": 0.4}
    assert profile.made_per_turn == (0.3, 0.4)


def test_a_phase_is_timed_without_those_inside_it() -> None:
    watch = Stopwatch()
    with watch.span("decide", tenants=3), watch.span("gate", queries=7):
        sum(range(200_000))
    (decide,), (gate,) = watch.samples["decide"], watch.samples["gate"]
    assert decide.items == gate.items == 7
    assert decide.seconds < gate.seconds
    assert watch.outer_s == pytest.approx(decide.seconds + gate.seconds, rel=0.2)


# ---- traffic and the router


def test_shares_are_zipf_and_sum_to_one() -> None:
    traffic = Traffic(1_000, 1.0, 10, 1e9)
    weights = 1 / np.arange(1, 1001)
    assert traffic.head_shares == pytest.approx(weights / weights.sum())
    assert traffic.tail_share == 0
    assert traffic.history(1) == pytest.approx(10_000 / weights.sum())


@pytest.mark.parametrize("skew", [0.0, 0.6, 1.0, 1.3])
def test_the_tail_in_aggregate_is_the_tail_one_by_one(skew: float) -> None:
    tenants = 3 * capacity_load.HEAD_TENANTS
    traffic = Traffic(tenants, skew, 10, 1e12)
    weights = np.arange(1, tenants + 1, dtype=float) ** -skew
    exact = weights / weights.sum()
    assert np.allclose(traffic.head_shares, exact[: traffic.head], rtol=1e-4)
    assert traffic.tail_share == pytest.approx(exact[traffic.head :].sum(), rel=1e-4)
    drawn = traffic.tail_ranks(np.random.default_rng(0).random(20_000))
    assert drawn.min() > traffic.head and drawn.max() <= tenants
    middle = traffic.head + np.searchsorted(np.cumsum(exact[traffic.head :]), exact[traffic.head :].sum() / 2)
    assert np.mean(drawn <= middle) == pytest.approx(0.5, abs=0.02)


def test_no_tenant_is_larger_than_the_largest() -> None:
    traffic = Traffic(10**8, 1.0, 300, 1e5)
    assert traffic.history(1) == pytest.approx(1e5, rel=0.02)
    assert traffic.history(1) == traffic.history(2)
    assert traffic.head_shares.sum() + traffic.tail_share == pytest.approx(1)


def test_the_most_active_tenants_fill_the_memory() -> None:
    traffic = Traffic(10**6, 0.8, 100, 1e5)
    assert traffic.resident_rank(1e8) == 10**6, "all of it fits"
    half = traffic.resident_rank(5e7)
    stored = sum(traffic.history(rank) for rank in range(1, half + 1))
    assert stored == pytest.approx(5e7, rel=0.01)


def test_the_spread_is_the_routers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head tenants one by one; with a smaller head, the aggregate comes near the same shares."""
    traffic, of = Traffic(60_000, 0.5, 10, 1e9), shard_map(7)
    exact = Spread.over(traffic, of)
    assert exact.shares.sum() == pytest.approx(1)
    for rank in (1, 2, 500, 60_000):
        assert of.shards[exact.owners[rank - 1]] == of.owner(tenant_name(rank))
    monkeypatch.setattr(capacity_load, "HEAD_TENANTS", 2_000)
    rough = Spread.over(Traffic(60_000, 0.5, 10, 1e9), of)
    assert rough.shares.sum() == pytest.approx(1)
    assert np.abs(rough.shares - exact.shares).max() < 0.1 / 7
    assert len(set(rough.shares.tolist())) == 7, "the tail has its noise"


def test_a_shard_gets_the_turns_of_its_own_tenants() -> None:
    spread = Spread.over(Traffic(50, 1.0, 10, 1e9), shard_map(4))
    drawn = Counter(spread.ranks(spread.hottest, 5_000).tolist())
    assert {int(spread.owners[rank - 1]) for rank in drawn} == {spread.hottest}
    first = min(drawn)
    expected = spread.traffic.share(first) / spread.shares[spread.hottest]
    assert drawn[first] / 5_000 == pytest.approx(expected, abs=0.03)


# ---- one shard in simulated time


def test_searchable_takes_what_the_steps_take() -> None:
    """100 turns in steps of 10: ten commits, and 100 turns' own time."""
    profile = profile_of(commit=Cost(fixed_s=1.0), admit=Cost(per_item_s=0.01))
    shard = shard_of(profile, with_llm=False)
    for n in range(100):
        shard.put(Arrival("t", (), str(n)))
    while len(shard.scheduler.inbox):
        shard.step()
    assert shard.clock.now_s == pytest.approx(10 * 1.0 + 100 * 0.01)
    assert [round(delay, 2) for _, delay in shard.searchable_s[::10]] == [
        pytest.approx(1.1 * n) for n in range(1, 11)
    ]


def test_one_tenants_calls_follow_each_other_and_tenants_overlap() -> None:
    """m: merge, refine. 1: episode, refine. c: merge, episode, two refinements. Eight latencies."""
    life = "..m1c"
    calls = 2 + 2 + 4
    for tenants in (1, 5):
        shard = fed(shard_of(profile_of((life,) * 5, llm_s=2.0)), tenants, len(life))
        assert shard.clock.now_s == pytest.approx(calls * 2.0)
        assert sum(shard.llm.calls.values()) == calls * tenants
        assert shard.llm.at_servers.most == tenants
        assert len(shard.decided_s) == tenants * len(life)


def test_slots_bound_the_calls_at_once() -> None:
    servers = LLMServer(seconds={"merge": 1.0, "episode": 1.0, "refine": 1.0}, slots=2)
    shard = fed(shard_of(profile_of(("r",) * 7), servers=servers), 7, 1)
    assert shard.clock.now_s == pytest.approx(4.0), "seven calls, two at a time"
    assert shard.llm.at_servers.most == 2 and shard.llm.waiting.most == 5


def test_reading_replies_slows_the_engine() -> None:
    """50 replies of 0.1 s arrive at once: the client's thread reads one after the other."""
    shard = fed(shard_of(profile_of(("r",) * 50, llm_s=1.0, reply=Cost(per_item_s=0.1))), 50, 1)
    assert shard.clock.now_s == pytest.approx(1.0 + 50 * 0.1)


def test_the_gate_pays_for_the_rows_it_reads_and_cold_tenants_for_their_load() -> None:
    profile = profile_of(gate=Cost(per_extra_s=1e-6), load=Cost(per_item_s=5.0))
    settings = Settings(device="cpu")
    spent = {}
    for history, resident in ((0, True), (99, True), (99, False)):
        memoir = Memoir(".", history, resident)
        shard = SimulatedShard(profile, settings, lambda _, m=memoir: m)  # type: ignore[misc]
        spent[history, resident] = fed(shard, 1, 1).clock.now_s
    assert spent[0, True] == pytest.approx(1_000 * 1e-6)
    assert spent[99, True] == pytest.approx(100_000 * 1e-6)
    assert spent[99, False] == pytest.approx(5.0 + 100_000 * 1e-6)


@given(
    st.lists(st.text("012345abcdef.rm", min_size=1, max_size=12), min_size=1, max_size=4),
    st.integers(0, 3),
)
@hypothesis_settings(max_examples=25, deadline=None)
def test_every_turn_is_decided_as_its_life_says(lives: list[str], seed: int) -> None:
    """Whatever the latencies: the calls are those of the lives, each turn is decided once."""
    profile = profile_of(tuple(lives), commit=Cost(fixed_s=0.3), reply=Cost(per_item_s=0.05))
    servers = LLMServer(seconds={"merge": 0.5, "episode": 1.0, "refine": 0.7}, slots=2, spread=0.9)
    shard = shard_of(profile, servers=servers, seed=seed)
    for tenant, life in enumerate(lives):
        for n in range(len(life)):
            shard.put(Arrival(f"t{tenant}", (), f"{tenant}-{n}", rank=tenant))
    shard.finish()
    assert len(shard.decided_s) == len(shard.searchable_s) == sum(map(len, lives))
    expected = {op: round(calls * sum(map(len, lives))) for op, calls in profile.calls_per_turn.items()}
    assert {op: shard.llm.calls[op] for op in expected} == expected


def test_a_life_that_ends_goes_on_without_its_youth() -> None:
    memoir = Memoir("....rrrrmmmm1111", history=14)
    assert "".join(memoir.code(seq) for seq in range(16)) == "11rrrrmmmm1111rr"


# ---- plans


def test_a_stream_lags_more_the_nearer_it_comes_to_the_limit() -> None:
    profile = profile_of(("..m." * 5,), commit=Cost(fixed_s=0.01), admit=Cost(per_item_s=0.002))
    spread = Spread.over(Traffic(1_000, 0.5, 10, 1e4), shard_map(1))
    limit = saturated(
        profile,
        lambda _: Memoir(profile.lives[0]),
        [Arrival(tenant_name(r), (), str(r), rank=r) for r in range(1, 1_001)],
        1.0,
        decide=False,
    )
    lags = []
    for load in (0.2, 0.8, 2.0):
        found = flowing(
            profile,
            lambda _: Memoir(profile.lives[0]),
            spread,
            0,
            load * limit,
            LLMServer.even(0.1),
            turns=1_000,
        )
        lags.append(found["searchable_lag_s"]["p95"])
        assert found["decided_lag_s"]["p95"] >= found["searchable_lag_s"]["p95"] > 0
    assert lags[0] < lags[1] < lags[2]
    assert lags[2] > 5 * lags[0], "twice the limit: the queue grows as long as the stream lasts"


def test_a_plan_names_servers_loads_and_bottleneck_and_repeats_itself() -> None:
    costs = {"commit": Cost(fixed_s=0.005), "admit": Cost(per_item_s=1e-4), "resume": Cost(per_item_s=1e-3)}
    profile = profile_of(("...m......",)).model_copy(update={"costs": profile_of().costs | costs})
    slots = {"slots": 10, "seconds": {"merge": 1.0, "episode": 1.0, "refine": 1.0}}
    profile = profile.model_copy(update={"llm": LLMServer(**slots)})  # type: ignore[arg-type]
    assumed = Assumptions(turns=2_048, history_turns=30, skew=0.0)
    row = plan(profile, Size(4, 10_000, 200.0), assumed)
    assert row["llm_servers_needed"] == 5, "200 turns/s x 0.2 calls x 1 s on servers of 10 slots, 80% full"
    assert row["loads"]["LLM servers"] == 0.8
    assert row["llm_calls_per_s"] == 40.0
    assert row["searchable_capacity_per_s"] > row["decided_capacity_per_s"] > 200
    assert row["bottleneck"].startswith("LLM servers")
    assert plan(profile, Size(4, 10_000, 200.0), assumed) == row
    short = plan(profile, Size(4, 10_000, 200.0), assumed, llm_servers=2)
    assert short["loads"]["LLM servers"] == 2.0
    assert short["hottest"]["decided_lag_s"]["p95"] > 2 * row["hottest"]["decided_lag_s"]["p95"]
    assert short["hottest"]["searchable_lag_s"]["p95"] < 1, "what is stored does not wait for the LLM"


def test_a_thousand_shards_take_more_than_ten_and_skew_costs() -> None:
    profile = profile_of(commit=Cost(fixed_s=0.005), admit=Cost(per_item_s=1e-4))
    assumed = Assumptions(turns=2_048)
    few, many = (plan(profile, Size(n, n * 10_000), assumed) for n in (10, 1_000))
    assert 50 < many["searchable_capacity_per_s"] / few["searchable_capacity_per_s"] <= 100
    assert many["hottest_over_mean_shard"] > few["hottest_over_mean_shard"] > 1


def test_wrong_sizes_are_refused_with_an_example() -> None:
    assert capacity.size_of("10:1e6:5000") == Size(10, 1_000_000, 5_000.0)
    for text in ("10", "0:5", "x:1", "1:1:1:1", "1:1:-2"):
        with pytest.raises(ValueError, match="GPUS:TENANTS"):
            capacity.size_of(text)
    with pytest.raises(ValueError, match="2,048 or more"):
        Assumptions(turns=100)
    with pytest.raises(ValueError, match="largest tenant"):
        Traffic(10, 1.0, 300, 10)


def test_the_command_ends_in_one_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    profile_of(("...m",), commit=Cost(fixed_s=0.005)).write(path)
    command = ["capacity", "plan", "--profile", str(path)]
    monkeypatch.setattr(
        sys, "argv", [*command, "--size", "2:1000", "--turns", "2048", "--out", str(tmp_path)]
    )
    capacity.main()
    result = orjson.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == orjson.loads((tmp_path / "capacity-plan.json").read_bytes())
    assert result["sizes"][0]["gpus"] == 2
    monkeypatch.setattr(sys, "argv", [*command, "--size", "2"])
    with pytest.raises(SystemExit, match="GPUS:TENANTS"):
        capacity.main()


# ---- against the engine


def test_the_model_makes_the_calls_that_the_engine_makes(tmp_path: Path, ray_address: str) -> None:
    """Lives that were recorded from a real run, replayed: the same LLM calls, turn for turn; so on Ray."""
    if not LOCOMO.exists():
        pytest.skip(f"no LoCoMo data at {LOCOMO}")
    calibration = Calibration(LOCOMO, turns_per_tenant=60)
    calibration._deciding(tmp_path / "recorded", tenants=5, turns=60, batch=64)
    measured = capacity_check.run(case := Case("", 5, 60, 0.001), LOCOMO, tmp_path / "run")
    profile = profile_of(calibration.lives, commit=Cost(fixed_s=0.01))
    assert {len(life) for life in calibration.lives} == {60}
    assert predict(case, profile).llm_calls == measured.llm_calls > 0
    assert capacity_check.run_on_ray(case, LOCOMO, tmp_path).llm_calls == measured.llm_calls


@pytest.mark.soak
@pytest.mark.timeout(3_600)
def test_the_prediction_is_within_a_fifth_of_this_machine(ray_address: str) -> None:
    """Real time on a machine that may be busy: so many rounds that a median stands for it."""
    if not LOCOMO.exists():
        pytest.skip(f"no LoCoMo data at {LOCOMO}")
    _, result = check(LOCOMO, rounds=ROUNDS)
    found = ratios(result["cases"])
    assert len(found) == 2 * len(TARGETS) * len(CASES)
    assert all(abs(ratio - 1) <= WITHIN for ratio in found), result["cases"]
