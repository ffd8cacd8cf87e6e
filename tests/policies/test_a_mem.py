"""A-Mem by hand: links, evolution, and what is left alone (docs/policies/a-mem.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from undertow.bench.mock.llm import MockReplies
from undertow.engine.base.model import Memory
from undertow.engine.policies.a_mem.policy import AMem
from undertow.engine.policies.base import PromptBudget, TurnView, rewording
from undertow.prompts.reply_schemas import AnnotateReply, ConnectReply, Evolution

from ..support.engine import RecordingLLM, bytes_hold, open_engine, put, turn_of
from ..support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under

LATER = "Ann tells of sailing at last"


def about(context: str = "Ann speaks") -> AnnotateReply:
    return AnnotateReply(keywords=["boat\n trip"], tags=["leisure"], context=context)


def evolution(note: int, context: str = LATER) -> Evolution:
    return Evolution(note=note, keywords=["sail"], tags=["sport"], context=context)


def connected(links: Sequence[int] = (), evolved: Sequence[Evolution] = ()) -> ConnectReply:
    return ConnectReply(links=[*links], evolved=[*evolved])


def taken(view: View, seq: int, *replies: Any, budget: PromptBudget = ROOMY) -> Driven:
    """A turn of one message, and the replies about it."""
    said = f"Ann: boat number{seq}"
    view.turns[seq] = TurnView(seq, said, f"2026-03-0{seq + 1}", (said,))
    view.record = seq
    done = drive(AMem(budget).decide(seq, view), view, replies=replies)
    view.take_in(done.outcome)
    return done


def begun() -> View:
    """A view with one note."""
    view = View({})
    taken(view, 0, about())
    return view


def notes(view: View) -> list[Memory]:
    return view.current("fact")


def test_a_note_is_the_message_with_what_the_llm_says_about_it() -> None:
    view = begun()
    (note,) = notes(view)
    assert note.text == "Ann: boat number0\nKeywords: boat trip\nTags: leisure\nContext: Ann speaks"
    assert (note.source_messages, note.links) == (((0, 0),), ())


def test_links_and_evolution_come_of_one_reply() -> None:
    view = begun()
    done = taken(view, 1, about(), connected([1], [evolution(1), evolution(1, "again"), evolution(7)]))
    first, second = notes(view)
    assert [p.operation for p in done.prompts] == ["annotate", "connect"]
    assert second.links == (first.id,) and second.version == 1
    assert first.text.endswith(f"Context: {LATER}") and (first.version, first.shown_seqs) == (2, (1,))
    assert first.text.startswith("Ann: boat number0\n"), "the message itself stays"


def test_the_context_of_a_note_beside_it_is_no_evolution() -> None:
    view = View({})
    taken(view, 0, about("Ann has a boat"))
    taken(view, 1, about("Ann sails"), connected([], [evolution(1, "Ann sails")]))
    assert [note.version for note in notes(view)] == [1, 1]
    for context in ("Ann rests", "Ann has a boat"):  # of the new note, and of one of the two
        taken(view, 2, about("Ann rests"), connected([], [evolution(1, context), evolution(2, context)]))
    assert [note.text.rpartition(" ")[2] for note in notes(view)[:2]] == ["boat", "sails"]


def test_a_number_of_no_note_links_nothing() -> None:
    view = begun()
    taken(view, 1, about(), connected([1, 9]))
    assert notes(view)[1].links == ()


def test_an_evolved_note_is_shown_as_its_message_and_rests_on_its_neighbours_alone() -> None:
    view = begun()
    for seq in range(1, 9):
        done = taken(view, seq, about(), connected([], [evolution(1, f"{LATER} {seq}")]))
        assert LATER not in done.prompts[1].user
    evolved = [note for note in notes(view) if note.version > 1]
    assert evolved and all({*note.shown_seqs} < {*range(9)} for note in evolved)


def test_a_users_words_do_not_evolve() -> None:
    view = begun()
    view.memories = [rewording(notes(view)[0], "Ann owns a boat", 1)]
    done = taken(view, 2, about(), connected([1], [evolution(1)]))
    mine, newer = notes(view)
    assert mine.text == "Ann owns a boat" and newer.links == (mine.id,)
    assert "Ann owns a boat" in lines_under(done.prompts[1], "Stored notes")[0]


def test_neighbours_without_room_are_left_out() -> None:
    view = begun()
    view.memories = [replace(notes(view)[0], text="boat " * 5_000)]
    assert [p.operation for p in taken(view, 1, about()).prompts] == ["annotate"]


def test_a_deleted_turn_has_notes_made_again_that_evolved_in_its_sight() -> None:
    view = begun()
    taken(view, 1, about(), connected([1], [evolution(1)]))
    taken(view, 2, about(), connected([1, 2]))
    linked = set(notes(view)[2].links)
    del view.turns[1]
    view.record = 3
    done = drive(AMem(ROOMY).forget(3, 1, view), view, replies=[about("Ann again")])
    view.take_in(done.outcome)
    first, third = notes(view)
    assert first.text.endswith("Context: Ann again") and first.shown_seqs == ()
    assert LATER not in "".join(note.text for note in notes(view))
    assert set(third.links) == linked, "its own words are of its own turn: it is not made again"


def test_where_that_fails_they_go_and_a_replay_makes_them_once() -> None:
    view = begun()
    taken(view, 1, about(), connected([], [evolution(1)]))
    del view.turns[1]
    view.record = 2
    done = drive(AMem(ROOMY).forget(2, 1, view), view, replies=[BAD])
    view.take_in(done.outcome)
    assert notes(view) == [] and done.outcome.cluster == (0,)


def test_an_answer_gets_the_best_notes_and_what_they_link_to(tmp_path: Path) -> None:
    llm = RecordingLLM(MockReplies(3))
    with open_engine(tmp_path, llm, policy="a-mem", k_sem=1, k_sub=0, answer_tokens=0) as engine:
        put(engine, [turn_of("ann", n, f"boat harbour sail number{n}") for n in range(6)])
        assert engine.drain()
        stored = {fact.id: fact for fact in engine.get_all("ann")}
        best, *others = engine.recall("ann", "boat harbour sail number5").facts
        assert stored[best.id].links and {fact.id for fact in others} == {*stored[best.id].links}
        assert len(engine.search("ann", "boat").facts) == 1, "a search returns what it is asked for"


def test_no_word_of_a_deleted_turn_is_left(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(MockReplies(3)), policy="a-mem") as engine:
        put(engine, [turn_of("ann", n, "boat xylophonist" if n == 1 else f"boat {n}") for n in range(4)])
        assert engine.drain()
        assert any("xylophonist" in note.text for note in engine.get_all("ann") if note.shown_seqs)
        engine.delete(engine.search("ann", "xylophonist", k_sub=1).turns[0].id)
        assert engine.drain()
        engine.purge()
    assert not bytes_hold(tmp_path, "xylophonist")
