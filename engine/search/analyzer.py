"""Turns texts into terms for keyword search: hashed stems of lower-cased words."""

from __future__ import annotations

import re
import zlib
from collections.abc import Container
from functools import lru_cache

from undertow.engine.search.irregular_forms import BASE_FORMS

# Chinese and Japanese have no spaces between words, Korean has few: pairs of characters serve as words.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff"
_FIRST_UNSPACED, _LAST_UNSPACED = "\u3040", "\ufaff"
_NO_TERM = -1
LONGEST_KEPT = 32
_WORDS = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
_VOWELS = frozenset("aeiouy")

# English stop words: they say how a question is phrased, not what it is about. A tenant has too few texts for
# their BM25 weight to vanish by itself. ("s", "t" and such are what follows an apostrophe.)
_FUNCTION_WORDS = frozenset(
    (
        *("a", "about", "after", "am", "an", "and", "are", "as", "at", "be", "been", "before", "being"),
        *("but", "by", "can", "could", "d", "did", "do", "does", "down", "for", "from", "had", "has"),
        *("have", "he", "her", "here", "him", "his", "how", "i", "if", "in", "into", "is", "it", "its"),
        *("just", "ll", "m", "may", "me", "might", "my", "no", "not", "of", "on", "or", "our", "out"),
        *("over", "re", "s", "she", "should", "so", "t", "than", "that", "the", "their", "them", "then"),
        *("there", "these", "they", "this", "those", "to", "up", "us", "ve", "was", "we", "were", "what"),
        *("when", "where", "which", "who", "whom", "why", "will", "with", "would", "you", "your"),
    )
)


class Analyzer(dict[str, int]):
    """Turns texts into lists of terms. It caches words: use one for a batch of texts, then drop it.

    A term is the CRC-32 of a stem. Among 65,000 stems about one pair collides.
    """

    def of(self, text: str) -> list[int]:
        """The terms of a text, in order, with repeats."""
        return [term for word in _words(text.lower()) if (term := self[word]) != _NO_TERM]

    def by_term(self, text: str) -> dict[int, str]:
        """Of each term of a text the first word, in lower case."""
        found: dict[int, str] = {}
        for word in _words(text.lower()):
            if (term := self[word]) != _NO_TERM:
                found.setdefault(term, word)
        return found

    def without(self, text: str, left_out: Container[int]) -> str:
        """The words of a text that are terms, but for those left out, as they are written."""
        kept = (w for w in _WORDS.findall(text) if (t := self[w.lower()]) != _NO_TERM and t not in left_out)
        return " ".join(kept)

    def __missing__(self, word: str) -> int:
        term = self[word] = _quick_term(word)
        return term


def terms_of(text: str) -> list[int]:
    """As `Analyzer.of`, for a single text."""
    return [term for word in _words(text.lower()) if (term := _quick_term(word)) != _NO_TERM]


def _term(word: str) -> int:
    return _NO_TERM if word in _FUNCTION_WORDS else zlib.crc32(root(word).encode())


# of the words of all tenants, for later texts
_kept_term = lru_cache(1 << 14)(_term)


def _quick_term(word: str) -> int:
    return _kept_term(word) if len(word) <= LONGEST_KEPT else _term(word)


def forget_words() -> None:
    """Forget the words of all texts, as a purge promises."""
    _kept_term.cache_clear()


def _words(text: str) -> list[str]:
    found: list[str] = _WORDS.findall(text)
    if text.isascii():
        return found
    return [word for run in found for word in _parted(run)]


def _parted(run: str) -> list[str]:
    if run[0] < _FIRST_UNSPACED or run[0] > _LAST_UNSPACED or len(run) == 1:
        return [run]
    return [run[i : i + 2] for i in range(len(run) - 1)]


def root(word: str) -> str:
    """The stem of a lower-case word's base form, the same for all its forms."""
    return stem(BASE_FORMS.get(word, word))


def stem(word: str) -> str:
    """A lower-case word without the most common English endings.

    Lighter than Porter's stemmer: it rarely conflates different words, and hardly affects other languages.
    Plurals are handled as by Harman (1991).
    """
    word = _singular(word)
    for ending in ("ing", "ed"):
        base = word.removesuffix(ending)
        if base != word and len(base) >= 3 and not _VOWELS.isdisjoint(base):
            doubled = len(base) > 3 and base[-1] == base[-2] and base[-1] not in "lsz"
            word = base[:-1] if doubled else base
            break
    if len(word) > 4:
        word = word.removesuffix("ly")
    if len(word) > 3:
        word = word.removesuffix("e")
    return word[:-1] + "i" if len(word) > 3 and word.endswith("y") else word


def _singular(word: str) -> str:
    if len(word) <= 3 or not word.endswith("s"):
        return word
    if word.endswith("ies"):
        return word if word.endswith(("eies", "aies")) else word[:-3] + "y"
    if word.endswith("es"):
        return word if word.endswith(("aes", "ees", "oes")) else word[:-1]
    return word if word.endswith(("us", "ss")) else word[:-1]
