"""Pairs of runs: which figure is read, and which interval its ratios give."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from undertow.bench.pairs import compare, figure_of, interval


def test_interval_takes_the_order_statistics_of_the_sign_test() -> None:
    # P(all eight on one side) = 2 / 256 = 0.8%; the second smallest and largest would cover 93%
    assert interval([8, 1, 7, 2, 6, 3, 5, 4]) == (1, 8)
    assert interval([float(n) for n in range(1, 11)]) == (2, 9)  # 97.9%; (3, 8) would cover 89%
    assert interval([1.0, 2.0, 3.0]) == (-float("inf"), float("inf"))


def test_figure_that_is_missing_is_an_error_that_names_it() -> None:
    assert figure_of({"gate": [{"rate": 3}]}, "gate.0.rate") == 3.0
    for path in ("gate.0.speed", "gate.1.rate", "gate"):
        with pytest.raises(ValueError, match=path):
            figure_of({"gate": [{"rate": 3}]}, path)


def test_commands_run_in_alternating_order(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def command(name: str, figure: int) -> str:
        printed = json.dumps(json.dumps({"rate": figure}))
        return f"echo {name} >> {log}; {sys.executable} -c 'print(\"noise\"); print({printed})'"

    found = compare(command("old", 2), command("new", 3), "rate", 6, "a")
    assert log.read_text().split() == ["old", "new", "new", "old"] * 3
    assert (found["old"], found["new"], found["median"]) == (2, 3, 1.5)
    assert (found["low"], found["high"]) == (1.5, 1.5)
