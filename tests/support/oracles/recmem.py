"""RecMem for one tenant as a plain program, see `oracle`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from undertow.engine.base.model import Turn, memory_id, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import BadReply, LLMClient
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    direct_prompt,
    episode_prompt,
    merge_prompt,
    refine_prompt,
)
from undertow.prompts.reply_schemas import EpisodesReply, FactsReply, MergeReply

from .run import Oracle, OracleDecision, OracleMemory, Thresholds, Whole, exact_dot

FACTS_SHOWN = 10


@dataclass
class _Draft:
    """What a job would store; thrown away as a whole when a step of it fails."""

    versions: list[OracleMemory] = field(default_factory=list)

    def count(self, kind: str) -> int:
        return sum(m.kind == kind and m.version == 1 for m in self.versions)

    def facts(self) -> list[OracleMemory]:
        return [m for m in self.versions if m.kind == "fact"]


class OracleRecMem(Oracle):
    """Takes the turns of one tenant in order of seq; `decisions`, `versions`, `prompts` tell what came."""

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Thresholds) -> None:
        super().__init__(tenant, encoder, llm)
        self.settings = settings  # may be changed between turns
        self._turns: dict[int, Turn] = {}
        self._vectors: dict[int, Whole] = {}
        self._live: list[int] = []

    def take(self, seq: int, turn: Turn) -> None:
        """Decide one turn (the spec's steps 1 to 6)."""
        self._turns[seq] = self._dated(turn)
        self._vectors[seq] = self._embed(turn.text)
        nearest, score = self._nearest_episode(seq)
        asked = nearest is not None and score is not None and score >= self.settings.merge_threshold
        decision, cluster, settled = self._decide(seq, nearest if asked else None)
        name = nearest.id if nearest is not None else None
        self.decisions.append(OracleDecision(seq, decision, asked, name, score, cluster, settled))
        self._live.append(seq)
        self._live = [s for s in self._live if s not in settled]

    def current(self, kind: str) -> list[OracleMemory]:
        """The newest version of each memory of `kind`, in order of birth."""
        newest = {m.id: m for m in self.versions if m.kind == kind}
        return sorted(newest.values(), key=lambda m: (m.born_at_seq, m.ordinal))

    # the steps

    def _decide(
        self, seq: int, candidate: OracleMemory | None
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        alone = (seq,)
        if candidate is not None:
            try:
                if self._merged(seq, candidate):
                    return "merged", alone, alone
            except BadReply:
                return "parked", alone, alone
        related = self._related(seq)
        if len(related) + 1 < self.settings.recurrence_count:
            return "waits", (), ()
        cluster = tuple(sorted([*related, seq]))
        try:
            return "fired", cluster, cluster if self._consolidated(seq, cluster) else ()
        except BadReply:
            return "parked", cluster, cluster

    def _nearest_episode(self, seq: int) -> tuple[OracleMemory | None, float | None]:
        best: OracleMemory | None = None
        best_score: float | None = None
        for episode in self.current("episode"):  # in tie order, so only a better one replaces
            score = exact_dot(self._vectors[seq], self._embed(episode.text))
            if best_score is None or score > best_score:
                best, best_score = episode, score
        return best, best_score

    def _related(self, seq: int) -> list[int]:
        """R_i of equation 5, within the k_gate nearest live turns."""
        scored = [(-exact_dot(self._vectors[seq], self._vectors[s]), s) for s in self._live]
        nearest = sorted(scored)[: 2 * self.settings.recurrence_count]
        return [s for minus_score, s in nearest if -minus_score >= self.settings.similarity_threshold]

    def _merged(self, seq: int, old: OracleMemory) -> bool:
        """Equation 6, then 8 and 9 with the new turn alone. False: the LLM refused."""
        shown = ShownMemory(1, old.timestamp, old.text)
        reply = self._ask(merge_prompt(shown, self._shown((seq,))[0]))
        assert isinstance(reply, MergeReply)
        if not reply.same_story:
            return False
        sources = tuple(sorted({*old.sources, seq}))
        new = OracleMemory(
            id=old.id,
            kind="episode",
            version=old.version + 1,
            text=reply.narrative,
            sources=sources,
            made_at_seq=seq,
            born_at_seq=old.born_at_seq,
            ordinal=old.ordinal,
            timestamp=self._latest(sources),
            shown=old.shown,
        )
        draft = _Draft([new])
        self._refine(seq, new, (seq,), draft)
        self.versions += draft.versions
        return True

    def _consolidated(self, seq: int, cluster: tuple[int, ...]) -> bool:
        """Equations 7 to 9. False: no episode came of the cluster."""
        ordered = tuple(sorted(cluster, key=lambda s: (time_key(self._turns[s].timestamp), s)))
        draft = _Draft()
        if self.settings.ablation == "direct-extraction":
            self._extract(seq, ordered, draft)
            self.versions += draft.versions
            return bool(draft.versions)
        reply = self._ask(episode_prompt(self._shown(ordered)))
        assert isinstance(reply, EpisodesReply)
        episodes = []
        for ordinal, told in enumerate(reply.episodes):
            numbers = told.turns
            valid = bool(numbers) and all(1 <= n <= len(ordered) for n in numbers)
            sources = tuple(sorted({ordered[n - 1] for n in numbers})) if valid else cluster
            episode = OracleMemory(
                id=memory_id(self.tenant, 1, seq, "episode", ordinal),
                kind="episode",
                version=1,
                text=told.text,
                sources=sources,
                made_at_seq=seq,
                born_at_seq=seq,
                ordinal=ordinal,
                timestamp=self._latest(sources),
                shown=tuple(sorted(set(cluster) - set(sources))),
            )
            draft.versions.append(episode)
            episodes.append(episode)
        for episode in episodes:
            self._refine(seq, episode, ordered, draft)
        self.versions += draft.versions
        return bool(episodes)

    def _refine(self, seq: int, episode: OracleMemory, turns: Sequence[int], draft: _Draft) -> None:
        """Equations 8 and 9: facts of `turns` that `episode` and the nearest facts do not hold."""
        if self.settings.ablation == "without-facts":
            return
        shown = ShownMemory(1, episode.timestamp, episode.text)
        facts = self._nearest_facts(episode.text, draft)
        listed = [ShownMemory(i, f.timestamp, f.text) for i, f in enumerate(facts, 1)]
        self._keep(seq, refine_prompt(shown, self._shown(turns), listed), facts, turns, draft, episode.id)

    def _extract(self, seq: int, turns: Sequence[int], draft: _Draft) -> None:
        """Section 4.3: facts of raw turns."""
        facts = self._nearest_facts("\n".join(self._turns[s].text for s in turns), draft)
        listed = [ShownMemory(i, f.timestamp, f.text) for i, f in enumerate(facts, 1)]
        self._keep(seq, direct_prompt(self._shown(turns), listed), facts, turns, draft, None)

    def _nearest_facts(self, text: str, draft: _Draft) -> list[OracleMemory]:
        vector = self._embed(text)
        known = self.current("fact") + draft.facts()  # by birth seq, then ordinal: stable sort keeps it
        return sorted(known, key=lambda f: -exact_dot(vector, self._embed(f.text)))[:FACTS_SHOWN]

    def _keep(
        self,
        seq: int,
        prompt: Prompt,
        nearest: Sequence[OracleMemory],
        turns: Sequence[int],
        draft: _Draft,
        episode_id: str | None,
    ) -> None:
        reply = self._ask(prompt)
        assert isinstance(reply, FactsReply)
        heard = [f.text for f in nearest]
        for told in reply.facts:
            if told.text in heard:
                continue
            heard.append(told.text)
            ordinal = draft.count("fact")
            replaced = told.replaces
            says = told.turns if told.turns and all(1 <= n <= len(turns) for n in told.turns) else ()
            sources = tuple(sorted({turns[n - 1] for n in says} or turns))
            links = (nearest[replaced - 1].id,) if replaced and 1 <= replaced <= len(nearest) else ()
            draft.versions.append(
                OracleMemory(
                    id=memory_id(self.tenant, 1, seq, "fact", ordinal),
                    kind="fact",
                    version=1,
                    text=told.text,
                    sources=sources,
                    made_at_seq=seq,
                    born_at_seq=seq,
                    ordinal=ordinal,
                    timestamp=self._latest(sources),
                    supersedes=links,
                    shown=tuple(sorted(set(turns) - set(sources))),
                    episode_id=episode_id,
                    fact_kind=told.kind,
                )
            )

    # helpers

    def _shown(self, seqs: Sequence[int]) -> list[ShownTurn]:
        return [ShownTurn(i, self._turns[s].timestamp, self._turns[s].text) for i, s in enumerate(seqs, 1)]

    def _latest(self, sources: Sequence[int]) -> str | None:
        last = max(sources, key=lambda s: (time_key(self._turns[s].timestamp), s))
        return self._turns[last].timestamp
