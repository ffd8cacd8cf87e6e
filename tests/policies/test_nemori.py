"""NEMORI's coroutine driven by hand: windows, episodes, facts, their management, replay and forgetting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from undertow.engine.base.config import Ablation, ManagementName
from undertow.engine.base.model import Decision, Memory, memory_id
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import PromptBudget, TurnView, deletion
from undertow.engine.policies.nemori.knowledge import management_of
from undertow.engine.policies.nemori.partition import Partition, partition_of
from undertow.engine.policies.nemori.policy import Nemori
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.reply_schemas import (
    ConsolidateReply,
    MessageGroup,
    NarrativeReply,
    PartitionReply,
    PredictionReply,
    Reply,
    SelectReply,
    StatementDraft,
    StatementsReply,
    SummaryReply,
)

from ..support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under, stored

# ---- partitions


@given(
    st.lists(st.lists(st.integers(-2, 12), max_size=8), max_size=6),
    st.integers(1, 10),
)
@hypothesis_settings(max_examples=100, deadline=None)
def test_whatever_is_named_no_message_is_lost_or_doubled(named: list[list[int]], count: int) -> None:
    found = partition_of(named, count)
    assert sorted(n for group in found.groups for n in group) == list(range(1, count + 1))
    assert all(group and list(group) == sorted(group) for group in found.groups)
    flat = [n for numbers in named for n in numbers]
    valid = [n for n in flat if 1 <= n <= count]
    assert found.invented == len(flat) - len(valid)
    assert found.repeated == len(valid) - len(set(valid))
    assert found.missing == count - len(set(valid))
    kept = [n for group in found.groups for n in group if n in valid]
    for number in kept:  # where it was named first
        first = next(numbers for numbers in named if number in numbers)
        group = next(group for group in found.groups if number in group)
        assert any(n in first for n in group)


@pytest.mark.parametrize(
    ("named", "groups"),
    [
        ([[3, 1], [2, 4]], ((1, 3), (2, 4))),
        ([[4], [1, 2, 3]], ((4,), (1, 2, 3))),
        ([[1], [4]], ((1, 2), (3, 4))),
        ([[3], []], ((1, 2, 3, 4),)),
        ([[1, 2], [2, 3], [4, 9]], ((1, 2), (3,), (4,))),
        ([], ((1, 2, 3, 4),)),
    ],
)
def test_a_missing_message_joins_the_nearest_group(named: list[list[int]], groups: Any) -> None:
    assert partition_of(named, 4).groups == groups
    assert partition_of(groups, 4) == Partition(groups), "what is a partition stays as it is"


# ---- replies


def grouped(*groups: Sequence[int]) -> PartitionReply:
    return PartitionReply(groups=[MessageGroup(messages=list(group)) for group in groups])


def told(cue: str, narrative: str = "It happened.") -> NarrativeReply:
    return NarrativeReply(cue=cue, narrative=narrative)


def facts(*texts: str, said_in: Sequence[int] = (1, 2)) -> StatementsReply:
    """`said_in`: by number, the messages that say them."""
    return StatementsReply(facts=[StatementDraft(text=text, messages=list(said_in)) for text in texts])


def decided(action: Any, *targets: int, text: str = "") -> ConsolidateReply:
    return ConsolidateReply(action=action, targets=list(targets), text=text)


GUESS = PredictionReply(prediction="They talked.")
ALONE = SelectReply(continues=None)
FIRST = SelectReply(continues=1)
NOTHING = facts()


def view_of(count: int, *, memories: Sequence[Memory] = (), words: int = 0, open_from: int = 0) -> View:
    """Turns of two messages each."""
    turns = {}
    for n in range(count):
        lines = (f"Ann: ask{n} " + "word " * words, f"Bo: reply{n}")
        turns[n] = TurnView(n, "\n".join(lines), f"2026-03-{n + 1:02d}", lines)
    return View(turns, list(memories), settled_end=open_from)


def policy(
    *,
    management: ManagementName = "native",
    ablation: Ablation | None = None,
    theta: float = 1.0,
    budget: PromptBudget = ROOMY,
) -> Nemori:
    return Nemori(budget, 4, management_of(management, theta), ablation)


def decide(view: View, seq: int, *replies: Reply | BadReply, of: Nemori | None = None) -> Driven:
    view.record = seq
    return drive((of or policy()).decide(seq, view), view, replies=replies)


def fact(text: str, born: int, *sources: int, **more: Any) -> Memory:
    return stored("fact", text, born, sources, **more)


def episode(text: str, born: int, *messages: tuple[int, int]) -> Memory:
    sources = tuple(sorted({seq for seq, _ in messages}))
    return stored("episode", text, born, sources, source_messages=messages)


def operations(done: Driven) -> list[str]:
    return [p.operation for p in done.prompts]


# ---- windows


def test_turns_wait_until_the_window_is_full_and_then_all_of_it_is_decided() -> None:
    view = view_of(3)
    waiting = decide(view, 0)
    assert (waiting.outcome.decision, waiting.outcome.settled, waiting.prompts) == (Decision.WAITS, (), [])
    done = decide(view, 1, grouped([1, 2, 3, 4]), told("Cue"), GUESS, NOTHING)
    assert (done.outcome.decision, done.outcome.cluster, done.outcome.settled) == (
        Decision.FIRED,
        (0, 1),
        (0, 1),
    )
    assert lines_under(done.prompts[0], "Messages")[2].endswith('"2026-03-02","Ann: ask1 "]')
    assert done.outcome.reason is None


def test_the_window_begins_behind_the_last_settled_turn_and_deleted_turns_leave_it() -> None:
    view = view_of(6, open_from=2)
    del view.turns[2]
    assert decide(view, 3).outcome.decision is Decision.WAITS
    done = decide(view, 4, grouped([1, 2, 3, 4]), told("Cue"), GUESS, NOTHING)
    assert done.outcome.cluster == (3, 4)


def test_the_window_is_the_shortest_beginning_that_is_long_enough() -> None:
    """Where it was longer once: what is behind it stays open."""
    done = decide(view_of(6), 5, grouped([1, 2, 3, 4]), told("Cue"), GUESS, NOTHING)
    assert done.outcome.settled == (0, 1)


def test_a_flush_takes_what_is_left() -> None:
    view = view_of(1)
    view.record = 1
    done = drive(policy().flush(1, view), view, replies=[grouped([1], [2]), *_two_plain_episodes()])
    assert (done.outcome.decision, done.outcome.settled) == (Decision.FIRED, (0,))
    assert [m.source_messages for m in done.made("episode")] == [((0, 0),), ((0, 1),)]
    view.settled_end = 1
    empty = drive(policy().flush(1, view), view)
    assert (empty.outcome.decision, empty.outcome.drafts) == (Decision.WAITS, ())


def _two_plain_episodes() -> list[Reply]:
    return [told("One"), GUESS, NOTHING, told("Two"), ALONE, GUESS, NOTHING]


def test_one_message_alone_is_not_partitioned() -> None:
    view = view_of(1)
    view.turns[0] = TurnView(0, "Ann: hi", None, ("Ann: hi",))
    view.record = 1
    done = drive(policy().flush(1, view), view, replies=[told("Hi"), GUESS, NOTHING])
    assert operations(done) == ["narrate", "predict", "distil"]


# ---- episodes


def test_groups_become_episodes_one_after_the_other() -> None:
    done = decide(
        view_of(2),
        1,
        grouped([1, 4], [2, 3]),
        *(told("Ann\n asks  twice", "She asked."), GUESS, facts("Ann asks.")),
        *(told("Bo replies"), ALONE, GUESS, facts("Bo replies.", "Bo replies."), decided("new")),
    )
    made = done.made("episode")
    assert [m.text for m in made] == ["Ann asks twice\nShe asked.", "Bo replies\nIt happened."]
    assert [m.source_messages for m in made] == [((0, 0), (1, 1)), ((0, 1), (1, 0))]
    assert [m.id for m in made] == [memory_id("ann", 1, 1, "episode", n) for n in range(2)]
    assert [(m.text, m.source_seqs, m.episode_id) for m in done.made("fact")] == [
        ("Ann asks.", (0, 1), made[0].id),
        ("Bo replies.", (0, 1), made[1].id),
    ]
    narrate = done.prompts[1]
    assert [line.split('"')[3] for line in lines_under(narrate, "Messages")] == ["Ann: ask0 ", "Bo: reply1"]
    select = done.prompts[5]
    assert "Ann asks twice" in lines_under(select, "Stored episodes")[0], "the one of the group before"


def test_a_repair_is_counted_in_the_decision() -> None:
    done = decide(view_of(2), 1, grouped([1, 2, 2, 7]), told("Cue"), GUESS, NOTHING)
    assert done.made("episode")[0].source_messages == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert done.outcome.reason == "the partition was repaired: 2 missing, 1 repeated, 1 invented"
    assert done.outcome.repairs == 4
    parked = decide(view_of(2), 1, grouped([1, 2, 2, 7]), BAD).outcome
    assert (parked.decision, parked.repairs) == (Decision.PARKED, 4), "though the reason is another"


def test_an_episode_that_goes_on_is_told_anew_and_learnt_from_as_a_whole() -> None:
    old = episode("Old cue\nOld story.", 1, (0, 1), (1, 0))
    view = view_of(4, memories=[old], open_from=2)
    replies = [grouped([1, 2, 3, 4]), told("New cue"), FIRST, told("Joined cue", "All of it."), GUESS]
    done = decide(view, 3, *replies, facts("Learnt.", said_in=(1, 2, 3, 5)))
    (joined,) = done.made("episode")
    assert (joined.id, joined.version, joined.text) == (old.id, 2, "Joined cue\nAll of it.")
    assert (joined.born_at_seq, joined.made_at_seq, joined.source_seqs) == (1, 3, (0, 1, 2, 3))
    assert joined.source_messages == ((0, 1), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1))
    shown = lines_under(done.prompts[3], "Episodes")
    assert ["Old story." in shown[0], "New cue" in shown[1]] == [True, True]
    assert '"Joined cue"' in lines_under(done.prompts[4], "Cue")[0], "the cue alone, not the narrative"
    raw = lines_under(done.prompts[5], "Messages")
    assert (len(raw), "reply0" in raw[0]) == (6, True)
    assert done.made("fact")[0].source_seqs == (0, 1, 2, 3)


@pytest.mark.parametrize("number", [None, 2, 0])
def test_null_and_wrong_numbers_continue_nothing(number: int | None) -> None:
    view = view_of(4, memories=[episode("Old\nStory.", 1, (0, 0))], open_from=2)
    replies = [grouped([1, 2, 3, 4]), told("New"), SelectReply(continues=number), GUESS, NOTHING]
    (made,) = decide(view, 3, *replies).made("episode")
    assert (made.version, made.born_at_seq) == (1, 3)


def test_the_five_nearest_episodes_are_candidates() -> None:
    old = [episode(f"Cue{n}\nStory.", n, (0, 0)) for n in range(7)]
    view = view_of(4, memories=old, open_from=2)
    done = decide(view, 3, grouped([1, 2, 3, 4]), told("New"), ALONE, GUESS, NOTHING)
    assert len(lines_under(done.prompts[2], "Stored episodes")) == 5


def test_a_window_that_does_not_fit_is_partitioned_and_narrated_in_parts() -> None:
    view = view_of(2, words=300)
    whole = decide(view, 1, grouped([1, 2, 3, 4]), told("x"), GUESS, NOTHING).prompts
    small = PromptBudget(min(p.size_tokens for p in whole if "Messages:" in p.user) + 63, 64)
    replies = [grouped([1, 2]), grouped([1, 2]), told("One"), GUESS, NOTHING]
    done = decide(view, 1, *replies, told("Two"), ALONE, GUESS, NOTHING, of=policy(budget=small))
    assert [m.source_messages for m in done.made("episode")] == [((0, 0), (0, 1)), ((1, 0), (1, 1))]
    view.turns[1] = replace(view.turns[1], messages=("Ann: " + "word " * 9_000, "Bo: hm"))
    done = decide(view, 1)
    assert (done.outcome.decision, done.outcome.settled, done.prompts) == (Decision.PARKED, (0, 1), [])


# ---- facts


def window(view: View, *replies: Reply | BadReply, **options: Any) -> Driven:
    """Turns 8 and 9 as one episode."""
    view.settled_end = 8
    return decide(view, 9, grouped([1, 2, 3, 4]), told("Boats"), *replies, of=policy(**options))


def test_facts_nearer_than_tau_are_evoked_and_no_others() -> None:
    near, far = fact("Boats It happened.", 0, 0), fact("Cakes.", 1, 1)
    view = view_of(10, memories=[near, far])
    evoked = lines_under(window(view, GUESS, NOTHING, theta=0.9).prompts[2], "Stored facts")
    assert [near.text in line for line in evoked] == [True]
    assert len(lines_under(window(view, GUESS, NOTHING, theta=-1.0).prompts[2], "Stored facts")) == 2
    none = window(view, GUESS, NOTHING, theta=1.0).prompts[2]
    assert none.user.endswith("Stored facts:\nnone")


SAILS, ROWS = fact("Ann sails.", 0, 0), fact("Ann rows.", 1, 1)


def consolidated(reply: ConsolidateReply, *known: Memory, text: str = "Ann swims.") -> Driven:
    return window(view_of(10, memories=known or (SAILS, ROWS)), GUESS, facts(text, said_in=(1, 4)), reply)


def shown_at(done: Driven, known: Memory) -> int:
    lines = lines_under(done.prompts[-1], "Stored facts")
    return next(n for n, line in enumerate(lines, 1) if known.text in line)


def test_a_new_fact_keeps_its_words_and_its_episode() -> None:
    done = consolidated(decided("new"))
    (made,) = done.made("fact")
    assert (made.text, made.source_seqs, made.supersedes) == ("Ann swims.", (8, 9), ())
    assert made.episode_id == done.made("episode")[0].id


def test_a_merge_puts_one_text_in_the_place_of_all_of_them() -> None:
    first = shown_at(consolidated(decided("new")), SAILS)
    done = consolidated(decided("merge", first, 3 - first, text="Ann sails and rows."))
    (made,) = done.made("fact")
    assert (made.id, made.version, made.text) == (SAILS.id, 2, "Ann sails and rows.")
    assert (made.source_seqs, made.supersedes) == ((0, 1, 8, 9), (ROWS.id,))
    assert done.deleted() == [ROWS.id]
    bare = consolidated(decided("merge", 1))
    assert bare.made("fact")[0].text == "Ann swims.", "without words of its own, the new fact's"


def test_a_conflict_ends_the_old_fact_and_inserts_the_new_one() -> None:
    done = consolidated(decided("conflict", 1), SAILS)
    (made,) = done.made("fact")
    assert (made.text, made.version, made.supersedes) == ("Ann swims.", 1, (SAILS.id,))
    assert done.deleted() == [SAILS.id]


def test_what_a_later_turn_told_is_not_made_untrue_by_one_that_is_read_late() -> None:
    later = fact("Ann lives in Berlin.", 12, 12)
    done = consolidated(decided("conflict", 1), later)
    assert (done.deleted(), done.made("fact")) == ([], []), "nor does the older one stand beside it"


def test_of_several_that_it_is_in_conflict_with_the_older_ones_end_and_one_later_one_keeps_it_out() -> None:
    later = fact("Ann dives.", 12, 12)
    first = shown_at(consolidated(decided("new"), SAILS, later), SAILS)
    done = consolidated(decided("conflict", first, 3 - first), SAILS, later)
    assert (done.deleted(), done.made("fact")) == ([SAILS.id], [])


def gone_on(*replies: Reply | BadReply, said_in: Sequence[int], known: Memory) -> Driven:
    """Turns 8 and 9 go on with the episode of turn 0; what is distilled of all of it is "Rome."."""
    home = episode("Home\nAnn lives in Rome.", 1, (0, 0), (0, 1))
    view = view_of(10, memories=[home, known], open_from=8)
    joined = [grouped([1, 2, 3, 4]), told("Flat"), FIRST, told("Home"), GUESS]
    return decide(view, 9, *joined, facts("Rome.", said_in=said_in), *replies)


@pytest.mark.parametrize("said_in", [(1,), (2, 1), (), (9,)])
def test_what_an_episode_told_before_it_went_on_is_dated_by_its_own_words(said_in: tuple[int, ...]) -> None:
    """Without a usable number, the oldest message says it."""
    oslo = fact("Ann lives in Oslo.", 5, 5)
    done = gone_on(decided("conflict", 1), said_in=said_in, known=oslo)
    assert (done.deleted(), done.made("fact")) == ([], [])
    assert '"2026-03-01"' in lines_under(done.prompts[-1], "New fact")[0]
    (new,) = gone_on(decided("new"), said_in=said_in, known=oslo).made("fact")
    assert (new.source_seqs, new.shown_seqs, new.timestamp) == ((0,), (8, 9), "2026-03-01")


def test_a_fact_that_was_distilled_beside_later_words_gives_way_to_what_was_said_between() -> None:
    rome = fact("Ann lives in Rome.", 3, 0, shown_seqs=(12,))
    done = gone_on(decided("conflict", 1), said_in=(3,), known=rome)
    assert done.deleted() == [rome.id] and done.made("fact")[0].supersedes == (rome.id,)


def test_a_merge_keeps_apart_who_said_it_and_what_was_shown() -> None:
    known = fact("Ann lived in Rome.", 3, 5, shown_seqs=(0, 6))
    (merged,) = gone_on(decided("merge", 1), said_in=(1,), known=known).made("fact")
    assert (merged.source_seqs, merged.shown_seqs, merged.timestamp) == ((0, 5), (6, 8, 9), "2026-03-06")


@pytest.mark.parametrize("reply", [decided("merge"), decided("conflict", 9), decided("merge", 0, 3)])
def test_a_directive_without_a_shown_target_is_new(reply: ConsolidateReply) -> None:
    done = consolidated(reply)
    assert ([m.text for m in done.made("fact")], done.deleted()) == (["Ann swims."], [])


def test_each_fact_is_compared_with_those_of_the_same_reply_before_it() -> None:
    done = window(view_of(10), GUESS, facts("Ann sails.", "Ann is a sailor."), decided("merge", 1))
    versions = [(d.memory.version, d.memory.text) for d in done.outcome.drafts if d.memory.kind == "fact"]
    assert versions == [(1, "Ann sails."), (2, "Ann is a sailor.")]


# ---- management


def test_append_adds_and_asks_nothing() -> None:
    done = window(view_of(10, memories=[SAILS]), GUESS, facts("Ann sails."), management="append")
    assert operations(done) == ["partition", "narrate", "predict", "distil"]
    assert [m.text for m in done.made("fact")] == ["Ann sails."]


def test_summary_keeps_one_text_that_is_all_that_is_evoked() -> None:
    view = view_of(10)
    replies = [GUESS, facts("Ann sails.", "Bo bakes.", said_in=(1, 4)), SummaryReply(summary="All.")]
    done = window(view, *replies, management="summary")
    (first,) = done.made("fact")
    assert (first.text, first.source_seqs, first.version) == ("All.", (8, 9), 1)
    assert len(lines_under(done.prompts[-1], "New facts")) == 2
    old = replace(first, source_seqs=(0,))
    view = view_of(10, memories=[old])
    replies = [GUESS, facts("Ann rows.", said_in=(1, 4)), SummaryReply(summary="More.")]
    done = window(view, *replies, management="summary")
    assert "All." in lines_under(done.prompts[2], "Stored facts")[0]
    (again,) = done.made("fact")
    assert (again.id, again.text, again.version, again.source_seqs) == (old.id, "More.", 2, (0, 8, 9))


# ---- ablations (section 4.4)


def test_direct_extraction_reads_raw_groups_and_makes_no_episode() -> None:
    nemori_s = policy(ablation="direct-extraction")
    done = decide(view_of(2), 1, grouped([1, 2], [3, 4]), facts("One."), NOTHING, of=nemori_s)
    assert operations(done) == ["partition", "distil_direct", "distil_direct"]
    assert (done.made("episode"), [m.source_seqs for m in done.made("fact")]) == ([], [(0,)])
    assert done.outcome.settled == (0, 1)


def test_without_facts_and_fixed_chunks() -> None:
    done = decide(view_of(2), 1, grouped([1, 2, 3, 4]), told("Cue"), of=policy(ablation="without-facts"))
    assert (operations(done), done.made("fact")) == (["partition", "narrate"], [])
    done = decide(view_of(2), 1, told("Cue"), GUESS, NOTHING, of=policy(ablation="fixed-chunks"))
    assert operations(done) == ["narrate", "predict", "distil"]
    assert len(done.made("episode")[0].source_messages) == 4


# ---- parking and replay


@pytest.mark.parametrize("good", [0, 1, 2, 3])
def test_a_bad_reply_parks_the_window_and_stores_nothing(good: int) -> None:
    replies = [grouped([1, 2, 3, 4]), told("Cue"), GUESS][:good]
    outcome = decide(view_of(2), 1, *replies, BAD).outcome
    assert outcome.operation == ["partition", "narrate", "predict", "distil"][good]
    assert (outcome.decision, outcome.cluster, outcome.settled) == (Decision.PARKED, (0, 1), (0, 1))
    assert (outcome.drafts, "no JSON" in (outcome.reason or "")) == ((), True)


def replay(view: View, *replies: Reply | BadReply, cluster: tuple[int, ...] = (0, 1)) -> Driven:
    view.record = 9
    job = LlmJob("j", 1, "parked", "narrate", cluster)
    return drive(policy().replay(9, job, view), view, replies=replies)


def test_replay_is_the_window_once_more_and_carries_the_records_seq() -> None:
    done = replay(view_of(9), grouped([1, 2, 3, 4]), told("Cue"), GUESS, facts("Late."))
    (made,) = done.made("episode")
    assert (made.id, made.source_seqs) == (memory_id("ann", 1, 9, "episode", 0), (0, 1))
    assert (done.outcome.decision, done.outcome.revived) == (Decision.FIRED, ())
    assert replay(view_of(9), BAD).outcome.decision is Decision.PARKED
    assert replay(view_of(0)).outcome.decision is Decision.WAITS


def test_replay_takes_no_message_into_a_second_episode() -> None:
    held = episode("Held\nStory.", 1, (0, 0), (1, 1))
    again = [GUESS, facts("Held fact.")]
    rest = [grouped([1, 2]), told("Rest"), ALONE, GUESS, NOTHING]
    done = replay(view_of(9, memories=[held]), *again, *rest)
    assert [m.source_messages for m in done.made("episode")] == [((0, 1), (1, 0))]
    assert done.made("fact")[0].episode_id == held.id
    assert [len(lines_under(p, "Messages")) for p in done.prompts if p.operation == "distil"] == [2, 2]


# ---- forget


def forget(view: View, turn_seq: int, *replies: Reply | BadReply, **options: Any) -> Driven:
    del view.turns[turn_seq]
    view.record = 9
    return drive(policy(**options).forget(9, turn_seq, view), view, replies=replies)


def test_what_rests_on_a_deleted_turn_alone_goes_without_asking() -> None:
    alone, apart = episode("Alone\nx", 1, (2, 0), (2, 1)), episode("Apart\nx", 2, (3, 0))
    gone, stays = fact("Gone.", 1, 2), fact("Stays.", 2, 3)
    done = forget(view_of(9, memories=[alone, apart, gone, stays]), 2)
    assert (sorted(done.deleted()), done.prompts) == (sorted([alone.id, gone.id]), [])


def test_an_episode_is_told_anew_from_its_other_messages_and_lost_facts_are_distilled_again() -> None:
    both = episode("Both\nx", 1, (2, 0), (2, 1), (3, 0), (3, 1))
    lost, kept = fact("Lost.", 1, 2, 3, episode_id=both.id), fact("Kept.", 2, 3, episode_id=both.id)
    view = view_of(9, memories=[both, lost, kept])
    done = forget(view, 2, told("Anew"), GUESS, facts("Found."), decided("new"))
    (made,) = done.made("episode")
    assert (made.id, made.version, made.source_messages) == (both.id, 2, ((3, 0), (3, 1)))
    assert (done.deleted(), [m.text for m in done.made("fact")]) == ([lost.id], ["Found."])
    assert not any(word in p.user for p in done.prompts for word in ("ask2", "reply2", "Lost."))


def test_an_episode_beside_the_turn_is_left_and_its_lost_facts_are_distilled_again() -> None:
    """Facts of two episodes that a merge has made one."""
    here, there = episode("Here\nx", 1, (2, 0)), episode("There\nx", 2, (4, 0), (5, 0), (5, 1))
    merged = fact("Merged.", 1, 2, 5, episode_id=here.id)
    done = forget(view_of(9, memories=[here, there, merged]), 2, GUESS, facts("Told again."))
    assert sorted(done.deleted()) == sorted([here.id, merged.id])
    assert [(m.text, m.source_seqs, m.episode_id) for m in done.made("fact")] == [
        ("Told again.", (5,), there.id)
    ]


def test_a_fact_goes_with_a_turn_that_was_shown_with_those_that_said_it() -> None:
    told_of = fact("Told.", 1, 3, shown_seqs=(2,))
    assert forget(view_of(9, memories=[told_of]), 2, NOTHING).deleted() == [told_of.id]
    ended = deletion(told_of, 6)
    (again,) = forget(view_of(9, memories=[ended]), 2).outcome.drafts
    assert (again.memory.id, again.memory.made_at_seq) == (ended.id, 9)


def test_facts_without_an_episode_are_read_again_directly() -> None:
    loose = fact("Loose.", 1, 2, 3)
    done = forget(view_of(9, memories=[loose]), 2, facts("Anew."), ablation="direct-extraction")
    assert operations(done) == ["distil_direct"]
    assert (done.deleted(), [m.source_seqs for m in done.made("fact")]) == ([loose.id], [(3,)])


def test_a_memory_that_was_deleted_before_gives_up_its_history() -> None:
    ended = deletion(fact("Gone.", 2, 2), 6)
    done = forget(view_of(9, memories=[ended]), 2)
    assert [(d.memory.version, d.memory.made_at_seq) for d in done.outcome.drafts] == [(3, 9)]


def test_what_rests_on_a_deleted_turn_goes_even_when_nothing_can_take_its_place() -> None:
    both, lost = episode("Both\nx", 1, (2, 0), (3, 0)), fact("Lost.", 1, 2, 4)
    outcome = forget(view_of(9, memories=[both, lost]), 2, BAD)
    assert (outcome.outcome.decision, outcome.outcome.cluster) == (Decision.PARKED, (3, 4))
    assert sorted(outcome.deleted()) == sorted([both.id, lost.id])
    assert not outcome.made("fact") and not outcome.made("episode")


def parked_and_replayed(view: View, turn_seq: int, *replies: Reply | BadReply) -> Driven:
    parked = forget(view, turn_seq, BAD)
    assert parked.outcome.decision is Decision.PARKED
    view.take_in(parked.outcome)
    return replay(view, *replies, cluster=parked.outcome.cluster)


def test_an_episode_that_a_user_deleted_is_not_made_again_where_a_deletion_was_parked() -> None:
    dropped = deletion(episode("Dropped\nx", 3, (1, 0), (1, 1), (2, 0), (2, 1)), 4)
    lost = fact("Lost.", 3, 1, 2, 7)
    done = parked_and_replayed(view_of(9, memories=[dropped, lost]), 7, facts("Anew."))
    assert operations(done) == ["distil_direct"]
    assert (done.made("episode"), [m.text for m in done.made("fact")]) == ([], ["Anew."])


def test_one_that_a_user_deleted_is_not_made_again_where_its_own_turn_was_deleted_and_that_parked() -> None:
    dropped = deletion(episode("Dropped\nx", 3, (1, 0), (2, 0)), 4)
    view = view_of(9, memories=[dropped, fact("Lost.", 3, 1, 2)])
    done = parked_and_replayed(view, 1, facts("Anew."), told("Half"), GUESS, NOTHING)
    assert operations(done) == ["distil_direct", "narrate", "predict", "distil"]
    assert [m.source_messages for m in done.made("episode")] == [((2, 1),)], "which was in none"


def test_an_episode_that_went_with_a_turn_is_made_again_where_its_deletion_was_parked() -> None:
    shaken = episode("Shaken\nx", 1, (2, 0), (3, 0), (3, 1))
    again = grouped([1, 2]), told("Again"), GUESS, NOTHING
    done = parked_and_replayed(view_of(9, memories=[shaken]), 2, *again)
    assert [m.source_messages for m in done.made("episode")] == [((3, 0), (3, 1))]
