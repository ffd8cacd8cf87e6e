"""What HiMem's tests share: a small life to ask about, and a mock LLM whose judgements are told it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.replies import Messages
from undertow.engine.base.model import Turn
from undertow.engine.base.queries import FlushCommand
from undertow.engine.cluster.shard.call_queue import CallStamp
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.wire import pack
from undertow.engine.storage.row_codec import control_of

from ..engine import HeldLLM, rows_of, turn_of

SOON_S = 30.0
QUESTION = "What does Ann do in the harbour?"
BEST: dict[str, Any] = {"policy": "himem", "answer_mode": "best_effort"}


def sessions() -> list[Turn]:
    """Two sessions; the first turn of the second closes the first."""
    said = ("Ann sails in the harbour", "Ann mends the sail", "Ann plays the violin", "Ann bakes bread")
    turns = [turn_of("ann", n, f"{text} on day {n}") for n, text in enumerate(said)]
    return [Turn(t.tenant, t.messages, t.dedupe_key, f"s{n // 2}", t.timestamp) for n, t in enumerate(turns)]


def told(shard: Shard, llm: HeldLLM) -> str:
    """A shard that was told the life, and has decided it; the token of who told it."""
    token = shard.hello("client", 1).result(SOON_S).token
    shard.add(pack(sessions()[:3]), CallStamp("client", token, 0, 1)).result(SOON_S)
    flushed = shard.ask(FlushCommand("ann"))
    while not flushed.done():
        llm.release()
        time.sleep(0.01)
    return token


def logged(store: Path, kind: str) -> list[dict[str, Any]]:
    """The bodies of a store's control records of a kind, oldest first."""
    controls = [control_of(row) for row in rows_of(store, "control")]
    return [dict(control.body) for control in controls if control.kind == kind]


@dataclass(frozen=True, slots=True)
class Judging(MockReplies):
    """Whether `notes` and `episodes` are found sufficient; None: no usable reply. `lines`: what it names."""

    notes: bool | None = False
    episodes: bool | None = True
    lines: tuple[int, ...] = (1,)

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        if schema is None or "sufficient" not in schema["properties"]:
            return MockReplies.reply(self, messages, schema)
        of_episodes = messages[1]["content"].startswith("Episodes:")
        verdict = self.episodes if of_episodes else self.notes
        if verdict is None:
            return "I cannot say."
        return json.dumps({"lines": self.lines, "sufficient": verdict})
