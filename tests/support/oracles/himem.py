"""HiMem for one tenant as a plain program: one record after the other, lists and exact integers.

As oracle: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, memory_id, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import BadReply, LLMClient
from undertow.engine.policies.attribution import telling_words, turns_that_say
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    align_prompt,
    notes_all_prompt,
    notes_prompt,
    revise_prompt,
    segment_prompt,
    supplement_prompt,
    traits_prompt,
)

from .run import Oracle, OracleDecision, OracleMemory, exact_dot

SIMILAR = 10


@dataclass
class Note:
    text: str
    sources: list[int]
    shown: tuple[int, ...] = ()
    kind: str | None = None


class OracleHiMem(Oracle):
    """Takes the records of one tenant's log in order; `decisions`, `versions`, `prompts` tell what came."""

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm)
        self._settings = settings
        self._turns: dict[int, Turn] = {}
        self._open: list[int] = []
        self._uses: Counter[str] = Counter()  # of notes: how many answers they were given to
        # of the record at hand
        self._seq = 0
        self._made: list[OracleMemory] = []

    def take(self, seq: int, turn: Turn) -> None:
        """A turn: it closes the window of another session, or one that it does not fit into."""
        self._turns[seq] = self._dated(turn)
        window, grown = self._open, [*self._open, seq]
        same = bool(window) and self._turns[window[-1]].session_id == turn.session_id
        if not window or (same and self._has_room(grown)):
            self._open = grown
            self._decide(seq, "waits")
            return
        self._open = [seq]
        self._close(seq, window)

    def _has_room(self, window: list[int]) -> bool:
        """Whether the turns take at most half of what a prompt can hold beside its fixed words."""
        fixed = segment_prompt([]).size_tokens
        whole = self._settings.context_tokens - self._settings.reply_tokens
        return 2 * (segment_prompt(self._shown(window)).size_tokens - fixed) <= whole - fixed

    def flush(self, seq: int) -> None:
        """A flush: it closes the window."""
        window, self._open = self._open, []
        if window:
            self._close(seq, window)
        else:
            self._decide(seq, "waits")

    def reconsolidate(self, seq: int, question: str, episode_ids: Sequence[str]) -> None:
        """What a question missed is taken over from these episodes."""
        self._seq, self._made = seq, []
        try:
            self._revise(question, [m for i in episode_ids for m in self.current("episode") if m.id == i])
        except BadReply:
            self._decide(seq, "waits")
            return
        self._forget()
        self.versions += self._made
        self._decide(seq, "fired")

    def used(self, seq: int, fact_ids: Sequence[str]) -> None:
        self._uses.update(fact_ids)
        self._wait(seq)

    def current(self, kind: str) -> list[OracleMemory]:
        """The newest version of each memory of a kind that was not deleted, in order of birth."""
        newest = {m.id: m for m in [*self.versions, *self._made] if m.kind == kind}
        return sorted((m for m in newest.values() if m.text), key=lambda m: (m.born_at_seq, m.ordinal))

    # ---- a window

    def _decide(self, seq: int, what: str, cluster: Sequence[int] = ()) -> None:
        turns = tuple(cluster)
        self.decisions.append(OracleDecision(seq, what, False, None, None, turns, turns))
        self._made = []

    def _close(self, seq: int, window: list[int]) -> None:
        self._seq, self._made = seq, []
        try:
            self._write_episodes(window)
            self._write_notes(window)
        except BadReply:
            self._decide(seq, "parked", window)
            return
        self._forget()
        self.versions += self._made
        self._decide(seq, "fired", window)

    def _forget(self) -> None:
        """Section 2.5: one note after the other, while there are too many."""
        most = self._settings.himem_max_notes
        while most is not None and len(notes := self.current("fact")) > most:
            # of equals the oldest, and what this record has made or changed last
            self._end(min(notes, key=lambda n: (n.made_at_seq == self._seq, self._uses[n.id])))

    def _write_episodes(self, window: list[int]) -> None:
        reply = self._ask(segment_prompt(self._shown(window)))
        given = [d for d in reply.episodes if 1 <= d.first <= len(window)]
        starts = sorted({d.first for d in given}) or [1]
        for i, start in enumerate(starts):
            draft = next((d for d in given if d.first == start), reply.episodes[0])
            begin = 0 if i == 0 else start - 1
            end = starts[i + 1] - 1 if i + 1 < len(starts) else len(window)
            seqs = window[begin:end]
            said = [self._turns[s].text for s in seqs]
            if self._settings.himem_align_episodes:
                aligned = self._aligned([], [Note(t, [s]) for t, s in zip(said, seqs, strict=True)])
                said = [note.text for note in aligned]
            times = [t for s in self._by_time(seqs) if (t := self._turns[s].timestamp)]
            span = "undated" if not times else times[0]
            if times and times[-1] != times[0]:
                span += f" to {times[-1]}"
            text = "\n".join([f"{draft.topic} ({span})", draft.summary, *said])
            self._born("episode", text, seqs, (), tuple(sorted(set(window) - set(seqs))))

    def _write_notes(self, window: list[int]) -> None:
        turns = self._shown(window)
        if self._settings.call_form == "fused" and self._settings.himem_align_notes:
            self._keep([self._note(d, window) for d in self._ask(notes_all_prompt(turns)).notes], window)
            return
        notes = [self._note(d, window) for d in self._ask(notes_prompt(turns)).notes]
        shown = list(notes)
        while shown and not self._fits(traits_prompt(turns, self._listed(shown))):
            del shown[0]
        reply = self._ask(traits_prompt(turns, self._listed(shown)))
        notes += [self._note(d, window) for d in reply.notes]
        if self._settings.himem_align_notes and notes:
            notes = self._aligned(window, notes)
        self._keep(notes, window)

    def _keep(self, notes: list[Note], window: list[int]) -> None:
        for note in notes:
            note.shown = tuple(sorted(set(window) - set(note.sources)))
            self._store(note)

    def _note(self, draft: Any, window: list[int]) -> Note:
        right = draft.turns and all(1 <= n <= len(window) for n in draft.turns)
        sources = sorted({window[n - 1] for n in draft.turns}) if right else list(window)
        shown = {seq: telling_words(self._turns[seq].text) for seq in window}
        saying = turns_that_say(telling_words(draft.text), sources, shown)
        return Note(draft.text, list(saying), kind=draft.kind)

    def _aligned(self, window: list[int], notes: list[Note]) -> list[Note]:
        shown, listed = list(window), self._listed(notes)
        while shown and not self._fits(align_prompt(self._shown(shown), listed)):
            del shown[0]
        reply = self._ask(align_prompt(self._shown(shown), listed))
        done: dict[int, Any] = {}
        for change in reply.changes:
            if 1 <= change.note <= len(notes):
                done.setdefault(change.note, change)
        kept: dict[int, Note] = {
            n: replace(note, text=done[n].text if n in done and done[n].text else note.text)
            for n, note in enumerate(notes, 1)
        }
        for n in sorted(done):
            into = done[n].same_as
            if into in kept and into != n:
                kept[into].sources = sorted({*kept[into].sources, *kept[n].sources})
                del kept[n]
        return list(kept.values())

    def _store(self, note: Note) -> None:
        same = [m for m in self.current("fact") if m.text == note.text]
        if not same:
            self._born("fact", note.text, note.sources, (), note.shown, note.kind)
        elif set(note.sources) - set(same[-1].sources):
            self._again(same[-1], note.sources, note.text)

    # ---- a question

    def _revise(self, question: str, episodes: list[OracleMemory]) -> None:
        seen: list[OracleMemory] = []
        for episode in episodes:
            if not seen or self._fits(supplement_prompt(question, self._told([*seen, episode]))):
                seen.append(episode)
        shown = self._told(seen)
        found: list[Note] = []
        for draft in self._ask(supplement_prompt(question, shown)).notes:
            if draft.text not in [note.text for note in found]:
                right = draft.episodes and all(1 <= n <= len(seen) for n in draft.episodes)
                oldest = sorted(seen, key=lambda m: max(m.sources))[:1]
                saying = [seen[n - 1] for n in draft.episodes] if right else oldest
                sources = sorted({s for m in saying for s in m.sources})
                beside = sorted({s for m in seen for s in (*m.sources, *m.shown)} - set(sources))
                found.append(Note(draft.text, sources, tuple(beside), draft.kind))
        for known in self.current("fact"):
            for note in [n for n in found if n.text == known.text]:
                found.remove(note)
                if set(note.sources) - set(known.sources):
                    self._again(known, note.sources, note.text)
        stored = self.current("fact")
        near: list[OracleMemory] = []
        for note in found:
            vector = self._embed(note.text)
            nearest = sorted(stored, key=lambda m: -exact_dot(vector, self._embed(m.text)))[:SIMILAR]
            near += [m for m in nearest if m not in near]
        near.sort(key=lambda m: (m.born_at_seq, m.ordinal))
        decided: dict[int, Any] = {}
        if found and near:
            listed = [ShownMemory(n, m.timestamp, m.text) for n, m in enumerate(near, 1)]
            for d in self._ask(revise_prompt(self._listed(found), listed)).decisions:
                decided.setdefault(d.candidate, d)
        self._carry_out(found, near, decided)

    def _carry_out(self, found: list[Note], near: list[OracleMemory], decided: dict[int, Any]) -> None:
        changed: set[int] = set()
        for n, note in enumerate(found, 1):
            d = decided.get(n)
            at = d.note if d is not None and d.relation != "independent" else None
            if d is None or at is None or not 1 <= at <= len(near) or at in changed:
                self._born("fact", note.text, note.sources, (), note.shown, note.kind)
                continue
            old = near[at - 1]
            if d.relation == "extendable":
                changed.add(at)
                self._again(old, note.sources, d.text or note.text, note.shown)
            elif max(old.sources) <= max(note.sources):
                changed.add(at)
                self._end(old)
                self._born("fact", note.text, note.sources, (old.id,), note.shown, note.kind)

    # ---- helpers

    def _born(
        self,
        kind: str,
        text: str,
        seqs: Sequence[int],
        supersedes: tuple[str, ...] = (),
        shown: tuple[int, ...] = (),
        fact_kind: str | None = None,
    ) -> None:
        ordinal = len({m.id for m in self._made if m.kind == kind and m.born_at_seq == self._seq})
        identity = memory_id(self.tenant, 1, self._seq, kind, ordinal)
        time = self._turns[self._by_time(seqs)[-1]].timestamp
        holder = None
        if kind == "fact":
            holder = next((m.id for m in self.current("episode") if seqs[0] in m.sources), None)
        self._made.append(
            OracleMemory(
                identity,
                kind,
                1,
                text,
                tuple(seqs),
                self._seq,
                self._seq,
                ordinal,
                time,
                supersedes,
                holder,
                shown=shown,
                fact_kind=fact_kind,
            )
        )

    def _again(self, old: OracleMemory, seqs: Sequence[int], text: str, shown: tuple[int, ...] = ()) -> None:
        sources = tuple(sorted({*old.sources, *seqs}))
        beside = tuple(sorted({*old.shown, *shown} - set(sources)))
        time = self._turns[self._by_time(sources)[-1]].timestamp
        newer = replace(old, version=old.version + 1, made_at_seq=self._seq)
        self._made.append(replace(newer, text=text, sources=sources, timestamp=time, shown=beside))

    def _end(self, old: OracleMemory) -> None:
        self._made.append(replace(old, version=old.version + 1, made_at_seq=self._seq, text=""))

    def _by_time(self, seqs: Sequence[int]) -> list[int]:
        return sorted(seqs, key=lambda s: (time_key(self._turns[s].timestamp), s))

    def _shown(self, seqs: Sequence[int]) -> list[ShownTurn]:
        turns = [self._turns[s] for s in seqs]
        return [ShownTurn(n, turn.timestamp, turn.text) for n, turn in enumerate(turns, 1)]

    def _listed(self, notes: Sequence[Note]) -> list[ShownMemory]:
        times = [self._turns[self._by_time(note.sources)[-1]].timestamp for note in notes]
        pairs = zip(times, notes, strict=True)
        return [ShownMemory(n, time, note.text) for n, (time, note) in enumerate(pairs, 1)]

    def _told(self, memories: Sequence[OracleMemory]) -> list[ShownMemory]:
        return [ShownMemory(n, m.timestamp, m.text) for n, m in enumerate(memories, 1)]

    def _ask(self, prompt: Prompt) -> Any:
        return super()._ask(prompt)  # whose fields are those of the prompt's reply

    def _fits(self, prompt: Prompt) -> bool:
        return prompt.size_tokens + self._settings.reply_tokens <= self._settings.context_tokens
