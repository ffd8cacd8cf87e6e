"""The assumed replies of an LLM, for an estimate: the one place to change these numbers.

The lengths follow what our prompts ask for: an episode of three to six sentences, a merged one below twelve,
facts of one sentence, at most nine. A sentence is taken as 100 characters. The number of episodes, facts and
granted merges depends on the model (measured: docs/cost.md). The expected values for NEMORI follow
its paper's LoCoMo runs (tables 9 and 15) where they report them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import cycle, islice
from typing import Any

SENTENCE_CHARS = 100


def _range(low: float, expected: float, high: float) -> Any:
    return field(default=expected, metadata={"low": low, "expected": expected, "high": high})


@dataclass(frozen=True, slots=True)
class Assumptions:
    """Counts and shares are means, lengths are in characters. The defaults are the expected values."""

    # the cosine of a written text with the mean of the turns that it rests on
    likeness: float = _range(0.8, 0.88, 0.95)

    # RecMem: the share of requested merges that is granted; a merge lengthens its episode by a sentence, up
    # to `merged_chars`
    merge_share: float = _range(0.2, 0.5, 0.8)
    episodes_per_fire: float = _range(1, 1.5, 2.5)
    episode_chars: float = _range(300, 450, 700)
    merged_chars: float = _range(600, 900, 1_200)
    # per refinement, and per exchange that the eager policy reads
    facts: float = _range(1, 3, 6)
    fact_chars: float = _range(60, 100, 140)
    # eager: the share of candidates that become new facts; the others update a stored one
    added_share: float = _range(0.7, 0.7, 0.7)

    # NEMORI's groups and HiMem's episodes: messages until the topic changes
    topic_messages: float = _range(16, 8, 4)
    # NEMORI: the share of narrated episodes that continue a stored one
    continued_share: float = _range(0, 0.25, 0.5)
    narrative_chars: float = _range(650, 1_300, 2_400)
    prediction_chars: float = _range(200, 600, 1_200)
    facts_per_message: float = _range(0.23, 0.46, 0.8)

    # HiMem's notes by stage: stated, per turn (of RecMem's salient turns: facts); implied, per window;
    # the share that stage three rewords
    notes_per_turn: float = _range(0.5, 1, 2)
    traits: float = _range(0, 2, 6)
    aligned_share: float = _range(0.1, 0.3, 0.6)

    # A-Mem: the neighbours that a new note is linked to, and those that it changes
    links: float = _range(0, 1, 3)
    evolved: float = _range(0, 1, 3)

    # MemoryOS: a segment's summary, and the lines that one reading of its pages gives
    topic_chars: float = _range(200, 400, 700)
    persona_lines: float = _range(1, 4, 8)


LOW, EXPECTED, HIGH = (
    Assumptions(**{f.name: f.metadata[level] for f in fields(Assumptions)})
    for level in ("low", "expected", "high")
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
