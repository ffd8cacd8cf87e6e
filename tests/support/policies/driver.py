"""Policies driven by hand: memories as plain lists, and each effect answered as the scheduler would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import Memory, MemoryKind, Usage, memory_id
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import BadReply, LLMClient
from undertow.engine.policies.base import (
    Complete,
    Decide,
    Embed,
    GateReading,
    Nearest,
    PolicyResult,
    PromptBudget,
    ReadGate,
    Scored,
    Thresholds,
    TurnView,
    cosine,
)
from undertow.prompts.builders import Prompt
from undertow.prompts.reply_schemas import Reply

THETA = Thresholds(theta_sim=0.5, theta_merge=0.6, theta_count=3)
ROOMY = PromptBudget(context_tokens=8_192, reply_tokens=1_024)
ENCODER = HashingEncoder(64)
BAD = BadReply("no JSON", Usage(2, 10, 0, 4))


@dataclass
class View:
    """A tenant's memories as plain dicts: a `MemoryView`."""

    turns: dict[int, TurnView]
    memories: list[Memory] = field(default_factory=list)
    tenant: str = "ann"
    generation: int = 1
    thresholds: Thresholds = THETA
    record: int = 0  # the one that is decided
    settled_end: int = 0
    used: dict[str, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)  # settled

    def thetas_are_due(self, seq: int) -> bool:
        return False

    def turn(self, seq: int) -> TurnView:
        return self.turns[seq]

    def exists(self, seq: int) -> bool:
        return seq in self.turns

    def open_turns(self) -> list[int]:
        return [seq for seq in sorted(self.turns) if self.settled_end <= seq < self.record]

    def turns_before(self, seq: int) -> int:
        return sum(s < seq for s in self.turns)

    def turns_to(self, seq: int, count: int) -> list[int]:
        return [s for s in sorted(self.turns) if s <= seq][-count:]

    def look_back(
        self, seqs: Sequence[int], count: int, measure: Callable[[TurnView], int]
    ) -> NDArray[np.int32]:
        windows = [[measure(self.turn(s)) for s in self.turns_to(seq, count)] for seq in seqs]
        return np.array([[-1] * (count - len(window)) + window for window in windows], np.int32)

    def counts(self, seq: int) -> bool:
        return seq not in self.gone

    def salient_tokens(self, day: str) -> int:
        return 0

    def last_read_at_flush(self) -> int:
        return -1

    def uses(self) -> dict[str, int]:
        return self.used

    def current(self, kind: MemoryKind) -> list[Memory]:
        found = [m for m in self.memories if m.kind == kind and not m.deleted]
        return sorted(found, key=lambda m: (m.born_at_seq, m.ordinal))

    def ended(self, kind: MemoryKind) -> list[Memory]:
        return [m for m in self.memories if m.kind == kind and m.deleted]

    def take_in(self, outcome: PolicyResult) -> None:
        """What was decided, as it stands when the next record is."""
        made = {d.memory.id: d.memory for d in outcome.drafts}
        kept = {m.id: m for m in self.memories}
        self.memories = list((kept | made).values())


@dataclass
class Driven:
    outcome: PolicyResult
    prompts: list[Prompt]

    def made(self, kind: MemoryKind) -> list[Memory]:
        return [d.memory for d in self.outcome.drafts if d.memory.kind == kind and not d.memory.deleted]

    def deleted(self) -> list[str]:
        return [d.memory.id for d in self.outcome.drafts if d.memory.deleted]


def drive(
    steps: Decide,
    view: View,
    *,
    reading: GateReading | None = None,
    replies: Sequence[Reply | BadReply] = (),
    llm: LLMClient | None = None,
) -> Driven:
    """Answer each effect as the scheduler would, with all `replies`, or with those of `llm`."""
    waiting, prompts = list(replies), []
    value: Any = None
    try:
        while True:
            effect = steps.throw(value) if isinstance(value, BadReply) else steps.send(value)
            match effect:
                case ReadGate():
                    value = reading
                case Embed():
                    value = ENCODER.encode(effect.texts)
                case Nearest():
                    value = nearest(view, effect)
                case Complete():
                    prompts.append(effect.prompt)
                    value = waiting.pop(0) if llm is None else _reply_of(llm, effect.prompt)
    except StopIteration as end:
        assert not waiting, "replies that nobody asked for"
        return Driven(end.value, prompts)


def _reply_of(llm: LLMClient, prompt: Prompt) -> Reply | str | BadReply:
    try:
        return llm.submit(prompt, tenant="ann").result().reply
    except BadReply as error:
        return error


def nearest(view: View, ask: Nearest) -> list[Scored]:
    found = [Scored(m, cosine(ask.vector, vector_of(m.indexed))) for m in view.current(ask.kind)]
    return sorted(found, key=lambda s: (-s.score, s.memory.born_at_seq, s.memory.ordinal))[: ask.k]


def vector_of(text: str) -> NDArray[np.float16]:
    vector: NDArray[np.float16] = ENCODER.encode([text])[0]
    return vector


def view_of(count: int, *, memories: Sequence[Memory] = (), words: int = 3) -> View:
    turns = {n: TurnView(n, f"Ann: turn{n} " + "word " * words, f"2026-03-{n + 1:02d}") for n in range(count)}
    return View(turns, list(memories))


def stored(kind: MemoryKind, text: str, born: int, sources: tuple[int, ...], **more: Any) -> Memory:
    identity = memory_id("ann", 1, born, kind, 0)
    return Memory(identity, kind, "ann", text, 1, born, born, 0, sources, "2026-03-01", **more)


def lines_under(prompt: Prompt, heading: str) -> list[str]:
    """The lines of material in one section of a prompt."""
    _, _, rest = prompt.user.partition(f"{heading}:\n")
    lines = rest.split("\n")
    return lines[: next((i for i, line in enumerate(lines) if not line.startswith("[")), len(lines))]
