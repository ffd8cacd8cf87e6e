"""The capacity model: its closed forms against hand-made cases, the real router and a real run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.bench.machine import LOCOMO
from undertow.bench.system.capacity import check, model, run
from undertow.bench.system.capacity.model import Assumptions, Profile, Size, Traffic, plan
from undertow.engine.cluster.shard_map import ShardMap

PROFILE = Profile(
    name="made up",
    admit_s=4e-5,
    encode_s=1e-5,
    decide_s=2e-5,
    gate_byte_s=0.0,
    call_s=1e-3,
    commit_s=2e-3,
    load_s=0.0,
    calls_per_turn={"merge": 0.1, "episode": 0.05},
    busiest_calls_per_turn=0.5,
    memories_per_turn=0.25,
    row_bytes=1_000,
    arena_bytes=10**9,
    llm_seconds={"merge": 1.0, "episode": 2.0},
    llm_slots=10,
    sources={},
)
EVEN = Assumptions(skew=0.0, slowdown=1.0)


def test_rates_are_the_reciprocal_of_the_work_and_servers_fit_the_calls() -> None:
    row = plan(PROFILE, Size(1, 1_000, 1_000.0), EVEN)
    assert row["searchable_capacity_per_s"] == round(1 / 5e-5)
    assert row["decided_capacity_per_s"] == round(1 / (5e-5 + 2e-5 + 0.15e-3))
    assert row["llm_calls_per_s"] == 150.0
    # 0.2 s of calls a turn; 10 slots a server, loaded to 80%
    assert row["llm_servers_needed"] == 1_000 * 0.2 / 10 / 0.8
    assert row["loads"] == {
        "engine of the hottest shard": 0.22,
        "LLM servers": 0.8,
        "order within the largest tenant": 0.2,
    }
    assert row["bottleneck"] == "LLM servers, 80%"
    assert row["decided_lag_s"] == pytest.approx((2e-3 + 0.2) / 0.2, rel=1e-3)
    assert row["arena_bytes_per_shard"] == 1_000 * 300 * 1_250


def test_a_rate_beyond_the_limit_has_no_lag_and_names_what_binds() -> None:
    row = plan(PROFILE, Size(1, 1_000, 9_000.0), EVEN)
    assert (row["searchable_lag_s"], row["decided_lag_s"]) == (None, None)
    assert row["bottleneck"].startswith("engine of the hottest shard, 198%")
    few = plan(PROFILE, Size(1, 10, 100.0), EVEN)
    assert few["bottleneck"].startswith("order within the largest tenant, 200%")
    assert few["tenants_beyond_their_order"] == 10


def test_more_shards_take_more_and_skew_costs() -> None:
    sizes = [Size(gpus, 100_000) for gpus in (1, 10, 100)]
    even = [plan(PROFILE, size, EVEN)["decided_capacity_per_s"] for size in sizes]
    skewed = [plan(PROFILE, size, Assumptions(slowdown=1.0))["decided_capacity_per_s"] for size in sizes]
    assert even[0] < even[1] < even[2] and skewed[0] < skewed[1] < skewed[2]
    assert all(a > b for a, b in zip(even[1:], skewed[1:], strict=True))


def test_cold_tenants_cost_their_loads() -> None:
    small = PROFILE.model_copy(update={"arena_bytes": 10**8, "load_s": 1e-3})
    row = plan(small, Size(1, 1_000), EVEN)
    # of 300,000 turns 80,000 fit; the other tenants are loaded once in ten turns
    cold = 1 - 1e8 / 1_250 / 300_000
    assert row["resident_traffic_share"] == round(1 - cold, 3)
    assert row["searchable_capacity_per_s"] == round(1 / (5e-5 + cold / 10 * 1e-3))


@given(st.sampled_from((0.0, 0.5, 0.8, 1.0, 1.2)), st.integers(2_000, 20_000))
@settings(max_examples=25)
def test_the_tail_in_aggregate_is_the_tail_one_by_one(skew: float, tenants: int) -> None:
    given_ = Assumptions(skew=skew, largest_turns=1e9)
    exact = Traffic(tenants, given_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "HEAD_TENANTS", 1_000)
        aggregate = Traffic(tenants, given_)
    assert float(exact.head.sum()) == pytest.approx(1.0)
    assert float(aggregate.head.sum()) + aggregate.tail == pytest.approx(1.0)
    assert aggregate.tail == pytest.approx(float(exact.head[1_000:].sum()), rel=1e-3)
    assert aggregate.squares == pytest.approx(exact.squares, rel=1e-3)


def test_no_tenant_is_larger_than_the_largest() -> None:
    traffic = Traffic(10_000, Assumptions(skew=1.2, largest_turns=3_000))
    assert float(traffic.head[0]) * traffic.turns == pytest.approx(3_000, rel=0.01)
    with pytest.raises(ValueError, match="no smaller largest tenant"):
        Traffic(10, Assumptions(largest_turns=10))


def test_the_hottest_shard_is_that_of_the_clusters_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "HEAD_TENANTS", 500)
    traffic = Traffic(3_000, Assumptions())
    of = ShardMap(1, tuple(f"shard-{n:04d}" for n in range(8)))
    shares = [0.0] * 8
    for rank, share in enumerate(traffic.head, 1):
        shares[of.shards.index(of.owner(f"tenant-{rank}"))] += float(share)
    assert traffic.hottest_share(8) == pytest.approx(max(shares) + traffic.tail / 8)
    assert traffic.hottest_share(1) == pytest.approx(1.0)


def test_profiles_come_back_from_files_and_wrong_ones_name_file_and_field(tmp_path: Path) -> None:
    path, overlay = tmp_path / "profile.json", tmp_path / "over.json"
    PROFILE.write(path)
    assert Profile.read(path) == PROFILE
    assert "not measured" in Profile.read(path, run.H100).name
    for text, message in (
        ('{"admit_s": -1}', "over.json: admit_s: .*greater than 0"),
        ('{"speed": 1}', "over.json: speed: "),
        ("[1]", "not a JSON object"),
        ("{", "cannot be read as JSON"),
    ):
        overlay.write_text(text)
        with pytest.raises(ValueError, match=message):
            Profile.read(path, overlay)
    overlay.write_text("{}")
    path.write_text('{"admit_s": 1}')
    with pytest.raises(ValueError, match=r"profile\.json: name: Field required"):
        Profile.read(path, overlay)


@pytest.mark.parametrize("text", ["ten:1e6", "10", "0:5", "1:2:-3", "1:2:3:4"])
def test_wrong_sizes_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"as in 10:1e6:5000"):
        Size.of(text)


def test_the_command_ends_in_one_line_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    PROFILE.write(tmp_path / "profile.json")
    words: Sequence[str] = ("plan", "--profile", str(tmp_path / "profile.json"), "--with", str(run.H100))
    monkeypatch.setattr("sys.argv", ["capacity", *words, "--size", "10:1e6:5000", "--out", str(tmp_path)])
    run.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line == json.loads((tmp_path / "capacity-plan.json").read_text())
    assert line["sizes"][0]["offered_per_s"] == 5_000.0
    assert "assumed" in line["sources"]["llm"]


@pytest.mark.skipif(not LOCOMO.exists(), reason=f"{LOCOMO} is not there")
def test_a_check_measures_runs_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are the soak's to judge; here every constant is measured and every case compared."""
    monkeypatch.setattr(check, "CALIBRATION", check.LoadCase("", 10, 60, 0.0))
    monkeypatch.setattr(check, "CASES", (check.LoadCase("small", 10, 40, 0.01),))
    profile, result = check.check(LOCOMO, 1, ["engine"])
    assert 0 < profile.admit_s < 0.1 and profile.call_s > 0 and profile.load_s > 0 and profile.gate_byte_s > 0
    assert 0 < profile.calls <= profile.busiest_calls_per_turn
    (row,) = result["cases"]
    assert row["searchable_per_s"] > 0 and row["decided_ratio"] > 0
    profile.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile
