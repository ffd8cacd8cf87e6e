"""Policies for one tenant as plain programs: one turn after the other, lists and exact integers.

Written from the specification alone and sharing nothing of how the engine works: no arena, kernel,
scheduler, journal or policy. Only the prompts' wording, the encoder, the ids and the LLM are the
engine's, because the test is that the same prompts are sent and the same memories come of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import Memory, Turn
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import LLMClient
from undertow.prompts.builders import Prompt

Whole = NDArray[np.int64]


class Thresholds(Protocol):
    """What the oracle reads of the settings."""

    @property
    def similarity_threshold(self) -> float: ...

    @property
    def merge_threshold(self) -> float: ...

    @property
    def recurrence_count(self) -> int: ...

    @property
    def sim_share(self) -> float | None: ...

    @property
    def merge_share(self) -> float | None: ...

    @property
    def ablation(self) -> str | None: ...


@dataclass(frozen=True)
class OracleDecision:
    """What became of one turn. `settled`: the turns that left the gates with it, by seq.

    `thetas`: those that the turns so far have told, by name, for the turns after it.
    """

    seq: int
    decision: str
    merge_asked: bool
    nearest_episode: str | None
    score: float | None
    cluster: tuple[int, ...]
    settled: tuple[int, ...]
    thetas: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class OracleMemory:
    """One version of an episode or a fact; `sources` ascending."""

    id: str
    kind: str
    version: int
    text: str
    sources: tuple[int, ...]
    made_at_seq: int
    born_at_seq: int
    ordinal: int
    timestamp: str | None
    supersedes: tuple[str, ...] = ()
    episode_id: str | None = None
    source_messages: tuple[tuple[int, int], ...] = ()
    shown: tuple[int, ...] = ()
    fact_kind: str | None = None
    links: tuple[str, ...] = ()
    index_text: str = ""

    @classmethod
    def of(cls, memory: Memory) -> OracleMemory:
        """A version that the engine or a policy made."""
        theirs = {"sources": "source_seqs", "shown": "shown_seqs"}
        return cls(**{f.name: getattr(memory, theirs.get(f.name, f.name)) for f in fields(cls)})


def exact_dot(a: Whole, b: Whole) -> float:
    """Dot product of two fp16 unit vectors given as multiples of 2^-24: in integers, so exact."""
    return int(np.dot(a, b)) / 2**48


class Oracle:
    """What the policies have in common. `decisions`, `versions`, `prompts` tell what came of the turns."""

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient) -> None:
        self.tenant = tenant
        self.decisions: list[OracleDecision] = []
        self.versions: list[OracleMemory] = []
        self.prompts: list[Prompt] = []
        self._encoder = encoder
        self._llm = llm
        self._last_time: dict[str, str | None] = {}  # by session
        self._embedded: dict[str, Whole] = {}

    def take(self, seq: int, turn: Turn) -> None:
        """Decide one turn."""
        raise NotImplementedError

    def flush(self, seq: int) -> None:
        """A flush: here no turn waits for others to come."""
        self._wait(seq)

    def used(self, seq: int, fact_ids: Sequence[str]) -> None:
        """An answer was given these facts."""
        self._wait(seq)

    def reconsolidate(self, seq: int, question: str, episode_ids: Sequence[str]) -> None:
        """A question that these episodes covered and the facts did not; only HiMem learns from it."""
        self._wait(seq)

    def _wait(self, seq: int) -> None:
        self.decisions.append(OracleDecision(seq, "waits", False, None, None, (), ()))

    def _dated(self, turn: Turn) -> Turn:
        """With its own time, or its session's previous one."""
        time = turn.timestamp or self._last_time.get(turn.session_id)
        self._last_time[turn.session_id] = time
        return replace(turn, timestamp=time)

    def _ask(self, prompt: Prompt) -> Any:
        self.prompts.append(prompt)
        return self._llm.submit(prompt, tenant=self.tenant).result().reply

    def _embed(self, text: str) -> Whole:
        if text not in self._embedded:
            vector = self._encoder.encode([text])[0].astype(np.float64)
            self._embedded[text] = (vector * 2**24).astype(np.int64)
        return self._embedded[text]
