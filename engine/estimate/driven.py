"""The cost of NEMORI and HiMem: the policies themselves are run, and each effect answered by a guess.

So windows, ablations, settings and prompts that must be split are the engine's own. What is assumed are the
LLM's replies (`guessed_replies`), and what is near to what: of all memories the latest stand for the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from undertow.engine.base.model import Memory, MemoryKind, Turn, Usage, lines_of
from undertow.engine.encoders.token_count import TokenCount
from undertow.engine.estimate.guessed_replies import GuessedReplies
from undertow.engine.policies.base import (
    Complete,
    Decide,
    Effect,
    Embed,
    Nearest,
    Policy,
    PolicyResult,
    Scored,
    Thresholds,
    TurnView,
)
from undertow.prompts.builders import Prompt

NEAR, FAR = 1.0, 0.0


def driven_usage(
    policy: Policy, turns: Sequence[Turn], tokens: TokenCount, replies: GuessedReplies, evoked_facts: int
) -> dict[str, Usage]:
    """Calls and tokens by operation for one tenant's turns, and a flush behind them.

    `evoked_facts`: how many facts have a cosine above any threshold.
    """
    run = _Run(turns, tokens, replies, evoked_facts)
    for seq in range(len(turns)):
        run.decide(seq, policy.decide(seq, run.memories))
    run.decide(len(turns), policy.flush(len(turns), run.memories))
    return run.spent


class _Memories:
    """A `MemoryView` of turns and of what a policy has made of them; nothing is ever deleted by a user."""

    tenant = "estimated"
    generation = 1

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.record = 0  # the one that is decided
        self._turns = turns
        self._settled_end = 0
        self._kept: dict[MemoryKind, dict[str, Memory]] = {"episode": {}, "fact": {}}

    @property
    def thresholds(self) -> Thresholds:
        raise NotImplementedError("no policy that is run here has a gate")

    def turn(self, seq: int) -> TurnView:
        turn = self._turns[seq]
        return TurnView(seq, turn.text, turn.timestamp, lines_of(turn.messages), turn.session_id)

    def exists(self, seq: int) -> bool:
        return True

    def open_turns(self) -> Sequence[int]:
        return range(self._settled_end, self.record)

    def uses(self) -> Mapping[str, int]:
        return {}

    def current(self, kind: MemoryKind) -> Sequence[Memory]:
        return list(self._kept[kind].values())

    def ended(self, kind: MemoryKind) -> Sequence[Memory]:
        return ()

    def latest(self, kind: MemoryKind, k: int) -> list[Memory]:
        return list(islice(reversed(self._kept[kind].values()), k))

    def commit(self, outcome: PolicyResult) -> None:
        if outcome.settled:
            self._settled_end = max(outcome.settled) + 1
        for draft in outcome.drafts:
            memory = draft.memory
            if memory.deleted:
                self._kept[memory.kind].pop(memory.id, None)
            else:
                self._kept[memory.kind][memory.id] = memory


class _Run:
    """One tenant's records in order."""

    def __init__(
        self, turns: Sequence[Turn], tokens: TokenCount, replies: GuessedReplies, evoked_facts: int
    ) -> None:
        self.memories = _Memories(turns)
        self.spent: dict[str, Usage] = {}
        self._tokens = tokens
        self._replies = replies
        self._evoked_facts = evoked_facts

    def decide(self, seq: int, steps: Decide) -> None:
        self.memories.record = seq
        value: Any = None
        try:
            while True:
                value = self._answered(steps.send(value))
        except StopIteration as end:
            self.memories.commit(end.value)

    def _answered(self, effect: Effect) -> Any:
        match effect:
            case Embed():
                return np.zeros((len(effect.texts), 1), np.float16)
            case Nearest():
                found = enumerate(self.memories.latest(effect.kind, effect.k))
                near = self._evoked_facts if effect.kind == "fact" else 0
                return [Scored(memory, NEAR if n < near else FAR) for n, memory in found]
            case Complete():
                return self._reply(effect.prompt)
        raise NotImplementedError(f"{effect!r:.80} is not answered by a guess")

    def _reply(self, prompt: Prompt) -> Any:
        reply = self._replies.to(prompt)
        asked, said = self._tokens.of_prompt(prompt), self._tokens.of_text(reply.model_dump_json())
        self.spent[prompt.operation] = self.spent.get(prompt.operation, Usage()) + Usage(1, asked, 0, said)
        return reply
