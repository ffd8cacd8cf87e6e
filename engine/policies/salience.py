"""Salience: which turns say something that may be asked for once, though their topic never comes back.

RecMem reads a turn only when its topic recurs. A single mention of an allergy, a budget or an address never
does. So of each `window` turns in a row the LLM also reads those that say most for their length (`to_read`),
in one call and within a quota of tokens a day. And turns that say little, such as thanks, neither fire nor
count (`speaking`).

Both compare a turn with those right before it in its own log, so that terse and wordy tenants are treated
alike. They depend on the log alone: any batching, sharding or replay comes to the same.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from undertow.engine.policies.base import MemoryView, TurnView
from undertow.engine.policies.common_words import COMMON_WORDS, CUES, UNSPACED, WORDS

# A capital within a sentence: names, titles, places.
_NAMES = re.compile(r"(?<=[a-z,] )[A-Z][a-z]+")

# Turns that a turn is compared with, and the share of a window's words that is read.
LOOK_BACK, READ_SHARE = 16, 0.65
# What a line of a prompt takes besides its words; and words that each text counts as having besides its own,
# so that "Lisbon." is not the densest of all.
LINE_WORDS, SMOOTHING = 8, 2


def information(text: str) -> int:
    """How much a text says: its uncommon words, each once; numbers, names and cues of plans and dates twice.

    The list of common words is English: in another language every word counts.
    """
    words = set(WORDS.findall(text.lower()))
    telling = [word for word in words - COMMON_WORDS if len(word) > 2 or word[0].isdigit()]
    numbers = len([word for word in telling if word[0].isdigit()])
    unspaced = sum(map(len, UNSPACED.findall(text))) // 2
    return len(telling) + numbers + len(words & CUES) + len(set(_NAMES.findall(text))) + unspaced


@dataclass(frozen=True, slots=True)
class Salience:
    """`window` turns in a row, of which one call reads the better part (0: none are read).

    `quiet_share`: a turn says little if it is among so many, as a share, of the last `LOOK_BACK` turns that
    say least. `day_tokens`: a tenant's quota; a day is that of the turns, not of the clock, and a thousand
    turns where they are undated.
    """

    window: int
    quiet_share: float
    day_tokens: int

    def speaking(self, seqs: Sequence[int], memory: MemoryView) -> tuple[int, ...]:
        """Of turns that were not deleted those that are not among those of the last turns that say least."""
        told = memory.look_back(seqs, LOOK_BACK, _information)
        counts = (told >= 0).sum(axis=1)
        ordered = np.sort(np.where(told < 0, np.iinfo(told.dtype).max, told), axis=1)
        least = ordered[np.arange(len(seqs)), (self.quiet_share * (counts - 1)).astype(np.int64)]
        return tuple(seq for seq, speaks in zip(seqs, told[:, -1] >= least, strict=True) if speaks)

    def to_read(self, seq: int, memory: MemoryView, settled: Sequence[int]) -> tuple[int, ...]:
        """The turns to read once `seq` is decided: of the window that it completes; () within the window.

        `settled`: the turns that its decision has consolidated.
        """
        place = memory.turns_before(seq) + 1
        if not self.window or place % self.window or self._is_spent(seq, memory):
            return ()
        return self._best(memory.turns_to(seq, self.window), memory, settled)

    def left_over(self, seq: int, memory: MemoryView) -> tuple[int, ...]:
        """The turns to read at a flush: of the open window, after the last flush that read some."""
        begun = memory.turns_before(seq) % self.window if self.window else 0
        if not begun or self._is_spent(seq, memory):
            return ()
        last = memory.last_read_at_flush()
        return self._best([s for s in memory.turns_to(seq, begun) if s > last], memory, ())

    def _best(self, window: Sequence[int], memory: MemoryView, settled: Sequence[int]) -> tuple[int, ...]:
        """The turns that say most for their length, up to `READ_SHARE` of the window's words.

        Turns that were read already, in a cluster or for a fact, are left out.
        """
        newest_first = reversed(memory.current("fact"))
        facts = takewhile(lambda fact: fact.made_at_seq >= window[0], newest_first) if window else ()
        known = {s for fact in facts for s in fact.reach}
        read = {*known, *settled, *(s for s in window if not memory.counts(s))}
        texts = {s: _said(memory.turn(s)) for s in window}
        return tuple(sorted(best_for_their_length(texts, read)))

    def _is_spent(self, seq: int, memory: MemoryView) -> bool:
        return memory.salient_tokens(day_of(seq, memory)) >= self.day_tokens


def best_for_their_length(texts: Mapping[int, str], read: Container[int] = ()) -> list[int]:
    """The keys of the texts to read, best first, without those in `read`; equally good ones in order.

    An order by information alone takes long turns, and never reads "I'm allergic to nuts". If none fits, such
    as the only one, the best is read.
    """
    told = {key: information(text) for key, text in texts.items()}
    words = {key: len(WORDS.findall(text)) for key, text in texts.items()}
    room = READ_SHARE * sum(words[key] + LINE_WORDS for key in texts)
    ordered = sorted(texts, key=lambda key: (-told[key] / (words[key] + SMOOTHING), key))
    telling = [key for key in ordered if key not in read and told[key]]
    fitting: list[int] = []
    for key in telling:
        if words[key] + LINE_WORDS <= room:
            room -= words[key] + LINE_WORDS
            fitting.append(key)
    return fitting or telling[:1]


def day_of(seq: int, memory: MemoryView) -> str:
    """The day of the last turn up to a record, as in 2026-05-07; without a date its thousand, as in 3k."""
    last = (*memory.turns_to(seq, 1), seq)[0]
    timestamp = memory.turn(last).timestamp if memory.exists(last) else None
    return f"{memory.turns_before(last) // 1_000}k" if timestamp is None else timestamp[: len("2026-05-07")]


def _said(turn: TurnView) -> str:
    """The turn without the speakers' names."""
    return " ".join(line.partition(": ")[2] for line in turn.messages)


def _information(turn: TurnView) -> int:
    return information(_said(turn))
