"""The calls that RecMem would make, as real prompts around stand-in memories (paper, sections 3.2 to 3.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from undertow.engine.base.model import Turn, Usage
from undertow.engine.encoders.token_count import TokenCount
from undertow.engine.estimate.calibrate import Step
from undertow.engine.estimate.reply_guess import SENTENCE_CHARS, Guesser, stand_in
from undertow.engine.policies.recmem import KNOWN_FACTS
from undertow.prompts.builders import (
    Prompt,
    ShownMemory,
    ShownTurn,
    episode_prompt,
    merge_prompt,
    refine_prompt,
)
from undertow.prompts.reply_schemas import (
    EpisodeDraft,
    EpisodesReply,
    FactDraft,
    FactsReply,
    MergeReply,
    Reply,
)

Call = tuple[Prompt, Reply]

NUMBERS = 100  # an episode names no more turns


def recmem_usage(
    turns: Sequence[Turn], steps: Iterable[Step], tokens: TokenCount, guesser: Guesser
) -> dict[str, Usage]:
    """Calls and tokens by operation for one tenant's turns, decided as `steps` say."""
    spent: dict[str, Usage] = {}
    for prompt, reply in _Conversation(turns, guesser).calls(steps):
        used = Usage(1, tokens.of_prompt(prompt), 0, tokens.of_text(reply.model_dump_json()))
        spent[prompt.operation] = spent.get(prompt.operation, Usage()) + used
    return spent


class _Conversation:
    """One tenant's calls in order. Of each fired cluster one episode stands for all in later merges."""

    def __init__(self, turns: Sequence[Turn], guesser: Guesser) -> None:
        self._turns = turns
        self._guesser = guesser
        self._guess = guesser.guess
        self._episodes: list[str] = []
        self._facts: list[str] = []

    def calls(self, steps: Iterable[Step]) -> Iterator[Call]:
        for step in steps:
            if step.asked is not None:
                yield from self._merge(step.asked, step.turn, granted=step.merged)
            if step.cluster:
                yield from self._fire(step.cluster)

    def _merge(self, cluster: int, turn: int, *, granted: bool) -> Iterator[Call]:
        """Equation 6, and the refinement of what was merged."""
        old = self._episodes[cluster]
        (shown,) = self._shown((turn,))
        chars = min(len(old) + SENTENCE_CHARS, self._guess.merged_chars)
        narrative = stand_in([old, shown.text], max(chars, 1)) if granted else ""
        prompt = merge_prompt(ShownMemory(1, shown.timestamp, old), shown)
        yield prompt, MergeReply(same_story=granted, narrative=narrative)
        if granted:
            self._episodes[cluster] = narrative
            yield self._refine(narrative, [shown])

    def _fire(self, cluster: Sequence[int]) -> Iterator[Call]:
        """Equations 7 to 9."""
        shown = self._shown(cluster)
        n = self._guesser.episodes.take()
        written = [
            stand_in([t.text for t in shown[i::n] or shown], self._guess.episode_chars) for i in range(n)
        ]
        numbers = [t.number for t in shown][:NUMBERS]
        drafts = [EpisodeDraft(text=text, turns=numbers[i::n]) for i, text in enumerate(written)]
        yield episode_prompt(shown), EpisodesReply(episodes=drafts)
        self._episodes.append(written[0])
        for text in written:
            yield self._refine(text, shown)

    def _refine(self, episode: str, shown: Sequence[ShownTurn]) -> Call:
        """Equations 8 and 9. The latest facts stand for the nearest: they are as long."""
        date = shown[-1].timestamp
        known = [ShownMemory(n, date, text) for n, text in enumerate(self._facts[-KNOWN_FACTS:], 1)]
        prompt = refine_prompt(ShownMemory(1, date, episode), shown, known)
        count = self._guesser.facts.take()
        facts = [stand_in([shown[i % len(shown)].text], self._guess.fact_chars) for i in range(count)]
        self._facts += facts
        drafts = [FactDraft(text=text, kind="user_event", replaces=None) for text in facts]
        return prompt, FactsReply(facts=drafts)

    def _shown(self, seqs: Sequence[int]) -> list[ShownTurn]:
        turns = [self._turns[seq] for seq in seqs]
        return [ShownTurn(n, turn.timestamp, turn.text) for n, turn in enumerate(turns, 1)]
