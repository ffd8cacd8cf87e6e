"""The assumed replies of an LLM, for an estimate: the one place to change these numbers.

The lengths follow what our prompts ask for: an episode of three to six sentences, a merged one below twelve,
facts of one sentence, at most nine. A sentence is taken as 100 characters. The number of episodes, facts and
granted merges depends on the model (measured: docs/cost.md). The expected values for NEMORI follow
its paper's LoCoMo runs (tables 9 and 15) where they report them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

SENTENCE_CHARS = 100


@dataclass(frozen=True, slots=True)
class ReplyGuess:
    """Counts and shares are means, lengths are in characters."""

    # the cosine of a written text with the mean of the turns that it rests on
    likeness: float

    # RecMem: the share of requested merges that is granted; a merge lengthens its episode by a sentence, up
    # to `merged_chars`
    merge_share: float
    episodes_per_fire: float
    episode_chars: float
    merged_chars: float
    # per refinement, and per exchange that the eager policy reads
    facts: float
    fact_chars: float
    # eager: the share of candidates that become new facts; the others update a stored one
    added_share: float

    # NEMORI's groups and HiMem's episodes: messages until the topic changes
    topic_messages: float
    # NEMORI: the share of narrated episodes that continue a stored one
    continued_share: float
    narrative_chars: float
    prediction_chars: float
    facts_per_message: float

    # HiMem's notes by stage: stated, per turn; implied, per window; the share that stage three rewords
    notes_per_turn: float
    traits: float
    aligned_share: float


_LOW_EXPECTED_HIGH: dict[str, tuple[float, float, float]] = {
    "likeness": (0.8, 0.88, 0.95),
    "merge_share": (0.2, 0.5, 0.8),
    "episodes_per_fire": (1, 1.5, 2.5),
    "episode_chars": (300, 450, 700),
    "merged_chars": (600, 900, 1_200),
    "facts": (1, 3, 6),
    "fact_chars": (60, 100, 140),
    "added_share": (0.7, 0.7, 0.7),
    "topic_messages": (16, 8, 4),
    "continued_share": (0, 0.25, 0.5),
    "narrative_chars": (650, 1_300, 2_400),
    "prediction_chars": (200, 600, 1_200),
    "facts_per_message": (0.23, 0.46, 0.8),
    "notes_per_turn": (0.5, 1, 2),
    "traits": (0, 2, 6),
    "aligned_share": (0.1, 0.3, 0.6),
}
LOW, EXPECTED, HIGH = (
    ReplyGuess(**{name: values[n] for name, values in _LOW_EXPECTED_HIGH.items()}) for n in range(3)
)


class Evenly:
    """Whole numbers with a given mean, spread as evenly as possible: 1.5 gives 1, 2, 1, 2."""

    def __init__(self, mean: float) -> None:
        self._mean = mean
        self._asked = 0

    def take(self, times: int = 1) -> int:
        """The sum of the next `times` numbers."""
        before = self._taken
        self._asked += times
        return self._taken - before

    @property
    def _taken(self) -> int:
        return int(self._mean * self._asked + 1e-9)  # a mean that is a quotient may fall short of its sum


def stand_in(texts: Sequence[str], chars: float) -> str:
    """Words of the texts, repeated if they are too few, cut to a length; "" if there are none."""
    words = " ".join(texts).split()
    most = 1 + int(chars) // 2  # a word and its space have at least two characters
    return " ".join(islice(cycle(words), most))[: int(chars)]
