"""The cost of an eager policy: calls for every turn (Mem0, Chhikara et al. 2025, section 2.1).

Its prompts are not built here: each is a fixed size and the lines that it shows. Facts that several
candidates are near to are shown once, which is not taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.engine.base.model import Turn, Usage
from undertow.engine.encoders.token_count import BYTES_PER_TOKEN, TokenCount
from undertow.engine.estimate.reply_guess import Guesser
from undertow.engine.policies.eager import RECENT_TURNS, SIMILAR_FACTS
from undertow.prompts.builders import ShownTurn, fenced


@dataclass(frozen=True, slots=True)
class EagerShape:
    """What the two prompts hold; the fixed sizes as counted by Qwen2.5's tokenizer."""

    extract_fixed_tokens: int = 365
    recent_turns: int = RECENT_TURNS
    reconcile_fixed_tokens: int = 437
    similar_facts: int = SIMILAR_FACTS
    # of the candidates, how many become facts of their own; the others change one or nothing
    added_share: float = 0.7
    # around a fact's words: number, date and JSON where it is shown, JSON where it is extracted
    shown_tokens: int = 15
    extracted_tokens: int = 6
    # a decision; what an update says anew counts as a part of it
    decision_tokens: int = 25


SHAPE = EagerShape()


def eager_usage(
    turns: Sequence[Turn], tokens: TokenCount, guesser: Guesser, shape: EagerShape = SHAPE
) -> dict[str, Usage]:
    """Calls and tokens of one tenant's turns: `extract` for each, `reconcile` where that found anything."""
    extract = reconcile = Usage()
    found = 0
    fact = guesser.guess.fact_chars // BYTES_PER_TOKEN
    recent: list[int] = []
    for turn in turns:
        candidates = guesser.facts.take()
        line = tokens.of_text(fenced(ShownTurn(1, turn.timestamp, turn.text)) + "\n")
        prompt = tokens.template_tokens + shape.extract_fixed_tokens + sum(recent) + line
        extract += Usage(1, prompt, 0, candidates * (fact + shape.extracted_tokens))
        recent = [*recent, line][-shape.recent_turns :]
        if candidates:
            stored = min(int(found * shape.added_share), candidates * shape.similar_facts)
            shown = (candidates + stored) * (fact + shape.shown_tokens)
            prompt = tokens.template_tokens + shape.reconcile_fixed_tokens + shown
            reconcile += Usage(1, prompt, 0, candidates * shape.decision_tokens)
            found += candidates
    return {"extract": extract, "reconcile": reconcile}
