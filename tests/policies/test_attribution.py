"""Facts rest on the turns that say them, whatever turns a reply names."""

from __future__ import annotations

import pytest

from undertow.engine.policies.attribution import repeated, telling_words, turns_that_say
from undertow.engine.policies.base import GateReading, TurnView
from undertow.engine.policies.himem.policy import HiMem
from undertow.engine.policies.nemori.knowledge import Append
from undertow.engine.policies.nemori.policy import Nemori
from undertow.engine.policies.recmem import RecMem
from undertow.prompts.reply_schemas import (
    EpisodeFactsDraft,
    EpisodeFactsReply,
    FactDraft,
    MergeFactsReply,
    NarrativeReply,
    NoteDraft,
    NotesAllReply,
    PredictionReply,
    SegmentDraft,
    SegmentReply,
    StatementDraft,
    StatementsReply,
)

from ..support.policies.driver import ROOMY, View, drive, stored

SHOWN = {
    0: "Gina: I work at Door Dash now.",
    3: "Gina: We booked the flight to Rome for 3 May.",
    7: "Gina: My sister Ada opens a bakery in Lyon.",
}


def words_of(texts: dict[int, str]) -> dict[int, frozenset[str]]:
    return {number: telling_words(text) for number, text in texts.items()}


@pytest.mark.parametrize(
    ("fact", "named", "says"),
    [
        ("Gina works at Door Dash.", [0], (0,)),
        ("Gina works at Door Dash.", [7], (0,)),
        ("Gina works at Door Dash.", [0, 3, 7], (0,)),
        ("Gina's sister Ada opens a bakery.", [0, 3], (7,)),
        ("Gina booked a flight to Rome, and Ada opens a bakery.", [3, 7], (3, 7)),
        ("Gina booked a flight to Rome, and Ada opens a bakery in Lyon.", [3], (3, 7)),
        ("Gina booked a flight to Rome, and Ada opens a bakery in Lyon.", [0], (3, 7)),
        ("Gina, who works, booked the flight to Rome.", [3], (3,)),
        ("Gina is happy.", [3, 0], (0, 3)),
    ],
)
def test_a_fact_rests_on_the_turns_that_have_its_words(
    fact: str, named: list[int], says: tuple[int, ...]
) -> None:
    assert turns_that_say(telling_words(fact), named, words_of(SHOWN)) == says


def test_a_language_without_spaces_is_told_apart_by_pairs_of_characters() -> None:
    shown = {1: "李雷: 我对花生过敏", 2: "李雷: 下周去北京出差", 3: "李雷: 谢谢你"}
    assert turns_that_say(telling_words("李雷对花生过敏。"), [2], words_of(shown)) == (1,)
    assert turns_that_say(telling_words("李雷去北京出差。"), [2], words_of(shown)) == (2,)
    with_a_name = {1: "我对花生过敏", 2: "欧阳修文来了", 3: "谢谢你"}
    assert turns_that_say(telling_words("欧阳修文对花生过敏。"), [1], words_of(with_a_name)) == (1,)


def test_a_merge_repeats_an_older_turn_only_if_that_says_most_of_the_fact() -> None:
    before = words_of({0: "Ann: I take the driving test in March.", 3: "Ann: I sold the red bicycle."})
    now = words_of({7: "Ann: I finally did it!"})
    assert repeated(telling_words("Ann passed the driving test without mistakes."), now, before) == ()
    assert repeated(telling_words("Ann sold the red bicycle."), now, before) == (3,)
    told_again = words_of({7: "Ann: The red bicycle is sold, as I said."})
    assert repeated(telling_words("Ann sold the red bicycle."), told_again, before) == ()
    assert repeated(frozenset(), now, before) == repeated(telling_words("Ann."), now, before) == ()


def view() -> View:
    turns = {
        seq: TurnView(seq, text, f"2026-0{n}-01", (text,), "s")
        for n, (seq, text) in enumerate(SHOWN.items(), 1)
    }
    found = View(turns)
    found.record = 8
    return found


def test_recmem_dates_a_fact_by_the_turn_that_says_it() -> None:
    """Also in a merge, whose reply repeats what the episode tells."""
    works = FactDraft(text="Gina works at Door Dash.", kind="user_event", turns=[3], replaces=None)
    fires = GateReading(None, None, (0, 3), (0.9, 0.8), 2)
    reply = EpisodeFactsReply(episodes=[EpisodeFactsDraft(text="All.", turns=[1, 2, 3], facts=[works])])
    policy = RecMem(ROOMY, is_fused=True)
    (made,) = drive(policy.decide(7, view()), view(), reading=fires, replies=[reply]).made("fact")
    assert (made.source_seqs, made.shown_seqs, made.timestamp) == ((0,), (3, 7), "2026-01-01")

    known = view()
    known.memories = [stored("episode", "Gina has a job and a flight.", 3, (0, 3))]
    reading = GateReading(known.memories[0], 0.9)
    again = works.model_copy(update={"turns": [1]})
    bakery = FactDraft(text="Ada opens a bakery.", kind="user_event", turns=[1], replaces=None)
    merge = MergeFactsReply(same_story=True, narrative="More.", facts=[again, bakery])
    done = drive(policy.decide(7, known), known, reading=reading, replies=[merge])
    assert [(f.source_seqs, f.shown_seqs) for f in done.made("fact")] == [((0,), (7,)), ((7,), ())]


def test_himem_and_nemori_date_a_fact_by_the_turn_that_says_it() -> None:
    segment = SegmentReply(episodes=[SegmentDraft(first=1, topic="T", summary="S.")])
    notes = NotesAllReply(notes=[NoteDraft(text="Gina works at Door Dash.", kind="fact", turns=[3])])
    done = drive(HiMem(ROOMY, is_fused=True).flush(8, view()), view(), replies=[segment, notes])
    assert [note.source_seqs for note in done.made("fact")] == [(0,)]

    told = [
        NarrativeReply(cue="Gina", narrative="Her news."),
        PredictionReply(prediction="Nothing."),
        StatementsReply(facts=[StatementDraft(text="Gina works at Door Dash.", messages=[3])]),
    ]
    nemori = Nemori(ROOMY, 3, Append(0.7), "fixed-chunks")
    done = drive(nemori.flush(8, view()), view(), replies=told)
    assert [fact.source_seqs for fact in done.made("fact")] == [(0,)]
