"""The cost of an eager policy: calls for every turn (Mem0, Chhikara et al. 2025, section 2.1).

Its prompts are not built here: each is a fixed size and the lines that it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.engine.model import Message, Turn, Usage
from undertow.engine.reply_guess import Guesser
from undertow.engine.token_count import BYTES_PER_TOKEN, TokenCount
from undertow.prompts import ShownTurn, fenced


@dataclass(frozen=True, slots=True)
class EagerShape:
    """What the two prompts hold. The fixed sizes are in tokens, estimated by those of RecMem's own."""

    extract_fixed_tokens: int = 500
    recent_messages: int = 10
    reconcile_fixed_tokens: int = 500
    similar_facts: int = 10
    # of the candidates, how many become facts of their own; the others update one or change nothing
    added_share: float = 0.7
    # what a line around a fact takes beside its words: number, date, JSON; in a reply the decision's fields
    line_tokens: int = 15


SHAPE = EagerShape()


def eager_usage(
    turns: Sequence[Turn], tokens: TokenCount, guesser: Guesser, shape: EagerShape = SHAPE
) -> dict[str, Usage]:
    """Calls and tokens of one tenant's turns: `extract` for each, `reconcile` where that found anything."""
    extract = reconcile = Usage()
    found = 0
    recent: list[int] = []
    for turn in turns:
        lines = [_line_tokens(message, turn, tokens) for message in turn.messages]
        candidates = guesser.facts.take()
        line = shape.line_tokens + guesser.guess.fact_chars // BYTES_PER_TOKEN
        prompt = tokens.template_tokens + shape.extract_fixed_tokens + sum(recent) + sum(lines)
        extract += Usage(1, prompt, 0, candidates * line)
        recent = [*recent, *lines][-shape.recent_messages :]
        if candidates:
            shown = candidates + min(int(found * shape.added_share), candidates * shape.similar_facts)
            prompt = tokens.template_tokens + shape.reconcile_fixed_tokens + shown * line
            reconcile += Usage(1, prompt, 0, candidates * line)
            found += candidates
    return {"extract": extract, "reconcile": reconcile}


def _line_tokens(message: Message, turn: Turn, tokens: TokenCount) -> int:
    text = f"{message.speaker}: {message.content}"
    return tokens.of_text(fenced(ShownTurn(1, message.timestamp or turn.timestamp, text))) + 1
