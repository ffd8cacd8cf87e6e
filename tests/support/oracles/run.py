"""Policies for one tenant as plain programs: one turn after the other, lists and exact integers.

Written from the specification alone and sharing nothing of how the engine works: no arena, kernel,
scheduler, journal or policy. Only the prompts' wording, the encoder, the ids and the LLM are the
engine's, because the test is that the same prompts are sent and the same memories come of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Memory, Turn, memory_id, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import BadReply, LLMClient
from undertow.prompts.builders import Prompt, ShownMemory, ShownTurn

Whole = NDArray[np.int64]


@dataclass(frozen=True)
class OracleDecision:
    """What became of one turn. `settled`: the turns that left the gates with it, by seq.

    `thetas`: those that the turns so far have told, by name, for the turns after it.
    """

    seq: int
    decision: str
    merge_asked: bool = False
    nearest_episode: str | None = None
    score: float | None = None
    cluster: tuple[int, ...] = ()
    settled: tuple[int, ...] = ()
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


def listed(memories: Iterable[OracleMemory]) -> list[ShownMemory]:
    return [ShownMemory(n, m.timestamp, m.text) for n, m in enumerate(memories, 1)]


class Oracle:
    """What the policies have in common. `decisions`, `versions`, `prompts` tell what came of the turns.

    It takes the records of one tenant's log in order of seq.
    """

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        self.tenant = tenant
        self.settings = settings  # may be changed between turns
        self.turns: dict[int, Turn] = {}
        self.decisions: list[OracleDecision] = []
        self.versions: list[OracleMemory] = []
        self.prompts: list[Prompt] = []
        # of the record at hand
        self.seq = 0
        self.made: list[OracleMemory] = []
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

    def current(self, kind: str) -> list[OracleMemory]:
        """The newest version of each memory of a kind that was not deleted, in order of birth."""
        newest = {m.id: m for m in (*self.versions, *self.made) if m.kind == kind}
        return sorted((m for m in newest.values() if m.text), key=lambda m: (m.born_at_seq, m.ordinal))

    # ---- a record

    def _hear(self, seq: int, turn: Turn) -> None:
        """Keep a turn, with its own time or its session's previous one."""
        time = turn.timestamp or self._last_time.get(turn.session_id)
        self._last_time[turn.session_id] = time
        self.turns[seq] = replace(turn, timestamp=time)

    def _wait(self, seq: int) -> None:
        self.decisions.append(OracleDecision(seq, "waits"))

    def _decide_on(self, seq: int, turns: tuple[int, ...], make: Callable[[], object]) -> None:
        """The turns leave the gates, with what `make` makes of them."""
        decision = "parked" if self._stored(seq, make) is None else "fired"
        self.decisions.append(OracleDecision(seq, decision, cluster=turns, settled=turns))

    def _stored(self, seq: int, make: Callable[[], object]) -> int | None:
        """How many versions `make` made. None: a reply was of no use, and nothing is stored."""
        self.seq, self.made = seq, []
        try:
            make()
        except BadReply:
            self.made = []
            return None
        made, self.made = self.made, []
        self.versions += made
        return len(made)

    # ---- versions

    def _first(
        self, kind: str, text: str, sources: Iterable[int], shown: Iterable[int] = (), **more: Any
    ) -> OracleMemory:
        """The first version of a memory that the turns `sources` say, told when those `shown` were seen."""
        born = [m for m in (*self.versions, *self.made) if m.kind == kind and m.born_at_seq == self.seq]
        ordinal = len({m.id for m in born})
        name = memory_id(self.tenant, 1, self.seq, kind, ordinal)
        new = OracleMemory(name, kind, 1, text, (), self.seq, self.seq, ordinal, None, **more)
        return self._resting_on(new, sources, shown)

    def _born(
        self, kind: str, text: str, sources: Iterable[int], shown: Iterable[int] = (), **more: Any
    ) -> OracleMemory:
        self.made.append(self._first(kind, text, sources, shown, **more))
        return self.made[-1]

    def _next(
        self, old: OracleMemory, text: str, sources: Iterable[int], shown: Iterable[int] = (), **more: Any
    ) -> OracleMemory:
        """The next version of a memory, which `sources` say too."""
        newer = replace(old, version=old.version + 1, made_at_seq=self.seq, text=text, **more)
        self.made.append(self._resting_on(newer, (*old.sources, *sources), shown))
        return self.made[-1]

    def _resting_on(self, memory: OracleMemory, sources: Iterable[int], shown: Iterable[int]) -> OracleMemory:
        said = tuple(sorted({*sources}))
        beside = tuple(sorted({*shown} - {*said}))
        return replace(memory, sources=said, timestamp=self._latest(said), shown=beside)

    def _end(self, old: OracleMemory) -> None:
        self.made.append(replace(old, version=old.version + 1, made_at_seq=self.seq, text=""))

    # ---- turns and texts

    def _by_time(self, seqs: Iterable[int]) -> list[int]:
        return sorted(seqs, key=lambda s: (time_key(self.turns[s].timestamp), s))

    def _latest(self, seqs: Iterable[int]) -> str | None:
        return self.turns[self._by_time(seqs)[-1]].timestamp

    def _shown_turns(self, seqs: Iterable[int]) -> list[ShownTurn]:
        turns = [self.turns[s] for s in seqs]
        return [ShownTurn(n, turn.timestamp, turn.text) for n, turn in enumerate(turns, 1)]

    def _fits(self, prompt: Prompt) -> bool:
        return prompt.size_tokens + self.settings.reply_tokens <= self.settings.context_tokens

    def _ask(self, prompt: Prompt) -> Any:
        self.prompts.append(prompt)
        return self._llm.submit(prompt, tenant=self.tenant).result().reply

    def _embed(self, text: str) -> Whole:
        if text not in self._embedded:
            vector = self._encoder.encode([text])[0].astype(np.float64)
            self._embedded[text] = (vector * 2**24).astype(np.int64)
        return self._embedded[text]

    def _likeness(self, text: str, memory: OracleMemory) -> float:
        return exact_dot(self._embed(text), self._embed(memory.index_text or memory.text))

    def _nearest(
        self, text: str, memories: Iterable[OracleMemory], most: int | None = None
    ) -> list[OracleMemory]:
        """The memories most like a text, of equals the first."""
        return sorted(memories, key=lambda m: -self._likeness(text, m))[:most]
