"""`undertow bench sweep`: what its points mean, that it is deterministic, and its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from undertow.bench.quality import sweeps
from undertow.bench.quality.ablations import ABLATIONS, ablated, varied
from undertow.bench.quality.datasets import Sample, load
from undertow.bench.quality.evidence import firing_rates
from undertow.bench.quality.sweeps import SWEPT, construction, evidence
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.base.config import Settings
from undertow.engine.base.model import PolicyName
from undertow.engine.encoders.hashing import HashingEncoder

from ...support.cli import TOPICS, run
from ...support.eval import conversation, question, talk, written

SETTINGS = Settings(device="cpu", encoder="hash:384")


def made_up(**changes: Any) -> dict[str, Any]:
    """A sample in LoCoMo's form: 24 messages, twelve turns, on three recurring topics."""
    texts = (f"{TOPICS[n // 2 % 3]} day {n}" for n in range(24))
    questions = [
        question("Who varnishes the boat on day 0?", 4, "D1:1"),
        question("And the zeppelin?", 4, "D9:9"),
    ]
    return conversation(conversation=talk(texts, "Ann", "Ben"), qa=questions, **changes)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path, made_up(), made_up(sample_id="another"))


@pytest.fixture
def samples(data: Path) -> list[Sample]:
    return list(load(data, "locomo", 1_000_000))[:1]


def test_a_point_tells_what_construction_takes(samples: list[Sample]) -> None:
    vectors = KeptVectors(HashingEncoder(384))
    often = construction(samples, varied(SETTINGS, theta_sim=0.6, theta_count=3), vectors)
    assert often["turns"] == 12
    assert often["consolidated_share"] == 1.0, "each topic fires at its third turn, its fourth is merged"
    assert (often["consolidations"], often["merges"]) == (3, 3)
    assert often["calls"]["episode"] == often["calls"]["merge"] == 3
    assert "refine" not in often["calls"]
    paper = construction(samples, varied(SETTINGS, theta_sim=0.6, theta_count=3, calls="paper"), vectors)
    assert paper["calls"]["refine"] == paper["merges"] + paper["episodes"]
    assert often["prompt_tokens"].keys() == often["calls"].keys()
    never = construction(samples, varied(SETTINGS, theta_sim=0.6, theta_count=5), vectors)
    assert (never["consolidated_share"], never["calls"], never["prompt_tokens"]) == (0.0, {}, {})


def test_a_varied_threshold_takes_theta_merge_along_unless_that_is_set() -> None:
    assert varied(SETTINGS, theta_sim=0.9).merge_threshold == 0.9
    assert varied(Settings(device="cpu", theta_merge=0.6), theta_sim=0.9).merge_threshold == 0.6
    assert varied(SETTINGS, theta_count=7).similarity_threshold == 0.71


@pytest.mark.parametrize(
    ("policy", "environment"),
    [
        ("recmem", {"ABLATION": "without-facts"}),
        ("nemori", {"ABLATION": "without-facts", "MANAGEMENT": "append"}),
        ("himem", {"HIMEM_ALIGN_EPISODES": "1"}),
    ],
)
def test_an_ablation_leaves_out_one_part(
    monkeypatch: pytest.MonkeyPatch, policy: PolicyName, environment: dict[str, str]
) -> None:
    for name, value in {**environment, "K_EPI": "7", "POLICY": policy}.items():
        monkeypatch.setenv(f"UNDERTOW_{name}", value)
    whole = Settings(device="cpu", encoder="hash:384")
    plain = Settings(device="cpu", encoder="hash:384", ablation=None, management="native").model_dump()
    plain |= {"himem_align_episodes": False}
    left = [name for name, of in ABLATIONS.items() if policy in of.of]
    assert len(left) >= 4
    for name in ABLATIONS:
        if name not in left:
            with pytest.raises(ValueError, match=f"{name} is an ablation of .*, and not of {policy}"):
                ablated(whole, name)
            continue
        changes = ABLATIONS[name].changes
        kept = {"k_sem": 14} if "k_epi" in changes else {}
        assert ablated(whole, name).model_dump() == {**plain, **kept, **changes}
        assert changes.items() - plain.items(), "it changes something"


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_recall_grows_with_k_in_each_tier_of_the_policy(samples: list[Sample], policy: PolicyName) -> None:
    often = varied(SETTINGS, policy=policy, short_term_pages=1, heat_threshold=0.0)
    often = varied(often, theta_sim=0.6, theta_count=3)
    found = evidence(samples, often, KeptVectors(HashingEncoder(384)))
    assert list(found) == list(SWEPT[policy].counts)
    for count, points in found.items():
        assert [point[count] for point in points] == list(sweeps.K)
        recall = [point["evidence_recall"] for point in points]
        assert recall == sorted(recall)
        assert recall[-1] == 0.5 or count != "k_sub", "the one that is there, of two questions"
        assert {point["questions"] for point in points} == {2}
        assert 0 < points[0]["turns_behind"] <= points[-1]["turns_behind"] <= 12.0


def test_behind_no_memories_is_no_evidence(samples: list[Sample]) -> None:
    never = varied(SETTINGS, theta_sim=0.99, salience_turns=0)
    found = evidence(samples, never, KeptVectors(HashingEncoder(384)))
    for count in ("k_epi", "k_sem"):
        assert {(p["evidence_recall"], p["turns_behind"]) for p in found[count]} == {(0.0, 0.0)}


