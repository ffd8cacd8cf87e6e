"""NEMORI for one tenant as a plain program: one turn after the other, lists and exact integers.

As recmem.py: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, memory_id, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import BadReply, LLMClient
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
from .run import Oracle, OracleDecision, OracleMemory, exact_dot

EPISODES_SHOWN, FACTS_EVOKED, FACTS_COMPARED = 5, 10, 5


@dataclass(frozen=True)
class _Said:
    """One message: the turn that it stands in, and its place there."""

    seq: int
    place: int
    text: str


class OracleNemori(Oracle):
    """Takes the turns of one tenant in order of seq."""

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm)
        self.settings = settings
        self._times: dict[int, str | None] = {}
        self._buffer: list[_Said] = []
        self._every: dict[tuple[int, int], _Said] = {}
        self._made: list[OracleMemory] = []
        self._fused = settings.call_form == "fused"
        self._notes = OracleAMem(tenant, encoder, llm, settings)
        self._pages = OracleMemoryOS(tenant, encoder, llm, settings)
        self._pages.of_facts, self._pages.times = True, self._times
        self._notes.prompts = self._pages.prompts = self.prompts

    def take(self, seq: int, turn: Turn) -> None:
        """Decide one turn."""
        self._times[seq] = self._dated(turn).timestamp
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

    def current(self, kind: str) -> list[OracleMemory]:
        """The newest version of each memory of `kind` that was not deleted, in order of birth."""
        newest = {m.id: m for m in (*self.versions, *self._made) if m.kind == kind}
        return sorted((m for m in newest.values() if m.text), key=lambda m: (m.born_at_seq, m.ordinal))

    # the steps

    def _window(self, seq: int) -> None:
        window, self._buffer = self._buffer, []
        turns = tuple(sorted({said.seq for said in window}))
        self._made = []
        try:
            for group in self._partitioned(window):
                self._remember(seq, group)
            decision = "fired"
            self.versions += self._made
        except BadReply:
            decision = "parked"
        self._made = []
        self.decisions.append(OracleDecision(seq, decision, False, None, None, turns, turns))

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

    def _remember(self, seq: int, group: list[_Said]) -> None:
        if self.settings.ablation == "direct-extraction":
            self._keep(seq, self._ask(distil_direct_prompt(self._shown(group))), group, None)
            return
        told = self._told(narrate_prompt(self._shown(group)))
        turns = tuple(sorted({said.seq for said in group}))
        parts = tuple((said.seq, said.place) for said in group)
        older = self._continued(told, turns, self._index(parts))
        if older is None:
            episode = self._born(seq, "episode", told, turns, source_messages=parts)
        else:
            shown = [ShownMemory(1, older.timestamp, older.text), ShownMemory(2, self._latest(turns), told)]
            told = self._told(integrate_prompt(shown))
            parts = (*older.source_messages, *parts)
            episode = self._next_version(seq, older, told, turns, source_messages=parts)
        if self.settings.ablation != "without-facts":
            self._learn(seq, episode, [self._every[part] for part in parts])

    def _index(self, parts: tuple[tuple[int, int], ...]) -> str:
        """Table 6: the messages of an episode, where they are what it is found by."""
        if self.settings.nemori_index == "narrative":
            return ""
        return "\n".join(self._every[part].text for part in parts)

    def _continued(self, told: str, turns: tuple[int, ...], index: str) -> OracleMemory | None:
        nearest = [m for _, m in self._nearest("episode", index or told)[:EPISODES_SHOWN]]
        if not nearest:
            return None
        lines = [m.text.split("\n")[0] if self._fused else m.text for m in nearest]
        shown = [ShownMemory(n, nearest[n - 1].timestamp, line) for n, line in enumerate(lines, 1)]
        reply = self._ask(select_prompt(ShownMemory(1, self._latest(turns), told), shown))
        assert isinstance(reply, SelectReply)
        if reply.continues is None or not 1 <= reply.continues <= len(nearest):
            return None
        return nearest[reply.continues - 1]

    def _learn(self, seq: int, episode: OracleMemory, raw: list[_Said]) -> None:
        cue = ShownMemory(1, episode.timestamp, episode.text.split("\n")[0])
        shown = [ShownMemory(n, m.timestamp, m.text) for n, m in enumerate(self._evoked(episode), 1)]
        guess = self._ask(predict_prompt(cue, shown))
        assert isinstance(guess, PredictionReply)
        prediction = ShownMemory(1, episode.timestamp, guess.prediction)
        reply = self._ask(distil_prompt(self._shown(raw), prediction))
        self._keep(seq, reply, raw, episode.id)

    def _evoked(self, episode: OracleMemory) -> list[OracleMemory]:
        if self.settings.management == "summary":
            return self.current("fact")
        near = self._nearest("fact", episode.index_text or episode.text)
        if self.settings.management == "memory-os":
            return self._shown_pages([m for _, m in near])
        near = near[:FACTS_EVOKED]
        if self.settings.management == "a-mem":
            best = [m for _, m in near]
            linked = [m for note in best for i in note.links for m in self.current("fact") if m.id == i]
            return best + [m for n, m in enumerate(linked) if m not in best and m not in linked[:n]]
        return [m for score, m in near if score > self.settings.theta_evoke]

    def _keep(self, seq: int, reply: Reply | str, raw: list[_Said], episode_id: str | None) -> None:
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
            self._summarise(seq, said_in, turns)
            return
        if self.settings.management == "native" and self._fused:
            self._consolidate_all(seq, said_in, turns, episode_id)
            return
        for text, said in said_in.items():
            beside = tuple(sorted(turns - set(said)))
            if self.settings.management == "append":
                self._born(seq, "fact", text, said, episode_id=episode_id, beside=beside)
            elif self.settings.management == "a-mem":
                self._note(self._born(seq, "fact", text, said, episode_id=episode_id, beside=beside))
            elif self.settings.management == "memory-os":
                self._page(self._born(seq, "fact", text, said, episode_id=episode_id, beside=beside))
            else:
                self._consolidate(seq, text, said, beside, episode_id)

    def _note(self, fact: OracleMemory) -> None:
        """Appendix A.3: the fact is a message that A-Mem makes a note of."""
        self._made.remove(fact)
        stored = [m for m in (*self.versions, *self._made) if m.kind == "fact"]
        self._notes.versions = [*stored]
        self._notes.episodes = {e.id: e.sources for e in self.current("episode")}
        self._notes.note(replace(fact, text=""), fact.text)
        self._made += self._notes.versions[len(stored) :]

    def _page(self, fact: OracleMemory) -> None:
        """Appendix A.3: the fact is a page of MemoryOS."""
        self._made[-1] = page = replace(fact, fact_kind="page")
        reach = frozenset((*page.sources, *page.shown))
        self._pages.pages[page.id] = OraclePage(page.text, page.timestamp, page.sources, reach)
        stored, made = ([m for m in of if m.kind == "fact"] for of in (self.versions, self._made))
        others = [m for m in self._made if m.kind != "fact"]
        self._made = others + self._pages.file(fact.made_at_seq, stored, made, self.settings.short_term_pages)

    def _shown_pages(self, near: list[OracleMemory]) -> list[OracleMemory]:
        """What MemoryOS shows for an answer: short-term memory, the profile, and the nearest of the rest."""
        every = self.current("fact")
        filed = {i for m in (*self.versions, *self._made) if m.fact_kind == "segment" for i in m.links}
        found = [m for m in every if m.fact_kind == "page" and m.id not in filed]
        found += [m for m in every if m.fact_kind == "profile"]
        found += [m for m in near if m.fact_kind == "page"][:10]
        found += [m for m in near if m.fact_kind == "segment"][:5]
        found += [m for m in near if m.fact_kind in ("knowledge", "agent")][:5]
        return [m for n, m in enumerate(found) if m not in found[:n]]

    def _summarise(self, seq: int, said_in: dict[str, tuple[int, ...]], turns: set[int]) -> None:
        """Appendix A.1: the one text that is all that is known, told anew."""
        stored = self.current("fact")
        new = [ShownMemory(n, self._latest(said), text) for n, (text, said) in enumerate(said_in.items(), 1)]
        reply = self._ask(summarise_prompt(new, [ShownMemory(1, m.timestamp, m.text) for m in stored]))
        assert isinstance(reply, SummaryReply) and len(stored) < 2
        sources = tuple(sorted({s for said in said_in.values() for s in said}))
        if stored:
            beside = (*turns, *stored[0].shown)
            self._next_version(seq, stored[0], reply.summary, sources, beside=beside)
        else:
            self._born(seq, "fact", reply.summary, sources, beside=tuple(sorted(turns - set(sources))))

    def _consolidate_all(
        self, seq: int, said_in: dict[str, tuple[int, ...]], turns: set[int], episode_id: str | None
    ) -> None:
        """Each fact with those near to it, all in one call; one without any is new."""
        near = {text: self._nearest("fact", text)[:FACTS_COMPARED] for text in said_in}
        floor = self.settings.theta_compare
        asked = [text for text, found in near.items() if found and found[0][0] >= floor]
        close = {m.id for text in asked for score, m in near[text] if score >= floor}
        stored = [m for m in self.current("fact") if m.id in close]
        decided: dict[str, CandidateDecision] = {}
        if asked:
            new = [ShownMemory(n, self._latest(said_in[text]), text) for n, text in enumerate(asked, 1)]
            shown = [ShownMemory(n, m.timestamp, m.text) for n, m in enumerate(stored, 1)]
            reply = self._ask(consolidate_all_prompt(new, shown))
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
            beside = tuple(sorted(turns - set(said)))
            self._settle(seq, text, said, beside, episode_id, action, named, words)

    def _consolidate(
        self, seq: int, text: str, turns: tuple[int, ...], beside: tuple[int, ...], episode_id: str | None
    ) -> None:
        similar = [m for _, m in self._nearest("fact", text)[:FACTS_COMPARED]]
        if not similar:
            self._born(seq, "fact", text, turns, episode_id=episode_id, beside=beside)
            return
        shown = [ShownMemory(n, m.timestamp, m.text) for n, m in enumerate(similar, 1)]
        reply = self._ask(consolidate_prompt(ShownMemory(1, self._latest(turns), text), shown))
        assert isinstance(reply, ConsolidateReply)
        named: list[OracleMemory] = []
        for number in reply.targets:
            if 1 <= number <= len(similar) and similar[number - 1] not in named:
                named.append(similar[number - 1])
        self._settle(seq, text, turns, beside, episode_id, reply.action, named, reply.text)

    def _settle(
        self,
        seq: int,
        text: str,
        turns: tuple[int, ...],
        beside: tuple[int, ...],
        episode_id: str | None,
        action: str,
        named: Sequence[OracleMemory],
        merged: str,
    ) -> None:
        """Store a fact as was decided."""
        if action == "merge" and named:
            sources = turns + tuple(s for m in named for s in m.sources)
            for other in named[1:]:
                self._end(seq, other)
            gone = named[0].supersedes + tuple(m.id for m in named[1:])
            links = tuple(dict.fromkeys(gone))
            unnamed = beside + tuple(s for m in named for s in m.shown)
            self._next_version(seq, named[0], merged or text, sources, supersedes=links, beside=unnamed)
            return
        untrue = [m for m in named if action == "conflict" and m.sources[-1] <= turns[-1]]
        for other in untrue:
            self._end(seq, other)
        if action == "conflict" and len(untrue) < len(named):
            return  # later words say otherwise
        links = tuple(m.id for m in untrue)
        self._born(seq, "fact", text, turns, episode_id=episode_id, supersedes=links, beside=beside)

    # helpers

    def _nearest(self, kind: str, text: str) -> list[tuple[float, OracleMemory]]:
        vector = self._embed(text)
        scored = [(exact_dot(vector, self._embed(m.index_text or m.text)), m) for m in self.current(kind)]
        return sorted(scored, key=lambda pair: -pair[0])  # stable: by birth where equal

    def _born(
        self,
        seq: int,
        kind: str,
        text: str,
        turns: tuple[int, ...],
        *,
        episode_id: str | None = None,
        supersedes: tuple[str, ...] = (),
        source_messages: tuple[tuple[int, int], ...] = (),
        beside: tuple[int, ...] = (),
    ) -> OracleMemory:
        ordinal = sum(m.kind == kind and m.version == 1 for m in self._made)
        memory = OracleMemory(
            memory_id(self.tenant, 1, seq, kind, ordinal),
            kind,
            1,
            text,
            turns,
            seq,
            seq,
            ordinal,
            self._latest(turns),
            supersedes,
            episode_id,
            source_messages,
            beside,
            index_text=self._index(source_messages),
        )
        self._made.append(memory)
        return memory

    def _next_version(
        self,
        seq: int,
        old: OracleMemory,
        text: str,
        turns: Sequence[int],
        *,
        supersedes: tuple[str, ...] | None = None,
        source_messages: tuple[tuple[int, int], ...] = (),
        beside: tuple[int, ...] = (),
    ) -> OracleMemory:
        sources = tuple(sorted({*old.sources, *turns}))
        new = replace(
            old,
            version=old.version + 1,
            made_at_seq=seq,
            text=text,
            sources=sources,
            timestamp=self._latest(sources),
            supersedes=old.supersedes if supersedes is None else supersedes,
            source_messages=source_messages,
            index_text=self._index(source_messages),
            shown=tuple(sorted(set(beside) - set(sources))),
        )
        self._made.append(new)
        return new

    def _end(self, seq: int, old: OracleMemory) -> None:
        self._made.append(replace(old, version=old.version + 1, made_at_seq=seq, text=""))

    def _told(self, prompt: Prompt) -> str:
        reply = self._ask(prompt)
        assert isinstance(reply, NarrativeReply)
        return " ".join(reply.cue.split()) + "\n" + reply.narrative

    def _shown(self, messages: Sequence[_Said]) -> list[ShownTurn]:
        return [ShownTurn(n, self._times[said.seq], said.text) for n, said in enumerate(messages, 1)]

    def _latest(self, sources: Sequence[int]) -> str | None:
        return self._times[max(sources, key=lambda s: (time_key(self._times[s]), s))]
