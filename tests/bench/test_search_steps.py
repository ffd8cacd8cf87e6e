"""The steps to the default search: offline rankings that are the engine's, and steps that differ as named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from undertow.bench.quality.search_steps import (
    DEFAULT,
    STEPS,
    main,
    raised,
    reciprocal_ranks,
    terms_of,
    texts_of,
)
from undertow.engine.base.model import Message, Turn

from ..support.cli import TOPICS, run
from ..support.eval import conversation, question, said, written

COLOURS = ("red", "green", "blue", "amber")


def talk() -> dict[str, Any]:
    """Two sessions of 16 turns on recurring topics, and a question to one message of each fourth."""
    sessions: dict[str, Any] = {}
    for n in range(64):
        name = f"session_{1 + n // 32}"
        text = f"{TOPICS[n // 2 % 3]} {COLOURS[n // 2 % 4]} item{n // 3}"
        sessions.setdefault(name, []).append(said(n, ("Ann", "Ben")[n % 2], text))
        sessions[f"{name}_date_time"] = f"1:56 pm on {8 + n // 32} May, 2023"
    asked = [
        question(f"Which {COLOURS[n // 2 % 4]} item of Ann was booked on {8 + n // 32} May?", 4, f"D1:{n}")
        for n in range(0, 64, 4)
    ]
    return conversation(conversation=sessions, qa=asked)


@pytest.mark.parametrize(
    ("search", "step"), [("dense", "cosine alone"), ("hybrid", "and the best of the stretch, 0.3")]
)
def test_the_engines_own_searches_are_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: Any, search: str, step: str
) -> None:
    data = written(tmp_path, talk())
    options = ("--data", data, "--evidence-only", "--out", tmp_path / "evidence", "--json")
    told = run("eval", "locomo", *options, env={"UNDERTOW_SEARCH": search}).doc
    monkeypatch.setenv("UNDERTOW_ENCODER", "hash:384")
    assert main(["--data", str(data), "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "search-steps.json").read_bytes())
    assert document == json.loads(capsysbinary.readouterr().out)
    found = {one["step"]: one for one in document["steps"]}
    assert list(found) == [one.name for one in STEPS]
    assert found[step]["held_back"]["questions"] == 0
    figures = [f"evidence_recall_at_{k}" for k in (5, 10, 20)]
    assert [found[step]["all"][name] for name in figures] == [told[name] for name in figures]
    assert 0 < told["evidence_recall_at_5"] < told["evidence_recall_at_20"]
    assert len({json.dumps(one["all"]) for one in document["steps"]}) > 5, "the steps differ"


def test_terms_and_texts_are_what_a_step_says() -> None:
    stems = terms_of("the boats and a boat", DEFAULT)
    assert len(stems) == 2 and len(set(stems)) == 1, "function words go, endings too"
    assert len(set(terms_of("the boats and a boat", replace(DEFAULT, stems=False)))) == 2
    assert len(terms_of("the boats and a boat", replace(DEFAULT, function_words=True))) == 5
    turn = Turn("t", (Message("user", "Hi.", "Ann"), Message("user", "Yes?", "Ben")), "k", "s", "2023-05-08")
    assert texts_of(turn, DEFAULT) == ["Ann: Hi.\nBen: Yes?\n8 May 2023"]
    assert texts_of(turn, replace(DEFAULT, speakers=False, by_message=True, day=False)) == ["Hi.", "Yes?"]


def test_fusions_by_hand() -> None:
    cosines, shares = np.array([0.5, 0.2, 0.8]), np.array([0.0, 1.0, 0.0])
    assert raised(3.0)(cosines, shares) == pytest.approx([0.5, 1 - 0.8 * np.exp(-3), 0.8])
    # ranks 2, 3, 1 by cosine and 2, 1, 3 by share: equal ones keep their order
    assert reciprocal_ranks(10)(cosines, shares) == pytest.approx([2 / 12, 1 / 13 + 1 / 11, 1 / 11 + 1 / 13])
