"""What RecMem reads besides recurring topics, and what does not count in its gate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.base.model import Message, Turn
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import GateReading, TurnView
from undertow.engine.policies.recmem import RecMem
from undertow.engine.policies.salience import Salience, best_for_their_length, information
from undertow.engine.tenants.view import View as RealView
from undertow.prompts.reply_schemas import (
    EpisodeDraft,
    EpisodesReply,
    FactDraft,
    FactsReply,
    Reply,
    SalientReply,
)

from ..support.engine import RecordingLLM, open_engine
from ..support.policies.driver import BAD, ROOMY, View, drive, stored

SMALL_TALK = "Wow, that's really great, thank you so much!"
TELLING = "Ann booked 3 nights in Lisbon for 12 May"
SALIENT: dict[str, Any] = {"profile": "companion", "salience_turns": 4, "theta_count": 50}


def said(*texts: str, day: str | None = "2026-03-01") -> list[Turn]:
    return [Turn("ann", (Message("user", text),), f"{n} {text}", "s", day) for n, text in enumerate(texts)]


def view(*texts: str) -> View:
    turns = {n: TurnView(n, f"Ann: {t}", f"2026-03-{n + 1:02d}", (f"Ann: {t}",)) for n, t in enumerate(texts)}
    return View(turns)


def test_small_talk_says_nothing_and_numbers_names_and_plans_say_more() -> None:
    assert information(SMALL_TALK) == 0
    assert (
        information("I booked it") < information("I booked Lisbon") < information("I booked Lisbon for 3 May")
    )
    assert information("allergic to nuts") > information("fond of nuts")
    assert information("nuts nuts nuts nuts") == information("nuts"), "each word once"
    assert information("我对花生过敏，请记住") > 2, "a language without spaces"
    assert information("") == 0


def test_short_turns_are_read_before_long_ones_and_small_talk_never() -> None:
    long = "we talked for a while about how the garden looks and what to do with it " * 3
    texts = {1: long, 2: "I'm allergic to nuts", 3: SMALL_TALK, 4: "My budget is 900 euros"}
    order = list(best_for_their_length(texts))
    assert order[:2] == [4, 2] and 3 not in order
    assert list(best_for_their_length({1: "boats", 2: "boats"})) == [1], "of equals the older, not all"
    assert best_for_their_length({1: "I'm allergic to nuts"}) == [1], "the only one"
    table = {9: " ".join(f"Row{n} {n}" for n in range(200))}
    assert {2, 4} < set(best_for_their_length(texts | table)) < {1, 2, 4, 9}, "it crowds out none"


def test_each_window_is_read_once_in_one_call_and_its_turns_stay_live(tmp_path: Path) -> None:
    llm = RecordingLLM(MockReplies(1))
    with open_engine(tmp_path, llm, **SALIENT) as engine:
        engine.add_batch(said(TELLING, SMALL_TALK, SMALL_TALK, SMALL_TALK, SMALL_TALK, TELLING + " too"))
        assert engine.drain()
        (asked,) = llm.prompts["ann"]
        facts = engine.get_all("ann")
        assert engine.tenant_stats("ann")["waiting_turns"] == 6
        assert asked.operation == "salient" and TELLING in asked.user and SMALL_TALK not in asked.user
        assert facts and {fact.source_seqs for fact in facts} == {(0,)}
        told = engine.explain("ann")[3]
        assert (told["decision"], told["salient_seqs"]) == ("waits", [0])
        assert told["fact_ids"] == [fact.id for fact in facts]
        assert engine.usage("ann")["salient"]["calls"] == 1
        engine.flush("ann")
        assert len(llm.prompts["ann"]) == 2 and TELLING + " too" in llm.prompts["ann"][1].user
        engine.flush("ann")
        assert len(llm.prompts["ann"]) == 2, "what was read for a fact is not read again"


def test_a_flush_does_not_pay_again_for_what_a_former_one_read(tmp_path: Path) -> None:
    nothing = RecordingLLM(MockReplies(1, empty_rate=1.0))
    with open_engine(tmp_path, nothing, **SALIENT) as engine:
        engine.add_batch(said(TELLING, TELLING + " too", TELLING + " again"))
        assert engine.flush("ann")
        (first,) = nothing.prompts["ann"]
        assert engine.flush("ann")
        assert nothing.prompts["ann"] == [first]
    later = RecordingLLM(MockReplies(1, empty_rate=1.0))
    with open_engine(tmp_path, later, **SALIENT) as engine:
        assert engine.flush("ann")
        assert not later.prompts
        engine.add_batch(said("I booked Lisbon for 3 May"))
        assert engine.drain()
        assert len(later.prompts["ann"]) == 1, "the complete window"


def test_a_day_has_a_quota(tmp_path: Path) -> None:
    days = [*["2026-03-01"] * 8, *["2026-03-02"] * 4]
    turns = [replace(t, timestamp=day) for t, day in zip(said(*[TELLING] * 12), days, strict=True)]
    for quota, calls in ((0, 0), (1, 2), (20_000, 3)):
        llm = RecordingLLM(MockReplies(1, empty_rate=1.0))
        with open_engine(tmp_path / str(quota), llm, **SALIENT, salience_day_tokens=quota) as engine:
            engine.add_batch(turns)
            assert engine.drain()
        assert len(llm.prompts["ann"]) == calls, quota
        with open_engine(tmp_path / str(quota), None, **SALIENT, salience_day_tokens=quota) as engine:
            made = engine.tenants.existing("ann").making
            spent = (made.salient_day, made.salient_tokens > 0)
        assert spent == (("2026-03-02", True) if calls else ("", False))


def test_undated_turns_have_a_quota_for_each_thousand(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(), **SALIENT) as engine:
        engine.add_batch(said(*[TELLING] * 4, day=None))
        assert engine.drain()
        assert engine.tenants.existing("ann").making.salient_day == "0k"


def test_an_unusable_reply_is_parked_and_replayed_and_settles_no_turn(tmp_path: Path) -> None:
    bad = MockLLM(MockReplies(1, malformed_rate=1.0, malformed_sticky=True))
    with open_engine(tmp_path, bad, **SALIENT) as engine:
        engine.add_batch(said(*[TELLING] * 4))
        assert engine.drain()
        (job,) = engine.tenants.existing("ann").jobs.values()
        assert (job.operation, job.state) == ("salient", "parked")
        assert engine.tenant_stats("ann")["waiting_turns"] == 4
    with open_engine(tmp_path, MockLLM(), **SALIENT) as engine:
        assert engine.replay_jobs() == 1
        assert engine.drain() and not engine.tenants.existing("ann").jobs
        assert engine.get_all("ann") and engine.tenant_stats("ann")["waiting_turns"] == 4


@pytest.mark.parametrize("share", [0.0, 0.7])
def test_turns_that_say_little_neither_fire_nor_count(share: float) -> None:
    log = view(*[TELLING, SMALL_TALK] * 3, TELLING)
    policy = RecMem(ROOMY, salience=Salience(0, share, 0))
    replies = [BAD] if share == 0.0 else []
    for seq, relevant in ((6, (1, 3, 5)), (5, (0, 2, 4))):
        reading = GateReading(None, None, relevant, (0.9,) * 3, 3)
        done = drive(policy.decide(seq, log), log, reading=reading, replies=replies)
        assert bool(done.prompts) == (share == 0.0)


def test_small_talk_is_not_offered_to_an_episode() -> None:
    log = view(*[TELLING, SMALL_TALK] * 3)
    near = GateReading(stored("episode", "Ann travels.", 1, (0,)), 0.9)
    done = drive(RecMem(ROOMY, salience=Salience(0, 0.7, 0)).decide(5, log), log, reading=near)
    assert not done.prompts and not done.outcome.merge_asked


def test_a_failed_read_is_parked_without_settling_its_turns() -> None:
    log = view(*[TELLING] * 3, "Ben sold 40 canoes in Porto")
    policy = RecMem(ROOMY, salience=Salience(4, 0.0, 1_000))
    done = drive(policy.decide(3, log), log, reading=GateReading(None, None), replies=[BAD])
    assert (done.outcome.decision, done.outcome.operation, done.outcome.settled) == ("parked", "salient", ())
    assert done.outcome.cluster == done.outcome.salient != ()


def test_a_window_is_read_though_its_last_turn_is_parked() -> None:
    log = view(*[TELLING] * 3, "Ben sold 40 canoes in Porto")
    policy = RecMem(ROOMY, salience=Salience(4, 0.0, 1_000))
    fact = FactDraft(text="Ben sold canoes.", kind="user_event", turns=[1], replaces=None)
    reading = GateReading(None, None, (0, 1), (0.9,) * 2, 2)
    done = drive(policy.decide(3, log), log, reading=reading, replies=[BAD, SalientReply(facts=[fact])])
    parked = done.outcome
    assert (parked.decision, parked.operation, parked.cluster) == ("parked", "episode", (0, 1, 3))
    assert [(m.text, m.source_seqs) for m in done.made("fact")] == [("Ben sold canoes.", (2,))]


def test_a_failed_read_takes_nothing_from_what_recurred() -> None:
    log = view(*[TELLING] * 3, "Ben sold 40 canoes in Porto")
    policy = RecMem(ROOMY, salience=Salience(4, 0.0, 1_000))
    told: list[Reply | BadReply] = [
        EpisodesReply(episodes=[EpisodeDraft(text="They travel.", turns=[])]),
        FactsReply(facts=[]),
        BAD,
    ]
    reading = GateReading(None, None, (0, 1), (0.9,) * 2, 2)
    done = drive(policy.decide(3, log), log, reading=reading, replies=told)
    assert [memory.text for memory in done.made("episode")] == ["They travel."]
    assert (done.outcome.decision, done.outcome.settled) == ("fired", (0, 1, 3))
    assert done.outcome.reason is not None


@pytest.mark.parametrize("seed", range(3))
def test_what_turns_say_is_known_as_it_is_whatever_was_deleted_since_it_was_asked(
    seed: int, tmp_path: Path
) -> None:
    rng, quiet = Random(seed), Salience(0, 0.3, 0)

    def measure(turn: TurnView) -> int:
        return information(" ".join(line.partition(": ")[2] for line in turn.messages))

    with open_engine(tmp_path, MockLLM(), **SALIENT) as engine:
        texts = [
            " ".join(rng.choices(["thanks", "Lisbon", "Ann", "May", "ship", "7"], k=9)) for _ in range(40)
        ]
        ids = [receipt.id for receipt in engine.add_batch(said(*texts[:20]))]
        engine.flush("ann")  # a record that is no turn
        ids += [receipt.id for receipt in engine.add_batch(said(*texts)[20:])]
        engine.drain()
        while len(ids) > 8:
            of = engine.tenants.existing("ann")
            seen, last = RealView(of, of.next_seq, of.making), range(of.next_seq)
            turns = [seq for seq in last if seq not in of._controls and of.exists(seq)]
            asked = sorted(rng.sample(turns, min(8, len(turns))))
            told = [[measure(of.turn(s)) for s in seen.turns_to(seq, 16)] for seq in asked]
            found = seen.look_back(asked, 16, measure)
            assert [[n for n in row if n >= 0] for row in found.tolist()] == told
            speak = [row[-1] >= sorted(row)[int(0.3 * (len(row) - 1))] for row in told]
            assert quiet.speaking(asked, seen) == tuple(s for s, yes in zip(asked, speak, strict=True) if yes)
            for id in rng.sample(ids, 8):
                ids.remove(id)
                assert id is not None
                engine.delete(id, tenant="ann")
            engine.drain()
