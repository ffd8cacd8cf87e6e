"""Questions whose tenant is erased before the LLM has replied: nobody is answered, and nothing is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from undertow.engine.api.answer_calls import PendingAnswer
from undertow.engine.api.engine import Engine
from undertow.engine.base.queries import AnswerQuery, EraseCommand, UsageQuery
from undertow.engine.cluster.shard.call_queue import CallStamp
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.cluster.wire import pack
from undertow.engine.tenants.registry import UnknownTenant

from ..support.cluster.in_process import begin, settings
from ..support.engine import DeafLLM, HeldLLM, open_engine
from ..support.llm_servers import wait_until
from ..support.policies.himem import BEST, QUESTION, SOON_S, Judging, logged, sessions, settled, told

# all that an answer may log is logged
LEARNING: dict[str, Any] = {**BEST, "himem_max_notes": 9}


def judged_once(engine: Engine, llm: HeldLLM) -> PendingAnswer:
    """A question about a settled life; its second judgement is under way."""
    engine.add_batch(sessions()[:3])
    settled(engine, llm)
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
        settled(engine, llm)
        before, spent = len(llm.prompts["ann"]), engine.usage("ann")
        assert asked.call is not None and asked.call.done(), "the reply has come, late"
        if heard:
            with pytest.raises(UnknownTenant, match="'ann' was erased meanwhile"):
                engine.heard(asked)
        engine.let_go(asked)
        settled(engine, llm)
        assert len(llm.prompts["ann"]) == before, "nothing is asked about the new life"
        assert engine.usage("ann") == spent and "sufficiency" not in spent
        assert logged(tmp_path, "reconsolidate") == logged(tmp_path, "used") == []
        records = engine.export_page("ann").items
        engine.import_("copy", records)
        assert [m.text for m in engine.get_all("copy")] == [m.text for m in engine.get_all("ann")]


@pytest.mark.parametrize("again", [True, False])
def test_a_shard_tells_who_asked_an_erased_tenant(again: bool, tmp_path: Path) -> None:
    llm = DeafLLM(Judging())
    shard = Shard(begin(tmp_path, 1), "s0", settings(**LEARNING), EngineParts(llm=lambda _: llm))
    try:
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
    finally:
        shard.close()
