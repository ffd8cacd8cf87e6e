"""The eager policy for one tenant as a plain program: one turn after the other, lists and exact integers.

As oracle: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from undertow.engine.base.model import Turn, memory_id, time_key
from undertow.engine.encoders.base import Encoder
from undertow.engine.llm.client import BadReply, LLMClient
from undertow.prompts.builders import ShownMemory, ShownTurn, extract_prompt, reconcile_prompt
from undertow.prompts.reply_schemas import ExtractReply, ReconcileReply

from .run import Oracle, OracleDecision, OracleMemory, Thresholds, exact_dot

RECENT, SIMILAR = 5, 10


class OracleEager(Oracle):
    """Takes the turns of one tenant in order of seq; `decisions`, `versions`, `prompts` tell what came."""

    def __init__(self, tenant: str, encoder: Encoder, llm: LLMClient, settings: Thresholds) -> None:
        super().__init__(tenant, encoder, llm)
        self._turns: dict[int, Turn] = {}

    def take(self, seq: int, turn: Turn) -> None:
        """Decide one turn."""
        self._turns[seq] = self._dated(turn)
        try:
            made = self._made_of(seq)
        except BadReply:
            self.decisions.append(OracleDecision(seq, "parked", False, None, None, (seq,), (seq,)))
            return
        self.versions += made
        settled = (seq,) if made else ()
        self.decisions.append(OracleDecision(seq, "fired", False, None, None, (seq,), settled))

    def current(self) -> list[OracleMemory]:
        """The newest version of each fact that was not deleted, in order of birth."""
        newest = {m.id: m for m in self.versions}
        return sorted((m for m in newest.values() if m.text), key=lambda m: (m.born_at_seq, m.ordinal))

    def _made_of(self, seq: int) -> list[OracleMemory]:
        candidates = self._extracted(seq)
        stored = self.current()
        shown: list[OracleMemory] = []
        for text in candidates:
            vector = self._embed(text)
            nearest = sorted(stored, key=lambda f: -exact_dot(vector, self._embed(f.text)))[:SIMILAR]
            shown += [f for f in nearest if f not in shown]
        shown.sort(key=lambda m: (m.born_at_seq, m.ordinal))
        made: list[OracleMemory] = []
        for i, fact in enumerate(shown):
            if fact.text in candidates and seq not in fact.sources:
                shown[i] = self._also_from(fact, seq, fact.text)
                made.append(shown[i])
        candidates = [text for text in candidates if text not in [f.text for f in shown]]
        if not candidates:
            return made
        decided: dict[int, tuple[str, int | None, str]] = {}
        if shown:
            date = self._turns[seq].timestamp
            prompt = reconcile_prompt(
                [ShownMemory(i, date, text) for i, text in enumerate(candidates, 1)],
                [ShownMemory(i, f.timestamp, f.text) for i, f in enumerate(shown, 1)],
            )
            reply = self._ask(prompt)
            assert isinstance(reply, ReconcileReply)
            for d in reply.decisions:
                decided.setdefault(d.candidate, (d.action, d.fact, d.text))
        return made + self._carried_out(seq, candidates, shown, decided)

    def _also_from(self, old: OracleMemory, seq: int, text: str) -> OracleMemory:
        """The next version of a fact, which this turn told too."""
        sources = tuple(sorted({*old.sources, seq}))
        last = max(sources, key=lambda s: (time_key(self._turns[s].timestamp), s))
        time = self._turns[last].timestamp
        newer = replace(old, version=old.version + 1, made_at_seq=seq)
        return replace(newer, text=text, sources=sources, timestamp=time)

    def _carried_out(
        self,
        seq: int,
        candidates: Sequence[str],
        shown: Sequence[OracleMemory],
        decided: dict[int, tuple[str, int | None, str]],
    ) -> list[OracleMemory]:
        made: list[OracleMemory] = []
        changed: set[int] = set()
        again: list[int] = []
        births = 0
        for number, text in enumerate(candidates, 1):
            action, fact, words = decided.get(number, ("add", None, ""))
            if action == "none":
                again += [fact] if fact is not None and 1 <= fact <= len(shown) else []
                continue
            names_one = fact is not None and 1 <= fact <= len(shown) and fact not in changed
            if action == "add" or fact is None or not names_one:
                made.append(self._born(seq, births, text))
                births += 1
                continue
            changed.add(fact)
            old = shown[fact - 1]
            if action == "delete":
                made.append(replace(old, version=old.version + 1, made_at_seq=seq, text=""))
                continue
            made.append(self._also_from(old, seq, words or text))
        told = [shown[i - 1] for i in dict.fromkeys(again) if i not in changed]
        return made + [self._also_from(f, seq, f.text) for f in told if seq not in f.sources]

    def _born(self, seq: int, ordinal: int, text: str) -> OracleMemory:
        identity = memory_id(self.tenant, 1, seq, "fact", ordinal)
        time = self._turns[seq].timestamp
        return OracleMemory(identity, "fact", 1, text, (seq,), seq, seq, ordinal, time)

    def _extracted(self, seq: int) -> list[str]:
        read = sorted(self._turns)[-RECENT - 1 :]
        shown = [ShownTurn(i, self._turns[s].timestamp, self._turns[s].text) for i, s in enumerate(read, 1)]
        reply = self._ask(extract_prompt(shown[:-1], shown[-1]))
        assert isinstance(reply, ExtractReply)
        texts: list[str] = []
        for fact in reply.facts:
            if fact.text not in texts:
                texts.append(fact.text)
        return texts
