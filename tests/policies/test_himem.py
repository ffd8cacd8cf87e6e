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
from undertow.engine.policies.himem.policy import Alignment, HiMem
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.builders import prompt_version, segment_prompt
from undertow.prompts.reply_schemas import (
    AlignReply,
    NoteChange,
    NoteDraft,
    NotesReply,
    Reply,
    SegmentDraft,
    SegmentReply,
    TraitDraft,
    TraitsReply,
)

from ..support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under, stored

NONE = NotesReply(notes=[])
NO_TRAITS = TraitsReply(notes=[])
SAME = AlignReply(changes=[])


def himem(budget: PromptBudget = ROOMY, *, notes: bool = True, episodes: bool = False) -> HiMem:
    return HiMem(budget, Alignment(notes, episodes))


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


def test_a_session_stays_open_until_the_first_turn_of_another() -> None:
    view = talk("aaab")
    for seq in range(3):
        done = run(himem().decide(seq, at(view, seq)), view)
        assert (done.outcome.decision, done.outcome.settled, done.prompts) == (Decision.WAITS, (), [])
    done = run(himem().decide(3, at(view, 3)), view, pieces(1), NONE, NO_TRAITS)
    assert operations(done) == ["segment", "notes", "traits"], "without notes there is nothing to align"
    assert (done.outcome.decision, done.outcome.cluster, done.outcome.settled) == (
        Decision.FIRED,
        (0, 1, 2),
        (0, 1, 2),
    )
    assert "turn3" not in done.prompts[0].user, "which begins the next window"
    assert {m.made_at_seq for m in done.made("episode")} == {3}


def test_a_flush_closes_the_window_and_does_nothing_where_none_is_open() -> None:
    view = talk("aaa")
    done = run(himem().flush(3, at(view, 3)), view, pieces(1), NONE, NO_TRAITS)
    assert done.outcome.settled == (0, 1, 2)
    view.settled_end = 3
    done = run(himem().flush(4, at(view, 4)), view)
    assert (done.outcome.decision, done.outcome.drafts) == (Decision.WAITS, ())
    view.turns[5] = TurnView(5, "Ann: more", "2026-03-09", session="a")
    assert run(himem().decide(5, at(view, 5)), view).outcome.decision is Decision.WAITS, (
        "a new window has begun"
    )


def test_a_window_is_closed_by_the_turn_with_which_it_takes_more_than_half_of_a_prompts_room() -> None:
    view = talk("aaaaaa", words=300)
    whole = himem(PromptBudget(8_192, 64))
    size = run(whole.flush(3, at(view, 3)), view, pieces(1), NONE, NO_TRAITS).prompts[0].size_tokens
    fixed = segment_prompt(()).size_tokens
    tight = himem(PromptBudget(fixed + 2 * (size - fixed) + 64, 64))
    assert run(tight.decide(2, at(view, 2)), view).outcome.decision is Decision.WAITS
    done = run(tight.decide(3, at(view, 3)), view, pieces(1), NONE, NO_TRAITS)
    assert done.outcome.settled == (0, 1, 2)
    view.settled_end = 3
    assert run(tight.decide(4, at(view, 4)), view).outcome.decision is Decision.WAITS


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


def test_an_episode_holds_its_topic_time_span_summary_and_turns_word_for_word() -> None:
    view = talk("aaaab")
    view.turns[3] = TurnView(3, "Ann: undated", None, session="a")
    done = run(himem().decide(4, at(view, 4)), view, pieces(1, 3), NONE, NO_TRAITS)
    first, second = done.made("episode")
    said = "\n".join(view.turns[n].text for n in (0, 1))
    assert first.text == f"topic1 (2026-03-01 to 2026-03-02)\nAnn said 1.\n{said}"
    assert second.text.startswith("topic3 (2026-03-03)\n") and second.text.endswith("\nAnn: undated")
    assert [(m.source_seqs, m.ordinal, m.timestamp) for m in (first, second)] == [
        ((0, 1), 0, "2026-03-02"),
        ((2, 3), 1, "2026-03-03"),
    ]
    assert [m.id for m in (first, second)] == [memory_id("ann", 1, 4, "episode", n) for n in range(2)]
    assert {m.prompt_version for m in (first, second)} == {prompt_version("segment")}
    view.turns = {3: view.turns[3], 4: view.turns[4]}
    (bare,) = run(himem().decide(4, at(view, 4)), view, pieces(1), NONE, NO_TRAITS).made("episode")
    assert bare.text.startswith("topic1 (undated)\n")


