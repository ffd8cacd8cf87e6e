"""A shard's side of a trial: one call has it to itself, so that a death tells something about that call."""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.base.queries import DrainCommand
from undertow.engine.cluster.routing.errors import ShardExited
from undertow.engine.cluster.shard.call_queue import (
    TRIAL_S,
    CallQueues,
    CallStamp,
    StaleSession,
    TableCall,
    TurnCall,
)
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineUnusable
from undertow.engine.cluster.wire import pack, receipts_table
from undertow.engine.step.admission import QueueFull

from ...support.cluster.in_process import PARTS, begin, settings
from ...support.cluster.shard import SOON_S, hold
from ...support.engine import turn_of


def call(text: str = "x") -> TurnCall:
    return TableCall(pack([turn_of("ann", 0, text)]))


def test_a_call_on_trial_has_the_shard_to_itself() -> None:
    lines = CallQueues(100)
    tokens = {client: lines.begin(client) for client in ("suspect", "other")}
    before, during, after, tried = call(), call(), call(), call()
    assert lines.accept(before, CallStamp("other", tokens["other"], 0, 1), 0) == [before]
    assert lines.trial("suspect", len(before)) is None, "what is under way is to end first"
    assert lines.accept(during, CallStamp("other", tokens["other"], 1, 1), len(before)) == []
    with pytest.raises(QueueFull, match="alone"):
        during.future.result()
    assert (trial := lines.trial("suspect", 0)) is not None
    assert lines.trial("other", 0) is None
    assert lines.accept(tried, CallStamp("suspect", tokens["suspect"], 0, 1, trial), 0) == [tried]
    assert tried.alone and not before.alone
    assert lines.trial("other", 0) is None
    tried.future.set_result(receipts_table([]))
    assert lines.accept(after, CallStamp("other", tokens["other"], 1, 1), 0) == [after]


def test_a_trial_that_is_not_used_lapses() -> None:
    now_s = [0.0]
    lines = CallQueues(100, lambda: now_s[0])
    token = lines.begin("suspect")
    trial = lines.trial("suspect", 0)
    for _ in range(3):
        now_s[0] += 0.9 * TRIAL_S
        assert lines.trial("suspect", 0) == trial, "asked for again in time"
    now_s[0] += 1.1 * TRIAL_S
    assert lines.trial("other", 0) not in (None, trial)
    with pytest.raises(StaleSession, match="too late"):
        lines.accept(call(), CallStamp("suspect", token, 0, 1, trial or ""), 0)


def test_a_shard_stores_a_call_on_trial_before_it_does_anything_else(shard: Shard) -> None:
    hello = shard.hello("suspect", 1).result(SOON_S)
    assert shard.hello("other", 1).result(SOON_S).process == hello.process
    trial = shard.trial("suspect").result(SOON_S)
    assert trial is not None
    release = hold(shard)
    stored = shard.add(pack([turn_of("ann", 0, "x")]), CallStamp("suspect", hello.token, 0, 1, trial))
    was_stored = shard._work.ask_without(stored.done)
    release()
    assert was_stored.result(SOON_S)
    assert shard.trial("other").result(SOON_S) is not None


def test_an_actor_that_is_to_be_restarted_takes_no_call_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from undertow.engine.cluster.ray.shard_actor import ShardActor

    monkeypatch.setattr("os._exit", lambda _: None)
    root = begin(tmp_path / "root", 1)
    actor = ShardActor(str(root), "s0", settings().model_dump(), pickle.dumps(PARTS), "")
    sick: Future[Any] = Future()
    sick.set_exception(EngineUnusable("the card is lost"))
    monkeypatch.setattr(actor._shard, "ask", lambda _: sick)

    async def ask() -> None:
        with pytest.raises(EngineUnusable):
            await actor.call("ask", [DrainCommand()])
        with pytest.raises(ShardExited):
            await actor.call("status")
        await actor.close()

    asyncio.run(ask())
