"""A run's folder: one line a question, for audit, and the summary of them all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from undertow.bench.quality.evidence import Retrieved
from undertow.bench.quality.scoring import summary

EVIDENCE, SUMMARY = "evidence.jsonl", "summary.json"


def write_evidence(retrieved: Iterable[Retrieved], folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Write both files as the questions come; returns the summary, which begins with what it is `about`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)  # of an earlier run: not to stand beside other lines
    scores = []
    with (folder / EVIDENCE).open("wb") as lines:
        for one in retrieved:
            lines.write(orjson.dumps(one.line(), option=orjson.OPT_APPEND_NEWLINE))
            scores.append(one.score)
    told = {**about, **summary(scores)}
    write_summary(folder, told)
    return told


def write_summary(folder: Path, told: dict[str, Any]) -> None:
    (folder / SUMMARY).write_bytes(orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
