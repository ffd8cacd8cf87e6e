"""Evaluations side by side: of the same questions only, with differences question by question."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from undertow.bench.mock_server import spawn_server
from undertow.bench.quality.side_by_side import main

from .cli_harness import run
from .eval_harness import conversation, written

pytest.importorskip("matplotlib", reason="the picture's package is not installed")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Of RecMem, of it without facts at answer time, of naive RAG, and of RecMem with fewer questions."""
    root = tmp_path_factory.mktemp("eval")
    path = written(root, conversation())
    options = (
        ("recmem",),
        ("without-facts", "--memories-of", root / "recmem", "--ablation", "without-semantic"),
        ("rag", "--policy", "naive-rag-2048"),
        ("fewer", "--questions", "2"),
    )
    with spawn_server() as url:
        for name, *more in options:
            done = run("eval", "locomo", "--data", path, "--llm", url, "--out", root / name, "--json", *more)
            assert done.code == 0, done.err
    return [root / name for name, *_ in options]


def f1_of(folder: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    return {line["question_id"]: line["f1"] for line in lines}


def test_differences_are_taken_question_by_question(
    folders: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recmem, without, rag, _ = folders
    assert main([str(recmem), str(without), str(rag), "--out", str(tmp_path / "made" / "both")]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| | judge | F1 | F1, difference |")
    assert [row.split("`")[1] for row in rows] == ["recmem", "without-facts", "rag"]
    assert rows[0].split("|")[4].strip() == "" and rows[2].split("|")[5].strip() == "0"
    told = json.loads((tmp_path / "made" / "both.json").read_bytes())
    assert told["benchmark"] == "locomo" and "cpu" in told["machine"]
    base, other = f1_of(recmem), f1_of(rag)
    expected = sum(other[question] - base[question] for question in base) / len(base)
    assert told["evaluations"]["rag"]["f1_difference"]["mean"] == pytest.approx(expected, abs=1e-4)
    assert told["evaluations"]["recmem"]["f1_difference"]["mean"] == 0
    assert (tmp_path / "made" / "both.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_compare_is_refused(
    folders: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recmem, _, _, fewer = folders
    for wrong, why in (
        (fewer, "its questions_per_sample is 2, the first one's is None"),
        (recmem, "there is a recmem already"),
        (tmp_path / "nowhere", "has no summary.json"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(recmem), str(wrong), "--out", str(tmp_path / "out")])
        assert ended.value.code == 2 and why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
