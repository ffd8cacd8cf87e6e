"""HiMem's coroutine driven by hand: windows, episodes, notes in three stages, replay and forgetting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.base.model import Decision, Memory, memory_id
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import Decide, PromptBudget, TurnView, deletion
from undertow.engine.policies.himem.episodes import cut
from undertow.engine.policies.himem.notes import Note, settled
from undertow.engine.policies.himem.policy import HiMem
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.reply_schemas import (
    AlignReply,
    NoteChange,
    NoteDraft,
    NotesReply,
    Reply,
    SegmentDraft,
    SegmentReply,
    SupplementReply,
    TraitDraft,
    TraitsReply,
)

from ...support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under, stored

NONE = NotesReply(notes=[])
NO_TRAITS = TraitsReply(notes=[])
SAME = AlignReply(changes=[])


def himem(budget: PromptBudget = ROOMY, *, notes: bool = True, episodes: bool = False) -> HiMem:
    return HiMem(budget, align_notes=notes, align_episodes=episodes)


def talk(sessions: str, memories: Sequence[Memory] = (), words: int = 3) -> View:
    """A turn for each letter, which names its session."""
    turns = {
        n: TurnView(n, f"Ann: turn{n} " + "word " * words, f"2026-03-{n + 1:02d}", session=session)
        for n, session in enumerate(sessions)
    }
    return View(turns, list(memories))


def at(view: View, seq: int) -> View:
    """As it is when record `seq` is decided."""
    view.record = seq
    return view


def pieces(*firsts: int) -> SegmentReply:
    drafts = [SegmentDraft(first=n, topic=f"topic{n}", summary=f"Ann said {n}.") for n in firsts]
    return SegmentReply(episodes=drafts)


def notes(*given: tuple[str, Any, list[int]]) -> NotesReply:
    return NotesReply(notes=[NoteDraft(text=text, kind=kind, turns=turns) for text, kind, turns in given])


def traits(*given: tuple[str, Any, list[int]]) -> TraitsReply:
    return TraitsReply(notes=[TraitDraft(text=text, kind=kind, turns=turns) for text, kind, turns in given])


def changes(*given: tuple[int, int | None, str]) -> AlignReply:
    return AlignReply(changes=[NoteChange(note=n, same_as=same, text=text) for n, same, text in given])


def run(steps: Decide, view: View, *replies: Reply | BadReply) -> Driven:
    return drive(steps, view, replies=replies)


def operations(done: Driven) -> list[str]:
    return [prompt.operation for prompt in done.prompts]


# ---- windows


def test_what_one_prompt_does_not_hold_is_cut_in_parts_and_an_oversized_turn_is_parked_alone() -> None:
    view = talk("aaaaaa", words=300)
    size = run(himem().flush(3, at(view, 3)), view, pieces(1), NONE, NO_TRAITS).prompts[0].size_tokens
    tight = himem(PromptBudget(size + 64, 64))
    done = run(tight.flush(6, at(view, 6)), view, pieces(1), pieces(2), NONE, NO_TRAITS, NONE, NO_TRAITS)
    assert operations(done) == ["segment", "segment", "notes", "traits", "notes", "traits"]
    assert [m.source_seqs for m in done.made("episode")] == [(0, 1, 2), (3, 4, 5)]
    view = talk("aa", words=3)
    view.turns[0] = TurnView(0, "Ann: " + "word " * 9_000, "2026-03-01", session="a")
    done = run(himem().decide(1, at(view, 1)), view)
    assert (done.outcome.decision, done.outcome.cluster, done.prompts) == (Decision.PARKED, (0,), [])
    assert (done.outcome.operation, done.outcome.settled) == ("segment", (0,))


# ---- episodes


@given(st.lists(st.integers(-2, 14), min_size=1, max_size=12), st.integers(1, 12))
def test_any_reply_gives_contiguous_episodes_that_hold_each_turn_once(firsts: list[int], count: int) -> None:
    made = cut(pieces(*firsts).episodes, count)
    assert [place for places, _ in made for place in places] == list(range(count))
    assert all(len(places) for places, _ in made)
    beginnings = {first for first in firsts if 1 <= first <= count}
    assert {places.start + 1 for places, _ in made[1:]} == {*sorted(beginnings)[1:]}


# ---- notes


numbers = st.integers(-1, 6)


@given(st.lists(st.tuples(numbers, st.one_of(st.none(), numbers)), max_size=8))
def test_whatever_alignment_says_no_source_is_lost_and_none_invented(
    given: list[tuple[int, int | None]],
) -> None:
    before = [Note(f"n{n}", "fact", (n,), "v") for n in range(4)]
    after = settled(before, changes(*((n, same, "") for n, same in given)).changes, "w")
    assert sorted(s for note in after for s in note.sources) == [0, 1, 2, 3]
    assert after and {note.text for note in after} <= {note.text for note in before}


def test_what_does_not_fit_beside_the_notes_is_left_out() -> None:
    view = talk("aab", words=300)
    said = notes(*((f"Note {n} " + "x " * 280, "fact", [1]) for n in range(6)))
    replies = pieces(1), said, NO_TRAITS, SAME
    whole = run(himem().decide(2, at(view, 2)), view, *replies).prompts
    tight = run(
        himem(PromptBudget(whole[3].size_tokens + 63, 64)).decide(2, at(view, 2)), view, *replies
    ).prompts
    assert [len(lines_under(p, "Turns")) for p in (whole[3], tight[3])] == [2, 1], "the first turn"
    assert [len(lines_under(p, "Notes")) for p in (whole[3], tight[3])] == [6, 6]


# ---- replay

JOB = LlmJob("j", 2, "parked", "segment", (0, 1))


def test_replay_remembers_the_window_and_what_it_makes_carries_the_records_seq() -> None:
    view = talk("aabb")
    done = run(himem().replay(9, JOB, view), view, pieces(2), notes(("One.", "fact", [2])), NO_TRAITS, SAME)
    (episode,) = done.made("episode")
    (note,) = done.made("fact")
    assert (episode.id, episode.source_seqs) == (memory_id("ann", 1, 9, "episode", 0), (0, 1))
    assert (note.made_at_seq, note.source_seqs, note.episode_id) == (9, (1,), episode.id)
    assert (done.outcome.cluster, done.outcome.settled, done.outcome.revived) == ((0, 1), (), ())


def test_replay_doubles_no_episode() -> None:
    view = talk("aabb", [stored("episode", "Held.", 5, (1,))])
    done = run(himem().replay(9, JOB, view), view, pieces(1), NONE, NO_TRAITS, NONE, NO_TRAITS)
    assert operations(done) == ["segment", "notes", "traits", "notes", "traits"]
    assert [m.source_seqs for m in done.made("episode")] == [(0,)]


# ---- forget


def forget(view: View, turn_seq: int, *replies: Reply | BadReply) -> Driven:
    view.settled_end = max(view.turns) + 1
    del view.turns[turn_seq]
    return run(himem().forget(12, turn_seq, view), view, *replies)


def made(kind: Any, text: str, born: int, *sources: int, ordinal: int = 0) -> Memory:
    identity = memory_id("ann", 1, born, kind, ordinal)
    return Memory(identity, kind, "ann", text, 1, born, born, ordinal, sources, "2026-03-01")


def test_a_deleted_turn_takes_along_all_of_its_window_which_is_made_anew_without_it() -> None:
    one, two = made("episode", "One.", 4, 0, 1), made("episode", "Two.", 4, 2, 3, ordinal=1)
    near, far = made("fact", "Near.", 4, 3), made("fact", "Far.", 8, 5)
    other = made("episode", "Other.", 8, 4, 5)
    view = talk("aaaabbc", [one, two, other, near, far])
    done = forget(view, 1, pieces(1), notes(("Anew.", "fact", [3])), NO_TRAITS, SAME)
    assert sorted(done.deleted()) == sorted([one.id, two.id, near.id])
    assert "turn1 " not in "".join(p.user for p in done.prompts)
    assert [m.source_seqs for m in done.made("episode")] == [(0, 2, 3)]
    assert [(m.text, m.source_seqs, m.born_at_seq) for m in done.made("fact")] == [("Anew.", (3,), 12)]


def test_a_note_of_several_windows_is_written_anew_of_each_other_window_by_itself() -> None:
    """So that no note of one holds words of another, which its sources would not tell."""
    both = made("fact", "Both.", 4, 0, 1, 4)
    spans = {4: (0,), 7: (1, 2), 8: (3, 4)}
    episodes = [made("episode", f"Born at {born}.", born, *seqs) for born, seqs in spans.items()]
    replies = NONE, NO_TRAITS, notes(("Anew.", "fact", [1])), NO_TRAITS, SAME
    done = forget(talk("abbccd", [*episodes, both]), 0, *replies)
    assert sorted(done.deleted()) == sorted([episodes[0].id, both.id])
    assert operations(done) == ["notes", "traits", "notes", "traits", "align"], "the other episodes stay"
    assert ["turn1" in p.user for p in done.prompts] == [True, True, False, False, False]
    (note,) = done.made("fact")
    assert (note.source_seqs, note.episode_id) == ((4,), episodes[2].id)


BAKES = made("fact", "Ann bakes bread.", 7, 1)
SAILS = made("fact", "Ann sails a red boat to Malta.", 9, 0, 1)


@pytest.mark.parametrize(
    ("written", "restored"),
    [
        (["Bread is what Ann bakes.", "Ann sails a boat to Malta."], ["Ann sails a boat to Malta."]),
        (["Bread is what Ann bakes."], []),
        ([BAKES.text], []),
        ([], []),
    ],
)
def test_of_another_window_the_lost_note_alone_is_restored(written: list[str], restored: list[str]) -> None:
    """The window's own notes stand: in other words they would be there twice."""
    here, there = made("episode", "Here.", 4, 0), made("episode", "There.", 7, 1)
    said = notes(*((text, "fact", [1]) for text in written))
    replies = [said, NO_TRAITS, SAME] if written else [said, NO_TRAITS]
    done = forget(talk("abc", [here, there, BAKES, SAILS]), 0, *replies)
    assert sorted(done.deleted()) == sorted([here.id, SAILS.id])
    assert [(m.text, m.source_seqs) for m in done.made("fact")] == [(text, (1,)) for text in restored]


