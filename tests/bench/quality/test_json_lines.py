"""Answers and verdicts as JSON lines: torn ends, order, and memory use."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from undertow.bench.quality.json_lines import KeptLines
from undertow.engine.base.model import UndertowError

from ...support.eval import lines_of


def test_lines_that_are_no_lines_are_refused_and_a_torn_end_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    good = '{"question_id": "a", "run": 1}\n'
    file.write_text(good + good.replace("a", "b", 1).replace('"b"', '"a"') + '{"question_id": "b", "ru')
    lines = KeptLines(file)
    assert len(lines) == 1 and file.read_text().count("\n") == 2
    lines.close()
    file.write_text(good + "not one\n" + good)
    with pytest.raises(UndertowError, match=r"answers.jsonl:2 .* --out"):
        KeptLines(file)


def test_settled_lines_stand_in_order(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    lines = KeptLines(file, heavy=("big",))
    for name in ("c", "a", "b"):
        lines.add({"question_id": name, "run": 1, "big": "x" * 10})
    lines.settle([(1, "a"), (1, "b"), (1, "c")])
    lines.add({"question_id": "d", "run": 1, "big": "y"})
    lines.close()
    assert [line["question_id"] for line in lines_of(file) if "big" in line] == list("abcd")
    assert lines.get((1, "a")) == {"question_id": "a", "run": 1}


def test_settling_what_is_settled_leaves_the_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    with closing(KeptLines(file)) as lines:
        for name in ("a", "b", "a"):
            lines.add({"question_id": name, "run": 1, "n": len(lines)})
        lines.settle([(1, "a")])
        assert file.read_text() == '{"question_id":"a","run":1,"n":2}\n{"question_id":"b","run":1,"n":1}\n'
        before = file.stat().st_ino
        lines.settle([(1, "a"), (1, "b")])
    assert file.stat().st_ino == before


@pytest.mark.parametrize("torn_bytes", [0, 5, 65_535, 65_536, 200_000])
def test_a_torn_end_of_any_length_is_cut(tmp_path: Path, torn_bytes: int) -> None:
    file = tmp_path / "answers.jsonl"
    for good in ("", '{"question_id": "a", "run": 1}\n'):
        file.write_text(good + "x" * torn_bytes)
        KeptLines(file).close()
        assert file.read_text() == good


def test_heavy_fields_are_never_held_in_memory_together(tmp_path: Path) -> None:
    """The material of full context may be more than a machine has."""
    file, count, size_bytes = tmp_path / "answers.jsonl", 100, 100_000
    texts = (json.dumps({"question_id": f"q{n}", "run": 1, "big": "x" * size_bytes}) for n in range(count))
    with file.open("w") as out:
        out.writelines(text + "\n" for text in texts)
        out.write("torn")
    tracemalloc.start()
    try:
        with closing(KeptLines(file, heavy=("big",))) as lines:
            lines.settle([(1, f"q{n}") for n in reversed(range(count))])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < count * size_bytes / 4, "a few lines at a time, as the parser needs them"
    assert [line["question_id"] for line in lines_of(file)[:2]] == ["q99", "q98"]
