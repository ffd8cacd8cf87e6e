"""What test_policy_change.py and test_policy_change_edits.py share."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from undertow.bench.mock.llm import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import PolicyName, Turn

from ...support.engine import HeldLLM, RecordingLLM, open_engine, turn_of
from ...support.faults.harness import THETA, TOPICS

REPLIES = MockReplies(1, refusal_rate=0.3, empty_rate=0.15)


# windows that close within these logs, as do sessions
WINDOW = {"window_messages": 7, "short_term_pages": 2, "heat_threshold": 2}


def topical(tenant: str, count: int, start: int = 0) -> list[Turn]:
    """Turns on three recurring topics, in sessions of seven: under each policy some make memories."""
    rng = random.Random(f"{tenant} {start}")
    words = [rng.sample(rng.choice(TOPICS[:3]).split(), 6) for _ in range(count)]
    turns = [turn_of(tenant, start + n, f"{' '.join(said)} n{n}") for n, said in enumerate(words)]
    return [replace(turn, session_id=f"s{(start + n) // 7}") for n, turn in enumerate(turns)]


def opened(store: Path, policy: PolicyName, llm: RecordingLLM | None = None, **more: Any) -> Engine:
    return open_engine(store, llm or RecordingLLM(REPLIES), **{**THETA, **WINDOW, "policy": policy, **more})


def begin(engine: Engine, tenant: str = "ann", to: PolicyName = "eager", *, records: int = 3) -> None:
    """Change the policy, and go on until some records were read again."""
    engine.set_policy(tenant, to)
    while (change := engine.policy(tenant)["change"]) and change["decided"] < records:
        if isinstance(engine._llm, HeldLLM):
            engine._llm.release()
        engine.step()
    assert change is not None, "it is under way"
