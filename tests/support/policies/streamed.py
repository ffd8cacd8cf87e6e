"""A policy over a whole log without an engine: each record is decided before the next."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.llm.client import LLMClient
from undertow.engine.policies.base import (
    Decide,
    GateReading,
    Policy,
    PolicyResult,
    Thresholds,
    TurnView,
    cosine,
)
from undertow.engine.storage.row_codec import LlmJob
from undertow.prompts.builders import Prompt

from ..oracles.run import OracleDecision, OracleMemory
from .driver import View, drive, vector_of


class Streamed:
    """Takes the records of one tenant's log in order; the attributes are those of an `Oracle`."""

    def __init__(self, policy: Policy, settings: Settings, llm: LLMClient) -> None:
        self.view = View({}, thresholds=Thresholds.of(settings))
        self.results: list[PolicyResult] = []
        self.decisions: list[OracleDecision] = []
        self.versions: list[OracleMemory] = []
        self.prompts: list[Prompt] = []
        self.llm = llm  # may be changed between records
        self._policy = policy
        self._live: list[int] = []
        self._last_time: dict[str, str | None] = {}  # by session

    def take(self, seq: int, turn: Turn) -> None:
        time = turn.timestamp or self._last_time.get(turn.session_id)
        self._last_time[turn.session_id] = time
        lines = tuple(turn.text.split("\n"))
        self.view.turns[seq] = TurnView(seq, turn.text, time, lines, turn.session_id)
        self.view.record = seq
        self._decide(seq, self._policy.decide(seq, self.view), self._reading(seq))
        self._live = [s for s in (*self._live, seq) if s not in self.results[-1].settled]
        self.view.gone |= {*self.results[-1].settled}

    def flush(self, seq: int) -> None:
        self.view.record = seq
        self._decide(seq, self._policy.flush(seq, self.view))

    def reconsolidate(self, seq: int, question: str, episode_ids: Sequence[str]) -> None:
        self.view.record = seq
        self._decide(seq, self._policy.reconsolidate(seq, question, episode_ids, self.view))

    def delete(self, seq: int, turn_seq: int) -> None:
        del self.view.turns[turn_seq]
        self._live = [s for s in self._live if s != turn_seq]
        self.view.record = seq
        self._decide(seq, self._policy.forget(seq, turn_seq, self.view))

    def replay(self, seq: int, job: LlmJob) -> None:
        self.view.record = seq
        self._decide(seq, self._policy.replay(seq, job, self.view))

    def _reading(self, seq: int) -> GateReading:
        """E* of equation 6 and R_i of equation 5, by sorting."""
        theta, vector = self.view.thresholds, vector_of(self.view.turns[seq].text)
        episodes = [(cosine(vector, vector_of(m.text)), m) for m in self.view.current("episode")]
        score, episode = max(episodes, key=lambda pair: pair[0], default=(None, None))
        scored = [(cosine(vector, vector_of(self.view.turns[s].text)), s) for s in self._live]
        near = sorted(((-s, n) for s, n in scored if s >= theta.theta_sim))
        shown = near[: theta.k_gate]
        return GateReading(episode, score, tuple(n for _, n in shown), tuple(-s for s, _ in shown), len(near))

    def _decide(self, seq: int, steps: Decide, reading: GateReading | None = None) -> None:
        done = drive(steps, self.view, reading=reading, llm=self.llm)
        result = done.outcome
        self.results.append(result)
        self.view.take_in(result)
        if result.settled:
            self.view.settled_end = max(self.view.settled_end, max(result.settled) + 1)
        self.prompts += done.prompts
        self.versions += [OracleMemory.of(draft.memory) for draft in result.drafts]
        read = result.reading or GateReading(None, None)
        self.decisions.append(
            OracleDecision(
                seq,
                str(result.decision),
                result.merge_asked,
                read.episode.id if read.episode else None,
                read.episode_score,
                result.cluster,
                result.settled,
            )
        )