def test_aligned_episodes_hold_the_reworded_turns() -> None:
    view = talk("aab")
    policy = himem(notes=False, episodes=True)
    done = run(
        policy.decide(2, at(view, 2)), view, pieces(1), changes((2, None, "Ann: aligned.")), NONE, NO_TRAITS
    )
    assert operations(done) == ["segment", "align", "notes", "traits"]
    (episode,) = done.made("episode")
    assert episode.text.endswith(f"\n{view.turns[0].text}\nAnn: aligned.")


# ---- notes


def test_notes_pass_three_stages_and_link_to_their_episodes() -> None:
    view = talk("aaab")
    stage1 = notes(
        ("Ann sails.", "fact", [1]), ("She rows.", "fact", [2]), ("Ann likes tea.", "preference", [9])
    )
    stage2 = traits(("Ann loves water.", "preference", [1, 3]), ("She sails.", "profile", [3]))
    stage3 = changes((2, None, "Ann rows."), (5, 1, ""))
    done = run(himem().decide(3, at(view, 3)), view, pieces(1, 3), stage1, stage2, stage3)
    assert operations(done) == ["segment", "notes", "traits", "align"]
    assert [("Ann sails." in line) for line in lines_under(done.prompts[2], "Notes")] == [True, False, False]
    assert len(lines_under(done.prompts[3], "Notes")) == 5
    made = done.made("fact")
    first, second = done.made("episode")
    assert [(m.text, m.fact_kind, m.source_seqs, m.episode_id) for m in made] == [
        ("Ann sails.", "fact", (0, 2), first.id),
        ("Ann rows.", "fact", (1,), first.id),
        ("Ann likes tea.", "preference", (0, 1, 2), first.id),
        ("Ann loves water.", "preference", (0, 2), first.id),
    ]
    assert second.source_seqs == (2,), "by which the first and third link to it too"
    versions = [prompt_version(name) for name in ("notes", "align", "notes", "traits")]
    assert [m.prompt_version for m in made] == versions


def test_without_alignment_the_notes_stay_as_they_were_extracted() -> None:
    view = talk("aab")
    replies = pieces(1), notes(("She rows.", "fact", [2])), traits(("She sails.", "profile", []))
    done = run(himem(notes=False).decide(2, at(view, 2)), view, *replies)
    assert operations(done) == ["segment", "notes", "traits"]
    assert [m.text for m in done.made("fact")] == ["She rows.", "She sails."]


numbers = st.integers(-1, 6)


@given(st.lists(st.tuples(numbers, st.one_of(st.none(), numbers)), max_size=8))
def test_whatever_alignment_says_no_source_is_lost_and_none_invented(
    given: list[tuple[int, int | None]],
) -> None:
    before = [Note(f"n{n}", "fact", (n,), "v") for n in range(4)]
    after = settled(before, changes(*((n, same, "") for n, same in given)).changes, "w")
    assert sorted(s for note in after for s in note.sources) == [0, 1, 2, 3]
    assert after and {note.text for note in after} <= {note.text for note in before}


def test_a_note_stored_word_for_word_rests_on_the_new_turns_too() -> None:
    old = stored("fact", "Ann sails.", 0, (0,), fact_kind="fact")
    view = talk("aab", [old])
    view.settled_end = 1
    said = notes(("Ann sails.", "fact", [1]), ("Ann sails.", "fact", [1]), ("New.", "fact", [1]))
    done = run(himem().decide(2, at(view, 2)), view, pieces(1), said, NO_TRAITS, SAME)
    again, new = done.made("fact")
    assert (again.id, again.text, again.version, again.source_seqs) == (old.id, old.text, 2, (0, 1))
    assert (new.version, new.source_seqs) == (1, (1,))


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


