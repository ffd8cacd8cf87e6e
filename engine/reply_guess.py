"""What an LLM is taken to reply, for an estimate: the one place to change these numbers.

The lengths follow what our own prompts ask for: an episode of three to six sentences, a merged one below
twelve, facts of one sentence, at most nine; a sentence is taken as 100 characters. How many episodes, facts
and granted merges there are is the model's choice: docs/cost.md has what was seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

SENTENCE_CHARS = 100


@dataclass(frozen=True, slots=True)
class ReplyGuess:
    """Counts and shares are means, lengths are in characters."""

    # of the merges asked for, the share that is granted
    merge_share: float
    episodes_per_fire: float
    episode_chars: int
    # a merge lengthens its episode by a sentence, up to this
    merged_chars: int
    # of one refinement, and of one exchange that an eager policy reads
    facts: float
    fact_chars: int


LOW = ReplyGuess(
    merge_share=0.2,
    episodes_per_fire=1,
    episode_chars=3 * SENTENCE_CHARS,
    merged_chars=6 * SENTENCE_CHARS,
    facts=1,
    fact_chars=60,
)
EXPECTED = ReplyGuess(
    merge_share=0.5,
    episodes_per_fire=1.5,
    episode_chars=9 * SENTENCE_CHARS // 2,
    merged_chars=9 * SENTENCE_CHARS,
    facts=3,
    fact_chars=SENTENCE_CHARS,
)
HIGH = ReplyGuess(
    merge_share=0.8,
    episodes_per_fire=2.5,
    episode_chars=7 * SENTENCE_CHARS,
    merged_chars=12 * SENTENCE_CHARS,
    facts=6,
    fact_chars=140,
)


class Guesser:
    """The replies of one run over any number of tenants."""

    def __init__(self, guess: ReplyGuess) -> None:
        self.guess = guess
        self.episodes = Evenly(guess.episodes_per_fire)
        self.facts = Evenly(guess.facts)


class Evenly:
    """Whole numbers of a given mean, spread as evenly as can be: 1.5 gives 1, 2, 1, 2."""

    def __init__(self, mean: float) -> None:
        self._mean = mean
        self._asked = 0

    def take(self) -> int:
        before = int(self._mean * self._asked)
        self._asked += 1
        return int(self._mean * self._asked) - before


def stand_in(texts: Sequence[str], chars: int) -> str:
    """Words of the texts, over again where they are too few, cut to a length; "" where there are none."""
    words = " ".join(texts).split()
    if not words:
        return ""
    most = 1 + chars // 2  # a word and its space have two characters at least
    return " ".join(islice(cycle(words), most))[:chars]
