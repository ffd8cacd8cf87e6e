"""The eager policy for one tenant as a plain program: one turn after the other, lists and exact integers.

As oracle: nothing of how the engine works, only its prompts' wording, encoder, ids and LLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from undertow.engine.base.model import Turn
from undertow.prompts.builders import ShownMemory, extract_prompt, reconcile_prompt
from undertow.prompts.reply_schemas import ExtractReply, ReconcileReply

from .run import Oracle, OracleDecision, OracleMemory, listed

RECENT, SIMILAR = 5, 10


class OracleEager(Oracle):
    def take(self, seq: int, turn: Turn) -> None:
        """Decide one turn."""
        self._hear(seq, turn)
        made = self._stored(seq, self._make)
        decision = "parked" if made is None else "fired"
        settled = () if made == 0 else (seq,)
        self.decisions.append(OracleDecision(seq, decision, cluster=(seq,), settled=settled))

    def _make(self) -> None:
        candidates = self._extracted()
        stored = self.current("fact")
        near = {f.id for text in candidates for f in self._nearest(text, stored, SIMILAR)}
        shown = [f for f in stored if f.id in near]
        for i, fact in enumerate(shown):
            if fact.text in candidates and self.seq not in fact.sources:
                shown[i] = self._next(fact, fact.text, (self.seq,))
        candidates = [text for text in candidates if text not in [f.text for f in shown]]
        decided: dict[int, tuple[str, int | None, str]] = {}
        if candidates and shown:
            date = self.turns[self.seq].timestamp
            new = [ShownMemory(i, date, text) for i, text in enumerate(candidates, 1)]
            reply = self._ask(reconcile_prompt(new, listed(shown)))
            assert isinstance(reply, ReconcileReply)
            for d in reply.decisions:
                decided.setdefault(d.candidate, (d.action, d.fact, d.text))
        self._carry_out(candidates, shown, decided)

    def _carry_out(
        self,
        candidates: Sequence[str],
        shown: Sequence[OracleMemory],
        decided: dict[int, tuple[str, int | None, str]],
    ) -> None:
        changed: set[int] = set()
        again: list[int] = []
        for number, text in enumerate(candidates, 1):
            action, fact, words = decided.get(number, ("add", None, ""))
            if action == "none":
                again += [fact] if fact is not None and 1 <= fact <= len(shown) else []
                continue
            names_one = fact is not None and 1 <= fact <= len(shown) and fact not in changed
            if action == "add" or fact is None or not names_one:
                self._born("fact", text, (self.seq,))
                continue
            changed.add(fact)
            if action == "delete":
                self._end(shown[fact - 1])
            else:
                self._next(shown[fact - 1], words or text, (self.seq,))
        for old in [shown[i - 1] for i in dict.fromkeys(again) if i not in changed]:
            if self.seq not in old.sources:
                self._next(old, old.text, (self.seq,))

    def _extracted(self) -> list[str]:
        shown = self._shown_turns(sorted(self.turns)[-RECENT - 1 :])
        reply = self._ask(extract_prompt(shown[:-1], shown[-1]))
        assert isinstance(reply, ExtractReply)
        return list(dict.fromkeys(fact.text for fact in reply.facts))
