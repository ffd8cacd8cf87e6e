"""NEMORI for one tenant as a plain program: one turn after the other, lists and exact integers.

As recmem.py: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import LLMClient
from undertow.engine.policies.attribution import telling_words, turns_that_say
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    consolidate_all_prompt,
    consolidate_prompt,
    distil_direct_prompt,
    distil_prompt,
    integrate_prompt,
    narrate_prompt,
    partition_prompt,
    predict_prompt,
    select_prompt,
    summarise_prompt,
)
from undertow.prompts.reply_schemas import (
    CandidateDecision,
    ConsolidateAllReply,
    ConsolidateReply,
    NarrativeReply,
    PartitionReply,
    PredictionReply,
    Reply,
    SelectReply,
    StatementsReply,
    SummaryReply,
)

from .a_mem import OracleAMem
from .memory_os import OracleMemoryOS, OraclePage
from .run import Oracle, OracleMemory, listed

EPISODES_SHOWN, FACTS_EVOKED, FACTS_COMPARED = 5, 10, 5


@dataclass(frozen=True)
class _Said:
    """One message: the turn that it stands in, and its place there."""

    seq: int
    place: int
    text: str


class OracleNemori(Oracle):
    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm, settings)
        self._buffer: list[_Said] = []
        self._every: dict[tuple[int, int], _Said] = {}
        self._fused = settings.call_form == "fused"
        self._notes = OracleAMem(tenant, encoder, llm, settings)
        self._pages = OracleMemoryOS(tenant, encoder, llm, settings)
        self._pages.of_facts = True
        self._notes.turns = self._pages.turns = self.turns
        self._notes.prompts = self._pages.prompts = self.prompts

    def take(self, seq: int, turn: Turn) -> None:
        """Decide one turn."""
        self._hear(seq, turn)
        for place, message in enumerate(turn.messages):
            said = _Said(seq, place, f"{message.speaker}: {message.content}")
            self._buffer.append(said)
            self._every[seq, place] = said
        if len(self._buffer) < self.settings.window_messages:
            self._wait(seq)
        else:
            self._window(seq)

    def flush(self, seq: int) -> None:
        """Decide a flush, which is a record of the log too."""
        if self._buffer:
            self._window(seq)
        else:
            self._wait(seq)

    # the steps

    def _window(self, seq: int) -> None:
        window, self._buffer = self._buffer, []
        turns = tuple(sorted({said.seq for said in window}))
        self._decide_on(seq, turns, partial(self._remember_all, window))

    def _remember_all(self, window: list[_Said]) -> None:
        for group in self._partitioned(window):
            self._remember(group)

    def _partitioned(self, window: list[_Said]) -> list[list[_Said]]:
        if len(window) == 1 or self.settings.ablation == "fixed-chunks":
            return [window]
        reply = self._ask(partition_prompt(self._shown(window)))
        assert isinstance(reply, PartitionReply)
        groups: list[list[int]] = []
        seen: list[int] = []
        for named in reply.groups:
            groups.append([])
            for number in named.messages:
                if 1 <= number <= len(window) and number not in seen:
                    groups[-1].append(number)
                    seen.append(number)
        if not seen:
            return [window]
        for number in range(1, len(window) + 1):
            step = 0
            while number not in seen:  # look one further to the left, then to the right
                step += 1
                near = [n for n in (number - step, number + step) if n in seen]
                if near:
                    next(g for g in groups if near[0] in g).append(number)
                    break
        return [[window[n - 1] for n in sorted(group)] for group in groups if group]

    def _remember(self, group: list[_Said]) -> None:
        if self.settings.ablation == "direct-extraction":
            self._keep(self._ask(distil_direct_prompt(self._shown(group))), group, None)
            return
        told = self._told(narrate_prompt(self._shown(group)))
        turns = tuple(sorted({said.seq for said in group}))
        parts = tuple((said.seq, said.place) for said in group)
        older = self._continued(told, turns, self._index(parts))
        if older is not None:
            shown = [*listed([older]), ShownMemory(2, self._latest(turns), told)]
            told = self._told(integrate_prompt(shown))
            parts = (*older.source_messages, *parts)
        more: dict[str, Any] = {"source_messages": parts, "index_text": self._index(parts)}
        if older is None:
            episode = self._born("episode", told, turns, **more)
        else:
            episode = self._next(older, told, turns, **more)
        if self.settings.ablation != "without-facts":
            self._learn(episode, [self._every[part] for part in parts])

    def _index(self, parts: tuple[tuple[int, int], ...]) -> str:
        """Table 6: the messages of an episode, where they are what it is found by."""
        if self.settings.nemori_index == "narrative":
            return ""
        return "\n".join(self._every[part].text for part in parts)

    def _continued(self, told: str, turns: tuple[int, ...], index: str) -> OracleMemory | None:
        nearest = self._nearest(index or told, self.current("episode"), EPISODES_SHOWN)
        if not nearest:
            return None
        lines = [m.text.split("\n")[0] if self._fused else m.text for m in nearest]
        shown = [ShownMemory(n, nearest[n - 1].timestamp, line) for n, line in enumerate(lines, 1)]
        reply = self._ask(select_prompt(ShownMemory(1, self._latest(turns), told), shown))
        assert isinstance(reply, SelectReply)
        if reply.continues is None or not 1 <= reply.continues <= len(nearest):
            return None
        return nearest[reply.continues - 1]

    def _learn(self, episode: OracleMemory, raw: list[_Said]) -> None:
        cue = ShownMemory(1, episode.timestamp, episode.text.split("\n")[0])
        guess = self._ask(predict_prompt(cue, listed(self._evoked(episode))))
        assert isinstance(guess, PredictionReply)
        prediction = ShownMemory(1, episode.timestamp, guess.prediction)
        reply = self._ask(distil_prompt(self._shown(raw), prediction))
        self._keep(reply, raw, episode.id)

    def _evoked(self, episode: OracleMemory) -> list[OracleMemory]:
        facts = self.current("fact")
        if self.settings.management == "summary":
            return facts
        text = episode.index_text or episode.text
        near = self._nearest(text, facts)
        if self.settings.management == "memory-os":
            return self._shown_pages(near)
        near = near[:FACTS_EVOKED]
        if self.settings.management == "a-mem":
            linked = [m for note in near for i in note.links for m in facts if m.id == i]
            return near + [m for n, m in enumerate(linked) if m not in near and m not in linked[:n]]
        return [m for m in near if self._likeness(text, m) > self.settings.theta_evoke]

    def _keep(self, reply: Reply | str, raw: list[_Said], episode_id: str | None) -> None:
        """Give what was distilled to the management."""
        assert isinstance(reply, StatementsReply)
        turns = {said.seq for said in raw}
        said_in: dict[str, tuple[int, ...]] = {}
        for fact in reply.facts:
            right = fact.messages and all(1 <= n <= len(raw) for n in fact.messages)
            lines = {(said.seq, said.place): telling_words(said.text) for said in raw}
            named = {[*lines][n - 1] for n in fact.messages} if right else {min(lines)}
            saying = turns_that_say(telling_words(fact.text), named, lines)
            said_in.setdefault(fact.text, tuple(sorted({turn for turn, _ in saying})))
        if self.settings.management == "summary" and said_in:
            self._summarise(said_in, turns)
            return
        if self.settings.management == "native" and self._fused:
            self._consolidate_all(said_in, turns, episode_id)
            return
        for text, said in said_in.items():
            if self.settings.management == "append":
                self._born("fact", text, said, turns, episode_id=episode_id)
            elif self.settings.management == "a-mem":
                self._note(self._first("fact", text, said, turns, episode_id=episode_id))
            elif self.settings.management == "memory-os":
                self._page(self._born("fact", text, said, turns, episode_id=episode_id, fact_kind="page"))
            else:
                self._consolidate(text, said, turns, episode_id)

    def _note(self, fact: OracleMemory) -> None:
        """Appendix A.3: the fact is a message that A-Mem makes a note of."""
        self._notes.versions = [m for m in (*self.versions, *self.made) if m.kind == "fact"]
        self._notes.episodes = {e.id: e.sources for e in self.current("episode")}
        self._notes.seq, self._notes.made = self.seq, []
        self._notes.note(replace(fact, text=""), fact.text)
        self.made += self._notes.made

    def _page(self, page: OracleMemory) -> None:
        """Appendix A.3: the fact is a page of MemoryOS."""
        reach = frozenset((*page.sources, *page.shown))
        self._pages.pages[page.id] = OraclePage(page.text, page.timestamp, page.sources, reach)
        stored, made = ([m for m in of if m.kind == "fact"] for of in (self.versions, self.made))
        others = [m for m in self.made if m.kind != "fact"]
        self.made = others + self._pages.file(self.seq, stored, made, self.settings.short_term_pages)

    def _shown_pages(self, near: list[OracleMemory]) -> list[OracleMemory]:
        """What MemoryOS shows for an answer: short-term memory, the profile, and the nearest of the rest."""
        every = self.current("fact")
        filed = {i for m in (*self.versions, *self.made) if m.fact_kind == "segment" for i in m.links}
        found = [m for m in every if m.fact_kind == "page" and m.id not in filed]
        found += [m for m in every if m.fact_kind == "profile"]
        found += [m for m in near if m.fact_kind == "page"][:10]
        found += [m for m in near if m.fact_kind == "segment"][:5]
        found += [m for m in near if m.fact_kind in ("knowledge", "agent")][:5]
        return [m for n, m in enumerate(found) if m not in found[:n]]

    def _summarise(self, said_in: dict[str, tuple[int, ...]], turns: set[int]) -> None:
        """Appendix A.1: the one text that is all that is known, told anew."""
        stored = self.current("fact")
        new = [ShownMemory(n, self._latest(said), text) for n, (text, said) in enumerate(said_in.items(), 1)]
        reply = self._ask(summarise_prompt(new, listed(stored)))
        assert isinstance(reply, SummaryReply) and len(stored) < 2
        sources = {s for said in said_in.values() for s in said}
        if stored:
            self._next(stored[0], reply.summary, sources, {*turns, *stored[0].shown})
        else:
            self._born("fact", reply.summary, sources, turns)

    def _consolidate_all(
        self, said_in: dict[str, tuple[int, ...]], turns: set[int], episode_id: str | None
    ) -> None:
        """Each fact with those near to it, all in one call; one without any is new."""
        facts, floor = self.current("fact"), self.settings.theta_compare
        near = {
            text: [m for m in self._nearest(text, facts, FACTS_COMPARED) if self._likeness(text, m) >= floor]
            for text in said_in
        }
        asked = [text for text, found in near.items() if found]
        stored = [m for m in facts if any(m in found for found in near.values())]
        decided: dict[str, CandidateDecision] = {}
        if asked:
            new = [ShownMemory(n, self._latest(said_in[text]), text) for n, text in enumerate(asked, 1)]
            reply = self._ask(consolidate_all_prompt(new, listed(stored)))
            assert isinstance(reply, ConsolidateAllReply)
            for decision in reply.decisions:
                if 1 <= decision.candidate <= len(asked):
                    decided.setdefault(asked[decision.candidate - 1], decision)
        taken: list[OracleMemory] = []
        for text, said in said_in.items():
            named: list[OracleMemory] = []
            for number in decided[text].targets if text in decided else ():
                if 1 <= number <= len(stored) and stored[number - 1] not in (*named, *taken):
                    named.append(stored[number - 1])
            taken += named
            action, words = (decided[text].action, decided[text].text) if named else ("new", "")
            self._settle(text, said, turns, episode_id, action, named, words)

    def _consolidate(self, text: str, said: tuple[int, ...], turns: set[int], episode_id: str | None) -> None:
        similar = self._nearest(text, self.current("fact"), FACTS_COMPARED)
        if not similar:
            self._born("fact", text, said, turns, episode_id=episode_id)
            return
        reply = self._ask(consolidate_prompt(ShownMemory(1, self._latest(said), text), listed(similar)))
        assert isinstance(reply, ConsolidateReply)
        named: list[OracleMemory] = []
        for number in reply.targets:
            if 1 <= number <= len(similar) and similar[number - 1] not in named:
                named.append(similar[number - 1])
        self._settle(text, said, turns, episode_id, reply.action, named, reply.text)

    def _settle(
        self,
        text: str,
        said: tuple[int, ...],
        turns: set[int],
        episode_id: str | None,
        action: str,
        named: Sequence[OracleMemory],
        merged: str,
    ) -> None:
        """Store a fact as was decided."""
        if action == "merge" and named:
            sources = {*said, *(s for m in named for s in m.sources)}
            for other in named[1:]:
                self._end(other)
            gone = named[0].supersedes + tuple(m.id for m in named[1:])
            links = tuple(dict.fromkeys(gone))
            shown = {*turns, *(s for m in named for s in m.shown)}
            self._next(named[0], merged or text, sources, shown, supersedes=links)
            return
        untrue = [m for m in named if action == "conflict" and m.sources[-1] <= said[-1]]
        for other in untrue:
            self._end(other)
        if action == "conflict" and len(untrue) < len(named):
            return  # later words say otherwise
        links = tuple(m.id for m in untrue)
        self._born("fact", text, said, turns, episode_id=episode_id, supersedes=links)

    # helpers

    def _told(self, prompt: Prompt) -> str:
        reply = self._ask(prompt)
        assert isinstance(reply, NarrativeReply)
        return " ".join(reply.cue.split()) + "\n" + reply.narrative

    def _shown(self, messages: Sequence[_Said]) -> list[ShownTurn]:
        timed = [(self.turns[said.seq].timestamp, said.text) for said in messages]
        return [ShownTurn(n, time, text) for n, (time, text) in enumerate(timed, 1)]