@pytest.mark.parametrize(
    "replies",
    [
        (BAD,),
        (pieces(1), BAD),
        (pieces(1), NONE, BAD),
        (pieces(1), notes(("x", "fact", [])), NO_TRAITS, BAD),
    ],
)
def test_a_bad_reply_parks_the_window_and_stores_nothing(replies: tuple[Any, ...]) -> None:
    view = talk("aab")
    outcome = run(himem().decide(2, at(view, 2)), view, *replies).outcome
    assert (outcome.decision, outcome.operation, outcome.cluster) == (Decision.PARKED, "segment", (0, 1))
    assert (outcome.settled, outcome.drafts) == ((0, 1), ())
    assert "no JSON" in (outcome.reason or "")


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


def test_replay_parks_again_leaves_deleted_turns_out_and_doubles_no_episode() -> None:
    view = talk("aabb", [stored("episode", "Held.", 5, (1,))])
    done = run(himem().replay(9, JOB, view), view, pieces(1), NONE, NO_TRAITS, NONE, NO_TRAITS)
    assert operations(done) == ["segment", "notes", "traits", "notes", "traits"]
    assert [m.source_seqs for m in done.made("episode")] == [(0,)]
    del view.turns[1]
    again = run(himem().replay(9, JOB, view), view, BAD)
    assert (again.outcome.decision, again.outcome.cluster) == (Decision.PARKED, (0,))
    view.turns.clear()
    assert run(himem().replay(9, JOB, view), view).outcome.decision is Decision.WAITS


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


def test_what_rested_on_a_deleted_turn_goes_even_when_nothing_can_take_its_place() -> None:
    one, note = made("episode", "One.", 4, 0, 1), made("fact", "Note.", 4, 1, 5)
    view = talk("aabbbbc", [one, note])
    done = forget(view, 1, pieces(1), BAD)
    assert (done.outcome.decision, done.outcome.cluster) == (Decision.PARKED, (0, 5))
    assert (sorted(done.deleted()), done.made("episode")) == (sorted([one.id, note.id]), [])


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


# ---- forgetting by use


def test_of_too_many_notes_the_least_used_are_forgotten_and_of_equals_the_oldest() -> None:
    old = [made("fact", f"Old {n}.", 1, 0, ordinal=n) for n in range(4)]
    view = talk("aab", [made("episode", "Old.", 1, 0), *old])
    view.settled_end, view.used = 1, {old[0].id: 1, old[2].id: 3}
    policy = HiMem(ROOMY, Alignment(), max_notes=3)
    said = notes(("New.", "fact", [1]))
    done = run(policy.decide(2, at(view, 2)), view, pieces(1), said, NO_TRAITS, SAME)
    assert done.deleted() == [old[1].id, old[3].id], "neither a used one nor the new one"
    assert "2 notes forgotten" in (done.outcome.reason or "")
    view.used = {note.id: 1 for note in old}
    tight = HiMem(ROOMY, Alignment(), max_notes=1)
    done = run(tight.decide(2, at(view, 2)), view, pieces(1), said, NO_TRAITS, SAME)
    assert done.deleted() == [note.id for note in old]
    assert [m.kind for m in done.made("episode")] == ["episode"]
    assert run(himem().decide(2, at(view, 2)), view, pieces(1), said, NO_TRAITS, SAME).deleted() == [], "off"


def test_the_notes_stay_bounded_though_one_window_gives_more() -> None:
    view = talk("aab")
    said = notes(*((f"Note {n}.", "fact", [1]) for n in range(5)))
    policy = HiMem(ROOMY, Alignment(), max_notes=2)
    done = run(policy.decide(2, at(view, 2)), view, pieces(1), said, NO_TRAITS, SAME)
    kept = {m.text for m in done.made("fact") if m.id not in done.deleted()}
    assert kept == {"Note 3.", "Note 4."}
