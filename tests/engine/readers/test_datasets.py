"""The published data sets, as published and made up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.readers import detect_format
from undertow.serving import demo

from ...support.readers import GOOD, records


@pytest.fixture(scope="module")
def data() -> Path:
    folder = Path(__file__).resolve().parents[3].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the data sets are not shipped with the project: no ../shared/data")
    return folder


def test_locomo_samples_are_read_whole_and_in_session_order(data: Path) -> None:
    path = data / "locomo_dev.json"
    assert detect_format(path) == "locomo"
    found = records(path)
    assert [r.turns[0].tenant for r in found] == ["conv-26", "conv-30", "conv-41", "conv-42", "conv-43"]
    assert [r.position for r in found] == [1, 2, 3, 4, 5]
    assert not any(r.errors or r.warnings for r in found)
    assert [sum(len(t.messages) for t in r.turns) for r in found] == [419, 369, 663, 629, 680]
    for record, raw in zip(found, json.loads(path.read_text()), strict=True):
        sessions = list(dict.fromkeys(t.session_id for t in record.turns))
        assert sessions == [f"session_{n}" for n in range(1, len(sessions) + 1)]
        sizes = {k: len(v) for k, v in raw["conversation"].items() if isinstance(v, list)}
        assert Counter(t.session_id for t in record.turns) == {k: (n + 1) // 2 for k, n in sizes.items()}
        assert len({t.dedupe_key for t in record.turns}) == len(record.turns)
    first = found[0].turns[0]
    assert first.timestamp == "2023-05-08T13:56:00"
    assert [m.speaker for m in first.messages] == ["Caroline", "Melanie"]


def test_locomo_captions_are_part_of_the_text(data: Path) -> None:
    path = data / "locomo_dev.json"
    captions = [
        m["blip_caption"]
        for sample in json.loads(path.read_text())
        for session in sample["conversation"].values()
        if isinstance(session, list)
        for m in session
        if m.get("blip_caption")
    ]
    text = "\n".join(t.text for r in records(path) for t in r.turns)
    assert len(captions) > 100
    assert all(f"[image: {caption}]" in text for caption in captions)


def test_longmemeval_item_is_read_whole_and_by_date(data: Path) -> None:
    path = data / "longmemeval_one.json"
    assert detect_format(path) == "longmemeval"
    (record,) = records(path)
    assert not record.errors and not record.warnings
    assert {t.tenant for t in record.turns} == {"e47becba"}
    assert len({t.session_id for t in record.turns}) == 53
    assert sum(len(t.messages) for t in record.turns) == 550
    dates = [t.timestamp or "" for t in record.turns]
    assert dates[0] == "2023-05-20T02:21:00" and dates == sorted(dates)
    shapes = Counter(tuple(m.role for m in t.messages) for t in record.turns)
    assert set(shapes) == {("user", "assistant"), ("assistant",)} | (shapes.keys() & {("user",)})


def test_locomo_streams_from_a_made_up_file(tmp_path: Path) -> None:
    """Number order, an odd last message, an empty session, a bad session, a second sample."""

    def spoken(n: int) -> dict[str, Any]:
        return {"speaker": "Ann" if n % 2 else "Bob", "dia_id": f"D:{n}", "text": f"text {n}"}

    conversation = {
        "session_10": [spoken(10)],
        "session_10_date_time": "9:00 am on 2 March, 2026",
        "session_2": [spoken(1), {**spoken(2), "text": "", "blip_caption": "a red boat"}, spoken(3)],
        "session_2_date_time": "9:00 am on 1 March, 2026",
        "session_3": [],
        "session_4": [spoken(1), {"speaker": "Bob", "text": " "}],
        "session_5": [spoken(1)],
        "session_5_date_time": "soon",
    }
    sample = {"sample_id": "c1", "conversation": conversation}
    path = tmp_path / "l.json"
    path.write_text(json.dumps([sample, {"sample_id": "c2"}, {**sample, "sample_id": "c3"}]))
    first, second, third = records(path)
    assert [(t.session_id, len(t.messages)) for t in first.turns] == [
        ("session_2", 2),
        ("session_2", 1),
        ("session_10", 1),
    ]
    assert first.turns[0].text == "Ann: text 1\nBob: [image: a red boat]"
    assert [e.field for e in first.errors] == [
        "conversation.session_4[1].text",
        "conversation.session_5_date_time",
    ]
    assert second.turns == () and [e.field for e in second.errors] == ["conversation"]
    assert third.turns[0].tenant == "c3"
    assert records(path, after=1) == [second, third]


def test_longmemeval_sessions_are_sorted_by_date_and_matched(tmp_path: Path) -> None:
    item = {
        "question_id": "q",
        "haystack_sessions": [GOOD["messages"], [{"role": "user", "content": "earlier"}], [{"role": "user"}]],
        "haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/05/19 (Fri) 02:21", "2023/05/21 (Sun) 02:21"],
        "haystack_session_ids": ["late", "early", "bad"],
    }
    path = tmp_path / "q.json"
    path.write_text(json.dumps(item))
    (record,) = records(path)
    assert [t.session_id for t in record.turns] == ["early", "late"]
    assert [e.field for e in record.errors] == ["haystack_sessions[2][0].content"]
    path.write_text(json.dumps([{**item, "haystack_dates": []}]))
    (record,) = records(path)
    assert record.errors[0].field == "haystack_sessions"


def test_broken_array_keeps_the_samples_before_the_break(tmp_path: Path) -> None:
    sample = {"sample_id": "c", "conversation": {"session_1": [{"speaker": "A", "text": "hi"}]}}
    path = tmp_path / "x.json"
    path.write_text("[" + json.dumps(sample) + ", {broken")
    (record,) = records(path)
    assert len(record.turns) == record.position == 1 and "after 1 samples" in record.errors[0].reason


def test_the_shipped_conversation_is_well_formed() -> None:
    folder = Path(demo.__path__[0])
    found = records(folder / "conversation.jsonl")
    assert not any(r.errors or r.warnings for r in found)
    turns = [t for r in found for t in r.turns]
    assert (len(found), len(turns)) == (12, 60)
    assert all([m.speaker for m in t.messages] == ["Nora", "Pilot"] and t.timestamp for t in turns)
    questions = json.loads((folder / "questions.json").read_text(encoding="utf-8"))
    assert len(questions) == 3 and all(
        q["question"] and q["gist"] and q["tenant"] == "nora" for q in questions
    )
