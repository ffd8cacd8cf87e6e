"""The check of estimates against runs with an LLM that are reported in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.system import estimate_check
from undertow.engine.estimate.estimate import TOTAL

from ..support import eval as eval_harness
from ..support.eval import written

USED = {"calls": 4, "prompt_tokens": 100, "cached_prompt_tokens": 50, "completion_tokens": 10}
MADE_WITH = {"theta_sim": 0.01, "theta_count": 2, "encoder": "hash:384"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return written(tmp_path, *(eval_harness.conversation(sample_id=name) for name in ("conv-1", "conv-2")))


def checked(folder: Path, data: Path, report: Any, *options: str) -> list[dict[str, Any]]:
    (folder / "report.json").write_text(json.dumps(report))
    arguments = [str(folder / "report.json"), "--data", str(data), "--out", str(folder / "out"), *options]
    assert estimate_check.main(arguments) == 0
    runs: list[dict[str, Any]] = json.loads((folder / "out" / "estimate-real.json").read_text())["runs"]
    return runs


def test_a_summary_is_estimated_with_its_own_thresholds_by_conversation(tmp_path: Path, data: Path) -> None:
    spent = {"conv-1": {"episode": USED}, "conv-2": {"episode": USED, "merge": USED, "answer": USED}}
    spent["conv-2"]["refine"] = USED  # as every run before calls were fused
    summary = {**MADE_WITH, "policy": "recmem", "construction": {"by_conversation": spent}}
    [run] = checked(tmp_path, data, summary)
    assert (run["policy"], run["theta_sim"], run["theta_count"]) == ("recmem", 0.01, 2)
    assert run["conv-1"][TOTAL]["calls"]["metered"] == 4
    assert run["conv-2"][TOTAL]["calls"]["metered"] == 12, "answers are no construction"
    assert run["conv-2"]["refine"]["calls"]["expected"] > 0
    assert run["conv-2"]["merge"]["prompt_tokens"]["metered"] == 100
    [run] = checked(tmp_path, data, summary, "--sample", "conv-2")
    assert "conv-1" not in run


def test_a_file_of_several_runs_is_read_without_those_that_were_stopped(tmp_path: Path, data: Path) -> None:
    whole = {"construction": {"by_conversation": {"conv-1": {"episode": USED}}}}
    alone = {"construction": {"by_operation": {"extract": USED}}}
    report = {"machine": "one", "recmem": {**MADE_WITH, "policy": "recmem", **whole}, "eager": alone}
    _, eager = checked(tmp_path, data, report)
    assert (eager["policy"], eager["conv-1"]["extract"]["calls"]["metered"]) == ("eager", 4)
    assert len(checked(tmp_path, data, {**report, "eager": {**alone, "exchanges_decided": 2}})) == 1


def test_thresholds_by_run_are_read_without_conversations_that_were_not_finished(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERTOW_ENCODER", "hash:384")
    conversations = {
        name: {"undecided_turns": left, "usage": {"episode": USED}}
        for name, left in (("conv-1", 0), ("conv-2", 7))
    }
    report = {"theta_count": 2, "runs": [{"theta_sim": 0.01, "conversations": conversations}]}
    [run] = checked(tmp_path, data, report)
    assert run["theta_sim"] == 0.01 and "conv-1" in run and "conv-2" not in run


def test_what_cannot_be_checked_is_named(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        checked(tmp_path, data, {"turns": 3})
    assert "reports no usage by conversation" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        estimate_check.main(["--data", str(data), "--sample", "conv9"])
    assert "'conv9'" in capsys.readouterr().err
