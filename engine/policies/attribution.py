"""Which of the turns that a prompt showed say a fact.

A reply names them, and a small model often names the wrong ones. A fact then has the date of a turn that says
something else. So what a reply names is checked against the words of the turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from itertools import pairwise
from math import fsum
from typing import TypeVar

from undertow.engine.policies.common_words import COMMON_WORDS, UNSPACED, WORDS

STEM = 5
"""Letters by which words are told apart: "booked" and "booking" are one."""
TRUSTED, CLEAR, ADDED, REPEATED = 0.3, 0.25, 0.35, 0.66
"""Least weight of the turns that a reply names, as a share of that of the turn that fits best; the share of
the fact's words that this one has at least; the least weight that a further turn adds, as a share of what the
better ones have; and the share of a fact's words that an earlier turn has if the fact only repeats it."""
NEW_WORDS, NEW_SHARE = 3, 0.1
"""A turn with so many of the fact's words that the others lack, and this share of all, counts in any case."""

Key = TypeVar("Key", int, tuple[int, int])
"""The seq of a turn, or a message: the seq of its turn, and its line in it."""


def turns_that_say(fact: Set[str], named: Collection[Key], shown: Mapping[Key, Set[str]]) -> tuple[Key, ...]:
    """The turns, or messages, that say a fact, ascending. All texts are given by their telling words.

    A word counts 1/n if n of the shown turns have it, and nothing if all do. The named turns stay unless
    another fits clearly better; then that one counts instead, the first of equals. A named turn that adds
    little to the others is left out. A fact may be packed of several turns: any turn is added that has enough
    words that the others lack. `named`, if no word distinguishes the turns.
    """
    every = {number: fact & said for number, said in shown.items()}
    spread = Counter(word for has in every.values() for word in has)
    held = {number: {word for word in has if spread[word] < len(every)} for number, has in every.items()}

    def weight(has: Collection[str]) -> float:
        return fsum(1 / spread[word] for word in has)  # the same in any order

    best = max(sorted(shown), key=lambda number: weight(held[number]))
    if not held[best]:
        return tuple(sorted(named))
    is_clear = len(held[best]) >= CLEAR * len(fact)
    if is_clear and weight(set().union(*(held[n] for n in named))) < TRUSTED * weight(held[best]):
        named = [best]
    covered: set[str] = set()
    kept: list[Key] = []
    for number in sorted(named, key=lambda number: (-weight(held[number]), number)):
        if not kept or weight(held[number] - covered) >= ADDED * weight(covered):
            kept.append(number)
            covered |= held[number]
    while True:
        further = max(sorted(held), key=lambda number: _amount(held[number] - covered))
        if _amount(held[further] - covered) < max(NEW_WORDS, NEW_SHARE * _amount(fact)):
            return tuple(sorted(kept))
        kept.append(further)
        covered |= held[further]


def _amount(words: Set[str]) -> float:
    """How many words; a pair of characters of a language without spaces is half of one."""
    return sum(0.5 if UNSPACED.match(word) else 1.0 for word in words)


def repeated(fact: Set[str], said: Mapping[Key, Set[str]], before: Mapping[Key, Set[str]]) -> tuple[Key, ...]:
    """The newest turn from `before` that says most of a fact; () if none does, or `said` says as much.

    A reply that retells an episode may repeat its facts as news.
    """
    turns = [*said.values(), *before.values()]
    rare = {word for word in fact if not all(word in words for words in turns)}
    old = [number for number, words in before.items() if len(rare & words) >= REPEATED * len(rare)]
    is_news = any(len(rare & words) >= TRUSTED * len(rare) for words in said.values())
    return () if is_news or not old else (max(old),)


def telling_words(text: str) -> frozenset[str]:
    """The stems of a text's uncommon words; pairs of characters where there are no spaces."""
    words = {word for word in WORDS.findall(text.lower()) if word not in COMMON_WORDS}
    pairs = {a + b for run in UNSPACED.findall(text) for a, b in pairwise(run)}
    return frozenset({word[:STEM] for word in words if not UNSPACED.match(word)} | pairs)
