"""HiMem for one tenant as a plain program: one record after the other, lists and exact integers.

As oracle: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

from collections import Counter
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
    ShownMemory,
    align_prompt,
    notes_all_prompt,
    notes_prompt,
    revise_prompt,
    segment_prompt,
    supplement_prompt,
    traits_prompt,
)

from .run import Oracle, OracleDecision, OracleMemory, listed

SIMILAR = 10


@dataclass
class Note:
    text: str
    sources: list[int]
    shown: tuple[int, ...] = ()
    kind: str | None = None


class OracleHiMem(Oracle):
    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Settings) -> None:
        super().__init__(tenant, encoder, llm, settings)
        self._open: list[int] = []
        self._uses: Counter[str] = Counter()  # of notes: how many answers they were given to

    def take(self, seq: int, turn: Turn) -> None:
        """A turn: it closes the window of another session, or one that it does not fit into."""
        self._hear(seq, turn)
        window, grown = self._open, [*self._open, seq]
        same = bool(window) and self.turns[window[-1]].session_id == turn.session_id
        if not window or (same and self._has_room(grown)):
            self._open = grown
            self._wait(seq)
            return
        self._open = [seq]
        self._close(seq, window)

    def _has_room(self, window: list[int]) -> bool:
        """Whether the turns take at most half of what a prompt can hold beside its fixed words."""
        fixed = segment_prompt([]).size_tokens
        whole = self.settings.context_tokens - self.settings.reply_tokens
        return 2 * (segment_prompt(self._shown_turns(window)).size_tokens - fixed) <= whole - fixed

    def flush(self, seq: int) -> None:
        """A flush: it closes the window."""
        window, self._open = self._open, []
        if window:
            self._close(seq, window)
        else:
            self._wait(seq)

    def reconsolidate(self, seq: int, question: str, episode_ids: Sequence[str]) -> None:
        """What a question missed is taken over from these episodes."""
        episodes = [m for i in episode_ids for m in self.current("episode") if m.id == i]
        revised = self._stored(seq, partial(self._revise, question, episodes))
        self.decisions.append(OracleDecision(seq, "waits" if revised is None else "fired"))

    def used(self, seq: int, fact_ids: Sequence[str]) -> None:
        self._uses.update(fact_ids)
        self._wait(seq)

    # ---- a window

    def _close(self, seq: int, window: list[int]) -> None:
        self._decide_on(seq, tuple(window), partial(self._write, window))

    def _write(self, window: list[int]) -> None:
        self._write_episodes(window)
        self._write_notes(window)
        self._forget()

    def _forget(self) -> None:
        """Section 2.5: one note after the other, while there are too many."""
        most = self.settings.himem_max_notes
        while most is not None and len(notes := self.current("fact")) > most:
            # of equals the oldest, and what this record has made or changed last
            self._end(min(notes, key=lambda n: (n.made_at_seq == self.seq, self._uses[n.id])))

    def _write_episodes(self, window: list[int]) -> None:
        reply = self._ask(segment_prompt(self._shown_turns(window)))
        given = [d for d in reply.episodes if 1 <= d.first <= len(window)]
        starts = sorted({d.first for d in given}) or [1]
        for i, start in enumerate(starts):
            draft = next((d for d in given if d.first == start), reply.episodes[0])
            begin = 0 if i == 0 else start - 1
            end = starts[i + 1] - 1 if i + 1 < len(starts) else len(window)
            seqs = window[begin:end]
            said = [self.turns[s].text for s in seqs]
            if self.settings.himem_align_episodes:
                aligned = self._aligned([], [Note(t, [s]) for t, s in zip(said, seqs, strict=True)])
                said = [note.text for note in aligned]
            times = [t for s in self._by_time(seqs) if (t := self.turns[s].timestamp)]
            span = "undated" if not times else times[0]
            if times and times[-1] != times[0]:
                span += f" to {times[-1]}"
            text = "\n".join([f"{draft.topic} ({span})", draft.summary, *said])
            self._born("episode", text, seqs, window)

    def _write_notes(self, window: list[int]) -> None:
        turns = self._shown_turns(window)
        if self.settings.call_form == "fused" and self.settings.himem_align_notes:
            self._keep([self._note(d, window) for d in self._ask(notes_all_prompt(turns)).notes], window)
            return
        notes = [self._note(d, window) for d in self._ask(notes_prompt(turns)).notes]
        shown = list(notes)
        while shown and not self._fits(traits_prompt(turns, self._listed(shown))):
            del shown[0]
        reply = self._ask(traits_prompt(turns, self._listed(shown)))
        notes += [self._note(d, window) for d in reply.notes]
        if self.settings.himem_align_notes and notes:
            notes = self._aligned(window, notes)
        self._keep(notes, window)

    def _keep(self, notes: list[Note], window: list[int]) -> None:
        for note in notes:
            note.shown = tuple(window)
            same = [m for m in self.current("fact") if m.text == note.text]
            if not same:
                self._tell(note)
            elif set(note.sources) - set(same[-1].sources):
                self._next(same[-1], note.text, note.sources, same[-1].shown)

    def _note(self, draft: Any, window: list[int]) -> Note:
        right = draft.turns and all(1 <= n <= len(window) for n in draft.turns)
        sources = sorted({window[n - 1] for n in draft.turns}) if right else list(window)
        shown = {seq: telling_words(self.turns[seq].text) for seq in window}
        saying = turns_that_say(telling_words(draft.text), sources, shown)
        return Note(draft.text, list(saying), kind=draft.kind)

    def _aligned(self, window: list[int], notes: list[Note]) -> list[Note]:
        shown, stated = list(window), self._listed(notes)
        while shown and not self._fits(align_prompt(self._shown_turns(shown), stated)):
            del shown[0]
        reply = self._ask(align_prompt(self._shown_turns(shown), stated))
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

    # ---- a question

    def _revise(self, question: str, episodes: list[OracleMemory]) -> None:
        seen: list[OracleMemory] = []
        for episode in episodes:
            if not seen or self._fits(supplement_prompt(question, listed([*seen, episode]))):
                seen.append(episode)
        shown = listed(seen)
        found: list[Note] = []
        for draft in self._ask(supplement_prompt(question, shown)).notes:
            if draft.text not in [note.text for note in found]:
                right = draft.episodes and all(1 <= n <= len(seen) for n in draft.episodes)
                oldest = sorted(seen, key=lambda m: max(m.sources))[:1]
                saying = [seen[n - 1] for n in draft.episodes] if right else oldest
                sources = sorted({s for m in saying for s in m.sources})
                beside = tuple(s for m in seen for s in (*m.sources, *m.shown))
                found.append(Note(draft.text, sources, beside, draft.kind))
        for known in self.current("fact"):
            for note in [n for n in found if n.text == known.text]:
                found.remove(note)
                if set(note.sources) - set(known.sources):
                    self._next(known, note.text, note.sources, known.shown)
        stored = self.current("fact")
        similar = {m.id for note in found for m in self._nearest(note.text, stored, SIMILAR)}
        near = [m for m in stored if m.id in similar]
        decided: dict[int, Any] = {}
        if found and near:
            for d in self._ask(revise_prompt(self._listed(found), listed(near))).decisions:
                decided.setdefault(d.candidate, d)
        self._carry_out(found, near, decided)
        self._forget()

    def _carry_out(self, found: list[Note], near: list[OracleMemory], decided: dict[int, Any]) -> None:
        changed: set[int] = set()
        for n, note in enumerate(found, 1):
            d = decided.get(n)
            at = d.note if d is not None and d.relation != "independent" else None
            if d is None or at is None or not 1 <= at <= len(near) or at in changed:
                self._tell(note)
                continue
            old = near[at - 1]
            if d.relation == "extendable":
                changed.add(at)
                self._next(old, d.text or note.text, note.sources, {*old.shown, *note.shown})
            elif max(old.sources) <= max(note.sources):
                changed.add(at)
                self._end(old)
                self._tell(note, (old.id,))

    # ---- helpers

    def _tell(self, note: Note, supersedes: tuple[str, ...] = ()) -> None:
        """A new note, held to be of the episode that its first turn is in."""
        holder = next((m.id for m in self.current("episode") if note.sources[0] in m.sources), None)
        links: dict[str, Any] = {"supersedes": supersedes, "episode_id": holder}
        self._born("fact", note.text, note.sources, note.shown, fact_kind=note.kind, **links)

    def _listed(self, notes: Sequence[Note]) -> list[ShownMemory]:
        return [ShownMemory(n, self._latest(note.sources), note.text) for n, note in enumerate(notes, 1)]