@pytest.mark.parametrize(
    ("policy", "name", "few"),
    [
        ("recmem", "theta_merge", (0.3, 1.0)),
        ("nemori", "window_messages", (4, 24)),
        ("nemori", "theta_compare", (-1.0, 1.0)),
        ("memory-os", "heat_threshold", (1, 100)),
        ("memory-os", "short_term_pages", (1, 12)),
    ],
)
def test_a_setting_of_a_policy_changes_what_construction_takes(
    samples: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    policy: PolicyName,
    name: str,
    few: tuple[float, float],
) -> None:
    assert name in SWEPT[policy].construction
    swept = replace(SWEPT[policy], construction={name: few})
    monkeypatch.setitem(sweeps.SWEPT, policy, swept)
    settings = varied(SETTINGS, policy=policy, theta_sim=0.3, theta_count=3)
    told: list[None] = []
    swept_points = sweeps.sweep(
        samples, settings, KeptVectors(HashingEncoder(384)), lambda: told.append(None)
    ).construction[name]
    assert [point[name] for point in swept_points] == list(few)
    low, high = (sum(point["calls"].values()) for point in swept_points)
    assert low > high, "the lower value asks for more"
    assert len(told) == sweeps.runs(swept) == 3


def test_every_swept_setting_has_values_around_its_default() -> None:
    for policy, swept in SWEPT.items():
        settings = varied(SETTINGS, policy=policy)
        for name, values in swept.construction.items():
            assert list(values) == sorted(values)
            assert values[0] <= sweeps.in_force(settings)[name] <= values[-1]


def test_the_command_writes_figures_and_picture_and_twice_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra `eval`")
    few = {"theta_sim": (0.6, 0.9), "theta_count": (3, 5)}
    monkeypatch.setitem(sweeps.SWEPT, "recmem", replace(SWEPT["recmem"], construction=few))
    told = []
    # what it draws is RecMem's, whatever policy the environment names
    for folder, policy in ((tmp_path / "one", "recmem"), (tmp_path / "two", "himem")):
        command = ("bench", "sweep", "--data", data, "--sample", "made-up", "--out", folder, "--json")
        ran = run(*command, env={"UNDERTOW_POLICY": policy})
        assert ran.code == 0, ran.err
        assert (folder / "sweep-recmem.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((folder / "sweep-recmem.json").read_bytes()) == ran.doc
        told.append(ran.doc)
    assert told[0] == told[1]
    assert [point["theta_sim"] for point in told[0]["theta_sim"]] == [0.6, 0.9]
    assert (told[0]["encoder"], told[0]["samples"]) == ("hash:384", ["made-up"])
    assert told[0]["where_not_varied"].items() >= {"theta_count": 5, "sim_share": 0.02, "k_sub": 10}.items()
    assert [point["k_epi"] for point in told[0]["k_epi"]] == list(sweeps.K)


@pytest.mark.parametrize("policy", ["a-mem", "memory-os"])
def test_the_command_sweeps_the_policy_that_it_is_given(
    data: Path, tmp_path: Path, policy: PolicyName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has only k to draw, the other also settings of construction."""
    pytest.importorskip("matplotlib", reason="the picture needs the extra `eval`")
    two = {name: values[:2] for name, values in SWEPT[policy].construction.items()}
    monkeypatch.setitem(sweeps.SWEPT, policy, replace(SWEPT[policy], construction=two))
    command = ("bench", "sweep", "--policy", policy, "--data", data, "--sample", "made-up", "--out", tmp_path)
    ran = run(*command, env={"UNDERTOW_POLICY": "nemori", "UNDERTOW_MANAGEMENT": "append"})
    assert ran.code == 0, ran.err
    found = json.loads((tmp_path / f"sweep-{policy}.json").read_bytes())
    assert found["policy"] == policy
    assert [[point[name] for point in found[name]] for name in two] == [list(of) for of in two.values()]
    assert (tmp_path / f"sweep-{policy}.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_no_locomo_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"tenant": "ann", "messages": [{"role": "user", "content": "hi"}]}\n')
    ran = run("bench", "sweep", "--data", path, "--out", tmp_path / "out")
    assert ran.code != 0
    assert "not locomo" in ran.err
    assert not (tmp_path / "out").exists()


def test_firing_rates_are_those_of_each_tenant_or_of_parts_of_it(
    samples: list[Sample], data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = {samples[0].tenant: samples[0].turns}
    parts = firing_rates.parts_of(turns, 5)
    assert [(name, len(of)) for name, of in parts.items()] == [("made-up/0", 5), ("made-up/5", 5)]
    assert {turn.tenant for turn in parts["made-up/5"]} == {"made-up/5"}
    paper = varied(SETTINGS, theta_sim=0.6, theta_merge=1.0, theta_count=3, salience_turns=0, quiet_share=0.0)
    observed = {turn.text.split("\n")[0]: ("seen", "twice") for turn in samples[0].turns[:3]}
    whole, vectors = firing_rates.parts_of(turns, None), KeptVectors(HashingEncoder(384))
    told = firing_rates.rates(whole, paper, vectors, observed)
    assert told["fires"]["mean"] == told["requests"]["mean"] == 25.0, "the third turn of each of three topics"
    assert told["observations_a_turn"] == {
        "fired": {"turns": 9, "mean": 0.6667, "low": 0.0, "high": 1.3333},
        "salient": {"turns": 0, "mean": None, "low": None, "high": None},
        "all": {"turns": 12, "mean": 0.5, "low": 0.0, "high": 1.0},
    }
    assert firing_rates.spread([0.0, 2.0, 4.0]) == {
        **{"mean": 2.0, "deviation": 1.63, "ratio": 0.82, "least": 0.0, "most": 4.0, "none": 1}
    }
    monkeypatch.setenv("UNDERTOW_ENCODER", "hash:384")
    assert firing_rates.main(["--data", str(data), "--parts", "6"]) == 0
    assert json.loads(capsys.readouterr().out)["the default"]["by share"]["tenants"] == 4
