"""`undertow bench sweep`: what its points mean, that it is deterministic, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.quality import sweeps
from undertow.bench.quality.ablations import ABLATIONS, ablated, varied
from undertow.bench.quality.datasets import Sample, load
from undertow.bench.quality.evidence import firing_rates
from undertow.bench.quality.sweeps import construction, evidence, evidence_behind
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
    fixed = Settings(device="cpu", theta_merge=0.6)
    assert varied(fixed, theta_sim=0.9).merge_threshold == 0.6
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


def test_recall_grows_with_k_to_what_there_is(samples: list[Sample]) -> None:
    points = evidence(samples, SETTINGS, KeptVectors(HashingEncoder(384)))
    assert [point["k_sub"] for point in points] == list(sweeps.K_SUB)
    recall = [point["evidence_recall"] for point in points]
    assert recall == sorted(recall)
    assert recall[-1] == 0.5, "all turns: the one that is there, of two questions"
    assert {point["questions"] for point in points} == {2}


def test_what_is_behind_episodes_grows_with_k_to_the_turns_they_rest_on(samples: list[Sample]) -> None:
    often = varied(SETTINGS, theta_sim=0.6, theta_count=3)
    points = evidence_behind(samples, often, KeptVectors(HashingEncoder(384)))
    assert [point["k_epi"] for point in points] == list(sweeps.K_EPI)
    first, last = points[0], points[-1]
    assert first["turns_behind"] < last["turns_behind"] == 12.0, "all turns are consolidated"
    assert last["evidence_recall"] == 0.5, "the one that is there, of two questions"
    assert [p["evidence_recall"] for p in points] == sorted(p["evidence_recall"] for p in points)
    never = evidence_behind(samples, varied(SETTINGS, theta_sim=0.99), KeptVectors(HashingEncoder(384)))
    assert {(p["evidence_recall"], p["turns_behind"]) for p in never} == {(0.0, 0.0)}


def test_the_command_writes_figures_and_picture_and_twice_the_same(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs the extra `eval`")
    for name, few in (("THETA_SIM", (0.6, 0.9)), ("THETA_COUNT", (3, 5))):
        monkeypatch.setattr(sweeps, name, few)
    told = []
    # what it draws is RecMem's, whatever policy the environment names
    for folder, policy in ((tmp_path / "one", "recmem"), (tmp_path / "two", "himem")):
        command = ("bench", "sweep", "--data", data, "--sample", "made-up", "--out", folder, "--json")
        ran = run(*command, env={"UNDERTOW_POLICY": policy})
        assert ran.code == 0, ran.err
        assert (folder / "sweeps.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((folder / "sweeps.json").read_bytes()) == ran.doc
        told.append(ran.doc)
    assert told[0] == told[1]
    assert [point["theta_sim"] for point in told[0]["theta_sim"]] == [0.6, 0.9]
    assert (told[0]["encoder"], told[0]["samples"]) == ("hash:384", ["made-up"])
    assert told[0]["where_not_varied"]["k_sub"] == 10
    assert [point["k_epi"] for point in told[0]["k_epi"]] == list(sweeps.K_EPI)


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
    told = firing_rates.rates(firing_rates.parts_of(turns, None), paper, KeptVectors(HashingEncoder(384)))
    assert told["fires"]["mean"] == told["requests"]["mean"] == 25.0, "the third turn of each of three topics"
    assert firing_rates.spread([0.0, 2.0, 4.0]) == {
        **{"mean": 2.0, "deviation": 1.63, "ratio": 0.82, "least": 0.0, "most": 4.0, "none": 1}
    }
    monkeypatch.setenv("UNDERTOW_ENCODER", "hash:384")
    assert firing_rates.main(["--data", str(data), "--parts", "6"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["the default"]["by share"]["tenants"] == 4
