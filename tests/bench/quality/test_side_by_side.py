"""Evaluations side by side: of the same questions only, with differences question by question."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.server import spawn_server
from undertow.bench.quality.side_by_side import main, read
from undertow.engine.base.model import UndertowError

from ...support.cli import run
from ...support.eval import conversation, lines_of, written

RESULTS = Path(__file__).parents[3] / "docs" / "results"

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
    return {line["question_id"]: line["f1"] for line in lines_of(folder / "answers.jsonl")}


def test_differences_are_taken_question_by_question(
    folders: Sequence[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recmem, without, rag, _ = folders
    assert main([str(recmem), str(without), str(rag), "--out", str(tmp_path / "made" / "both")]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| | judge | difference | F1 | difference |")
    assert [row.split("`")[1] for row in rows] == ["recmem", "without-facts", "rag"]
    assert rows[0].split("|")[3].strip() == rows[0].split("|")[5].strip() == ""
    assert rows[2].split("|")[6].strip() == "0"
    told = json.loads((tmp_path / "made" / "both.json").read_bytes())
    assert told["benchmark"] == "locomo" and "cpu" in told["machine"]
    base, other = f1_of(recmem), f1_of(rag)
    expected = sum(other[question] - base[question] for question in base) / len(base)
    assert told["evaluations"]["rag"]["f1_difference"]["mean"] == pytest.approx(expected, abs=1e-4)
    assert told["evaluations"]["recmem"]["f1_difference"]["mean"] == 0
    for figure in ("f1_difference", "judge_difference"):
        of = told["evaluations"]["rag"][figure]
        assert of["low"] <= of["mean"] <= of["high"]
        assert (of["verdict"] == "not distinguishable") == (of["low"] <= 0 <= of["high"])
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


VERSIONS = {"answer": "a1", "sufficiency": "s1", "episode": "e1"}


def made(folder: Path, f1: Mapping[tuple[int, str], float], /, **changes: Any) -> Path:
    """A folder of an evaluation of two questions, as far as a comparison reads it."""
    summary = {
        "benchmark": "locomo",
        "data": "locomo.json",
        "repeats": 1,
        "questions": 2,
        "judge_model": "j",
        "judge_prompt": {"version": "j1", "file": None},
        "prompt_versions": VERSIONS,
    }
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary | changes))
    lines = [
        {"run": run, "question_id": question, "f1": of, "answer": "a"} for (run, question), of in f1.items()
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


ONCE = {(1, "a"): 0.5, (1, "b"): 0.25}
TWICE = {**ONCE, (2, "a"): 0.0, (2, "b"): 1.0}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"judge_prompt": {"version": "j2", "file": None}}, "judge_prompt.version is 'j2', .* is 'j1'"),
        ({"judge_prompt": {"version": "own", "file": "own.j2"}}, "judge_prompt.version is 'own'"),
        ({"judge_prompt": None}, "judge_prompt.version is None"),
        ({"prompt_versions": VERSIONS | {"answer": "a2"}}, "prompt_versions.answer is 'a2', .* is 'a1'"),
        ({"prompt_versions": VERSIONS | {"sufficiency": "s2"}}, "prompt_versions.sufficiency is 's2'"),
        ({"prompt_versions": {}}, "prompt_versions.answer is None"),
        ({"repeats": 2}, "repeats is 2, the first one's is 1"),
    ],
)
def test_scores_of_other_prompts_or_repeats_are_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    base, other = made(tmp_path / "base", ONCE), made(tmp_path / "other", TWICE, **changes)
    with pytest.raises(UndertowError, match=f"{other}: its {why}.*Compare evaluations of the same"):
        read([base, other])


def test_other_policies_ablations_and_prompts_of_construction_compare(tmp_path: Path) -> None:
    own = {"judge_prompt": {"version": "own", "file": "own.j2"}}
    renamed = {"judge_prompt": {"version": "own", "file": "renamed.j2"}}
    base = made(tmp_path / "base", ONCE, policy="himem", answer_mode="best_effort", **own)
    others = [
        made(tmp_path / "hybrid", ONCE, policy="himem", answer_mode="hybrid", **own),
        made(tmp_path / "recmem", ONCE, policy="recmem", ablation="without-facts", **renamed),
        made(tmp_path / "older", ONCE, prompt_versions=VERSIONS | {"episode": "e0"}, **own),
    ]
    assert list(read([base, *others])) == ["base", "hybrid", "recmem", "older"]


def test_the_published_ablations_compare(tmp_path: Path) -> None:
    told = json.loads((RESULTS / "ablations.json").read_bytes())["evaluations"]
    folders = [made(tmp_path / name, ONCE, **summary) for name, summary in told.items()]
    assert list(read(folders)) == list(told)


def test_runs_beyond_the_repeats_count_nowhere(tmp_path: Path) -> None:
    """A command with more --repeats has left them: the summary is not about them."""
    base, other = made(tmp_path / "base", TWICE), made(tmp_path / "other", dict.fromkeys(ONCE, 0.0))
    difference = read([base, other])["other"]["f1_difference"]
    assert difference == {"mean": -0.375, "low": -0.5, "high": -0.25, "verdict": "worse"}
    assert read([other, base])["base"]["f1_difference"]["verdict"] == "better"


def test_the_judge_is_compared_on_what_it_judged_twice(tmp_path: Path) -> None:
    """An answer that is missing is wrong; what the judge left open in one of the two counts in neither."""
    questions = dict.fromkeys([(1, f"q{n}") for n in range(40)], 0.5)
    base, other, third = (made(tmp_path / name, questions) for name in ("base", "other", "third"))
    for folder, right in ((base, 10), (other, 30)):
        verdicts = ["right" if n < right else "wrong" for n in range(40)]
        verdicts[0] = "unjudged" if folder == other else "right"
        lines = [{"run": 1, "question_id": f"q{n}", "verdict": said} for n, said in enumerate(verdicts)]
        (folder / "verdicts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = read([base, other, third])
    of = told["other"]["judge_difference"]
    assert of["mean"] == pytest.approx(20 / 39, abs=1e-4) and of["verdict"] == "better"
    nothing = {"mean": None, "low": None, "high": None, "verdict": "not distinguishable"}
    assert told["third"]["judge_difference"] == nothing


def test_a_question_without_a_line_is_refused(tmp_path: Path) -> None:
    whole, torn = made(tmp_path / "whole", ONCE), made(tmp_path / "torn", {(1, "a"): 0.5})
    for folders in ([whole, torn], [torn, whole]):
        with pytest.raises(UndertowError, match=f"{torn}: .* no line of question b in run 1, which {whole} "):
            read(folders)
    (torn / "answers.jsonl").unlink()
    with pytest.raises(UndertowError, match=r"has no answers.jsonl"):
        read([whole, torn])


def test_a_folder_of_evidence_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"benchmark": "locomo"}')
    with pytest.raises(UndertowError, match=r"has no answers. .* --evidence-only"):
        read([tmp_path])


def test_material_is_not_held_in_memory(tmp_path: Path) -> None:
    folder, count, size_bytes = made(tmp_path / "full", {}), 100, 500_000
    with (folder / "answers.jsonl").open("w") as out:
        for n in range(count):
            line = {"run": 1, "question_id": str(n), "f1": 0.5, "answer": "a", "material": "x" * size_bytes}
            out.write(json.dumps(line) + "\n")
    tracemalloc.start()
    try:
        read([folder])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < count * size_bytes / 4


def test_real_folders_that_judged_otherwise_are_refused(folders: Sequence[Path], tmp_path: Path) -> None:
    """Of what `undertow eval` writes: the fields that are compared are there."""
    recmem, _, rag, _ = folders
    for field, version in (("judge_prompt", "version"), ("prompt_versions", "answer")):
        other = tmp_path / field
        shutil.copytree(rag, other, ignore=shutil.ignore_patterns("store"))
        summary = json.loads((other / "summary.json").read_bytes())
        assert summary[field][version]
        summary[field][version] = "another"
        (other / "summary.json").write_text(json.dumps(summary))
        with pytest.raises(UndertowError, match=f"its {field}.{version} is 'another'"):
            read([recmem, other])
