"""RecMem for one tenant as a plain program, see `oracle`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, memory_id, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import BadReply, LLMClient
from undertow.engine.policies.attribution import telling_words, turns_that_say
from undertow.engine.policies.salience import information
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    direct_prompt,
    episode_facts_prompt,
    episode_prompt,
    merge_facts_prompt,
    merge_prompt,
    refine_prompt,
    salient_prompt,
)
from undertow.prompts.reply_schemas import (
    EpisodeFactsDraft,
    EpisodeFactsReply,
    EpisodesReply,
    FactDraft,
    FactsReply,
    MergeFactsReply,
    MergeReply,
    Reply,
    SalientReply,
)

from .pair_thetas import ToldThetas
from .run import Oracle, OracleDecision, OracleMemory, Whole, exact_dot

FACTS_SHOWN = 10
FactsPrompt = Callable[[Sequence[ShownTurn], Sequence[ShownMemory]], Prompt]


@dataclass
class _Draft:
    """What a job would store; thrown away as a whole when a step of it fails."""

    versions: list[OracleMemory] = field(default_factory=list)
    facts_before: int = 0  # stored of the same record

    def count(self, kind: str) -> int:
        return self.facts_before + sum(m.kind == kind and m.version == 1 for m in self.versions)

    def facts(self) -> list[OracleMemory]:
        return [m for m in self.versions if m.kind == "fact"]


class OracleRecMem(Oracle):
    """Takes the turns of one tenant in order of seq; `decisions`, `versions`, `prompts` tell what came."""

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm)
        self.settings = settings  # may be changed between turns
        is_set = bool(settings.salience_turns or settings.quiet_share)
        self._salient = settings.profile != "paper" and settings.ablation is None and is_set
        self._fused = settings.call_form == "fused" and settings.ablation is None
        self._spent: dict[str, int] = {}  # tokens of salient turns by day
        self._last_day = ""
        self._read_at_flush = -1  # the last flush that read turns
        self._turns: dict[int, Turn] = {}
        self._information: dict[int, int] = {}
        self._vectors: dict[int, Whole] = {}
        self._live: list[int] = []
        self._thetas = ToldThetas()

    def take(self, seq: int, turn: Turn) -> None:
        """Decide one turn (the spec's steps 1 to 6)."""
        self._turns[seq] = self._dated(turn)
        self._information[seq] = information(self._words(seq))
        self._vectors[seq] = self._embed(turn.text)
        thetas = self._thetas.in_force(self.settings)
        nearest, score = self._nearest_episode(seq)
        asked = nearest is not None and score is not None and score >= thetas["theta_merge"]
        asked = asked and self._speaks(seq)
        decision, cluster, settled = self._decide(seq, nearest if asked else None, thetas["theta_sim"])
        if len(self._turns) % (self.settings.salience_turns or 1) == 0:
            window = sorted(self._turns)[-self.settings.salience_turns :]
            if (failed := self._read(seq, window, [*self._live, seq], settled)) and decision == "waits":
                decision, cluster = "parked", failed
        name = nearest.id if nearest is not None else None
        told = self._thetas.told_after(self._vectors)
        self.decisions.append(OracleDecision(seq, decision, asked, name, score, cluster, settled, told))
        self._live.append(seq)
        self._live = [s for s in self._live if s not in settled]

    def flush(self, seq: int) -> None:
        """What says most of the window that is not complete is read."""
        begun = len(self._turns) % (self.settings.salience_turns or 1)
        window = [s for s in sorted(self._turns)[-begun:] if s > self._read_at_flush] if begun else []
        calls = len(self.prompts)
        failed = self._read(seq, window, self._live, ())
        if len(self.prompts) > calls:
            self._read_at_flush = seq
        self.decisions.append(
            OracleDecision(seq, "parked" if failed else "waits", False, None, None, failed, ())
        )

    def current(self, kind: str) -> list[OracleMemory]:
        """The newest version of each memory of `kind`, in order of birth."""
        newest = {m.id: m for m in self.versions if m.kind == kind}
        return sorted(newest.values(), key=lambda m: (m.born_at_seq, m.ordinal))

    # the steps

    def _decide(
        self, seq: int, candidate: OracleMemory | None, theta_sim: float
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        alone = (seq,)
        if candidate is not None:
            try:
                if self._merged(seq, candidate):
                    return "merged", alone, alone
            except BadReply:
                return "parked", alone, alone
        cluster = tuple(sorted([*self._related(seq, theta_sim), seq]))
        if len(cluster) >= self.settings.recurrence_count:
            cluster = tuple(s for s in cluster if self._speaks(s)) if self._speaks(seq) else ()
        if len(cluster) < self.settings.recurrence_count:
            return "waits", (), ()
        try:
            made = self._consolidated(seq, cluster)
            return "fired", cluster, cluster if made or self._salient else ()
        except BadReply:
            return "parked", cluster, cluster

    def _words(self, seq: int) -> str:
        return " ".join(m.content for m in self._turns[seq].messages)

    def _speaks(self, seq: int) -> bool:
        """Not among the share of the last 16 turns that say least."""
        if not self._salient:
            return True
        last = sorted(self._information[s] for s in [s for s in sorted(self._turns) if s <= seq][-16:])
        return self._information[seq] >= last[int(self.settings.quiet_share * (len(last) - 1))]

    def _read(
        self, seq: int, window: Sequence[int], live: Sequence[int], settled: Sequence[int]
    ) -> tuple[int, ...]:
        """Facts of the half of a window that says most; what failed, or ()."""
        if not self._salient or not self.settings.salience_turns or not window:
            return ()
        day = self._day(window[-1])
        spent = self._spent.get(day, 0) if day == self._last_day else 0
        if spent >= self.settings.salience_day_tokens:
            return ()
        known = {s for f in self.current("fact") if f.made_at_seq < seq for s in (*f.sources, *f.shown)}
        unread = [s for s in window if s in live and s not in known and s not in settled]
        words = {s: len(re.findall(r"[^\W_]+", self._words(s))) for s in window}
        room = 0.65 * sum(count + 8 for count in words.values())
        turns: list[int] = []
        for s in sorted(unread, key=lambda s: (-self._information[s] / (words[s] + 2), s)):
            if self._information[s] and words[s] + 8 <= room:
                room -= words[s] + 8
                turns = sorted([*turns, s])
        telling = [s for s in unread if self._information[s]]
        if telling and not turns:
            turns = [max(telling, key=lambda s: (self._information[s] / (words[s] + 2), -s))]
        if not turns:
            return ()
        draft = _Draft(facts_before=sum(m.born_at_seq == seq and m.kind == "fact" for m in self.versions))
        ordered = sorted(turns, key=lambda s: (time_key(self._turns[s].timestamp), s))
        failed: tuple[int, ...] = ()
        try:
            self._extract(seq, ordered, draft, salient_prompt)
            self.versions += draft.versions
        except BadReply:
            failed = tuple(turns)
        day = self._day(turns[-1])
        self._spent[day] = (self._spent.get(day, 0) if day == self._last_day else 0) + self._cost
        self._last_day = day
        return failed

    def _day(self, turn_seq: int) -> str:
        before = sum(s < turn_seq for s in self._turns)
        return (self._turns[turn_seq].timestamp or f"{before // 1_000}k")[:10]

    def _ask(self, prompt: Prompt) -> Reply | str:
        self.prompts.append(prompt)
        try:
            completion = self._llm.submit(prompt, tenant=self.tenant).result()
        except BadReply as bad:
            self._cost = bad.usage.prompt_tokens + bad.usage.completion_tokens
            raise
        self._cost = completion.usage.prompt_tokens + completion.usage.completion_tokens
        return completion.reply

    def _nearest_episode(self, seq: int) -> tuple[OracleMemory | None, float | None]:
        best: OracleMemory | None = None
        best_score: float | None = None
        for episode in self.current("episode"):  # in tie order, so only a better one replaces
            score = exact_dot(self._vectors[seq], self._embed(episode.text))
            if best_score is None or score > best_score:
                best, best_score = episode, score
        return best, best_score

    def _related(self, seq: int, theta_sim: float) -> list[int]:
        """R_i of equation 5, within the k_gate nearest live turns."""
        scored = [(-exact_dot(self._vectors[seq], self._vectors[s]), s) for s in self._live]
        nearest = sorted(scored)[: 2 * self.settings.recurrence_count]
        return [s for minus_score, s in nearest if -minus_score >= theta_sim]

    def _merged(self, seq: int, old: OracleMemory) -> bool:
        """Equation 6, then 8 and 9 with the new turn alone. False: the LLM refused."""
        shown, turn = ShownMemory(1, old.timestamp, old.text), self._shown((seq,))[0]
        near = self._nearest_facts(old.text, _Draft())[:5] if self._fused else []
        reply = self._ask(
            merge_facts_prompt(shown, _listed(near), turn) if self._fused else merge_prompt(shown, turn)
        )
        assert isinstance(reply, MergeReply)
        if not reply.same_story:
            return False
        sources = tuple(sorted({*old.sources, seq}))
        new = replace(
            old,
            version=old.version + 1,
            text=reply.narrative,
            sources=sources,
            made_at_seq=seq,
            timestamp=self._latest(sources),
        )
        draft = _Draft([new])
        if isinstance(reply, MergeFactsReply):
            self._keep(seq, reply.facts, near, (seq,), draft, new.id, before=old.sources)
        else:
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
        shown = self._shown(ordered)
        near = self._nearest_facts(self._joined(ordered), draft) if self._fused else []
        fused = episode_facts_prompt(shown, _listed(near))
        reply = self._ask(fused if self._fused else episode_prompt(shown))
        assert isinstance(reply, EpisodesReply | EpisodeFactsReply)
        episodes = []
        for ordinal, told in enumerate(reply.episodes):
            numbers = told.turns
            valid = bool(numbers) and all(1 <= n <= len(ordered) for n in numbers)
            sources = tuple(sorted({ordered[n - 1] for n in numbers})) if valid else cluster
            episode = self._born(seq, "episode", ordinal, told.text, sources, cluster)
            draft.versions.append(episode)
            episodes.append(episode)
        heard: list[str] = []
        for episode, written in zip(episodes, reply.episodes, strict=True):
            if isinstance(written, EpisodeFactsDraft):
                fresh = [fact for fact in written.facts if fact.text not in heard]
                heard += [fact.text for fact in fresh]
                self._keep(seq, fresh, near, ordered, draft, episode.id)
            else:
                self._refine(seq, episode, ordered, draft)
        self.versions += draft.versions
        return bool(episodes)

    def _refine(self, seq: int, episode: OracleMemory, turns: Sequence[int], draft: _Draft) -> None:
        """Equations 8 and 9: facts of `turns` that `episode` and the nearest facts do not hold."""
        if self.settings.ablation == "without-facts":
            return
        shown = ShownMemory(1, episode.timestamp, episode.text)
        facts = self._nearest_facts(episode.text, draft)
        told = self._told(refine_prompt(shown, self._shown(turns), _listed(facts)))
        self._keep(seq, told, facts, turns, draft, episode.id)

    def _extract(
        self, seq: int, turns: Sequence[int], draft: _Draft, prompt_of: FactsPrompt = direct_prompt
    ) -> None:
        """Section 4.3: facts of raw turns."""
        facts = self._nearest_facts(self._joined(turns), draft)
        told = self._told(prompt_of(self._shown(turns), _listed(facts)))
        self._keep(seq, told, facts, turns, draft, None)

    def _told(self, prompt: Prompt) -> Sequence[FactDraft]:
        reply = self._ask(prompt)
        assert isinstance(reply, FactsReply | SalientReply)
        return reply.facts

    def _nearest_facts(self, text: str, draft: _Draft) -> list[OracleMemory]:
        vector = self._embed(text)
        known = self.current("fact") + draft.facts()  # by birth seq, then ordinal: stable sort keeps it
        return sorted(known, key=lambda f: -exact_dot(vector, self._embed(f.text)))[:FACTS_SHOWN]

    def _keep(
        self,
        seq: int,
        facts: Sequence[FactDraft],
        nearest: Sequence[OracleMemory],
        turns: Sequence[int],
        draft: _Draft,
        episode_id: str | None,
        before: Sequence[int] = (),
    ) -> None:
        heard = [f.text for f in nearest]
        for told in facts:
            if told.text in heard:
                continue
            heard.append(told.text)
            ordinal = draft.count("fact")
            replaced = told.replaces
            says = told.turns if told.turns and all(1 <= n <= len(turns) for n in told.turns) else ()
            words = telling_words(told.text)
            shown = {s: telling_words(self._turns[s].text) for s in (*turns, *before)}
            sources = turns_that_say(
                words, {turns[n - 1] for n in says} or turns, {s: shown[s] for s in turns}
            )
            old = nearest[replaced - 1] if replaced and 1 <= replaced <= len(nearest) else None
            if old is None:
                told_by = {s: shown[s] for s in (*sources, *before[-32:])}
                rare = {w for w in words if any(w not in has for has in told_by.values())}
                kept = [s for s in before[-32:] if len(rare & shown[s]) >= 0.66 * len(rare)]
                if kept and all(len(rare & shown[s]) < 0.3 * len(rare) for s in sources):
                    sources = (max(kept),)
            elif time_key(self._latest(sources)) < time_key(old.timestamp):
                sources = tuple(sorted({turns[n - 1] for n in says} or turns))
            links = (old.id,) if old else ()
            fact = self._born(seq, "fact", ordinal, told.text, sources, turns)
            draft.versions.append(replace(fact, supersedes=links, episode_id=episode_id, fact_kind=told.kind))

    # helpers

    def _born(
        self, seq: int, kind: str, ordinal: int, text: str, sources: tuple[int, ...], shown: Sequence[int]
    ) -> OracleMemory:
        """The first version of a memory."""
        return OracleMemory(
            id=memory_id(self.tenant, 1, seq, kind, ordinal),
            kind=kind,
            version=1,
            text=text,
            sources=sources,
            made_at_seq=seq,
            born_at_seq=seq,
            ordinal=ordinal,
            timestamp=self._latest(sources),
            shown=tuple(sorted(set(shown) - set(sources))),
        )

    def _joined(self, turns: Sequence[int]) -> str:
        return "\n".join(self._turns[s].text for s in turns)

    def _shown(self, seqs: Sequence[int]) -> list[ShownTurn]:
        return [ShownTurn(i, self._turns[s].timestamp, self._turns[s].text) for i, s in enumerate(seqs, 1)]

    def _latest(self, sources: Sequence[int]) -> str | None:
        last = max(sources, key=lambda s: (time_key(self._turns[s].timestamp), s))
        return self._turns[last].timestamp


def _listed(facts: Sequence[OracleMemory]) -> list[ShownMemory]:
    return [ShownMemory(i, fact.timestamp, fact.text) for i, fact in enumerate(facts, 1)]
