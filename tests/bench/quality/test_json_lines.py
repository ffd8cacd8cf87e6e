"""Answers and verdicts as JSON lines: torn ends, lines of one key, and memory use."""

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


def test_of_two_lines_of_a_key_the_later_counts_and_both_stand_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    written = [{"question_id": name, "run": 1, "n": n, "big": "x" * 10} for n, name in enumerate("cac")]
    with closing(KeptLines(file, heavy=("big",))) as lines:
        for line in written[:2]:
            lines.add(line)
    with closing(KeptLines(file, heavy=("big",))) as lines:
        lines.add(written[2])
    with closing(KeptLines(file, heavy=("big",))) as again:
        for kept in (lines, again):
            assert len(kept) == 2 and kept.get((1, "c")) == {"question_id": "c", "run": 1, "n": 2}
    assert lines_of(file) == written


@pytest.mark.parametrize("torn_bytes", [0, 5, 200_000])
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
            assert len(lines) == count
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < count * size_bytes / 4, "a few lines at a time, as the parser needs them"
