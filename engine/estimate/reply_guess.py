"""What an LLM is taken to reply, for an estimate: the one place to change these numbers.

The lengths follow what our own prompts ask for: an episode of three to six sentences, a merged one below
twelve, facts of one sentence, at most nine; a sentence is taken as 100 characters. How many episodes, facts
and granted merges there are is the model's choice: docs/cost.md has what was seen. What is expected of NEMORI
follows its paper's LoCoMo runs (tables 9 and 15), where they tell it.
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

    # NEMORI's groups and HiMem's episodes: how many messages go by until another topic is taken up
    topic_messages: float
    # of the episodes that were narrated, the share that goes on with a stored one
    continued_share: float
    narrative_chars: int
    # facts with a cosine above tau, of the ten that a prediction may be made from
    evoked_facts: int
    prediction_chars: int
    # of a message that is distilled
    facts_per_message: float

    # HiMem's notes by stage: stated, of a turn; implied, of a window; the share that stage three rewords
    notes_per_turn: float
    traits: float
    aligned_share: float


LOW = ReplyGuess(
    merge_share=0.2,
    episodes_per_fire=1,
    episode_chars=3 * SENTENCE_CHARS,
    merged_chars=6 * SENTENCE_CHARS,
    facts=1,
    fact_chars=60,
    topic_messages=16,
    continued_share=0,
    narrative_chars=650,
    evoked_facts=0,
    prediction_chars=200,
    facts_per_message=0.23,
    notes_per_turn=0.5,
    traits=0,
    aligned_share=0.1,
)
EXPECTED = ReplyGuess(
    merge_share=0.5,
    episodes_per_fire=1.5,
    episode_chars=9 * SENTENCE_CHARS // 2,
    merged_chars=9 * SENTENCE_CHARS,
    facts=3,
    fact_chars=SENTENCE_CHARS,
    topic_messages=8,
    continued_share=0.25,
    narrative_chars=1_300,
    evoked_facts=5,
    prediction_chars=600,
    facts_per_message=0.46,
    notes_per_turn=1,
    traits=2,
    aligned_share=0.3,
)
HIGH = ReplyGuess(
    merge_share=0.8,
    episodes_per_fire=2.5,
    episode_chars=7 * SENTENCE_CHARS,
    merged_chars=12 * SENTENCE_CHARS,
    facts=6,
    fact_chars=140,
    topic_messages=4,
    continued_share=0.5,
    narrative_chars=2_400,
    evoked_facts=10,
    prediction_chars=1_200,
    facts_per_message=0.8,
    notes_per_turn=2,
    traits=6,
    aligned_share=0.6,
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

    def take(self, times: int = 1) -> int:
        """The sum of the next ones."""
        before = self._taken
        self._asked += times
        return self._taken - before

    @property
    def _taken(self) -> int:
        return int(self._mean * self._asked + 1e-9)  # a mean that is a quotient may fall short of its sum


def stand_in(texts: Sequence[str], chars: int) -> str:
    """Words of the texts, over again where they are too few, cut to a length; "" where there are none."""
    words = " ".join(texts).split()
    if not words:
        return ""
    most = 1 + chars // 2  # a word and its space have two characters at least
    return " ".join(islice(cycle(words), most))[:chars]
