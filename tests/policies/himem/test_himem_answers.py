"""Answers from HiMem's two tiers: hybrid and best effort, and what a question that missed sets going."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from undertow.bench.mock.llm import MockReplies
from undertow.engine.api.answer_calls import PendingAnswer
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import AnswerMode, InputError
from undertow.engine.base.queries import AnswerQuery, EraseCommand, TenantUsageQuery, UsageQuery
from undertow.engine.cluster.shard.call_queue import CallStamp
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.cluster.wire import pack
from undertow.engine.policies.base import Tiers
from undertow.engine.policies.registry import tiers_of
from undertow.engine.search.answer_modes import NOT_ANSWERABLE
from undertow.engine.tenants.registry import UnknownTenant
from undertow.prompts.operations import QUERY_OPERATIONS
from undertow.serving.auth.limits import answer_tokens

from ...support.cluster.in_process import begin, settings
from ...support.engine import (
    ENCODER,
    MARKER,
    DeafLLM,
    HeldLLM,
    RecordingLLM,
    open_engine,
    rows_of,
    settings_of,
    settle,
    turn_of,
)
from ...support.llm_servers import wait_until
from ...support.policies.driver import lines_under
from ...support.policies.himem import BEST, QUESTION, SOON_S, Judging, logged, sessions, told


def filled(engine: Engine) -> None:
    engine.add_batch(sessions()[:3])
    assert engine.drain()


def asked(store: Path, replies: MockReplies, **options: Any) -> tuple[str, list[str], RecordingLLM]:
    """The answer to QUESTION, and the operations that it took, before anything else was decided."""
    llm = RecordingLLM(replies)
    with open_engine(store, llm, **{**BEST, **options}) as engine:
        filled(engine)
        before = len(llm.prompts["ann"])
        text = engine.answer("ann", QUESTION).text
        return text, [p.operation for p in llm.prompts["ann"][before:]], llm


def missed(store: Path) -> list[dict[str, Any]]:
    return logged(store, "reconsolidate")


# ---- modes


def test_hybrid_shows_notes_episodes_and_the_turns_of_the_open_window(tmp_path: Path) -> None:
    _, operations, llm = asked(tmp_path, Judging(), answer_mode="hybrid")
    assert operations == ["answer"]
    prompt = llm.prompts["ann"][-1]
    assert lines_under(prompt, "Facts") and lines_under(prompt, "Episodes")
    (turn,) = lines_under(prompt, "Turns")
    assert "violin" in turn, "the others are in their episode"
    assert missed(tmp_path) == []


def test_ten_of_each_by_default_and_none_of_a_tier_that_is_left_out(tmp_path: Path) -> None:
    assert tiers_of(Settings(policy="himem")) == Tiers(k_epi=10, k_sem=10, consolidated=False)
    _, _, llm = asked(tmp_path, Judging(), answer_mode="hybrid", k_epi=0, k_sem=10)
    assert lines_under(llm.prompts["ann"][-1], "Facts") and not lines_under(
        llm.prompts["ann"][-1], "Episodes"
    )


def test_best_effort_is_content_with_notes_that_are_sufficient(tmp_path: Path) -> None:
    _, operations, llm = asked(tmp_path, Judging(notes=True))
    assert operations == ["sufficiency", "answer"]
    judging, answering = llm.prompts["ann"][-2:]
    assert lines_under(judging, "Notes and turns")
    assert lines_under(answering, "Facts") and not lines_under(answering, "Episodes")
    assert missed(tmp_path) == []


def test_best_effort_looks_at_episodes_only_where_the_notes_are_not_sufficient(tmp_path: Path) -> None:
    _, operations, llm = asked(tmp_path, Judging())
    assert operations == ["sufficiency", "sufficiency", "answer"], "the answer waits for nothing else"
    assert lines_under(llm.prompts["ann"][-2], "Episodes") and lines_under(llm.prompts["ann"][-1], "Episodes")


@pytest.mark.parametrize("notes", [True, False])
def test_best_effort_answers_from_the_lines_that_the_judgement_names(notes: bool, tmp_path: Path) -> None:
    for lines, count in (((1,), 1), ((2,), 1), ((2, 1), 2)):
        judging = Judging(notes=notes, lines=lines)
        _, _, llm = asked(tmp_path / str(lines), judging)
        judged, answering = llm.prompts["ann"][-2:]
        heading = "Notes and turns" if notes else "Episodes"
        named = [json.loads(lines_under(judged, heading)[n - 1])[2] for n in lines]
        kept = [line for tier in ("Episodes", "Facts", "Turns") for line in lines_under(answering, tier)]
        assert sorted(json.loads(line)[2] for line in kept) == sorted(named) and len(kept) == count


def test_what_neither_supports_is_not_answerable_and_no_answer_is_written(tmp_path: Path) -> None:
    text, operations, _ = asked(tmp_path, Judging(episodes=False))
    assert (text, operations) == (NOT_ANSWERABLE, ["sufficiency", "sufficiency"])
    assert missed(tmp_path) == []


@pytest.mark.parametrize(("notes", "episodes"), [(None, True), (False, None)])
def test_a_judgement_without_a_usable_reply_decides_nothing(
    notes: bool | None, episodes: bool | None, tmp_path: Path
) -> None:
    text, operations, _ = asked(tmp_path, Judging(notes=notes, episodes=episodes))
    assert text != NOT_ANSWERABLE and operations == ["sufficiency", "sufficiency", "answer"]
    assert missed(tmp_path) == []


def test_a_store_of_turns_alone_is_answered_from_them(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging(notes=True)), **BEST) as engine:
        engine.add_batch(sessions()[:1])
        assert "harbour" in engine.answer("ann", QUESTION).text
        assert [hit.kind for hit in engine.answer("ann", QUESTION).found.ranked()] == ["turn"]


def test_judgements_are_a_cost_of_the_question(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging()), **BEST) as engine:
        filled(engine)
        built = engine.stats()["llm_calls"]
        assert engine.answer("ann", QUESTION).usage.calls == 3
        meter = engine.tenants.get("ann").meter
        assert (meter["sufficiency"].calls, meter["answer"].calls) == (2, 1)
        assert engine.stats()["llm_calls"] == built


def test_an_answer_that_no_llm_writes_is_told_too(tmp_path: Path) -> None:
    told: list[str] = []
    with open_engine(tmp_path, RecordingLLM(Judging(episodes=False)), **BEST) as engine:
        filled(engine)
        answer = engine.heard(engine.ask(AnswerQuery("ann", QUESTION), on_text=told.append))
        assert answer is not None and told == [NOT_ANSWERABLE]
    with open_engine(tmp_path, RecordingLLM(Judging()), **BEST) as engine:
        told.clear()
        answer = engine.heard(engine.ask(AnswerQuery("ann", QUESTION), on_text=told.append))
        assert answer is not None and "".join(told) == answer.text, "the judgements are not told"


def test_a_turn_deleted_while_it_is_judged_is_in_no_later_prompt(tmp_path: Path) -> None:
    llm = HeldLLM(Judging())
    with open_engine(tmp_path, llm, **BEST) as engine:
        receipts = engine.add_batch([turn_of("ann", 0, f"Ann sails with the {MARKER}"), *sessions()[2:3]])
        settle(engine)
        question = engine.ask(AnswerQuery("ann", QUESTION))
        assert MARKER in llm.prompts["ann"][-1].user
        assert receipts[0].id is not None
        engine.delete(receipts[0].id)
        later = len(llm.prompts["ann"])
        while (answer := engine.heard(question)) is None:
            llm.release()
        assert MARKER not in repr([p.user for p in llm.prompts["ann"][later:]]) + answer.text


# ---- what a question that missed sets going


def test_what_the_notes_missed_is_taken_over_after_the_answer(tmp_path: Path) -> None:
    llm = RecordingLLM(Judging())
    with open_engine(tmp_path, llm, **BEST) as engine:
        filled(engine)
        before = {m.id for m in engine.get_all("ann")}
        (episode,) = [m for m in engine.get_all("ann") if m.kind == "episode"][:1]
        answered = engine.answer("ann", QUESTION)
        assert {m.id for m in engine.get_all("ann")} == before and not engine.idle
        asked_by_now = len(llm.prompts["ann"])
        assert missed(tmp_path) == [], "no commit of it stands before the answer"
        engine.step()
        (body,) = missed(tmp_path)
        assert body["question"] == QUESTION
        assert body["episode_ids"] == [answered.found.episodes[0].id] and episode.kind == "episode"
        assert engine.drain()
        assert [p.operation for p in llm.prompts["ann"][asked_by_now:]] == ["supplement", "revise"]
        record = engine.tenants.get("ann").next_seq - 1
        changed = [m for m in engine.get_all("ann") if m.made_at_seq == record]
        supporting = {s for m in engine.get_all("ann") if m.id in body["episode_ids"] for s in m.source_seqs}
        assert changed and {m.kind for m in changed} == {"fact"}
        assert all(supporting <= set(m.source_seqs) for m in changed)
        told = (engine.get_all("ann"), engine.stats())
    with open_engine(tmp_path, **BEST) as engine:
        assert (engine.get_all("ann"), engine.stats()) == told, "read back from the log"


def test_an_answer_that_is_let_go_between_its_calls_asks_no_more_and_is_metered_once(tmp_path: Path) -> None:
    llm = HeldLLM(Judging())
    with open_engine(tmp_path, llm, **BEST) as engine:
        asked = judged_once(engine, llm)
        assert engine.usage("ann").get("sufficiency") is None, "the second judgement is under way"
        for _ in range(2):
            engine.let_go(asked)
        assert asked.call is not None and asked.call.cancelled()
        assert engine.usage("ann")["sufficiency"]["calls"] == 1
        operations = [prompt.operation for prompt in llm.prompts["ann"]]
        assert [op for op in operations if op in QUERY_OPERATIONS] == ["sufficiency", "sufficiency"]
    with open_engine(tmp_path, **BEST) as engine:
        assert engine.usage("ann")["sufficiency"]["calls"] == 1
    assert missed(tmp_path) == []


def test_a_whole_answer_that_is_called_off_between_its_calls_asks_no_more(tmp_path: Path) -> None:
    llm = HeldLLM(Judging())
    parts = EngineParts(llm=lambda _: llm)
    with closing(Shard(begin(tmp_path, 1), "s0", settings(**BEST), parts)) as shard:
        told(shard, llm)
        before = len(llm.prompts["ann"])
        answer = shard.ask(AnswerQuery("ann", QUESTION))
        wait_until(lambda: len(llm.held) == 1)
        llm.release()
        wait_until(lambda: len(llm.held) == 1)
        (_, _, second), *_ = llm.held
        assert answer.cancel()
        wait_until(second.cancelled)
        assert shard.ask(TenantUsageQuery("ann")).result(SOON_S)["sufficiency"]["calls"] == 1
        assert [p.operation for p in llm.prompts["ann"][before:]] == ["sufficiency", "sufficiency"]


def test_a_budget_has_room_for_every_call_of_an_answer() -> None:
    usual = Settings(policy="himem")
    assert answer_tokens(Settings(**BEST)) == answer_tokens(usual, "best_effort") == 3 * answer_tokens(usual)
    assert answer_tokens(Settings(**BEST), "hybrid") == answer_tokens(usual)


@pytest.mark.parametrize("usual", ["hybrid", "best_effort"])
def test_who_asks_may_choose_the_mode(usual: str, tmp_path: Path) -> None:
    llm = RecordingLLM(Judging())
    calls: dict[AnswerMode | None, int] = {}
    modes: tuple[AnswerMode | None, ...] = ("best_effort", "hybrid", None)
    with open_engine(tmp_path, llm, **{**BEST, "answer_mode": usual}) as engine:
        filled(engine)
        for mode in modes:
            before = len(llm.prompts["ann"])
            engine.answer("ann", QUESTION, mode=mode)
            calls[mode] = len(llm.prompts["ann"]) - before
        with pytest.raises(InputError, match="'worst' is none of hybrid, best_effort"):
            engine.answer("ann", QUESTION, mode="worst")  # type: ignore[arg-type]
    assert calls == {"best_effort": 3, "hybrid": 1, None: 1 if usual == "hybrid" else 3}
    assert len(missed(tmp_path)) == 1, "of best effort, whoever has chosen it"


def test_a_mode_of_himem_is_refused_for_a_tenant_with_another_policy(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging()), **BEST) as engine:
        engine.set_policy("ann", "eager")
        filled(engine)
        with pytest.raises(InputError, match="of the policy 'himem', and the tenant's is 'eager'"):
            engine.answer("ann", QUESTION, mode="best_effort")
        assert engine.answer("ann", QUESTION, mode="hybrid").usage.calls == 1


def test_a_tenant_is_answered_as_its_own_policy_is(tmp_path: Path) -> None:
    llm = RecordingLLM(Judging())
    with open_engine(tmp_path, llm, **BEST) as engine:
        engine.set_policy("ann", "eager")
        filled(engine)
        before = len(llm.prompts["ann"])
        engine.answer("ann", QUESTION)
        assert [p.operation for p in llm.prompts["ann"][before:]] == ["answer"], "the mode is HiMem's"
        engine.set_policy("ann", "himem")
        engine.answer("ann", QUESTION)
        assert missed(tmp_path) == []
        assert engine.flush("ann")
        before = len(llm.prompts["ann"])
        engine.answer("ann", QUESTION)
        assert [p.operation for p in llm.prompts["ann"][before:]] == ["sufficiency", "sufficiency", "answer"]
    assert len(missed(tmp_path)) == 1


def test_one_question_is_not_logged_twice_at_a_time_nor_without_self_evolution(tmp_path: Path) -> None:
    with open_engine(tmp_path / "on", RecordingLLM(Judging(lines=(9,))), **BEST) as engine:
        filled(engine)
        for _ in range(2):
            engine.answer("ann", QUESTION)
        engine.step()
        (body,) = missed(tmp_path / "on")
        found = engine.search("ann", QUESTION)
        assert body["episode_ids"] == [hit.id for hit in found.episodes], "it named none that was shown"
    _, operations, _ = asked(tmp_path / "off", Judging(), himem_self_evolution=False)
    assert operations[-1] == "answer" and missed(tmp_path / "off") == []


def test_a_reader_answers_and_logs_nothing(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(Judging()), **BEST) as engine:
        filled(engine)
    with Engine(
        tmp_path, settings_of(**BEST), ENCODER, llm=RecordingLLM(Judging()), writable=False
    ) as reader:
        assert reader.answer("ann", QUESTION).text
    assert missed(tmp_path) == []


def test_himems_settings_are_refused_under_another_policy() -> None:
    with pytest.raises(ValidationError, match="answer_mode is a setting of the policy 'himem'"):
        Settings(answer_mode="best_effort")
    with pytest.raises(ValidationError, match="himem_align_episodes is a setting of the policy 'himem'"):
        Settings(policy="eager", himem_align_episodes=True)


# ---- forgetting by use


def test_what_answers_were_given_is_logged_and_outlives_what_they_were_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"policy": "himem", "k_sem": 1, "himem_max_notes": 2}
    with open_engine(tmp_path, RecordingLLM(MockReplies()), **options) as engine:
        filled(engine)
        before = engine.get_all("ann")
        for _ in range(2):
            engine.answer("ann", "violin")
        used = engine.answer("ann", QUESTION).found.facts[0].id
        assert engine.drain()
        assert engine.get_all("ann") == before and {used} < {m.id for m in before}, "nothing is forgotten yet"
        assert dict(engine.tenants.get("ann").making.uses) == {used: 3}
        others = [turn_of("ann", n, f"Ann tells of book{n} page{n}") for n in range(10, 16)]
        engine.add_batch([replace(turn, session_id=f"b{n}") for n, turn in enumerate(others)])
        assert engine.flush("ann")
        notes = [m for m in engine.get_all("ann") if m.kind == "fact"]
        assert used in {m.id for m in notes} and len(notes) == 2
        assert len(engine.history(used)) == 1
        episodes = [m for m in engine.get_all("ann") if m.kind == "episode"]
        assert len({s for m in episodes for s in m.source_seqs}) == engine.stats()["turns"] == 9
    reasons = [orjson.loads(row.payload).get("reason") for row in rows_of(tmp_path, "decision")]
    assert any("forgotten" in reason for reason in reasons if reason)
    with open_engine(tmp_path, **options) as engine:
        assert [m for m in engine.get_all("ann") if m.kind == "fact"] == notes
        records = engine.export_page("ann").items
        engine.import_("copy", records)
        assert [m.text for m in engine.get_all("copy")] == [m.text for m in engine.get_all("ann")]
        assert dict(engine.tenants.get("ann").making.uses).keys() == {used}
        assert sum(engine.tenants.get("copy").making.uses.values()) == 3


# ---- questions whose tenant is erased before the LLM has replied

# all that an answer may log is logged
LEARNING: dict[str, Any] = {**BEST, "himem_max_notes": 9}


def judged_once(engine: Engine, llm: HeldLLM) -> PendingAnswer:
    """A question about a settled life; its second judgement is under way."""
    engine.add_batch(sessions()[:3])
    settle(engine)
    before = len(llm.prompts["ann"])
    asked = engine.ask(AnswerQuery("ann", QUESTION))
    llm.release()
    while len(llm.prompts["ann"]) < before + 2:
        assert engine.heard(asked) is None
    return asked


def test_a_question_of_an_erased_tenant_is_given_up_at_once(tmp_path: Path) -> None:
    llm = HeldLLM(Judging())
    with open_engine(tmp_path, llm, **LEARNING) as engine:
        asked = judged_once(engine, llm)
        assert engine.erase("ann", now=True) is not None
        with pytest.raises(UnknownTenant, match="'ann' was erased meanwhile"):
            engine.heard(asked)
        assert asked.call is not None and asked.call.cancelled()
        assert engine.usage() == {} and "ann" not in engine.tenants


@pytest.mark.parametrize("heard", [True, False])
def test_replies_to_an_erased_life_leave_nothing_in_the_next_one(heard: bool, tmp_path: Path) -> None:
    llm = DeafLLM(Judging())
    with open_engine(tmp_path, llm, **LEARNING) as engine:
        asked = judged_once(engine, llm)
        assert engine.erase("ann", now=True) is not None
        engine.add_batch(sessions()[:3])
        settle(engine)
        before, spent = len(llm.prompts["ann"]), engine.usage("ann")
        assert asked.call is not None and asked.call.done(), "the reply has come, late"
        if heard:
            with pytest.raises(UnknownTenant, match="'ann' was erased meanwhile"):
                engine.heard(asked)
        engine.let_go(asked)
        settle(engine)
        assert len(llm.prompts["ann"]) == before, "nothing is asked about the new life"
        assert engine.usage("ann") == spent and "sufficiency" not in spent
        assert logged(tmp_path, "reconsolidate") == logged(tmp_path, "used") == []
        records = engine.export_page("ann").items
        engine.import_("copy", records)
        assert [m.text for m in engine.get_all("copy")] == [m.text for m in engine.get_all("ann")]


@pytest.mark.parametrize("again", [True, False])
def test_a_shard_tells_who_asked_an_erased_tenant(again: bool, tmp_path: Path) -> None:
    llm = DeafLLM(Judging())
    parts = EngineParts(llm=lambda _: llm)
    with closing(Shard(begin(tmp_path, 1), "s0", settings(**LEARNING), parts)) as shard:
        token = told(shard, llm)
        before = len(llm.prompts["ann"])
        answer = shard.ask(AnswerQuery("ann", QUESTION))
        wait_until(lambda: len(llm.prompts["ann"]) == before + 1)
        llm.release()
        wait_until(lambda: len(llm.prompts["ann"]) == before + 2)
        assert shard.ask(EraseCommand("ann", now=True)).result(SOON_S) is not None
        if again:
            shard.add(pack(sessions()[:1]), CallStamp("client", token, 1, 1)).result(SOON_S)
        llm.release()
        with pytest.raises(UnknownTenant):
            answer.result(SOON_S)
        assert "sufficiency" not in shard.ask(UsageQuery()).result(SOON_S)
        assert [p.operation for p in llm.prompts["ann"][before:]] == ["sufficiency", "sufficiency"]
