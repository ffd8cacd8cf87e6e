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
from undertow.engine.policies.nemori.partition import Partition, partition_of
from undertow.engine.policies.nemori.policy import Nemori
from undertow.engine.policies.registry import management_of
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.reply_schemas import (
    AnnotateReply,
    ConsolidateReply,
    MessageGroup,
    NarrativeReply,
    PartitionReply,
    PredictionReply,
    Reply,
    SelectReply,
    StatementDraft,
    StatementsReply,
    TopicReply,
)

from ..support.engine import settings_of
from ..support.policies.driver import BAD, ROOMY, Driven, View, drive, lines_under, stored

# ---- partitions


@given(st.lists(st.lists(st.integers(-2, 12), max_size=8), max_size=6), st.integers(1, 10))
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
    options: dict[str, Any] = {"theta_evoke": theta, "calls": "paper", "short_term_pages": 1}
    settings = settings_of(policy="nemori", management=management, **options)
    return Nemori(budget, 4, management_of(settings), ablation)


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


def test_the_window_is_the_shortest_beginning_that_is_long_enough() -> None:
    """Where it was longer once: what is behind it stays open."""
    done = decide(view_of(6), 5, grouped([1, 2, 3, 4]), told("Cue"), GUESS, NOTHING)
    assert done.outcome.settled == (0, 1)


# ---- episodes


def test_a_repair_is_counted_in_the_decision() -> None:
    done = decide(view_of(2), 1, grouped([1, 2, 2, 7]), told("Cue"), GUESS, NOTHING)
    assert done.made("episode")[0].source_messages == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert done.outcome.reason == "the partition was repaired: 2 missing, 1 repeated, 1 invented"
    assert done.outcome.repairs == 4
    parked = decide(view_of(2), 1, grouped([1, 2, 2, 7]), BAD).outcome
    assert (parked.decision, parked.repairs) == (Decision.PARKED, 4), "though the reason is another"


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


# ---- parking and replay


def replay(view: View, *replies: Reply | BadReply, cluster: tuple[int, ...] = (0, 1)) -> Driven:
    view.record = 9
    job = LlmJob("j", 1, "parked", "narrate", cluster)
    return drive(policy().replay(9, job, view), view, replies=replies)


def test_replay_is_the_window_once_more_and_carries_the_records_seq() -> None:
    done = replay(view_of(9), grouped([1, 2, 3, 4]), told("Cue"), GUESS, facts("Late."))
    (made,) = done.made("episode")
    assert (made.id, made.source_seqs) == (memory_id("ann", 1, 9, "episode", 0), (0, 1))
    assert (done.outcome.decision, done.outcome.revived) == (Decision.FIRED, ())


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


def test_facts_without_an_episode_are_read_again_directly() -> None:
    loose = fact("Loose.", 1, 2, 3)
    done = forget(view_of(9, memories=[loose]), 2, facts("Anew."), ablation="direct-extraction")
    assert operations(done) == ["distil_direct"]
    assert (done.deleted(), [m.source_seqs for m in done.made("fact")]) == ([loose.id], [(3,)])


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


# ---- third-party managements (appendix A.3)


def note(content: str, born: int, *sources: int, **more: Any) -> Memory:
    text = f"{content}\nKeywords: boat\nTags: sport\nContext: She tells of it."
    return fact(text, born, *sources, prompt_version="connect", **more)


def test_a_note_of_a_fact_that_evolved_beside_a_deleted_turn_is_annotated_again() -> None:
    here, there = episode("Here\nx", 1, (2, 0)), episode("There\nx", 2, (5, 0), (6, 0), (6, 1))
    evolved = note("Ann sails.", 1, 2, shown_seqs=(5, 6), episode_id=here.id)
    lost = note("Bo rows.", 2, 5, shown_seqs=(6,), episode_id=there.id)
    linking = replace(evolved, id="a" * 32, links=(lost.id, evolved.id))
    view = view_of(9, memories=[here, there, evolved, lost, linking])
    about = AnnotateReply(keywords=["sail"], tags=[], context="Ann speaks")
    replies = [about, about, told("There again"), GUESS, NOTHING]
    done = forget(view, 5, *replies, management="a-mem")
    assert operations(done) == ["annotate", "annotate", "narrate", "predict", "distil"]
    first, second = done.made("fact")
    assert first.text == "Ann sails.\nKeywords: sail\nTags: \nContext: Ann speaks"
    assert (first.shown_seqs, second.links, done.deleted()) == ((), (evolved.id,), [lost.id])
    assert "Bo rows." not in "".join(p.user for p in done.prompts)
    view.turns[5] = view.turns[2]
    failed = forget(view, 5, BAD, management="a-mem").outcome
    gone = {d.memory.id for d in failed.drafts if d.memory.deleted}
    assert gone == {there.id, evolved.id, lost.id, linking.id}
    assert (failed.operation, failed.cluster) == ("annotate", (2, 6))


def test_the_pages_of_a_segment_that_told_of_a_deleted_turn_are_filed_again() -> None:
    told_of = episode("Cue\nx", 1, *((n, 0) for n in range(2, 6)))
    pages = [fact(f"Fact {n}.", n, n, fact_kind="page", episode_id=told_of.id) for n in range(2, 6)]
    ids = tuple(page.id for page in pages)
    segment = fact("All.\nKeywords: a", 6, 2, 3, 4, fact_kind="segment", links=ids[:3])
    line = fact("Ann is.", 7, 2, shown_seqs=(3, 4), fact_kind="profile", links=ids[:3])
    view = view_of(9, memories=[told_of, *pages, segment, line])
    topic = TopicReply(summary="Rest.", keywords=["b"])
    done = forget(view, 3, topic, topic, topic, told("Again"), management="memory-os")
    assert operations(done) == ["topic", "topic", "topic", "narrate"]
    assert sorted(done.deleted()) == sorted([pages[1].id, segment.id, line.id])
    (again,) = (m for m in done.made("fact") if m.version == 2)
    assert (again.fact_kind, again.source_seqs, again.links) == ("segment", (2, 4), (ids[0], ids[2]))
    assert "Fact 3." not in "".join(p.user for p in done.prompts), "the newest page waits"