def test_a_turn_that_was_merely_shown_for_a_lost_note_gives_none_in_its_place() -> None:
    lost = made("fact", "Ann sails.", 9, 0)
    view = talk("abc", [made("episode", "Here.", 4, 0), made("episode", "There.", 7, 1), BAKES])
    view.memories.append(replace(lost, shown_seqs=(1,)))
    done = forget(view, 0)
    assert (lost.id in done.deleted(), done.prompts) == (True, [])


def test_of_a_parked_deletion_nothing_is_written_of_a_window_that_has_notes() -> None:
    """The lost note's words are gone by then, so what doubles one that stands could not be told."""
    view = talk("abc", [made("episode", "Here.", 4, 0), made("episode", "There.", 7, 1), BAKES, SAILS])
    done = parked_and_replayed(view, 0)
    assert (done.outcome.decision, done.prompts, done.outcome.drafts) == (Decision.FIRED, [], ())


def test_what_a_user_deleted_does_not_come_back_and_gives_up_its_history() -> None:
    kept, gone = made("episode", "Kept.", 4, 0, 1), made("episode", "Gone.", 4, 2, 3, ordinal=1)
    done = forget(talk("aaaab", [kept, deletion(gone, 6)]), 1, pieces(1), NONE, NO_TRAITS)
    assert [m.source_seqs for m in done.made("episode")] == [(0,)]
    ended = [d.memory for d in done.outcome.drafts if d.memory.id == gone.id]
    assert [(m.version, m.made_at_seq, m.deleted) for m in ended] == [(3, 12, True)]


