"""What answers teach: in no answer's way, in the log by the next step, and of the life that was asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.replies import Messages
from undertow.engine.api.engine import Engine
from undertow.engine.step.answer_feedback import Feedback, FeedbackQueue
from undertow.engine.storage.journal import JournalError, Row

from ...support.engine import RecordingLLM, open_engine
from ...support.policies.himem import BEST, QUESTION, Judging, logged, sessions

# all that an answer may log is logged
LEARNING: dict[str, Any] = {**BEST, "himem_max_notes": 9}


def filled(engine: Engine) -> Engine:
    engine.add_batch(sessions()[:3])
    assert engine.drain()
    return engine


def counts(store: Path) -> tuple[int, int]:
    return len(logged(store, "reconsolidate")), len(logged(store, "used"))


@pytest.mark.parametrize("end", ["step", "drain", "flush", "close"])
def test_an_answer_waits_for_no_commit_of_what_it_teaches(end: str, tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging()), **LEARNING) as engine:
        filled(engine).answer("ann", QUESTION)
        engine.answer("ann", QUESTION, mode="hybrid")  # best effort gave episodes alone
        assert counts(tmp_path) == (0, 0) and not engine.idle and not engine.at_rest("ann")
        if end == "step":
            engine.step()
        elif end == "drain":
            assert engine.drain() and engine.idle
        elif end == "flush":
            assert engine.flush("ann")
            (question,) = logged(tmp_path, "reconsolidate")
            assert question["question"] == QUESTION
            log = engine.tenants.get("ann")
            last = log.control(log.next_seq - 1)
            assert last is not None and last.kind == "flush", "what was taught stands before it"
    assert counts(tmp_path) == (1, 1)


def test_a_disk_without_room_for_lessons_costs_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging()), **LEARNING) as engine:
        append = filled(engine).journal.append

        def refusing(rows: Sequence[Row]) -> None:
            if any(row.kind == "control" for row in rows):
                raise JournalError("no room")
            append(rows)

        monkeypatch.setattr(engine.journal, "append", refusing)
        assert engine.answer("ann", QUESTION).usage.calls == 3
        assert engine.usage("ann")["answer"]["calls"] == 1
        assert engine.llm_in_flight == 0
    assert counts(tmp_path) == (0, 0), "closed without an error: it was but a lesson"


def ask(engine: Engine, *questions: str) -> None:
    """Each answered, and what that teaches decided."""
    for question in questions:
        engine.answer("ann", question)
        assert engine.drain()


def test_a_question_is_taken_over_once_until_something_else_changes_the_memories(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging()), **BEST) as engine:
        ask(filled(engine), QUESTION, QUESTION, "And what does she mend?", QUESTION)
    assert counts(tmp_path) == (2, 0)
    with open_engine(tmp_path, RecordingLLM(Judging()), **BEST) as engine:
        ask(engine, QUESTION)
        assert counts(tmp_path) == (2, 0), "known after a restart"
        engine.add_batch(sessions()[3:])
        ask(engine, QUESTION)
        assert counts(tmp_path) == (2, 0), "a turn that waits has changed none"
        assert engine.flush("ann")
        ask(engine, QUESTION)
    assert counts(tmp_path) == (3, 0)


class Dumb(Judging):
    """Has no usable reply to what a question missed."""

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        supplements = schema is not None and "notes" in schema["properties"]
        return "?" if supplements and QUESTION in messages[1]["content"] else super().reply(messages, schema)


def test_a_question_that_taught_nothing_for_want_of_a_reply_is_taken_over_the_next_time(
    tmp_path: Path,
) -> None:
    with open_engine(tmp_path, RecordingLLM(Dumb()), **BEST) as engine:
        ask(filled(engine), QUESTION, QUESTION)
    assert counts(tmp_path) == (2, 0)


def test_questions_whose_notes_take_each_others_place_come_to_an_end(tmp_path: Path) -> None:
    llm = RecordingLLM(Judging())
    with open_engine(tmp_path, llm, **{**BEST, "himem_max_notes": 1}) as engine:
        ask(filled(engine), *[QUESTION, "And what does she mend?"] * 3)
        assert [memory.kind for memory in engine.get_all("ann")].count("fact") == 1
    assert len(logged(tmp_path, "reconsolidate")) == 2
    assert [p.operation for p in llm.prompts["ann"]].count("supplement") == 2


def test_a_lesson_ends_with_the_life_that_was_asked(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging()), **LEARNING) as engine:
        filled(engine).answer("ann", QUESTION)
        engine.erase("ann")
        assert engine.idle, "its words are held by nothing any more"
        filled(engine)
    assert counts(tmp_path) == (0, 0)


def test_a_tenants_lessons_are_committed_together(
    tmp_path: Path, calls_of: Callable[..., list[list[str]]]
) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging()), **LEARNING) as engine:
        filled(engine)
        for n in range(3):
            engine.answer("ann", f"{QUESTION} And on day {n}?")
            engine.answer("ann", f"{QUESTION} And on day {n}?", mode="hybrid")
        commits = calls_of(engine.journal, "append", lambda rows: [row.kind for row in rows])
        engine.step()
        assert [kinds for kinds in commits if "control" in kinds] == [["control"] * 6]
    assert counts(tmp_path) == (3, 3)


def test_the_queue_is_bounded_and_handed_out_by_tenant() -> None:
    feedback = FeedbackQueue(most=3)
    for n, tenant in enumerate(("ann", "bob", "ann", "bob")):
        feedback.put(Feedback(tenant, 1, "used", {"fact_ids": [str(n)]}))
    assert len(feedback) == 3 and feedback.holds("ann") and not feedback.holds("cleo")
    (bobs, anns) = feedback.take(2).values()
    assert [lesson.body["fact_ids"] for lesson in (*bobs, *anns)] == [["1"], ["2"]]
    feedback.forget(["bob"])
    assert len(feedback) == 0 and feedback.take(9) == {}
