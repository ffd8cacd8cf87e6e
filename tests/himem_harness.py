"""What HiMem's tests share: a mock LLM whose judgements are told it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from undertow.bench.mock_llm import MockReplies
from undertow.bench.mock_replies import Messages


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
