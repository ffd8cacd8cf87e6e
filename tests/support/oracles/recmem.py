"""RecMem for one tenant as a plain program, see run.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, time_key
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
from .run import Oracle, OracleDecision, OracleMemory, Whole, exact_dot, listed

FACTS_SHOWN = 10
FactsPrompt = Callable[[Sequence[ShownTurn], Sequence[ShownMemory]], Prompt]


class OracleRecMem(Oracle):
    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm, settings)
        is_set = bool(settings.salience_turns or settings.quiet_share)
        self._salient = settings.profile != "paper" and settings.ablation is None and is_set
        self._fused = settings.call_form == "fused" and settings.ablation is None
        self._spent: dict[str, int] = {}  # tokens of salient turns by day
        self._last_day = ""
        self._read_at_flush = -1  # the last flush that read turns
        self._information: dict[int, int] = {}
        self._vectors: dict[int, Whole] = {}
        self._live: list[int] = []
        self._thetas = ToldThetas()

    def take(self, seq: int, turn: Turn) -> None:
        """Decide one turn (the spec's steps 1 to 6)."""
        self._hear(seq, turn)
        self._information[seq] = information(self._words(seq))
        self._vectors[seq] = self._embed(turn.text)
        thetas = self._thetas.in_force(self.settings)
        nearest, score = self._nearest_episode(seq)
        asked = nearest is not None and score is not None and score >= thetas["theta_merge"]
        asked = asked and self._speaks(seq)
        decision, cluster, settled = self._decide(seq, nearest if asked else None, thetas["theta_sim"])
        if len(self.turns) % (self.settings.salience_turns or 1) == 0:
            window = sorted(self.turns)[-self.settings.salience_turns :]
            if (failed := self._read(seq, window, [*self._live, seq], settled)) and decision == "waits":
                decision, cluster = "parked", failed
        name = nearest.id if nearest is not None else None
        told = self._thetas.told_after(self._vectors)
        self.decisions.append(OracleDecision(seq, decision, asked, name, score, cluster, settled, told))
        self._live.append(seq)
        self._live = [s for s in self._live if s not in settled]

    def flush(self, seq: int) -> None:
        """What says most of the window that is not complete is read."""
        begun = len(self.turns) % (self.settings.salience_turns or 1)
        window = [s for s in sorted(self.turns)[-begun:] if s > self._read_at_flush] if begun else []
        calls = len(self.prompts)
        failed = self._read(seq, window, self._live, ())
        if len(self.prompts) > calls:
            self._read_at_flush = seq
        self.decisions.append(OracleDecision(seq, "parked" if failed else "waits", cluster=failed))

    # the steps

    def _decide(
        self, seq: int, candidate: OracleMemory | None, theta_sim: float
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        alone = (seq,)
        if candidate is not None:
            made = self._stored(seq, partial(self._merge, candidate))
            if made != 0:  # where the LLM did not refuse
                return "parked" if made is None else "merged", alone, alone
        cluster = tuple(sorted([*self._related(seq, theta_sim), seq]))
        if len(cluster) >= self.settings.recurrence_count:
            cluster = tuple(s for s in cluster if self._speaks(s)) if self._speaks(seq) else ()
        if len(cluster) < self.settings.recurrence_count:
            return "waits", (), ()
        made = self._stored(seq, partial(self._consolidate, cluster))
        if made is None:
            return "parked", cluster, cluster
        return "fired", cluster, cluster if made or self._salient else ()

    def _words(self, seq: int) -> str:
        return " ".join(m.content for m in self.turns[seq].messages)

    def _speaks(self, seq: int) -> bool:
        """Not among the share of the last 16 turns that say least."""
        if not self._salient:
            return True
        last = sorted(self._information[s] for s in [s for s in sorted(self.turns) if s <= seq][-16:])
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
        made = self._stored(seq, partial(self._extract, self._by_time(turns), salient_prompt))
        day = self._day(turns[-1])
        self._spent[day] = (self._spent.get(day, 0) if day == self._last_day else 0) + self._cost
        self._last_day = day
        return tuple(turns) if made is None else ()

    def _day(self, turn_seq: int) -> str:
        before = sum(s < turn_seq for s in self.turns)
        return (self.turns[turn_seq].timestamp or f"{before // 1_000}k")[:10]

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

    def _merge(self, old: OracleMemory) -> None:
        """Equation 6, then 8 and 9 with the new turn alone; nothing where the LLM refuses."""
        shown, turn = listed([old])[0], self._shown_turns((self.seq,))[0]
        near = self._nearest_facts(old.text)[:5] if self._fused else []
        reply = self._ask(
            merge_facts_prompt(shown, listed(near), turn) if self._fused else merge_prompt(shown, turn)
        )
        assert isinstance(reply, MergeReply)
        if not reply.same_story:
            return
        new = self._next(old, reply.narrative, (self.seq,), old.shown)
        if isinstance(reply, MergeFactsReply):
            self._keep(reply.facts, near, (self.seq,), new.id, before=old.sources)
        else:
            self._refine(new, (self.seq,))

    def _consolidate(self, cluster: tuple[int, ...]) -> None:
        """Equations 7 to 9."""
        ordered = self._by_time(cluster)
        if self.settings.ablation == "direct-extraction":
            self._extract(ordered)
            return
        shown = self._shown_turns(ordered)
        near = self._nearest_facts(self._joined(ordered)) if self._fused else []
        fused = episode_facts_prompt(shown, listed(near))
        reply = self._ask(fused if self._fused else episode_prompt(shown))
        assert isinstance(reply, EpisodesReply | EpisodeFactsReply)
        episodes = []
        for told in reply.episodes:
            numbers = told.turns
            valid = bool(numbers) and all(1 <= n <= len(ordered) for n in numbers)
            sources = {ordered[n - 1] for n in numbers} if valid else cluster
            episodes.append(self._born("episode", told.text, sources, cluster))
        heard: list[str] = []
        for episode, written in zip(episodes, reply.episodes, strict=True):
            if isinstance(written, EpisodeFactsDraft):
                fresh = [fact for fact in written.facts if fact.text not in heard]
                heard += [fact.text for fact in fresh]
                self._keep(fresh, near, ordered, episode.id)
            else:
                self._refine(episode, ordered)

    def _refine(self, episode: OracleMemory, turns: Sequence[int]) -> None:
        """Equations 8 and 9: facts of `turns` that `episode` and the nearest facts do not hold."""
        if self.settings.ablation == "without-facts":
            return
        facts = self._nearest_facts(episode.text)
        told = self._told(refine_prompt(listed([episode])[0], self._shown_turns(turns), listed(facts)))
        self._keep(told, facts, turns, episode.id)

    def _extract(self, turns: Sequence[int], prompt_of: FactsPrompt = direct_prompt) -> None:
        """Section 4.3: facts of raw turns."""
        facts = self._nearest_facts(self._joined(turns))
        told = self._told(prompt_of(self._shown_turns(turns), listed(facts)))
        self._keep(told, facts, turns, None)

    def _told(self, prompt: Prompt) -> Sequence[FactDraft]:
        reply = self._ask(prompt)
        assert isinstance(reply, FactsReply | SalientReply)
        return reply.facts

    def _nearest_facts(self, text: str) -> list[OracleMemory]:
        return self._nearest(text, self.current("fact"), FACTS_SHOWN)

    def _keep(
        self,
        facts: Sequence[FactDraft],
        nearest: Sequence[OracleMemory],
        turns: Sequence[int],
        episode_id: str | None,
        before: Sequence[int] = (),
    ) -> None:
        heard = [f.text for f in nearest]
        for told in facts:
            if told.text in heard:
                continue
            heard.append(told.text)
            replaced = told.replaces
            says = told.turns if told.turns and all(1 <= n <= len(turns) for n in told.turns) else ()
            words = telling_words(told.text)
            shown = {s: telling_words(self.turns[s].text) for s in (*turns, *before)}
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
            more: dict[str, Any] = {"supersedes": links, "episode_id": episode_id, "fact_kind": told.kind}
            self._born("fact", told.text, sources, turns, **more)

    def _joined(self, turns: Sequence[int]) -> str:
        return "\n".join(self.turns[s].text for s in turns)