def test_a_turn_of_an_open_window_has_left_nothing() -> None:
    done = forget(talk("aab", [made("episode", "Other.", 9, 0)]), 1)
    assert (done.outcome.drafts, done.prompts) == ((), [])


def parked_and_replayed(view: View, turn_seq: int, *replies: Reply | BadReply) -> Driven:
    parked = forget(view, turn_seq, BAD)
    assert parked.outcome.decision is Decision.PARKED
    view.take_in(parked.outcome)
    job = LlmJob("j", 12, "parked", "segment", parked.outcome.cluster)
    return run(himem().replay(13, job, view), view, *replies)


def test_an_episode_that_a_user_deleted_is_not_made_again_where_a_deletion_was_parked() -> None:
    here, there = made("episode", "Here.", 4, 0), made("episode", "There.", 7, 1, 2)
    both = made("fact", "Both.", 8, 0, 1, 2)
    replies = notes(("Anew.", "fact", [1])), NO_TRAITS, SAME
    done = parked_and_replayed(talk("abbc", [here, deletion(there, 9), both]), 0, *replies)
    assert operations(done) == ["notes", "traits", "align"]
    assert (done.made("episode"), [m.text for m in done.made("fact")]) == ([], ["Anew."])


def test_an_episode_that_went_with_a_turn_is_made_again_where_its_deletion_was_parked() -> None:
    view = talk("aaab", [made("episode", "Shaken.", 4, 0, 1, 2)])
    done = forget(view, 0, pieces(1), NONE, NO_TRAITS)
    view.take_in(done.outcome)
    done = parked_and_replayed(view, 1, pieces(1), NONE, NO_TRAITS)
    assert [m.source_seqs for m in done.made("episode")] == [(2,)]


# ---- reconsolidation

EARLY = stored("episode", "Ann moved to Berlin.", 2, (0, 1))
LATE = stored("episode", "Ann moved to Paris.", 5, (3, 4))


def ask(view: View, *replies: Reply, episodes: Sequence[str] = (LATE.id, EARLY.id)) -> Driven:
    return run(himem().reconsolidate(9, "Where does Ann live?", episodes, view), view, *replies)


def test_reconsolidation_skips_episodes_that_are_gone_or_rest_on_a_deleted_turn() -> None:
    view = talk("aaaaaa", [EARLY, LATE])
    del view.turns[4]
    done = ask(view, SupplementReply(notes=[]))
    assert [EARLY.text in line for line in lines_under(done.prompts[0], "Episodes")] == [True]
    del view.turns[0]
    assert ask(view).outcome.decision is Decision.WAITS
    assert ask(talk("aaaaaa", [EARLY]), episodes=("unknown",)).prompts == []
